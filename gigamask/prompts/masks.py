"""Mask prompts without an earlier round: the truth enters, the logits of an answer that a hurried person might have left leave.

Not here: the logits that a round hands on (`contracts.Round.handed_on`), how the model reads them (`model.prompt_encoder`).
"""

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor
from torch.nn import functional

from gigamask.errors import GigamaskError
from gigamask.types import Targets


def jittered_masks(
    targets: Targets, boxes_input: Float[Tensor, "M 4"], logit: float
) -> Float[Tensor, "M G G"]:
    """Returns the truth as logits, moved and stretched so that its box becomes `boxes_input`: it is wrong by as much as that box.

    A cell's logit is linear in its covered share, from `-logit` to `logit`; beyond the grid nothing is covered. Cells are taken, not blended.
    """
    shares = _low_shares(targets)
    side = shares.shape[-1]
    cells = [targets.cell_xy[axis] * targets.masks.shape[2 - axis] / side for axis in (0, 1)]
    (columns, across), (rows, down) = (
        _taken(targets.boxes_input[:, axis::2], boxes_input[:, axis::2], cells[axis], side)
        for axis in (0, 1)
    )
    mask = torch.arange(len(shares), device=shares.device)[:, None, None]
    taken = shares[mask, rows[:, :, None], columns[:, None]] * (down[:, :, None] & across[:, None])
    return logit * (2 * taken - 1)


def _low_shares(targets: Targets) -> Float[Tensor, "M G G"]:
    """Returns how much of each cell of the mask prompts' grid is covered."""
    height, width = targets.masks.shape[1:]
    side = targets.mask_prompt_size or width
    if height != width or width % side:
        raise GigamaskError(
            f"a truth of {height} x {width} cells gives no mask prompt of {side} x {side}; give one whose side is a multiple of {side}"
        )
    return functional.avg_pool2d(targets.masks[:, None].float(), width // side)[:, 0]


def _taken(
    old: Float[Tensor, "M 2"], new: Float[Tensor, "M 2"], cell: float, side: int
) -> tuple[Int64[Tensor, "M G"], Bool[Tensor, "M G"]]:
    """Returns which cell each cell is taken from along one axis when the interval `old` becomes `new`, and whether there is such a cell."""
    centres = (torch.arange(side, device=old.device) + 0.5) * cell
    scale = (old[:, 1:] - old[:, :1] + 1) / (new[:, 1:] - new[:, :1] + 1)
    found = ((old[:, :1] + (centres - new[:, :1]) * scale) / cell).floor().long()
    return found.clamp(0, side - 1), (found >= 0) & (found < side)
