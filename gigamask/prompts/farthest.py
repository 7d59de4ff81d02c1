"""The pixels that are farthest from the outside of regions, for all masks at once, on a GPU.

They are those of `masks.boundary.farthest_point`, which is faster on a CPU. The distance of a pixel
is the minimum of `d(x')^2 + (x - x')^2` over the pixels x' of its row, where d is the distance to
the nearest pixel outside in the same column (Saito and Toriwaki 1994). It is at most the distance
within its row and that within its column, so only few pixels can be the farthest.
"""

from typing import NamedTuple

import torch
from jaxtyping import Int32, Int64
from torch import Tensor
from torch.nn import functional

from gigamask.types import Masks

SAMPLED = 32
"""Side of the blocks of which one pixel each is looked at first."""
MAX_PIXELS = 2**23
"""Pixels of regions, and distances, that are in memory at a time."""


class FarthestPoints(NamedTuple):
    """The farthest pixel of each mask's region, the first of several in row-major order.

    Attributes:
        xy: The pixels; (0, 0) if there is none.
        squared: Their squared distances to the outside; 0 if there is no pixel.
    """

    xy: Int64[Tensor, "M 2"]
    squared: Int64[Tensor, "M"]


def center_clicks(
    target: Masks, pred_mask: Masks, valid: Masks, clicked: Int64[Tensor, "M n 2"]
) -> Int64[Tensor, "M 3"]:
    """Return x, y and label of each mask's next click, as `CenterClicks` defines it.

    Args:
        target: The masks.
        pred_mask: Their predictions.
        valid: False in the padding.
        clicked: Pixels xy of earlier clicks.
    """
    miss = farthest_points(target & ~pred_mask & valid, clicked)
    false_alarm = farthest_points(pred_mask & ~target & valid, clicked)
    is_miss = miss.squared > false_alarm.squared
    xy = torch.where(is_miss[:, None], miss.xy, false_alarm.xy)
    label = torch.where(is_miss, 1, torch.where(false_alarm.squared > 0, 0, -1))
    for region, sign in ((target & valid, 1), (~target & valid, 0)):
        open_masks = (label == -1).nonzero()[:, 0]
        if not len(open_masks):
            break
        point = farthest_points(region[open_masks], clicked[open_masks])
        xy[open_masks] = point.xy
        label[open_masks] = torch.where(point.squared > 0, sign, -1)
    return torch.cat([xy, label[:, None]], 1)


def farthest_points(region: Masks, taken: Int64[Tensor, "M n 2"]) -> FarthestPoints:
    """Return the pixel of each region that is farthest from the outside.

    The grid's border counts as outside.

    Args:
        region: A region of each mask.
        taken: Pixels xy that must not be returned; they do not count as outside.
    """
    if not region.numel():
        return FarthestPoints(taken.new_zeros(len(region), 2), taken.new_zeros(len(region)))
    count = max(1, MAX_PIXELS // region[0].numel())
    parts = map(_farthest, region.split(count), taken.split(count))
    return FarthestPoints(*(torch.cat(each) for each in zip(*parts, strict=True)))


def _farthest(region: Masks, taken: Int64[Tensor, "M n 2"]) -> FarthestPoints:
    """Return `farthest_points` of so few masks that they fit into memory."""
    width = region.shape[2]
    columns = _distances(region)
    bound = torch.minimum(columns, _distances(region.transpose(1, 2)).transpose(1, 2))
    reach = int(bound.max())
    _, index = functional.max_pool2d(
        bound[:, None].float(), SAMPLED, ceil_mode=True, return_indices=True
    )
    index = index.flatten(1)
    mask = torch.arange(len(region), device=region.device)[:, None].expand_as(index)
    sample = torch.stack([mask, index // width, index % width], -1).flatten(0, 1)
    least = _deepest(columns, sample, reach, taken).squared
    return _deepest(
        columns, (region & (bound.square() >= least[:, None, None])).nonzero(), reach, taken
    )


def _distances(region: Masks) -> Int32[Tensor, "M H W"]:
    """Return each pixel's distance to the nearest one outside in its column; 0 outside."""
    height = region.shape[1]
    row = torch.arange(1, height + 1, dtype=torch.int32, device=region.device)[:, None]
    above = torch.where(region, 0, row).cummax(1).values
    below = torch.where(region, height + 1, row).flip(1).cummin(1).values.flip(1)
    return torch.minimum(row - above, below - row)


def _deepest(
    columns: Int32[Tensor, "M H W"],
    pixels: Int64[Tensor, "N 3"],
    reach: int,
    taken: Int64[Tensor, "M n 2"],
) -> FarthestPoints:
    """Return which of some pixels is the farthest from the outside.

    Args:
        columns: Result of `_distances`.
        pixels: Index of the mask, y and x of each pixel.
        reach: Bound of the distances.
        taken: Pixels xy that count as distance 0.
    """
    masks, height, width = columns.shape
    best = pixels.new_zeros(masks)
    shift = torch.arange(-reach, reach + 1, dtype=torch.int32, device=columns.device)
    for mask, y, x in (part.unbind(1) for part in pixels.split(max(1, MAX_PIXELS // len(shift)))):
        across = x[:, None] + shift
        inside = (across >= 0) & (across < width)
        down = columns[mask[:, None], y[:, None], across.clamp(0, width - 1)]
        squared = torch.where(inside, down, 0).square().add_(shift.square()).amin(1)
        is_taken = (taken[mask] == torch.stack([x, y], 1)[:, None]).all(2).any(1)
        squared = squared.masked_fill(is_taken, 0)
        # Of equal distances, the first pixel has the largest key.
        key = squared.long() * (height * width) + (height * width - 1 - (y * width + x))
        key = torch.where(squared > 0, key, 0)
        best = best.scatter_reduce(0, mask, key, "amax")
    squared = best // (height * width)
    index = torch.where(squared > 0, height * width - 1 - best % (height * width), 0)
    return FarthestPoints(torch.stack([index % width, index // width], 1), squared)
