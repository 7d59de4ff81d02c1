"""Distances to the boundary of a region.

Enters: a region as pixels. Leaves: its deepest pixel, where evaluation clicks. The distance is exactly Euclidean and the image's border counts
as boundary, as in the evaluation of the SAM paper and in RITM's `Clicker`.

Not here: clicks of training (`prompts.clicks`), scores (`evaluate`).
"""

import cv2
import numpy as np
from jaxtyping import Bool


def farthest_point(error: Bool[np.ndarray, "H W"]) -> tuple[int, int, float]:
    """Returns `x`, `y` of the pixel of `error` that is farthest from its outside, the first in reading order among equals, and that distance.

    An empty region gives (0, 0, 0.0).
    """
    rows, columns = np.flatnonzero(error.any(1)), np.flatnonzero(error.any(0))
    if not len(rows):
        return 0, 0, 0.0
    top, left = int(rows[0]), int(columns[0])
    # Outside the region's box there is nothing but its outside, and one pixel of that is enough.
    padded = np.pad(error[top : rows[-1] + 1, left : columns[-1] + 1].astype(np.uint8), 1)
    # The quick 5 x 5 mask picks other pixels than the exact transform does.
    distance = cv2.distanceTransform(padded, cv2.DIST_L2, cv2.DIST_MASK_PRECISE)[1:-1, 1:-1]
    y, x = divmod(int(distance.argmax()), distance.shape[1])
    return left + x, top + y, float(distance[y, x])
