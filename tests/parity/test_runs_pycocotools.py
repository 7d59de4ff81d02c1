"""Runs against pycocotools, in both directions, on thousands of masks."""

import numpy as np
import pytest
from pycocotools import mask as coco

from gigamask.masks.rle import RLEMasks

# pycocotools 2.0 decodes through an old array protocol, which numpy 2 warns about.
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")


def random_masks(seed: int) -> np.ndarray:
    """Forty masks of one size: noise, smooth blobs, stripes, full and empty ones."""
    random = np.random.default_rng(seed)
    height, width = random.integers(1, [1, 90, 90, 300][seed % 4] + 1, 2)
    masks = random.random((40, height, width)) < random.choice(
        [0, 0.01, 0.1, 0.5, 0.99, 1], (40, 1, 1)
    )
    y, x = np.mgrid[:height, :width]
    for mask in masks[::2]:
        phase, turns = random.uniform(0, 6.3, 2), random.uniform(0, 12, 2)
        mask[:] = np.sin(phase[0] + turns[0] * y / height) + np.sin(
            phase[1] + turns[1] * x / width
        ) > random.uniform(-1, 1)
    return masks


def encode(masks: np.ndarray) -> list[dict]:
    return [coco.encode(np.asfortranarray(mask.astype(np.uint8))) for mask in masks]


@pytest.mark.parametrize("first", range(0, 100, 25))
def test_four_thousand_masks(first):
    for seed in range(first, first + 25):
        masks = random_masks(seed)
        size = masks.shape[1:]
        records = encode(masks)
        texts = [record["counts"] for record in records]
        runs = RLEMasks.from_coco(texts, size)
        assert np.array_equal(runs.to_dense(), masks)
        assert runs.to_coco() == texts
        assert RLEMasks.from_dense(masks).to_coco() == texts
        assert np.array_equal(runs.areas(), coco.area(records))


def test_uncompressed_counts():
    masks = random_masks(6)
    for mask in masks:
        flat = mask.T.ravel()
        changes = np.flatnonzero(np.diff(flat, prepend=False))
        counts = np.diff([0, *changes, flat.size]).tolist()
        packed = coco.frPyObjects({"size": list(mask.shape), "counts": counts}, *mask.shape)
        assert RLEMasks.from_coco([counts], mask.shape).to_coco() == [packed["counts"]]
