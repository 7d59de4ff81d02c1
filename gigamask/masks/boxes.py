"""Boxes `x0, y0, x1, y1`: how much they overlap, which end at a crop's edge, and thinned out where they say the same twice.

Enters: boxes `(n, 4)` in any unit, `x` to the right, `y` down. A side is the difference of its ends, as in torchvision, so a box of
one pixel whose ends are inclusive has no area. Thresholds, ties and roundings are those of torchvision's `nms` on a CPU: IoU in float32.

Not here: the boxes of masks (`runs`), boxes in the input square (`frame`).
"""

import numpy as np
from jaxtyping import Bool, Float, Float32, Int, Int64

from gigamask.errors import GigamaskError

Boxes = Float[np.ndarray, "n 4"] | Int[np.ndarray, "n 4"]


def areas(boxes: Boxes) -> Float32[np.ndarray, "n"]:
    """Returns each box's area."""
    wide = boxes.astype(np.float32)
    return (wide[:, 2] - wide[:, 0]) * (wide[:, 3] - wide[:, 1])


def iou(
    boxes: Boxes, others: Float[np.ndarray, "m 4"] | Int[np.ndarray, "m 4"]
) -> Float32[np.ndarray, "n m"]:
    """Returns each box's intersection over union with each of `others`; 0 where neither has an area."""
    a, b = boxes.astype(np.float32)[:, None], others.astype(np.float32)[None]
    shared = (
        (np.minimum(a[..., 2:], b[..., 2:]) - np.maximum(a[..., :2], b[..., :2])).clip(0).prod(-1)
    )
    union = areas(boxes)[:, None] + areas(others)[None] - shared
    return np.divide(shared, union, out=np.zeros_like(shared), where=union > 0)


def suppress(
    boxes: Boxes, scores: Float[np.ndarray, "n"], threshold: float
) -> Int64[np.ndarray, "k"]:
    """Returns the boxes that greedy non-maximum suppression keeps, highest score first; the first of equal scores goes before the others.

    A box falls when its IoU with one that is kept is above `threshold`, in [0, 1]; IoU of exactly the threshold lets it stay.
    """
    if not 0 <= threshold <= 1:
        raise GigamaskError(
            f"boxes are thinned out above an IoU of {threshold}; it is a share and must lie in [0, 1]"
        )
    left = np.argsort(-scores, kind="stable")
    kept = []
    while len(left):
        best, left = left[0], left[1:]
        kept.append(best)
        # Compared in float64: the nearest float32 to a threshold may lie above it.
        left = left[iou(boxes[best : best + 1], boxes[left])[0].astype(np.float64) <= threshold]
    return np.array(kept, np.int64)


def near_edge(
    boxes: Boxes, crop: tuple[int, int, int, int], size: tuple[int, int], within: float
) -> Bool[np.ndarray, "n"]:
    """Says which boxes end at most `within` from a side of `crop` (xyxy) that is not also a side of the image of `size` (H, W) to within as much."""
    height, width = size
    wide = boxes.astype(np.float32)
    at_crop, at_image = (
        np.abs(wide - np.array(each, np.float32)) <= within
        for each in (crop, (0, 0, width, height))
    )
    return np.asarray((at_crop & ~at_image).any(1))
