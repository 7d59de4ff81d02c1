"""Items and their columns are what plain Python finds in the same annotations, however they are cut
into blocks.
"""

from collections import Counter
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest import mock

import numpy as np
import pytest
import simplejpeg
from hypothesis import given, settings
from hypothesis import strategies as st
from pycocotools import mask as coco

from gigamask.data import annotation, dataset, sample_table, tar
from gigamask.data.index import Index, build
from gigamask.data.index_format import IndexManifest
from gigamask.data.mask_sampling import CandidateMasks, MaskFilters
from gigamask.data.sample_config import SampleConfig
from gigamask.data.sample_table import COLUMNS, open_sample_table
from gigamask.data.shard_index import LeftOut, ShardSummary, TarFile
from gigamask.data.shards import ShardReader
from gigamask.masks.transforms import ImageTransform
from gigamask.rng import make_rng as drawn
from tests import broken

SCORES = st.sampled_from([0.0, 0.25, 0.5, 0.9, 0.95, 1.0])
FILTERS = st.builds(
    MaskFilters,
    max_area=st.sampled_from([None, 0.9, 0.5, 0.05]),
    min_area=st.sampled_from([None, 0, 5]),
    min_predicted_iou=st.none() | SCORES,
    min_stability=st.none() | SCORES,
)


