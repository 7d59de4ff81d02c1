"""What can be sampled over an index, and what is said of it."""

import json

import numpy as np
import pytest
import simplejpeg
from msgspec.structs import replace

from gigamask.data import index as indexes
from gigamask.data import sample_table, tar
from gigamask.data.mask_sampling import MaskFilters
from gigamask.data.sample_table import COLUMNS, granularity, open_sample_table
from gigamask.datatools.stats import describe
from gigamask.masks.rle import RLEMasks
from gigamask.synthetic.scenes import write
from tests.errors import error_line


@pytest.fixture(scope="module")
def index(tmp_path_factory):
    folder = tmp_path_factory.mktemp("scenes")
    return indexes.build(write(folder, 12, shard_images=5), folder / "index")


def pair(number, sizes, scores=(1.0, 1.0)):
    """A jpg of 10 x 100 pixels and its json, whose masks cover so many pixels of it."""
    masks = (
        []
        if not sizes
        else RLEMasks.from_dense(
            np.arange(1000).reshape(1, 10, 100) < np.array(sizes).reshape(-1, 1, 1)
        ).to_coco()
    )
    segmentations = [{"size": [10, 100], "counts": mask.decode()} for mask in masks]
    annotations = [
        {"segmentation": each, "predicted_iou": scores[0], "stability_score": scores[1]}
        for each in segmentations
    ]
    image = {"image_id": number, "width": 100, "height": 10, "file_name": f"sa_{number}.jpg"}
    jpg = simplejpeg.encode_jpeg(np.zeros((10, 100, 3), np.uint8))
    return [
        (f"sa_{number}.jpg", jpg),
        (f"sa_{number}.json", json.dumps({"image": image, "annotations": annotations}).encode()),
    ]


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """One image each: all fine; as many fine as coarse; an empty mask only; no masks; too large a
    mask beside a fine one; no json."""
    folder = tmp_path_factory.mktemp("small")
    tar.write(folder / "a.tar", [*pair(0, [5, 9, 10, 5]), *pair(1, [5, 101, 5, 200], (0.5, 0.25))])
    tar.write(folder / "b.tar", [*pair(2, [0]), *pair(3, []), *pair(4, [950, 8]), pair(5, [])[0]])
    return indexes.build(folder, folder / "index")


@pytest.mark.parametrize("kind", ["image", "mask"])
def test_where_nothing_passes_there_are_no_items(small, kind):
    catalogue = open_sample_table(small, MaskFilters(min_area=2000), kind, {"region": np.arange(6)})
    assert catalogue.items.count == 0
    assert [len(column) for column in catalogue.items.columns.values()] == [0] * (len(COLUMNS) + 1)
    assert [len(column) for column in catalogue.locate(np.zeros(0, np.int64))] == [0, 0]


def test_borders_are_medium():
    assert granularity(np.array([0, 0.0099, 0.01, 0.1, 0.1001, 1])).tolist() == [0, 0, 1, 1, 2, 2]


@pytest.mark.slow
def test_granularity_is_what_statistics_count(real_data, tmp_path):
    index = indexes.build(real_data / "bsds_val" / "bsds500_val_000001.tar", tmp_path / "index")
    found = open_sample_table(index, MaskFilters(max_area=None), "mask").items.columns[
        "granularity"
    ]
    assert np.bincount(found).tolist() == list(describe(index)["granularity"].values())
    assert np.bincount(found).min() > 100


@pytest.mark.slow
def test_columns_are_computed_lazily_and_cached(index, monkeypatch):
    passes, plain = [], sample_table._blocks
    monkeypatch.setattr(sample_table, "_blocks", lambda *given: passes.append(1) or plain(*given))
    columns = open_sample_table(index, MaskFilters()).items.columns
    assert "difficulty" in columns
    assert tuple(columns) == COLUMNS
    columns["tar"], columns["masks"]
    assert not passes
    hard = columns["difficulty"]
    assert len(passes) == 1
    for name in ("area_fraction", "stability", "predicted_iou"):
        assert columns[name] is columns[name]
    assert columns["difficulty"] is hard
    assert len(passes) == 1
    columns["granularity"]
    assert len(passes) == 2


@pytest.mark.slow
def test_columns_that_nothing_needs_are_not_read(index):
    only = indexes.Index(index.folder, index.manifest, index.images, {"area": index.masks["area"]})
    for kind in ("image", "mask"):
        columns = open_sample_table(only, MaskFilters(), kind).items.columns
        assert len(columns["area_fraction"]) == len(columns["granularity"])
        with pytest.raises(KeyError, match="stability_score"):
            columns["stability"]


def test_users_columns_are_their_images(small):
    given = {"region": np.array([7, -1, 3, 4, 5, 6])}
    images, masks = (
        open_sample_table(small, MaskFilters(), kind, given).items.columns
        for kind in ("image", "mask")
    )
    assert images["region"].tolist() == [7, -1, 5]
    assert masks["region"].tolist() == [7] * 4 + [-1] * 4 + [5]
    assert tuple(images) == (*COLUMNS, "region")
    assert len(images) == len(COLUMNS) + 1
    assert "region" in images


def test_complexity_and_domain_are_derived_unless_given(small):
    shards = np.array([0, 1, 2, 3, 4, 4])
    paths = ["/a/sa_0001.tar", "/b/sa_17.tar", "s3://c/street_1.tar", "/photos", "/a/2.tar"]
    parts = [
        replace(small.manifest.parts[0], tar=replace(small.manifest.tars[0], path=path))
        for path in paths
    ]
    manifest = replace(small.manifest, parts=parts)
    images = {**small.images, "shard": shards, "masks": np.array([50, 51, 150, 151, 0, 4])}
    plain = indexes.Index(small.folder, manifest, images, small.masks)
    columns = open_sample_table(plain, MaskFilters(), with_masks=False).items.columns
    assert columns["complexity"].tolist() == [0, 1, 1, 2, 0, 0]
    assert columns["domain"].tolist() == [0, 0, 1, 2, 3, 3]
    given = {"domain": np.arange(6)}
    columns = open_sample_table(small, MaskFilters(), "image", given).items.columns
    assert tuple(columns) == COLUMNS
    assert len(columns) == len(COLUMNS)
    assert columns["domain"].tolist() == [0, 1, 4]


def test_without_masks_every_image_is_an_item(small):
    found = open_sample_table(
        small,
        MaskFilters(min_area=2000),
        attributes={"region": np.arange(6)},
        seed=3,
        with_masks=False,
    )
    assert (found.items.count, found.items.seed, found.items.tars) == (6, 3, 2)
    assert [column.tolist() for column in found.locate(np.array([5, 0]))] == [[5, 0], [-1, -1]]
    columns = found.items.columns
    known = ("tar", "masks", "width", "height", "complexity", "domain", "region")
    assert tuple(columns) == known
    assert len(columns) == len(known)
    assert columns["tar"].tolist() == [0, 0, 1, 1, 1, 1]
    assert columns["masks"].tolist() == [4, 4, 1, 0, 2, 0]
    assert columns["region"].tolist() == list(range(6))
    for name in ("granularity", "area_fraction", "predicted_iou", "stability", "difficulty"):
        assert name not in columns
        with error_line(rf"'{name}'.* {', '.join(known)},"):
            columns[name]
