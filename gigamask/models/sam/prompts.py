"""Points, boxes and masks of SAM's interface as the prompts that the mask decoder takes."""

import torch
from torch import Tensor
from torch.nn import functional

from gigamask.errors import GigamaskError
from gigamask.types import Prompts

PADDING_LABEL, CORNER_LABELS = -1, (2, 3)
"""Labels of a token without a point, and of a box's top-left and bottom-right corners."""


def make_prompts(
    points: Tensor | None,
    labels: Tensor | None,
    boxes: Tensor | None,
    masks: Tensor | None,
    multimask_output: bool,
    mask_size: int,
) -> Prompts:
    """Return the prompts of one image for the mask decoder.

    The tokens are the points, then the corners of the box; without a box, one padding token
    follows the points, as in SAM.

    Args:
        points: `(B, N, 2)` x and y in pixels of the model's input.
        labels: `(B, N)`; 1 foreground, 0 background, -1 no point.
        boxes: `(B, 4)` x0, y0, x1, y1 in pixels of the model's input.
        masks: `(B, 1, G, G)` low-resolution logits, or one for all prompts.
        multimask_output: Whether to predict three masks per prompt instead of one.
        mask_size: Side of the low-resolution masks, G.

    Returns:
        Prompts for B masks.

    Raises:
        GigamaskError: Points without labels, an unknown label, numbers of prompts that differ, or
            masks of another size.
    """
    if (points is None) != (labels is None):
        given, missing = "point_coords", "point_labels"
        if points is None:
            given, missing = missing, given
        raise GigamaskError(f"{given} needs {missing}: pass both, one label per point")
    tokens, kinds = [], []
    if points is not None and labels is not None:
        _check_points(points, labels)
        padding = int(boxes is None)
        tokens.append(functional.pad(points, (0, 0, 0, padding)))
        kinds.append(functional.pad(labels.long(), (0, padding), value=PADDING_LABEL))
    if boxes is not None:
        if boxes.ndim != 2 or boxes.shape[1] != 4:
            raise GigamaskError(f"boxes must be prompts x 4 (x0 y0 x1 y1), got {_shape(boxes)}")
        tokens.append(boxes.view(-1, 2, 2))
        kinds.append(torch.tensor([CORNER_LABELS], device=boxes.device).expand(len(boxes), 2))
    if masks is not None and masks.shape[1:] != (1, mask_size, mask_size):
        raise GigamaskError(
            f"mask_input must be prompts x 1 x {mask_size} x {mask_size} low-resolution logits, "
            f"got {_shape(masks)}"
        )
    counts = {len(token) for token in tokens}
    if masks is not None and (not tokens or len(masks) != 1):
        counts.add(len(masks))
    if len(counts) > 1:
        numbers = " and ".join(map(str, sorted(counts)))
        raise GigamaskError(
            f"points, boxes and masks must be of equally many prompts, got {numbers}"
        )
    count = counts.pop() if counts else 1
    if not tokens:
        device = None if masks is None else masks.device
        tokens = [torch.zeros(count, 0, 2, device=device)]
        kinds = [torch.zeros(count, 0, dtype=torch.int64, device=device)]
    dtype = max((token.dtype for token in tokens), key=lambda dtype: dtype.itemsize)
    return Prompts(
        torch.cat([token.to(dtype) for token in tokens], 1),
        torch.cat(kinds, 1),
        None if masks is None else masks[:, 0].expand(count, -1, -1),
        multimask_output,
    )


def _check_points(points: Tensor, labels: Tensor) -> None:
    if points.shape[:-1] != labels.shape or points.ndim != 3 or points.shape[-1] != 2:
        raise GigamaskError(
            "point_coords must be prompts x points x 2 and point_labels prompts x points, "
            f"got {_shape(points)} and {_shape(labels)}"
        )
    unknown = labels[(labels < PADDING_LABEL) | (labels > 1)]
    if len(unknown):
        raise GigamaskError(
            "point_labels must be 1 (foreground), 0 (background) or -1 (no point), "
            f"got {int(unknown[0])}; pass a box as `boxes`"
        )


def _shape(tensor: Tensor) -> str:
    return " x ".join(map(str, tensor.shape)) or "a single number"
