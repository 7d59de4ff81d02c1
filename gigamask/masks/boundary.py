"""Euclidean distances to the boundary of a mask, and the pixels along it."""

import cv2
import numpy as np
from jaxtyping import Bool, Int64


def farthest_point(
    error: Bool[np.ndarray, "H W"], taken: Int64[np.ndarray, "n 2"] | None = None
) -> tuple[int, int, float]:
    """Return the pixel of a region that is farthest from the outside.

    The image's border counts as outside, as in the evaluation of the SAM paper and in RITM's
    `Clicker`.

    Args:
        error: The region.
        taken: Pixels xy that must not be returned; they do not count as outside.

    Returns:
        `x`, `y` and the distance in pixels. Ties go to the first pixel in row-major order; (0, 0,
        0.0) if there is no pixel.
    """
    top, bottom, left, right = mask_extent(error)
    if top == bottom:
        return 0, 0, 0.0
    # One pixel of outside around the region's box is enough.
    padded = np.pad(error[top:bottom, left:right].astype(np.uint8), 1)
    # The faster 5 x 5 mask picks other pixels than the exact transform.
    distance = cv2.distanceTransform(padded, cv2.DIST_L2, cv2.DIST_MASK_PRECISE)[1:-1, 1:-1]
    if taken is not None:
        x, y = (taken - (left, top)).T
        within = (x >= 0) & (x < right - left) & (y >= 0) & (y < bottom - top)
        distance[y[within], x[within]] = 0
    y, x = divmod(int(distance.argmax()), distance.shape[1])
    return (left + x, top + y, float(distance[y, x])) if distance[y, x] else (0, 0, 0.0)


def outline(mask: Bool[np.ndarray, "H W"]) -> Bool[np.ndarray, "H W"]:
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


def inner_band(mask: Bool[np.ndarray, "H W"], width: int) -> Bool[np.ndarray, "H W"]:
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


def outer_rim(mask: Bool[np.ndarray, "H W"]) -> Bool[np.ndarray, "H W"]:
    """Return the pixels outside of a mask that touch it at a side or a corner."""
    return cv2.dilate(mask.astype(np.uint8), np.ones((3, 3), np.uint8)).astype(bool) & ~mask


def dilate(mask: Bool[np.ndarray, "H W"], radius: int) -> Bool[np.ndarray, "H W"]:
    """Dilate a mask by a disc.

    Args:
        mask: The mask.
        radius: Radius of the disc in pixels, inclusive.
    """
    distances = np.arange(-radius, radius + 1) ** 2
    disc = (distances[:, None] + distances[None] <= radius**2).astype(np.uint8)
    return cv2.dilate(mask.astype(np.uint8), disc).astype(bool)


def mask_extent(mask: Bool[np.ndarray, "H W"]) -> tuple[int, int, int, int]:
    """Return a mask's first row and one past its last, and the same for columns; 0 if empty."""
    rows, columns = np.flatnonzero(mask.any(1)), np.flatnonzero(mask.any(0))
    return (
        (int(rows[0]), int(rows[-1]) + 1, int(columns[0]), int(columns[-1]) + 1)
        if len(rows)
        else (0, 0, 0, 0)
    )
