"""Label images that were resized with smoothing, or saved as JPEG between: found, and mended.

Smoothing puts values between two objects that belong to neither, so that one disc of 255 on 0
becomes dozens of rims, and of objects 1 and 3 a rim goes to object 2. A pixel is one of a rim if no
3 x 3 pixels of its value touch it, and it lies between a lower and a higher value. In label images
as they are meant, hardly any pixel at an edge is, unless objects are no larger than a few pixels.
"""

from typing import NamedTuple

import cv2
import numpy as np
from jaxtyping import Bool, Int32

from gigamask.errors import CorruptSampleError

Labels = Int32[np.ndarray, "H W"]
MIN_VALUES, MIN_PIXELS = 2, 16
"""Fewest values and pixels of rims that are taken for smoothing."""
RIM_SHARE = 0.2
"""Share of rims among the pixels at edges; smoothing gives 0.22 to 0.8, cells of 12 px 0.15."""
EDGE_SHARE = 0.75
"""Largest share of pixels at edges; beyond, objects are too small to tell."""
MAX_SIDE = 4096
"""Pixels; of larger images, the middle is looked at."""
_KERNEL = np.ones((3, 3), np.uint8)


class Regions(NamedTuple):
    """The pixels of a label image that are at edges, in regions of one value, and in rims."""

    is_edge: Bool[np.ndarray, "H W"]
    is_region: Bool[np.ndarray, "H W"]
    is_rim: Bool[np.ndarray, "H W"]


def check(labels: Labels, name: str) -> None:
    """Raise an error if the edges of a label image are smoothed.

    Args:
        labels: Value of each pixel; 0 is background.
        name: The image's name in error messages.

    Raises:
        CorruptSampleError: They are.
    """
    if labels.max(initial=0) >= 2**24:  # beyond what floats hold
        return
    top, left = (max(0, (side - MAX_SIDE) // 2) for side in labels.shape)
    labels = labels[top : top + MAX_SIDE, left : left + MAX_SIDE]
    is_edge, _, is_rim = _regions(labels)
    edges, rims, values = is_edge.sum(), is_rim.sum(), np.unique(labels[is_rim])
    if (
        rims >= max(MIN_PIXELS, RIM_SHARE * edges)
        and len(values) >= MIN_VALUES
        and edges <= EDGE_SHARE * labels.size
    ):
        raise CorruptSampleError(
            f"{name}: {rims:,} of the {edges:,} pixels at the edges of its label image have one of "
            f"{len(values)} values between those of the two sides, as smoothing leaves them when "
            "masks are resized; resize them with nearest neighbor, or convert with --binary 128 "
            "(one mask: values from 128) or --nearest-value",
            "smoothed edges",
        )


def to_nearest_value(labels: Labels) -> tuple[Labels, int]:
    """Return a label image in which pixels of rims have the value of the nearest region.

    Args:
        labels: Value of each pixel; regions are at least 3 x 3 pixels.

    Returns:
        The label image, and the number of values that are lost though not all their pixels lie
        between a lower and a higher one, as those of rims do.
    """
    _, is_region, is_rim = _regions(labels)
    if not is_region.any():
        return labels, 0
    lost = np.setdiff1d(labels[~is_rim], np.append(labels[is_region], 0))
    _, nearest = cv2.distanceTransformWithLabels(
        (~is_region).astype(np.uint8), cv2.DIST_L2, cv2.DIST_MASK_5, labelType=cv2.DIST_LABEL_PIXEL
    )
    value_of = np.zeros(int(nearest.max()) + 1, np.int32)
    value_of[nearest[is_region]] = labels[is_region]
    return value_of[nearest], len(lost)


def _regions(labels: Labels) -> Regions:
    values = labels.astype(np.float32)
    lowest, highest = cv2.erode(values, _KERNEL), cv2.dilate(values, _KERNEL)
    is_core = lowest == highest
    is_between = (lowest < values) & (values < highest)
    lowest = cv2.dilate(np.where(is_core, values, np.float32(-1)), _KERNEL)
    highest = cv2.erode(np.where(is_core, values, np.float32(2**25)), _KERNEL)
    is_region = (lowest == values) | (highest == values)
    return Regions(~is_core, is_region, is_between & ~is_region)
