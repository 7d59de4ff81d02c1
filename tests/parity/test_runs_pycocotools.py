"""Runs against pycocotools, in both directions, on thousands of masks."""

import json
import tarfile

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


@pytest.mark.parametrize("seed", range(12))
def test_boxes(seed):
    masks = random_masks(seed)
    boxes = RLEMasks.from_dense(masks).boxes()
    expected = coco.toBbox(encode(masks))
    filled = masks.any((1, 2))
    assert np.array_equal(boxes[:, :2], expected[:, :2])
    # pycocotools gives width and height, which are one more than the difference of inclusive ends.
    assert np.array_equal(
        boxes[:, 2:] - boxes[:, :2] + 1, np.where(filled[:, None], expected[:, 2:], 0)
    )


@pytest.mark.parametrize("seed", range(12))
def test_iou(seed):
    masks = random_masks(seed)
    records = encode(masks)
    assert np.array_equal(
        RLEMasks.from_dense(masks).iou(RLEMasks.from_dense(masks[:15])),
        coco.iou(records, records[:15], [0] * 15),
    )


def test_uncompressed_counts():
    masks = random_masks(6)
    for mask in masks:
        flat = mask.T.ravel()
        changes = np.flatnonzero(np.diff(flat, prepend=False))
        counts = np.diff([0, *changes, flat.size]).tolist()
        packed = coco.frPyObjects({"size": list(mask.shape), "counts": counts}, *mask.shape)
        assert RLEMasks.from_coco([counts], mask.shape).to_coco() == [packed["counts"]]


def test_real_annotations(real_data):
    count = 0
    with tarfile.open(sorted((real_data / "bsds_val").glob("*.tar"))[0]) as tar:
        for member in tar:
            if not member.name.endswith(".json") or count > 1000:
                continue
            annotations = json.loads(tar.extractfile(member).read())["annotations"]
            records = [annotation["segmentation"] for annotation in annotations]
            runs = RLEMasks.from_coco(
                [record["counts"] for record in records], tuple(records[0]["size"])
            )
            assert [text.decode() for text in runs.to_coco()] == [
                record["counts"] for record in records
            ]
            assert np.array_equal(runs.areas(), [annotation["area"] for annotation in annotations])
            boxes = runs.boxes()
            assert np.array_equal(
                np.concatenate([boxes[:, :2], boxes[:, 2:] - boxes[:, :2]], 1),
                [annotation["bbox"] for annotation in annotations],
            )
            assert np.array_equal(
                runs.to_dense(), coco.decode(records).transpose(2, 0, 1).astype(bool)
            )
            count += len(records)
    assert count > 1000
