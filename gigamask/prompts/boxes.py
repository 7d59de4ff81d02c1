"""Box prompts: ground-truth boxes with random noise."""

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from gigamask.masks.valid_area import inside
from gigamask.types import RandomInputs, Targets


def add_box_noise(
    boxes_input: Float[Tensor, "M 4"],
    scale_xy: Float[Tensor, "M 2"],
    noise: Float[Tensor, "M 4"],
    relative_std: float | Float[Tensor, "M 1"],
    limit_px: float,
    extent_xy: Float[Tensor, "M 2"],
) -> Float[Tensor, "M 4"]:
    """Add Gaussian noise to each side of each box (Kirillov et al. 2023, appendix A).

    Args:
        boxes_input: Boxes, xyxy in input pixels with inclusive ends.
        scale_xy: Input pixels per pixel of the stored image, in x and y.
        noise: Standard normal numbers.
        relative_std: Standard deviation relative to the width or height, of all boxes or of each.
        limit_px: Largest shift of a side, in input pixels; larger noise is clamped.
        extent_xy: Width and height of the images without padding, in input pixels.

    Returns:
        Boxes within the images, with ordered sides.
    """
    size = boxes_input[:, 2:] - boxes_input[:, :2] + scale_xy
    change = (noise * relative_std * size.repeat(1, 2)).clamp(-limit_px, limit_px)
    moved = (boxes_input + change).unflatten(1, (2, 2))
    return inside(moved, extent_xy, scale_xy).sort(1).values.flatten(1)


def jitter_boxes(
    targets: Targets,
    random_inputs: RandomInputs,
    relative_std: float,
    limit_px: float,
    varies: bool = False,
) -> Float[Tensor, "M 4"]:
    """Add noise to the boxes of the targets, which stay in the images.

    Args:
        targets: Ground truth of M masks.
        random_inputs: Random numbers of the masks: `box_noise`, and with `varies` the first number
            of `clicks`, which places a point and is not needed for a box.
        relative_std: Standard deviation relative to the width or height.
        limit_px: Largest shift of a side, in input pixels.
        varies: Whether the standard deviation of each box is uniform from 0 to `relative_std`.
    """
    return add_box_noise(
        targets.boxes_input,
        targets.scale_xy,
        random_inputs.box_noise,
        relative_std * random_inputs.clicks[:, 0, :1] if varies else relative_std,
        limit_px,
        targets.extent,
    )


def corner_labels(count: int, device: torch.device) -> Int64[Tensor, "M 2"]:
    """Return the point labels, 2 and 3, of the corners of boxes.

    Args:
        count: Number of boxes.
        device: Device of the labels.
    """
    return torch.arange(2, 4, device=device).expand(count, 2)
