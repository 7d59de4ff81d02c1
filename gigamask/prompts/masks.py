"""Mask prompts without an earlier round: moved and stretched ground-truth masks as logits."""

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor
from torch.nn import functional

from gigamask.errors import GigamaskError
from gigamask.masks.valid_area import valid_cells
from gigamask.types import Targets


def jitter_masks(
    targets: Targets, boxes_input: Float[Tensor, "M 4"], logit: float
) -> Float[Tensor, "M G G"]:
    """Move and stretch the masks so that their boxes become `boxes_input`.

    Cells are copied, not interpolated.

    Args:
        targets: Ground truth of M masks.
        boxes_input: New boxes, xyxy in input pixels.
        logit: Logit of a covered cell; a cell's logit is linear in its covered fraction, down to
            `-logit`.

    Returns:
        Mask prompts as logits; nothing beyond the image is covered.
    """
    coverage = _coverage(targets)
    side = coverage.shape[-1]
    cells = [targets.cell_xy[axis] * targets.masks.shape[2 - axis] / side for axis in (0, 1)]
    old, new = (
        torch.cat([boxes[:, :2], boxes[:, 2:] + targets.scale_xy], 1)
        for boxes in (targets.boxes_input, boxes_input)
    )
    (columns, in_columns), (rows, in_rows) = (
        _source_cells(old[:, axis::2], new[:, axis::2], cells[axis], side) for axis in (0, 1)
    )
    mask = torch.arange(len(coverage), device=coverage.device)[:, None, None]
    inside = in_rows[:, :, None] & in_columns[:, None]
    inside &= valid_cells(targets.extent, (side, side), (cells[0], cells[1]), by_center=False)
    moved = coverage[mask, rows[:, :, None], columns[:, None]] * inside
    return logit * (2 * moved - 1)


def _coverage(targets: Targets) -> Float[Tensor, "M G G"]:
    """Return the covered fraction of each cell of the mask prompts' grid."""
    height, width = targets.masks.shape[1:]
    side = targets.mask_prompt_size or width
    if height != width or width % side:
        raise GigamaskError(
            f"targets must be square with a side that is a multiple of {side} to become mask "
            f"prompts of {side} x {side} (got {height} x {width})"
        )
    return functional.avg_pool2d(targets.masks[:, None].float(), width // side)[:, 0]


def _source_cells(
    old: Float[Tensor, "M 2"], new: Float[Tensor, "M 2"], cell: float, side: int
) -> tuple[Int64[Tensor, "M G"], Bool[Tensor, "M G"]]:
    """Return the source of each cell along one axis when interval `old` becomes `new`.

    Also return whether the source lies in the grid.
    """
    centers = (torch.arange(side, device=old.device) + 0.5) * cell
    scale = old.diff() / new.diff()
    source = ((old[:, :1] + (centers - new[:, :1]) * scale) / cell).floor().long()
    return source.clamp(0, side - 1), (source >= 0) & (source < side)
