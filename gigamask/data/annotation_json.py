"""Write SA-1B annotations.

Boxes are x, y, width, height with inclusive ends, so that width and height are one less than
COCO's; the keys have SA-1B's order.
"""

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Float, Int

from gigamask.masks.rle import RLEMasks


def image_record(
    image_id: int,
    masks: RLEMasks,
    ids: Sequence[int],
    points_xy: Int[np.ndarray, "n 2"] | Float[np.ndarray, "n 2"],
    predicted_iou: Float[np.ndarray, "n"],
    stability_score: Float[np.ndarray, "n"],
    crops: Int[np.ndarray, "n 4"] | None = None,
) -> dict[str, Any]:
    """Return the annotation of the image `sa_<image_id>`.

    Args:
        image_id: Number of the image.
        masks: The masks.
        ids: Id of each mask.
        points_xy: Prompt point of each mask in pixels.
        predicted_iou: Predicted IoU of each mask.
        stability_score: Stability score of each mask.
        crops: Crop of the image that each mask was made from, xyxy in pixels with exclusive ends;
            None for the whole image.

    Returns:
        The json as a dict.
    """
    height, width = masks.size
    if crops is None:
        crops = np.tile([0, 0, width, height], (len(masks), 1))
    return {
        "image": {
            "image_id": image_id,
            "width": width,
            "height": height,
            "file_name": f"sa_{image_id}.jpg",
        },
        "annotations": [
            {
                **fields,
                "predicted_iou": float(predicted_iou[i]),
                "point_coords": [[float(points_xy[i, 0]), float(points_xy[i, 1])]],
                "crop_box": [float(x0), float(y0), float(x1 - x0), float(y1 - y0)],
                "id": ids[i],
                "stability_score": float(stability_score[i]),
            }
            for i, (fields, (x0, y0, x1, y1)) in enumerate(
                zip(mask_fields(masks), crops.tolist(), strict=True)
            )
        ],
    }


def mask_fields(masks: RLEMasks) -> list[dict[str, Any]]:
    """Return the fields `bbox`, `area` and `segmentation` of each mask."""
    size, areas = list(masks.size), masks.areas().tolist()
    return [
        {
            "bbox": [float(x0), float(y0), float(x1 - x0), float(y1 - y0)],
            "area": area,
            "segmentation": {"size": size, "counts": counts.decode()},
        }
        for (x0, y0, x1, y1), area, counts in zip(
            masks.boxes().tolist(), areas, masks.to_coco(), strict=True
        )
    ]


def encode(record: dict[str, Any]) -> bytes:
    """Encode an annotation as the bytes of its file."""
    return json.dumps(record).encode()
