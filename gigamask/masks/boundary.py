"""Euclidean distances to the boundary of a mask, and the pixels along it."""

import math
from typing import NamedTuple

import cv2
import numpy as np
from jaxtyping import Bool, Float64, Int64, UInt8

Mask = Bool[np.ndarray, "H W"]
SEARCHED_WHOLE = 2**14
"""Pixels of a region's box up to which distances are computed in all of it."""
MAX_HALVINGS = 3
"""Halvings of a region's sides before its deepest parts are looked for."""


class _DeepParts(NamedTuple):
    """Boxes that contain all pixels at least `lower` from the outside; none is `upper` from it.

    A box is rows and columns, y0, y1, x0 and x1.
    """

    boxes: list[tuple[int, int, int, int]]
    lower: float
    upper: float


def farthest_point(
    error: Mask,
    taken: Int64[np.ndarray, "n 2"] | None = None,
    at_least: float = 0.0,
) -> tuple[int, int, float]:
    """Return the pixel of a region that is farthest from the outside.

    The image's border counts as outside, as in the evaluation of the SAM paper and in RITM's
    `Clicker`. Distances are compared as whole numbers, their squares.

    Args:
        error: The region.
        taken: Pixels xy that must not be returned; they do not count as outside.
        at_least: Distance of interest; a region without such a pixel may count as empty.

    Returns:
        `x`, `y` and the distance in pixels. Ties go to the first pixel in row-major order; (0, 0,
        0.0) if there is no pixel.
    """
    top, bottom, left, right = mask_extent(error)
    if top == bottom or min(bottom - top, right - left) + 1 < 2 * at_least:
        return 0, 0, 0.0
    # One pixel of outside around the region's box is enough.
    inside = error[top:bottom, left:right].astype(bool, copy=False)
    region = np.pad(inside.view(np.uint8), 1)
    origin = left - 1, top - 1
    free = None if taken is None else taken - origin
    parts = _deep_parts(region)
    if parts.upper < at_least:
        return 0, 0, 0.0
    deepest = max(_deepest(region, box, parts.upper, free) for box in parts.boxes)
    if deepest[0] < parts.lower**2:  # the deepest pixels are taken
        deepest = _deepest(region, (0, region.shape[0], 0, region.shape[1]), 0.0, free)
    squared, y, x = deepest
    return (origin[0] - x, origin[1] - y, math.sqrt(squared)) if squared else (0, 0, 0.0)


def _deep_parts(region: UInt8[np.ndarray, "h w"]) -> _DeepParts:
    """Return where a region is deepest, from the distances between blocks of 2, 4 or 8 pixels.

    A pixel of a block whose center is `d` blocks from the nearest block with a pixel outside is at
    most `d` blocks and two half diagonals from the outside, and at least `d` blocks less two.
    """
    height, width = region.shape
    whole = _DeepParts([(0, height, 0, width)], 0.0, min(height, width) / 2)
    if region.size <= SEARCHED_WHOLE:
        return whole
    levels = [region]
    while levels[-1].any():
        inside = levels[-1]
        rows = inside[:-1:2] & inside[1::2]
        levels.append(rows[:, :-1:2] & rows[:, 1::2])
    halvings = min(len(levels) - 4, MAX_HALVINGS)
    if halvings < 1:
        return whole
    block = 2**halvings
    distance = cv2.distanceTransform(
        np.pad(levels[halvings], 1), cv2.DIST_L2, cv2.DIST_MASK_PRECISE
    )
    most, diagonal = float(distance.max()), math.sqrt(2) * (block - 1)
    lower, upper = (most - math.sqrt(0.5)) * block - 0.01, most * block + diagonal + 0.01
    deep = (distance * block + diagonal >= lower).astype(np.uint8)
    stats = cv2.connectedComponentsWithStats(deep)[2][1:, :4].astype(np.int64) * block
    if (stats[:, 2:] + 2 * math.ceil(upper)).prod(1).sum() > region.size:
        return whole
    # The blocks are padded by one.
    boxes = [(y - block, y - block + h, x - block, x - block + w) for x, y, w, h in stats.tolist()]
    return _DeepParts(boxes, lower, upper)


