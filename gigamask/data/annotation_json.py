"""SA-1B's json, written: masks enter with what is said of them, the record of one image leaves, and its bytes.

Boxes are x, y, width, height with inclusive ends, so width and height are one less than COCO's; keys stand in SA-1B's order.

Not here: reading it (`data.annotation`).
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
    """Returns the json of image `sa_<image_id>`: its masks, each with its id, the prompt it was made from, and its scores.

    `crops` says which part of the image each was made from, as `xyxy` with half-open ends; None for all of it.
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
                **shape,
                "predicted_iou": float(predicted_iou[i]),
                "point_coords": [[float(points_xy[i, 0]), float(points_xy[i, 1])]],
                "crop_box": [float(x0), float(y0), float(x1 - x0), float(y1 - y0)],
                "id": ids[i],
                "stability_score": float(stability_score[i]),
            }
            for i, (shape, (x0, y0, x1, y1)) in enumerate(
                zip(mask_fields(masks), crops.tolist(), strict=True)
            )
        ],
    }


def mask_fields(masks: RLEMasks) -> list[dict[str, Any]]:
    """Returns of each mask what follows from its pixels: `bbox`, `area` and `segmentation`."""
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


def encode(told: dict[str, Any]) -> bytes:
    """Returns a record as the bytes of its file."""
    return json.dumps(told).encode()