@st.composite
def annotated(draw):
    """Images as (tar, width, height, masks), a mask as (area, predicted_iou, stability)."""
    images, tar_number = [], 0
    for _ in range(draw(st.integers(0, 12))):
        width, height = draw(st.integers(1, 40)), draw(st.integers(1, 40))
        sizes = st.integers(0, width * height) | st.sampled_from(
            [0, width * height, width * height // 100, width * height // 10]
        )
        masks = draw(st.lists(st.tuples(sizes, SCORES, SCORES), max_size=12))
        images.append((tar_number, width, height, masks))
        tar_number += draw(st.integers(0, 1))
    return images


def index_of(images):
    """An index in memory."""
    masks = [mask for image in images for mask in image[3]]
    counts = np.array([len(image[3]) for image in images], np.int32)
    of_images = {
        name: np.array([image[i] for image in images], np.int32)
        for i, name in enumerate(["shard", "width", "height"])
    }
    of_images |= {
        "masks": counts,
        "first_mask": np.concatenate([[0], np.cumsum(counts)]).astype(np.int64),
    }
    of_masks = {
        "area": np.array([mask[0] for mask in masks], np.int32),
        "predicted_iou": np.array([mask[1] for mask in masks], np.float32),
        "stability_score": np.array([mask[2] for mask in masks], np.float32),
    }
    summary = ShardSummary(TarFile("sa_0.tar", 0, ""), LeftOut([], 0, 0, ""), 0, 0, 0)
    shards = [summary] * (images[-1][0] + 1 if images else 0)
    manifest = IndexManifest(2, len(images), len(masks), {}, shards)
    return Index(Path("none"), manifest, of_images, of_masks)


def passes(mask, pixels, filters):
    area, predicted_iou, stability = mask
    return (
        area > 0
        and (filters.max_area is None or area <= filters.max_area * pixels)
        and (filters.min_area is None or area >= filters.min_area)
        and (
            filters.min_predicted_iou is None
            or predicted_iou >= np.float32(filters.min_predicted_iou)
        )
        and (filters.min_stability is None or stability >= np.float32(filters.min_stability))
    )


def level(share):
    return 0 if share < 0.01 else 2 if share > 0.1 else 1


def expect(images, filters, kind):
    """Each item as (row, mask) and its columns, the plain way."""
    places, rows = [], []
    for row, (tar_number, width, height, masks) in enumerate(images):
        pixels = width * height
        kept = [
            (area / pixels, np.float32(iou).item(), np.float32(stability).item())
            for area, iou, stability in filtered(masks, pixels, filters)
        ]
        groups = ([kept] if kept else []) if kind == "image" else [[mask] for mask in kept]
        for number, group in enumerate(groups):
            share, iou, stability = (
                sum(column) / len(group) for column in zip(*group, strict=True)
            )
            often = Counter(level(mask[0]) for mask in group)
            most = max(often, key=lambda value, often=often: (often[value], value))
            hard = (
                0.3 * (1 - share)
                + 0.3 * (1 - stability)
                + 0.2 * (1 - iou)
                + 0.2 * min(1, len(masks) / 200)
            )
            places.append((row, -1 if kind == "image" else number))
            crowd = (len(masks) > 50) + (len(masks) > 150)
            numbers = (tar_number, len(masks), width, height, share, iou, stability, most, hard)
            rows.append((*numbers, crowd, 0))
    return places, rows


def filtered(masks, pixels, filters):
    return [mask for mask in masks if passes(mask, pixels, filters)]


CUTS = st.fixed_dictionaries(
    {
        "BLOCK_IMAGES": st.sampled_from([1, 2, 5, 1024]),
        "IMAGES_AT_ONCE": st.sampled_from([1, 3, 2**14]),
        "ITEMS_AT_ONCE": st.sampled_from([1, 4, 2**14]),
        "FIRST_MASKS": st.integers(0, 3),
        "GATHER_RATIO": st.sampled_from([0.0, 0.5, 1.0]),
    }
)


@settings(deadline=None, max_examples=30)
@given(annotated(), FILTERS, st.sampled_from(["image", "mask"]), CUTS)
def test_items_and_columns_are_what_plain_python_finds(images, filters, kind, cuts):
    places, rows = expect(images, filters, kind)
    with mock.patch.multiple(sample_table, **cuts):
        catalogue = open_sample_table(index_of(images), filters, kind)
        found = {name: catalogue.items.columns[name] for name in catalogue.items.columns}
    assert catalogue.items.count == len(places)
    assert (
        list(
            zip(
                *(column.tolist() for column in catalogue.locate(np.arange(len(places)))),
                strict=True,
            )
        )
        == places
    )
    assert tuple(found) == COLUMNS
    for number, (name, column) in enumerate(found.items()):
        assert column.dtype == (np.float32 if number in (4, 5, 6, 8) else np.int32)
        expected = [row[number] for row in rows]
        if column.dtype == np.int32:
            assert column.tolist() == expected, name
        else:
            np.testing.assert_allclose(column, expected, rtol=0, atol=1e-6, err_msg=name)


@settings(deadline=None, max_examples=6)
@given(
    st.integers(0, 2**32),
    st.sampled_from(["image", "mask"]),
    st.sampled_from([MaskFilters(), MaskFilters(max_area=0.5, min_predicted_iou=0.9)]),
)
def test_columns_are_the_same_bytes_whatever_the_blocks(seed, kind, filters):
    random = np.random.default_rng(seed)
    images = []
    for number in range(30):
        masks = [
            (int(random.integers(200)), random.random(), random.random())
            for _ in range(random.integers(0, 40))
        ]
        images.append((number // 7, 20, 10, masks))

    def run(block, at_once):
        with mock.patch.multiple(sample_table, BLOCK_IMAGES=block, ITEMS_AT_ONCE=at_once):
            columns = open_sample_table(index_of(images), filters, kind).items.columns
            return {name: columns[name].tobytes() for name in columns}

    assert run(1, 3) == run(7, 64) == run(30, 1) == run(1024, 2**14)


@settings(deadline=None, max_examples=60)
@given(annotated(), FILTERS, st.sampled_from(["image", "mask"]), st.data())
def test_locating_some_is_locating_all_and_taking_some(images, filters, kind, data):
    catalogue = open_sample_table(index_of(images), filters, kind)
    every = catalogue.locate(np.arange(catalogue.items.count))
    some = np.array(
        data.draw(
            st.lists(
                st.integers(0, max(0, catalogue.items.count - 1)),
                max_size=9 if catalogue.items.count else 0,
            )
        ),
        np.int64,
    )
    for column, found in zip(every, catalogue.locate(some), strict=True):
        assert found.dtype == np.int64
        assert found.tolist() == column[some].tolist()


@st.composite
def archives(draw):
    """Members of a tar: small images of masks of any density, none and all included; some images
    have no masks, some no json."""
    members = []
    for number in range(draw(st.integers(1, 4))):
        height, width = draw(st.integers(1, 20)), draw(st.integers(1, 20))
        jpg = simplejpeg.encode_jpeg(np.zeros((height, width, 3), np.uint8))
        random, masks = np.random.default_rng(draw(st.integers(0, 2**32))), []
        for density in draw(st.lists(st.sampled_from([0.0, 0.02, 0.3, 1.0]), max_size=6)):
            mask = np.asfortranarray(random.random((height, width)) < density, np.uint8)
            masks.append((coco.encode(mask)["counts"].decode(), draw(SCORES), draw(SCORES)))
        record = broken.described(number, (height, width), masks)
        members += broken.members(number, jpg, record if draw(st.integers(0, 4)) else None)
    return members


@pytest.mark.filterwarnings(
    "ignore:__array__ implementation:DeprecationWarning"
)  # pycocotools against numpy 2
@settings(deadline=None, max_examples=25)
@given(archives(), FILTERS)
def test_items_are_the_masks_that_assembling_keeps(members, filters):
    with TemporaryDirectory() as folder:
        tar.write(Path(folder) / "a.tar", members)
        index = build(Path(folder) / "a.tar", Path(folder) / "index")
        images, masks = open_sample_table(index, filters), open_sample_table(index, filters, "mask")
        shards, entries = ShardReader(index.shard_paths), []
        for row in range(len(index)):
            raw = shards.read_entry(index, row)[1]
            entries.append(annotation.parse(raw, "it") if raw else None)
        kept = [trained_on(entry, filters) if entry else [] for entry in entries]
        assert images.locate(np.arange(images.items.count))[0].tolist() == [
            row for row, taken in enumerate(kept) if taken
        ]
        rows, numbers = masks.locate(np.arange(masks.items.count))
        places = list(zip(rows.tolist(), numbers.tolist(), strict=True))
        assert places == [
            (row, number) for row, taken in enumerate(kept) for number in range(len(taken))
        ]
        taken = [kept[row][number] for row, number in places]
        assert [trained_on(entries[row], filters, number) for row, number in places] == [
            [mask] for mask in taken
        ]
        areas = [
            entries[row].masks.areas()[mask] for (row, _), mask in zip(places, taken, strict=True)
        ]
        pixels = masks.items.columns["width"] * masks.items.columns["height"]
        np.testing.assert_allclose(masks.items.columns["area_fraction"] * pixels, areas, rtol=1e-6)


def trained_on(entry, filters, mask_index=-1):
    """The masks that are taken of an uncropped image when all may be, or when one of those that
    pass is requested."""
    candidates = CandidateMasks(
        entry.size,
        entry.masks.areas(),
        entry.masks.boxes(),
        entry.predicted_iou,
        entry.stability_score,
    )
    settings = SampleConfig(image_size=64, mask_size=16, max_masks=100, filters=filters)
    return dataset.choose_masks(
        candidates,
        dataset.allowed_masks(candidates, mask_index, settings),
        ImageTransform.resize_longest_side(entry.size, 64),
        settings,
        drawn(0, "masks"),
    ).tolist()
