"""Distances to the boundary of a region, and the pixels along it.

Enters: regions as pixels. Leaves: the deepest pixel, where evaluation clicks; the outline, the inner band and the outer rim of a region, and a
map grown by a disc, which scores of boundaries are made of. Distances are exactly Euclidean where nothing else is said.

Not here: clicks of training (`prompts.clicks`), scores (`evaluate`).
"""

import cv2
import numpy as np
from jaxtyping import Bool, Int64


def farthest_point(
    error: Bool[np.ndarray, "H W"], taken: Int64[np.ndarray, "n 2"] | None = None
) -> tuple[int, int, float]:
    """Returns `x`, `y` of the pixel of `error` that is farthest from its outside, the first in reading order among equals, and that distance.

    The image's border counts as boundary, as in the evaluation of the SAM paper and in RITM's `Clicker`. Pixels `xy` that are `taken` are no answer,
    but no boundary either. Where there is none, the answer is (0, 0, 0.0).
    """
    top, bottom, left, right = box_of(error)
    if top == bottom:
        return 0, 0, 0.0
    # Outside the region's box there is nothing but its outside, and one pixel of that is enough.
    padded = np.pad(error[top:bottom, left:right].astype(np.uint8), 1)
    # The quick 5 x 5 mask picks other pixels than the exact transform does.
    distance = cv2.distanceTransform(padded, cv2.DIST_L2, cv2.DIST_MASK_PRECISE)[1:-1, 1:-1]
    if taken is not None:
        x, y = (taken - (left, top)).T
        within = (x >= 0) & (x < right - left) & (y >= 0) & (y < bottom - top)
        distance[y[within], x[within]] = 0
    y, x = divmod(int(distance.argmax()), distance.shape[1])
    return (left + x, top + y, float(distance[y, x])) if distance[y, x] else (0, 0, 0.0)


def outline(mask: Bool[np.ndarray, "H W"]) -> Bool[np.ndarray, "H W"]:
    """Returns the pixels that differ from the one to the right, below, or both: a boundary one pixel wide, half a pixel towards the origin.

    In the last row only the pixel to the right is asked, in the last column only the one below, and the last pixel of all is never in: so a mask
    that ends at the image's border has no outline there, and a full one none at all. (David Martin's `seg2bmap`, as DAVIS's `_seg2bmap` has it.)
    """
    lines = np.zeros_like(mask)
    here = mask[:-1, :-1]
    lines[:-1, :-1] = (here ^ mask[:-1, 1:]) | (here ^ mask[1:, :-1]) | (here ^ mask[1:, 1:])
    lines[-1, :-1] = mask[-1, :-1] ^ mask[-1, 1:]
    lines[:-1, -1] = mask[:-1, -1] ^ mask[1:, -1]
    return lines


def inner_band(mask: Bool[np.ndarray, "H W"], width: int) -> Bool[np.ndarray, "H W"]:
    """Returns the mask's pixels within `width` of its outside, diagonal steps counting one; what is beyond the image counts as outside."""
    band = np.zeros_like(mask)
    top, bottom, left, right = box_of(mask)
    if top == bottom:
        return band
    inside = np.pad(mask[top:bottom, left:right].astype(np.uint8), 1)
    # A pixel is worn off in each turn; the padding wears the first, and beyond it cv2 takes what wears nothing off.
    eroded = cv2.erode(inside, np.ones((3, 3), np.uint8), iterations=width)
    band[top:bottom, left:right] = (inside != eroded)[1:-1, 1:-1]
    return band


def outer_rim(mask: Bool[np.ndarray, "H W"]) -> Bool[np.ndarray, "H W"]:
    """Returns the pixels outside the mask that touch it, at a corner too."""
    return cv2.dilate(mask.astype(np.uint8), np.ones((3, 3), np.uint8)).astype(bool) & ~mask


def grow(lines: Bool[np.ndarray, "H W"], radius: int) -> Bool[np.ndarray, "H W"]:
    """Returns the pixels within `radius` of one in `lines`."""
    away = np.arange(-radius, radius + 1) ** 2
    disc = (away[:, None] + away[None] <= radius**2).astype(np.uint8)
    return cv2.dilate(lines.astype(np.uint8), disc).astype(bool)


def box_of(mask: Bool[np.ndarray, "H W"]) -> tuple[int, int, int, int]:
    """Returns a mask's first row, one past its last, and the same of its columns; zeros for an empty mask."""
    rows, columns = np.flatnonzero(mask.any(1)), np.flatnonzero(mask.any(0))
    return (
        (int(rows[0]), int(rows[-1]) + 1, int(columns[0]), int(columns[-1]) + 1)
        if len(rows)
        else (0, 0, 0, 0)
    )
