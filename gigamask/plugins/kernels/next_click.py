"""The next click of each mask in one kernel: error region, draw, label, and input coordinates.

A pixel is drawn from the same two uniform numbers, and so is the same one, as in `prompts.clicks`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from gigamask.plugins.kernels.operators import contiguous, launch, padded, register, tuned
from gigamask.prompts.schedule import InteractiveSchedule
from gigamask.types import Prompts

if TYPE_CHECKING:
    from gigamask.types import PromptRound, Targets

PIXELS = 4096
"""Pixels that a program takes at a time, in whole rows."""
EXACT = 2**10
"""Widths of cells are exact in float32 if they are multiples of one by this, in input pixels."""


@triton.jit
def _regions(tensors, mask, rows, numbers, W: tl.constexpr):
    """Return the error of some rows of a prediction, and where a click would confirm the mask."""
    logits, index, masks, confirming, valid, _, _, _ = tensors
    predictions, height, width, _, _ = numbers
    first, columns = mask * height * width, tl.arange(0, W)
    at = mask * predictions
    if index is not None:
        at += tl.load(index + mask)
    places = rows[:, None] * width + columns[None]
    inside = (rows < height)[:, None] & (columns < width)[None]
    x = tl.load(logits + at * height * width + places, inside, 0.0).to(tl.float32)
    target = tl.load(masks + first + places, inside, 0) != 0
    error = ((x > 0) ^ target) & (tl.load(valid + first + places, inside, 0) != 0)
    return error.to(tl.int32), (tl.load(confirming + first + places, inside, 0) != 0).to(tl.int32)


@triton.jit
def _coordinate(place, cell, scale, extent):
    """Return a cell's center in input pixels, within the image."""
    center = place.to(tl.float64) * cell + ((cell - scale) / 2).to(tl.float64)
    most = tl.maximum(extent - scale, 0.0).to(tl.float64)
    return tl.minimum(tl.maximum(center, 0.0), most).to(tl.float32)


@tuned(({}, 8), ({}, 16))
def _kernel(tensors, found, numbers, S: tl.constexpr):
    """Choose the click of one mask."""
    W: tl.constexpr = S[0]
    BR: tl.constexpr = S[1]
    _, _, masks, _, valid, uniforms, scales, extents = tensors
    _, height, width, cell_x, cell_y = numbers
    mask = tl.program_id(0).to(tl.int64)
    errors, agreed = tl.zeros([BR], tl.int32), tl.zeros([BR], tl.int32)
    for start in range(0, height, BR):
        error, confirming = _regions(tensors, mask, start + tl.arange(0, BR), numbers, W)
        errors, agreed = errors + tl.sum(error, 1), agreed + tl.sum(confirming, 1)
    total, all_agreed = tl.sum(errors, 0), tl.sum(agreed, 0)
    has_error = total > 0
    total = tl.where(has_error, total, all_agreed)
    rank = (tl.load(uniforms + 2 * mask).to(tl.float64) * total.to(tl.float64)).to(tl.int32)
    y, before = 0 * total, 0 * total
    for start in range(0, height, BR):
        rows = start + tl.arange(0, BR)
        error, confirming = _regions(tensors, mask, rows, numbers, W)
        counts = tl.sum(tl.where(has_error, error, confirming), 1)
        above = (before + tl.cumsum(counts, 0) <= rank) & (rows < height)
        y, before = y + tl.sum(above.to(tl.int32), 0), before + tl.sum(counts, 0)
    y = tl.minimum(y, height - 1)
    error, confirming = _regions(tensors, mask, y + tl.arange(0, 1), numbers, W)
    counts = tl.sum(tl.where(has_error, error, confirming), 0)
    in_row = tl.sum(counts, 0).to(tl.float64)
    rank = (tl.load(uniforms + 2 * mask + 1).to(tl.float64) * in_row).to(tl.int32)
    left = (tl.cumsum(counts, 0) <= rank) & (tl.arange(0, W) < width)
    x = tl.minimum(tl.sum(left.to(tl.int32), 0), width - 1)
    place = mask * height * width + y * width + x
    label = tl.where(tl.load(masks + place) != 0, 1, 0)
    points, labels = found
    tl.store(labels + mask, tl.where(tl.load(valid + place) != 0, label, -1))
    for axis in tl.static_range(2):
        scale, extent = tl.load(scales + 2 * mask + axis), tl.load(extents + 2 * mask + axis)
        cell, cells = (cell_x, x) if axis == 0 else (cell_y, y)
        tl.store(points + 2 * mask + axis, _coordinate(cells, cell, scale, extent))


def next_click(tensors: list[Tensor | None], cells: list[float]) -> tuple[Tensor, Tensor]:
    """Return the next click of M masks, (M, 1, 2) in input pixels, and its label, (M, 1).

    Args:
        tensors: Logits, index of each mask's prediction or None, foreground, where a click confirms
            the mask, what is no padding, two uniform numbers of each mask, scales and extents.
        cells: Width and height of a cell in input pixels.
    """
    found, logits = _shape(tensors), tensors[0]
    assert logits is not None
    width = padded(logits.shape[3])
    launch(
        _kernel,
        lambda _: (len(logits),),
        *(tuple(tensors), found, (*logits.shape[1:], *cells)),
        S=(width, max(1, min(PIXELS // width, padded(logits.shape[2])))),
    )
    return found


def _shape(tensors: Any, *_: Any) -> tuple[Tensor, Tensor]:
    logits = tensors[0]
    points = logits.new_empty(len(logits), 1, 2, dtype=torch.float32)
    return points, logits.new_empty(len(logits), 1, dtype=torch.int64)


NEXT_CLICK = register(next_click, _shape, lambda *_: 0)


@dataclass(frozen=True)
class FusedSchedule(InteractiveSchedule):
    """SAM's rounds, whose clicks a kernel chooses; central ones are chosen without it."""

    def add_click(self, previous: PromptRound, targets: Targets, uniforms: Tensor) -> Prompts:
        """Return the previous round's tokens, a click in its error region, and its mask.

        Args:
            previous: The previous round.
            targets: Ground truth of M masks.
            uniforms: Two uniform numbers in [0, 1) for each mask.
        """
        cells = [float(each) for each in targets.cell_xy]
        is_exact = all((each * EXACT).is_integer() for each in cells)
        if self.center_click_prob or not is_exact or targets.scale_xy.dtype != torch.float32:
            return super().add_click(previous, targets, uniforms)
        logits, earlier = previous.prediction.logits.detach(), previous.prompts
        index = previous.best_index if logits.shape[1] > 1 else None
        masks = targets.foreground, targets.clickable, targets.valid
        tensors = contiguous(logits, index, *masks, uniforms, targets.scale_xy, targets.extent)
        point, label = NEXT_CLICK(tensors, cells)
        return Prompts(
            points_xy_input=torch.cat([earlier.points_xy_input, point], 1),
            labels=torch.cat([earlier.labels, label], 1),
            masks=previous.mask_input,
            multimask_output=False,
        )


def fused_schedule(schedule: Any) -> Any:
    """Return a schedule whose clicks a kernel chooses, if it is SAM's.

    Args:
        schedule: The schedule.
    """
    is_sam = type(schedule) is InteractiveSchedule
    return FusedSchedule(**vars(schedule)) if is_sam else schedule
