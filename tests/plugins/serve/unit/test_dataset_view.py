"""Browsing an index: responses match the index, and corrupt samples are reported."""

import json

import cv2
import numpy as np
import pytest
import simplejpeg

from gigamask import registry
from gigamask.data import annotation, image
from gigamask.data import index as indexes
from gigamask.data.shards import ShardReader
from gigamask.errors import CorruptSampleError
from gigamask.masks.rle import RLEMasks
from gigamask.plugins.serve.dataset_view import THUMBNAIL_PX, DatasetView
from gigamask.plugins.serve.open_images import NotFoundError
from gigamask.synthetic import scenes
from tests.broken import write_samples


def stored_in(index, row):
    """Returns the image and the json of a sample."""
    return ShardReader(index.shard_paths).read_entry(index, row)


def test_shards_counts_and_samplers_are_listed(dataset, index):
    told = dataset.overview()
    assert (told["images"], told["masks"], told["skipped_count"]) == (12, index.manifest.masks, 0)
    assert told["samplers"] == registry.names("sampler")


@pytest.mark.slow
def test_shard_offsets_are_listed(tmp_path):
    scenes.write(str(tmp_path), 6, seed=1, shard_images=2)
    shards = DatasetView(indexes.build(tmp_path, tmp_path / "index")).overview()["shards"]
    assert [(each["first"], each["images"]) for each in shards] == [(0, 2), (2, 2), (4, 2)]


@pytest.mark.parametrize(
    "first, count, rows",
    [(0, 5, range(5)), (10, 5, range(10, 12)), (99, 5, ()), (-3, 2, range(2))],
)
def test_images_are_listed_in_order(dataset, first, count, rows):
    assert [each["row"] for each in dataset.images(first, count)] == list(rows)


def test_masks_are_those_of_the_json(dataset, index):
    entry = annotation.parse(stored_in(index, 3)[1], "a")
    told = dataset.masks(3)
    assert (told["height"], told["width"]) == entry.size
    assert told["annotated"]
    found = RLEMasks.from_coco(
        [each["segmentation"]["counts"] for each in told["masks"]], entry.size
    )
    assert (found.to_dense() == entry.masks.to_dense()).all()
    assert [each["predicted_iou"] for each in told["masks"]] == pytest.approx(
        entry.predicted_iou.tolist(), abs=1e-4
    )
    json.dumps(told, allow_nan=False)


def test_pictures_are_the_stored_pixels_and_thumbnails_are_small_and_show_the_masks(dataset, index):
    raw = stored_in(index, 0)[0]
    stored, sent = image.decode(raw, "a"), simplejpeg.decode_jpeg(dataset.jpeg(0))
    assert sent.shape == stored.shape
    assert np.abs(sent.astype(int) - stored).mean() < 4
    small = simplejpeg.decode_jpeg(dataset.thumbnail(0)).astype(int)
    assert max(small.shape) == min(THUMBNAIL_PX, max(stored.shape))
    covered, size = dataset.file(0)[2].to_dense().any(0).astype(np.uint8), small.shape[1::-1]
    plain = cv2.resize(stored, size, interpolation=cv2.INTER_AREA)
    changed = np.abs(small - plain).mean(-1)
    covered = cv2.resize(covered, size, interpolation=cv2.INTER_NEAREST).astype(bool)
    assert changed[covered].mean() > 30
    assert changed[~covered].mean() < 12


@pytest.mark.parametrize("row", [-1, 12, 10**12])
def test_rows_that_are_not_there_are_unknown(dataset, row):
    with pytest.raises(NotFoundError, match="there is no image"):
        dataset.jpeg(row)


def test_what_cannot_be_read_is_skipped_or_said(tmp_path):
    write_samples(tmp_path / "broken.tar", faulty=9)
    dataset = DatasetView(indexes.build(tmp_path / "broken.tar", tmp_path / "index"))
    assert dataset.overview()["skipped_count"] == len(dataset.overview()["skipped"]) > 0
    json.dumps(dataset.overview())
    said = []
    for row in range(len(dataset.index)):
        for look in (dataset.jpeg, dataset.masks, dataset.thumbnail):
            try:
                look(row)
            except CorruptSampleError as bad:
                said.append(str(bad))
    assert said
    assert all(line.startswith("broken.tar:") for line in said)


def test_an_image_without_a_json_has_no_masks(tmp_path, index):
    (tmp_path / "pictures").mkdir()
    (tmp_path / "pictures" / "a.jpg").write_bytes(stored_in(index, 0)[0])
    dataset = DatasetView(indexes.build(tmp_path / "pictures", tmp_path / "index"))
    assert dataset.images(0, 1)[0]["annotated"] is False
    assert dataset.file(0)[2] is None
    with pytest.raises(NotFoundError, match="has no json"):
        dataset.masks(0)
