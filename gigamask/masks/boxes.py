"""Operations on boxes `x0, y0, x1, y1` that follow torchvision: area, IoU, non-maximum suppression.

The width of a box is `x1 - x0`, so a box of one pixel with inclusive ends has no area. Thresholds,
ties and rounding are those of torchvision's `nms` on a CPU, with IoU in float32.
"""

import numpy as np
from jaxtyping import Bool, Float, Float32, Int, Int64

Boxes = Float[np.ndarray, "n 4"] | Int[np.ndarray, "n 4"]


def box_area(boxes: Boxes) -> Float32[np.ndarray, "n"]:
    """Return the area of each box."""
    wide = boxes.astype(np.float32)
    return (wide[:, 2] - wide[:, 0]) * (wide[:, 3] - wide[:, 1])


def box_iou(
    boxes: Boxes, others: Float[np.ndarray, "m 4"] | Int[np.ndarray, "m 4"]
) -> Float32[np.ndarray, "n m"]:
    """Return the intersection over union of all pairs of boxes.

    Args:
        boxes: n boxes, xyxy in any unit.
        others: m boxes in the same unit.

    Returns:
        IoU of each of `boxes` with each of `others`; 0 where neither has an area.
    """
    a, b = boxes.astype(np.float32)[:, None], others.astype(np.float32)[None]
    shared = (
        (np.minimum(a[..., 2:], b[..., 2:]) - np.maximum(a[..., :2], b[..., :2])).clip(0).prod(-1)
    )
    union = box_area(boxes)[:, None] + box_area(others)[None] - shared
    return np.divide(shared, union, out=np.zeros_like(shared), where=union > 0)


def nms(
    boxes: Boxes, scores: Float[np.ndarray, "n"], iou_threshold: float
) -> Int64[np.ndarray, "k"]:
    """Return the boxes that greedy non-maximum suppression keeps.

    Args:
        boxes: Boxes xyxy.
        scores: Score of each box; ties go to the first box.
        iou_threshold: Threshold in [0, 1]; a box is removed if its IoU with a kept one is above it.

    Returns:
        Indices of the kept boxes, highest score first.
    """
    order = np.argsort(-scores, kind="stable")
    wide, is_kept = boxes[order].astype(np.float32), np.ones(len(order), bool)
    low, high = np.split(np.ascontiguousarray(wide.T), 2)
    for i in range(len(order)):
        if is_kept[i]:
            # Most boxes of a large image do not meet: a tenth of the time of their IoU tells.
            rest = slice(i + 1, None)
            meets = (low[:, rest] < high[:, i, None]) & (high[:, rest] > low[:, i, None])
            near = i + 1 + np.flatnonzero(meets.all(0))
            # Compared in float64: the nearest float32 to a threshold may lie above it.
            ious = box_iou(wide[i : i + 1], wide[near])[0].astype(np.float64)
            is_kept[near[ious > iou_threshold]] = False
    return order[is_kept]


def is_box_near_crop_edge(
    boxes: Boxes, crop: tuple[int, int, int, int], size: tuple[int, int], atol: float
) -> Bool[np.ndarray, "n"]:
    """Return which boxes touch a side of the crop that is not a side of the image.

    Args:
        boxes: Boxes xyxy in pixels of the image.
        crop: The crop, xyxy.
        size: Size of the image, (H, W).
        atol: Largest distance in pixels between a box's side and that of the crop or image.
    """
    height, width = size
    wide = boxes.astype(np.float32)
    at_crop, at_image = (
        np.abs(wide - np.array(box, np.float32)) <= atol for box in (crop, (0, 0, width, height))
    )
    return np.asarray((at_crop & ~at_image).any(1))