def _deepest(
    region: UInt8[np.ndarray, "h w"],
    box: tuple[int, int, int, int],
    margin: float,
    taken: Int64[np.ndarray, "n 2"] | None,
) -> tuple[float, int, int]:
    """Return the largest squared distance in a box, and -y and -x of its first pixel.

    Args:
        region: The region.
        box: Rows and columns to search, y0, y1, x0 and x1.
        margin: Distance around the box within which the outside is found.
        taken: Pixels xy that count as distance 0.
    """
    y0, y1, x0, x1 = box
    top, left = max(y0 - math.ceil(margin), 0), max(x0 - math.ceil(margin), 0)
    around = region[top : y1 + math.ceil(margin), left : x1 + math.ceil(margin)]
    squared = squared_edt(around)[y0 - top : y1 - top, x0 - left : x1 - left]
    if taken is not None:
        x, y = (taken - (x0, y0)).T
        within = (x >= 0) & (x < squared.shape[1]) & (y >= 0) & (y < squared.shape[0])
        squared[y[within], x[within]] = 0
    y, x = divmod(int(squared.argmax()), squared.shape[1])
    return float(squared[y, x]), -(y0 + y), -(x0 + x)


def squared_edt(region: UInt8[np.ndarray, "h w"]) -> Float64[np.ndarray, "h w"]:
    """Return the exact squared distance of each pixel to the nearest one outside the region.

    OpenCV returns rounded roots. Their squares are rounded to integers, which is exact for
    distances below 2048, as of all grids up to 4096 pixels wide or high.

    Args:
        region: 1 in the region, 0 outside; there must be a pixel outside.
    """
    # The faster 5 x 5 mask picks other pixels than the exact transform.
    distance = cv2.distanceTransform(region, cv2.DIST_L2, cv2.DIST_MASK_PRECISE).astype(np.float64)
    return np.rint(np.square(distance, out=distance), out=distance)


def outline(mask: Mask) -> Mask:
    """Return the pixels that differ from the pixel to the right, below, or diagonally below.

    This is David Martin's `seg2bmap`, as DAVIS's `_seg2bmap` implements it: a boundary one pixel
    wide, half a pixel towards the origin. The last row is compared only to the right, the last
    column only downwards, and the last pixel not at all. So a mask has no outline along the image's
    border, and a mask of the whole image has none at all.
    """
    lines = np.zeros_like(mask)
    inner = mask[:-1, :-1]
    lines[:-1, :-1] = (inner ^ mask[:-1, 1:]) | (inner ^ mask[1:, :-1]) | (inner ^ mask[1:, 1:])
    lines[-1, :-1] = mask[-1, :-1] ^ mask[-1, 1:]
    lines[:-1, -1] = mask[:-1, -1] ^ mask[1:, -1]
    return lines


def inner_band(mask: Mask, width: int) -> Mask:
    """Return the pixels of a mask within a distance of the outside.

    Args:
        mask: The mask; everything beyond the image counts as outside.
        width: Distance in pixels, where a diagonal step counts as one.
    """
    band = np.zeros_like(mask)
    top, bottom, left, right = mask_extent(mask)
    if top == bottom:
        return band
    inside = np.pad(mask[top:bottom, left:right].astype(np.uint8), 1)
    # The padding erodes the outermost pixels; by default, cv2 does not erode from the image border.
    eroded = cv2.erode(inside, np.ones((3, 3), np.uint8), iterations=width)
    band[top:bottom, left:right] = (inside != eroded)[1:-1, 1:-1]
    return band


def dilate(mask: Mask, radius: int) -> Mask:
    """Dilate a mask by a disc.

    Args:
        mask: The mask.
        radius: Radius of the disc in pixels, inclusive.
    """
    distances = np.arange(-radius, radius + 1) ** 2
    disc = (distances[:, None] + distances[None] <= radius**2).astype(np.uint8)
    return cv2.dilate(mask.astype(np.uint8), disc).astype(bool)


def mask_extent(mask: Mask) -> tuple[int, int, int, int]:
    """Return a mask's first row and one past its last, and the same for columns; 0 if empty."""
    rows, columns = np.flatnonzero(mask.any(1)), np.flatnonzero(mask.any(0))
    return (
        (int(rows[0]), int(rows[-1]) + 1, int(columns[0]), int(columns[-1]) + 1)
        if len(rows)
        else (0, 0, 0, 0)
    )
