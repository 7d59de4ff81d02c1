"""Soft edge maps out of automatic masks (SAM paper, section 7.2 and appendix D.2).

Enters the masks of an image and the logits they were cut from, both at the image's size; leaves a map in [0, 1], thin enough to score. The paper
takes the 768 masks of a 16 x 16 grid of points, three each, unfiltered by predicted IoU and stability, less duplicates.

Not here: finding the masks (`automatic_edges`), scores (`edges`).
"""

from collections.abc import Iterable

import cv2
import numpy as np
from jaxtyping import Bool, Float, Float32

from gigamask.geometry.boundary import outer_rim

EQUAL = 1.01
"""Up to what ratio two neighbours across an edge count as equal, and both stay, as in Dollar's `edgesNms`."""


def edge_map(
    found: Iterable[tuple[Bool[np.ndarray, "H W"], Float[np.ndarray, "H W"]]], size: tuple[int, int], thin: bool = True
) -> Float32[np.ndarray, "H W"]:
    """Returns how strong an edge is at each pixel of an image of `size`, from its masks and their logits, which are looked at one by one.

    Sobel's gradient of each mask's probability, kept on the pixels just outside the mask; the strongest of all masks; scaled to [0, 1]; then, unless
    `thin` is off, kept only where it is a ridge.
    """
    strongest = np.zeros(size, np.float32)
    for mask, logits in found:
        strength = slope(1 / (1 + np.exp(-logits.astype(np.float32).clip(-80, 80))))
        np.maximum(strongest, np.where(outer_rim(mask), strength, 0), out=strongest)
    scaled = scale(strongest)
    return ridges(scaled) if thin else scaled


def slope(values: Float32[np.ndarray, "H W"]) -> Float32[np.ndarray, "H W"]:
    """Returns the length of Sobel's 3 x 3 gradient; beyond the border lies what is before it."""
    across, down = (cv2.Sobel(values, cv2.CV_32F, *order, ksize=3, borderType=cv2.BORDER_REPLICATE) for order in ((1, 0), (0, 1)))
    return np.hypot(across, down)


def scale(values: Float32[np.ndarray, "H W"]) -> Float32[np.ndarray, "H W"]:
    """Returns the values moved and stretched to [0, 1]; zeros where all are equal."""
    low, high = values.min(initial=np.inf), values.max(initial=-np.inf)
    return (values - low) / (high - low) if high > low else np.zeros_like(values)


def ridges(edges: Float32[np.ndarray, "H W"]) -> Float32[np.ndarray, "H W"]:
    """Returns the map with 0 where a neighbour across the edge, one pixel to either side, is stronger (non-maximum suppression).

    Across is the direction in which the smoothed map curves downwards the most; between pixels it is interpolated linearly.
    """
    smooth = cv2.GaussianBlur(edges, (0, 0), 2)
    xx, yy, xy = (cv2.Sobel(smooth, cv2.CV_32F, *order, ksize=3, borderType=cv2.BORDER_REPLICATE) for order in ((2, 0), (0, 2), (1, 1)))
    # The angle that curves upwards the most; across is at right angles to it.
    along = 0.5 * np.arctan2(2 * xy, xx - yy)
    step_x, step_y = -np.sin(along), np.cos(along)
    y, x = np.mgrid[: edges.shape[0], : edges.shape[1]].astype(np.float32)
    sides = [cv2.remap(edges, x + sign * step_x, y + sign * step_y, cv2.INTER_LINEAR, borderMode=cv2.BORDER_REPLICATE) for sign in (1, -1)]
    return np.where(edges * EQUAL >= np.maximum(*sides), edges, np.float32(0))
