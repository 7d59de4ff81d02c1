"""Set operations, connected components and outlines of masks, from their run lengths.

Time and memory grow with the length of the boundaries, not with the pixels.
"""

from collections.abc import Sequence

import cv2
import numpy as np
from jaxtyping import Bool, Int64

from gigamask.masks.resample import cancel_pairs, repeat_index
from gigamask.masks.rle import RLEMasks, from_keys

Runs = tuple[Int64[np.ndarray, "R"], Int64[np.ndarray, "R"], Int64[np.ndarray, "R"]]


def paste(masks: RLEMasks, x0: int, y0: int, size: tuple[int, int]) -> RLEMasks:
    """Return masks of a crop as masks of the image.

    Args:
        masks: The masks of the crop, which lies within the image.
        x0: First column of the crop.
        y0: First row of the crop.
        size: (H, W) of the image.
    """
    if masks.size == size:
        return masks
    rows, columns = np.arange(size[0]) - y0, np.arange(size[1]) - x0
    rows[rows >= masks.size[0]] = columns[columns >= masks.size[1]] = -1
    return masks.resample(np.maximum(rows, -1), np.maximum(columns, -1))


def subtract(mask: RLEMasks, other: RLEMasks) -> RLEMasks:
    """Return the pixels of a mask that another does not have.

    Args:
        mask: One mask.
        other: One mask of the same size.
    """
    if not len(mask.bounds):
        return mask
    keys = np.concatenate([mask.bounds, other.bounds]).astype(np.int64)
    ours = np.arange(len(keys)) < len(mask.bounds)
    order = np.argsort(keys, kind="stable")
    keys, ours = keys[order], ours[order]
    kept = (np.cumsum(ours) % 2 == 1) & (np.cumsum(~ours) % 2 == 0)
    last = np.append(keys[1:] != keys[:-1], True)  # the state after all bounds at a place
    keys, kept = keys[last], kept[last]
    changed = np.diff(kept, prepend=False)
    return from_keys(mask.size, 1, keys[changed], mask.size[0] * mask.size[1] + 1)


def connected_components(mask: RLEMasks) -> RLEMasks:
    """Return the parts of a mask that do not touch, also not at corners, the largest first.

    Args:
        mask: One mask.
    """
    height, pixels = mask.size[0], mask.size[0] * mask.size[1]
    x, y0, y1 = column_runs(mask)
    begin, end = x * height + y0, x * height + y1
    # A run touches those of the next column from one row above it to one below.
    stride = height + 2
    first = np.searchsorted(x * stride + y1 + 1, (x + 1) * stride + y0 + 1, "left")
    stop = np.searchsorted(x * stride + y0 + 1, (x + 1) * stride + y1 + 1, "right")
    left, number = repeat_index(np.maximum(stop - first, 0))
    _, part = np.unique(_join(len(x), left, first[left] + number), return_inverse=True)
    areas = np.bincount(part, end - begin)
    rank = np.empty(len(areas), np.int64)
    rank[np.argsort(-areas, kind="stable")] = np.arange(len(areas))
    order = np.argsort(rank[part], kind="stable")
    base = rank[part][order] * (pixels + 1)
    keys = np.stack([base + begin[order], base + end[order]], 1).ravel()
    return from_keys(mask.size, len(areas), cancel_pairs(keys), pixels + 1)


def column_runs(mask: RLEMasks) -> Runs:
    """Return the runs of a mask within each column: column, first row, and row after the last.

    Args:
        mask: One mask.
    """
    height, pixels = mask.size[0], mask.size[0] * mask.size[1]
    bounds = mask.bounds.astype(np.int64)
    bounds = np.append(bounds, pixels) if len(bounds) % 2 else bounds
    begin, end = bounds[0::2], bounds[1::2]
    run, number = repeat_index((end - 1) // height - begin // height + 1)
    x = begin[run] // height + number
    y0 = np.maximum(begin[run], x * height) - x * height
    y1 = np.minimum(end[run], (x + 1) * height) - x * height
    return x, y0, y1


def _join(
    count: int, left: Int64[np.ndarray, "E"], right: Int64[np.ndarray, "E"]
) -> Int64[np.ndarray, "R"]:
    """Return the smallest number of those that each of `count` numbers is connected with."""
    label = np.arange(count)
    while (label[left] != label[right]).any():
        lower = np.minimum(label[left], label[right])
        np.minimum.at(label, label[left], lower)
        np.minimum.at(label, label[right], lower)
        while (label != label[label]).any():
            label = label[label]
    return label


def crop_to_box(mask: RLEMasks) -> tuple[tuple[slice, slice], Bool[np.ndarray, "h w"]]:
    """Return the rows and columns of a mask's box, and its pixels there.

    Args:
        mask: One mask, which is not empty.
    """
    x0, y0, x1, y1 = mask.boxes()[0].tolist()
    dense = mask.resample(np.arange(y0, y1 + 1), np.arange(x0, x1 + 1)).to_dense()[0]
    return (slice(y0, y1 + 1), slice(x0, x1 + 1)), dense


def outlines(mask: RLEMasks) -> list[list[Int64[np.ndarray, "_ 2"]]]:
    """Return the outlines of the parts of a mask along the edges of pixels, with their holes.

    Pixel (x, y) covers x to x + 1 and y to y + 1. The polygons cover exactly the mask, as
    pycocotools and all others draw them that fill by the even-odd rule.

    Args:
        mask: One mask, not empty.

    Returns:
        For each part, its outline, and then that of each hole, in the other direction.
    """
    (rows, columns), dense = crop_to_box(mask)
    # OpenCV's outlines connect the middles of pixels. Of pixels of half the size, those on both
    # sides of an edge at k are 2 k - 1 and 2 k.
    halves = dense.view(np.uint8).repeat(2, 0).repeat(2, 1)
    found, tree = cv2.findContours(halves, cv2.RETR_CCOMP, cv2.CHAIN_APPROX_NONE)
    corner = np.array([columns.start, rows.start])
    rings = [corner + _corners((each[:, 0].astype(np.int64) + 1) // 2) for each in found]
    parents = tree[0, :, 3]
    return [
        [rings[part], *(rings[hole] for hole in np.flatnonzero(parents == part))]
        for part in np.flatnonzero(parents < 0)
    ]


def join_rings(rings: Sequence[Int64[np.ndarray, "_ 2"]]) -> Int64[np.ndarray, "m 2"]:
    """Return one polygon of several, joined by lines there and back, for formats without holes.

    Args:
        rings: The corners of each.
    """
    joined = rings[0]
    for ring in rings[1:]:
        i = int(np.abs(joined - ring[0]).sum(1).argmin())
        joined = np.concatenate([joined[: i + 1], ring, ring[:1], joined[i:]])
    return joined


def _corners(path: Int64[np.ndarray, "n 2"]) -> Int64[np.ndarray, "m 2"]:
    """Return the points of a closed path where it turns."""
    path = path[(path != np.roll(path, 1, 0)).any(1)]
    before, after = path - np.roll(path, 1, 0), np.roll(path, -1, 0) - path
    return path[(np.sign(before) != np.sign(after)).any(1)]
