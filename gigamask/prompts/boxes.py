"""Box prompts: the truth's boxes enter, boxes as a hurried person would draw them leave.

Not here: boxes of masks (`geometry.runs`), boxes through the frame (`geometry.frame`).
"""

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from gigamask.types import RandomInputs, Targets


def jitter_boxes(
    boxes_input: Float[Tensor, "M 4"],
    noise: Float[Tensor, "M 4"],
    share: float,
    limit_px: float,
    largest_xy: tuple[float, float],
) -> Float[Tensor, "M 4"]:
    """Returns the boxes with each side moved by itself: Gaussian with a standard deviation of `share` of the width or height, at most `limit_px`.

    `noise` is standard normal; the move is clamped, not drawn again. Boxes are xyxy with inclusive ends, stay in [0, `largest_xy`] and in order.
    (Kirillov et al. 2023, appendix A.)
    """
    extent = boxes_input[:, 2:] - boxes_input[:, :2] + 1
    moved = boxes_input + (noise * share * extent.repeat(1, 2)).clamp(-limit_px, limit_px)
    x, y = (moved[:, axis::2].clamp(0, largest_xy[axis]).sort(1).values for axis in (0, 1))
    return torch.stack([x[:, 0], y[:, 0], x[:, 1], y[:, 1]], 1)


def jittered_boxes(
    targets: Targets, random_inputs: RandomInputs, share: float, limit_px: float
) -> Float[Tensor, "M 4"]:
    """Returns the truth's boxes with each side moved by the mask's own noise, inside the part of the input that the truth covers."""
    height, width = targets.valid.shape[1:]
    largest = width * targets.cell_xy[0] - 1, height * targets.cell_xy[1] - 1
    return jitter_boxes(targets.boxes_input, random_inputs.box_noise, share, limit_px, largest)


def corner_labels(count: int, device: torch.device) -> Int64[Tensor, "M 2"]:
    """Returns the labels of `count` boxes' corners."""
    return torch.arange(2, 4, device=device).expand(count, 2)
