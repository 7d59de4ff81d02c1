"""Tiles: parts of a large image that overlap by a halo, and what is one object in several of them.

Only run lengths of masks are kept, so that memory grows with the masks' outlines.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise, product

import numpy as np
from jaxtyping import Bool, Float32, Float64, Int, Int64

from gigamask.masks.rle import RLEMasks

SAME_IOU = 0.5
"""IoU from which masks of neighboring tiles are one object, where both tiles see it."""

Box = tuple[int, int, int, int]


@dataclass(frozen=True)
class TileGrid:
    """Tiles of equal size that cover an image evenly.

    An image smaller than a tile has tiles as high or as wide as the image.

    Attributes:
        size: Height and width of the image.
        tile: Side of a tile in pixels.
        halo: Least overlap of neighboring tiles in pixels, at most half of a tile.
    """

    size: tuple[int, int]
    tile: int
    halo: int

    @cached_property
    def lines(self) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
        """First and last row + 1 of each row of tiles, and the same for columns."""
        rows, columns = (_cover(length, self.tile, self.halo) for length in self.size)
        return rows, columns

    @cached_property
    def boxes(self) -> list[Box]:
        """The tiles, `xyxy` with exclusive ends, column by column."""
        rows, columns = self.lines
        return [(x0, y0, x1, y1) for (x0, x1), (y0, y1) in product(columns, rows)]

    def neighbors(self) -> Iterator[tuple[int, int, int]]:
        """Yield the indices of tiles that share a side, and its axis: 0 is left and right."""
        rows = self.lines[0]
        for index in range(len(self.boxes)):
            if index + len(rows) < len(self.boxes):
                yield index, index + len(rows), 0
            if (index + 1) % len(rows):
                yield index, index + 1, 1

    def nearest(self, region: Float64[np.ndarray, "4"]) -> Box:
        """Return the tile whose center is nearest to that of a region.

        Args:
            region: x0, y0, x1, y1 in pixels.
        """
        (y0, y1), (x0, x1) = (
            min(lines, key=lambda line: abs(sum(line) - region[axis] - region[axis + 2]))
            for axis, lines in zip((1, 0), self.lines, strict=True)
        )
        return x0, y0, x1, y1


def _cover(length: int, tile: int, halo: int) -> list[tuple[int, int]]:
    """Return the first and last pixel + 1 of the fewest tiles that cover a line."""
    if length <= tile:
        return [(0, length)]
    count = -(-(length - halo) // (tile - halo))
    starts = [index * (length - tile) // (count - 1) for index in range(count)]
    return [(start, start + tile) for start in starts]


def match_masks(
    masks: RLEMasks,
    scores: Float32[np.ndarray, "n"],
    tile_index: Int64[np.ndarray, "n"],
    grid: TileGrid,
    tolerance: float,
) -> Int64[np.ndarray, "n"]:
    """Find out which masks of several tiles are parts of one object.

    Masks are matched between neighbors, those with the highest IoU first, and at most one of a
    tile. If one of the masks that match ends before the borders of its tile, it has the whole
    object, and the others are not used. Nor is a mask that a border cuts, if a neighbor sees all of
    it and has no such mask, or has a better match for it.

    Args:
        masks: Masks of the image.
        scores: Score of each, which selects among those that have a whole object.
        tile_index: Index of the tile of each, ascending.
        grid: The tiles.
        tolerance: Largest distance in pixels from a border at which it may have cut a mask.

    Returns:
        The number of each mask's object, from 0; -1 if it is not used.
    """
    boxes, count = masks.boxes(), len(masks)
    offsets = np.searchsorted(tile_index, np.arange(len(grid.boxes) + 1))
    members = [np.arange(*pair) for pair in pairwise(offsets)]
    cut, seen_whole = np.zeros(count, bool), np.zeros(count, bool)
    for tile, own in zip(grid.boxes, members, strict=True):
        cut[own] = _is_cut(boxes[own], tile, grid.size, tolerance)
    pairs: list[tuple[float, int, int]] = []
    for first, second, axis in grid.neighbors():
        tiles = grid.boxes[first], grid.boxes[second]
        for own, other in ((members[first], tiles[1]), (members[second], tiles[0])):
            inside = (boxes[own, :2] >= other[:2]).all(1) & (boxes[own, 2:] < other[2:]).all(1)
            seen_whole[own] |= inside & ~_is_cut(boxes[own], other, grid.size, tolerance)
        pairs += _matches(masks, boxes, (members[first], members[second]), tiles, axis, tolerance)
    groups = _group(pairs, tile_index)
    sizes = np.bincount(groups, minlength=count)
    matched = np.zeros(count, bool)
    matched[[index for _, *both in pairs for index in both]] = True
    groups[cut & (sizes[groups] == 1) & (seen_whole | matched)] = -1
    for group in np.unique(groups[(groups >= 0) & ~cut]):
        own = np.flatnonzero(groups == group) if sizes[group] > 1 else np.array([group])
        whole = own[~cut[own]]
        groups[own] = -1
        groups[whole[scores[whole].argmax()]] = group
    return np.unique(groups, return_inverse=True)[1] - int((groups < 0).any())


def _is_cut(
    boxes: Int[np.ndarray, "n 4"], tile: Box, size: tuple[int, int], tolerance: float
) -> Bool[np.ndarray, "n"]:
    """Return which boxes reach a border of a tile that is not one of the image."""
    gaps = np.abs(boxes - (np.array(tile) - [0, 0, 1, 1]))
    is_inner = np.array(tile) != [0, 0, size[1], size[0]]
    return ((gaps <= tolerance) & is_inner).any(1)


def _matches(
    masks: RLEMasks,
    boxes: Int[np.ndarray, "n 4"],
    members: tuple[np.ndarray, np.ndarray],
    tiles: tuple[Box, Box],
    axis: int,
    tolerance: float,
) -> list[tuple[float, int, int]]:
    """Return the IoU and indices of masks of two neighbors that are one object.

    Masks that a border between the tiles cuts are compared where both tiles see them: in the
    overlap, or, without one, in the lines of pixels on both sides of the border.

    Args:
        masks: Masks of the image.
        boxes: Their boxes.
        members: Indices of the masks of both tiles.
        tiles: The tiles, the left or upper one first.
        axis: 0 if they lie side by side, 1 if one lies above the other.
        tolerance: As for `match_masks`.
    """
    low = [max(ends) for ends in zip(tiles[0][:2], tiles[1][:2], strict=True)]
    high = [min(ends) for ends in zip(tiles[0][2:], tiles[1][2:], strict=True)]
    starts = [low, list(low)]
    is_apart = low[axis] >= high[axis]
    if is_apart:
        starts[0][axis] -= 1
        high[axis] += 1
    size = [high[0] - low[0], high[1] - low[1]]
    strips, chosen, is_cut = [], [], []
    for side, (own, (x0, y0)) in enumerate(zip(members, starts, strict=True)):
        near = (boxes[own, :2] < [x0 + size[0], y0 + size[1]]) & (boxes[own, 2:] >= [x0, y0])
        own = own[near.all(1)]
        shown = masks[own].resample(np.arange(y0, y0 + size[1]), np.arange(x0, x0 + size[0]))
        there = np.flatnonzero(shown.areas())
        strips.append(shown[there])
        chosen.append(own[there])
        own_boxes = boxes[chosen[side]]
        gap = own_boxes[:, axis] - tiles[1][axis], tiles[0][axis + 2] - 1 - own_boxes[:, axis + 2]
        is_cut.append(gap[1 - side] <= tolerance)
    shared = strips[0].intersections(strips[1])
    either = is_cut[0][:, None] | is_cut[1][None]
    areas = [(strip.areas(), masks[own].areas()) for strip, own in zip(strips, chosen, strict=True)]
    visible, full = (areas[0][i][:, None] + areas[1][i][None] - shared for i in (0, 1))
    iou = shared / np.where(either | is_apart, visible, full)
    first, second = np.nonzero(iou >= SAME_IOU)
    return [
        (float(iou[i, j]), int(chosen[0][i]), int(chosen[1][j]))
        for i, j in zip(first, second, strict=True)
    ]


def _group(
    pairs: Sequence[tuple[float, int, int]], tile_index: Int64[np.ndarray, "n"]
) -> Int64[np.ndarray, "n"]:
    """Return the index of the first mask of each mask's group, which has one of a tile at most."""
    groups = np.arange(len(tile_index))
    members = {index: [index] for index in range(len(groups))}
    for _, a, b in sorted(pairs, key=lambda pair: (-pair[0], *pair[1:])):
        first, second = sorted((int(groups[a]), int(groups[b])))
        if first == second:
            continue
        together = members[first] + members[second]
        if len({int(tile_index[index]) for index in together}) == len(together):
            groups[members.pop(second)] = first
            members[first] = together
    return groups
