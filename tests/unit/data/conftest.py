"""Entries in SA-1B's format, made on the spot."""

import json

import numpy as np
import pytest
import simplejpeg

from gigamask.masks.rle import RLEMasks


def make_jpg(height: int = 24, width: int = 32, seed: int = 0) -> bytes:
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return simplejpeg.encode_jpeg(pixels, quality=90)


def make_record(masks: np.ndarray, image_id: int = 1) -> dict:
    count, height, width = masks.shape
    annotations = [
        {
            "bbox": [0.0, 0.0, 1.0, 1.0],
            "area": 1,
            "segmentation": {"size": [height, width], "counts": counts.decode()},
            "predicted_iou": 0.5 + index / (2 * count),
            "point_coords": [[0.5, 0.25]],
            "crop_box": [0, 0, width, 3.5],
            "id": 7 + index,
            "stability_score": 1,
        }
        for index, counts in enumerate(RLEMasks.from_dense(masks).to_coco())
    ]
    return {
        "image": {
            "image_id": image_id,
            "width": width,
            "height": height,
            "file_name": f"sa_{image_id}.jpg",
        },
        "annotations": annotations,
    }


@pytest.fixture(scope="session")
def jpg():
    """jpg(height, width, seed) returns the bytes of a JPEG of noise."""
    return make_jpg


@pytest.fixture
def masks():
    """Three masks on 24 x 32: a rectangle, a single pixel, noise."""
    held = np.zeros((3, 24, 32), bool)
    held[0, 3:9, 5:20] = True
    held[1, 23, 31] = True
    held[2] = np.random.default_rng(1).random((24, 32)) < 0.5
    return held


@pytest.fixture(scope="session")
def record():
    """record(masks, image_id) returns an annotation as plain data; `json.dumps` makes it a file."""
    return make_record


@pytest.fixture
def entry(masks):
    """entry(number) returns the two members of image `sa_{number}`."""

    def make(number: int) -> list[tuple[str, bytes]]:
        return [
            (f"sa_{number}.jpg", make_jpg(seed=number)),
            (f"sa_{number}.json", json.dumps(make_record(masks, number)).encode()),
        ]

    return make
