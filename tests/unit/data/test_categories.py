"""Categories from the json to the batch: names in annotations and index, numbers in samples."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch

from gigamask.data import annotation, tar
from gigamask.data import index as indexes
from gigamask.data.dataset import build_sample
from gigamask.data.image import encode_jpeg
from gigamask.data.loader import SampleSource, batches
from gigamask.data.mask_sampling import MaskFilters
from gigamask.data.sample_config import SampleConfig
from gigamask.masks.rle import RLEMasks
from gigamask.records import SampleRef, StepPlan
from gigamask.types import RandomSpec
from tests.errors import corrupt_sample

CONFIG = SampleConfig(image_size=32, mask_size=8, class_names=("dog", "7", "cat"))
RANDOM = RandomSpec(seed=0, clicks=1, blocks=0)
FIELDS = [
    {"category": "cat", "category_id": 3},
    {"category_id": 7},
    {},
    {"category": "bird"},
    {"category_id": "dog"},
]


def record(number: int, fields: list[dict]) -> dict:
    """A json whose masks cover six columns each, the later ones more rows."""
    masks = np.zeros((len(fields), 32, 32), bool)
    for n in range(len(fields)):
        masks[n, : 16 + 4 * n, 6 * n : 6 * n + 6] = True
    ones, points = np.ones(len(fields)), np.zeros((len(fields), 2))
    rle = RLEMasks.from_dense(masks)
    content = annotation.image_record(number, rle, range(len(fields)), points, ones, ones)
    for entry, extra in zip(content["annotations"], fields, strict=True):
        entry |= extra
    return content


def parse(fields: list[dict]) -> tuple[str, ...]:
    return annotation.parse(annotation.encode(record(0, fields)), "a.tar:sa_0").categories


def test_names_of_categories():
    assert parse(FIELDS) == ("cat", "7", "", "bird", "dog")
    assert parse([{}, {}]) == ()
    assert parse([]) == ()


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"category": 3}, "category"),
        ({"category_id": [1]}, "category_id"),
        ({"category": "x" * 101}, "101 characters"),
    ],
)
def test_invalid_categories_are_named(fields, message):
    with corrupt_sample(rf"sa_0.*{message}"):
        parse([fields])


@pytest.fixture
def index(tmp_path):
    jpg = encode_jpeg(np.full((32, 32, 3), 90, np.uint8), 90)
    contents = {0: record(0, FIELDS), 1: record(1, [{}, {}]), 2: record(2, [{"category": "cat"}])}
    for number, content in contents.items():
        members = [(f"sa_{number}.jpg", jpg), (f"sa_{number}.json", json.dumps(content).encode())]
        tar.write(tmp_path / f"{number}.tar", members)
    return indexes.build(sorted(tmp_path.glob("*.tar")), tmp_path / "index")


def test_the_index_counts_categories(index, tmp_path):
    """Also one that is joined from others; numbers come first."""
    counts = {"7": 1, "bird": 1, "cat": 2, "dog": 1}
    assert list(index.manifest.categories.items()) == list(counts.items())
    joined = indexes.build([index.folder], tmp_path / "joined")
    assert joined.manifest.categories == counts


@pytest.mark.parametrize("workers", [0, 1])
def test_classes_travel_with_their_masks(index, workers):
    plan = StepPlan((tuple(SampleRef(0, n, row) for n, row in enumerate((2, 1, 0))),), 0, 3)
    source = SampleSource(str(index.folder), CONFIG, RANDOM)
    [(batch,)] = batches(source, [plan], workers)
    assert batch.classes.tolist() == [2, -1, -1, 2, 1, -1, -1, 0]
    assert batch.mask_image.tolist() == [0, 1, 1, 2, 2, 2, 2, 2]
    assert batch.select(torch.tensor([0, 4])).classes.tolist() == [2, 1]
    plain = replace(source, sample_config=replace(CONFIG, class_names=()))
    assert next(batches(plain, [plan]))[0].classes is None


def test_classes_of_an_empty_batch(index):
    [(batch,)] = batches(SampleSource(str(index.folder), CONFIG, RANDOM), [StepPlan(((),), 0, 0)])
    assert (batch.classes.shape, batch.classes.dtype) == ((0,), torch.int64)


def test_classes_follow_filters_and_the_choice_of_masks():
    entry = annotation.parse(annotation.encode(record(0, FIELDS)), "a.tar:sa_0")
    jpg = encode_jpeg(np.zeros((32, 32, 3), np.uint8), 90)

    def classes(**changes: object) -> list[int]:
        config = replace(CONFIG, **changes)
        return build_sample(jpg, entry, SampleRef(0, 0, 0), config, RANDOM).classes.tolist()

    assert classes() == [2, 1, -1, -1, 0]
    assert classes(filters=MaskFilters(min_area=160)) == [-1, 0]
    one = build_sample(jpg, entry, SampleRef(0, 0, 0, mask_index=4), CONFIG, RANDOM)
    assert one.classes.tolist() == [0]
    # At this size of the grid, only the masks 1 and 4 have a cell.
    assert classes(mask_size=2) == [1, 0]
