"""A sample whose masks come from the mask store equals the one whose masks come from the json, bit
for bit.
"""

from dataclasses import fields, replace

import numpy as np
import pytest
import simplejpeg
from hypothesis import given, settings
from hypothesis import strategies as st

from gigamask.data import index, mask_store, mask_store_shard, tar
from gigamask.data.annotation import parse
from gigamask.data.augment import ColorJitter, HorizontalFlip, NoAugment
from gigamask.data.dataset import build_sample
from gigamask.data.mask_sampling import (
    BestMasks,
    DiverseMasks,
    MaskFilters,
    RandomMasks,
    SizeBalancedMasks,
)
from gigamask.data.sample_config import SampleConfig
from gigamask.data.shards import ShardReader
from gigamask.masks.rle import RLEMasks
from gigamask.masks.transforms import ImageTransform
from gigamask.records import SampleRef
from gigamask.types import RandomInputs, RandomSpec
from tests import broken

CHANCE = RandomSpec(seed=9, clicks=2, blocks=3)
SIZES = [(60, 90), (90, 61), (50, 50), (97, 70), (33, 200), (200, 33), (9, 9)]


@pytest.fixture(scope="module")
def opened(tmp_path_factory):
    """Noise of many sizes: every cell encodes where it was taken from. Some masks are empty, some
    cover all."""
    folder = tmp_path_factory.mktemp("noise")
    members = []
    for number, size in enumerate(SIZES):
        random = np.random.default_rng(number)
        masks = random.random((12, *size)) < np.linspace(0, 1, 12)[:, None, None]
        given = [
            (counts.decode(), random.random(), 0.9)
            for counts in RLEMasks.from_dense(masks).to_coco()
        ]
        pixels = random.integers(0, 256, (*size, 3), dtype=np.uint8)
        jpg = simplejpeg.encode_jpeg(pixels, quality=80)
        members += broken.members(number, jpg, broken.described(number, size, given))
    tar.write(folder / "a.tar", members[:6])
    tar.write(folder / "b.tar", members[6:])
    return index.build(folder, folder / "index")


@pytest.fixture(scope="module", params=[(64, 16), (64, 64), (60, 7)])
def store(request, opened, tmp_path_factory):
    side, grid = request.param
    return mask_store.build(
        opened, tmp_path_factory.mktemp("store") / "store", grid, side, mirrored=True
    )


def contents(sample):
    draws = [
        getattr(sample.random_inputs, field.name).numpy().tobytes()
        for field in fields(RandomInputs)
    ]
    arrays = (sample.image.numpy(), sample.masks.bounds, sample.masks.offsets, sample.boxes_input)
    return [
        sample.name,
        sample.ref,
        sample.transform,
        sample.masks.size,
        *((each.dtype, each.shape, each.tobytes()) for each in arrays),
        *draws,
    ]


@pytest.mark.parametrize("augment", [NoAugment(), HorizontalFlip(0.5), HorizontalFlip(1.0)])
@pytest.mark.parametrize(
    "choice", [RandomMasks(), DiverseMasks(), BestMasks(), SizeBalancedMasks()]
)
def test_samples_are_equal_bit_for_bit(opened, store, augment, choice):
    made = store.manifest
    common = SampleConfig(
        made.image_size,
        made.mask_size,
        5,
        MaskFilters(min_predicted_iou=0.1),
        choice,
        augment,
        ColorJitter(0.2, 0.2, 0.2),
    )
    shards = ShardReader(opened.shard_paths)
    for row in range(len(opened)):
        jpg, raw = shards.read_entry(opened, row)
        entry = parse(raw, opened.entry_name(row))
        for epoch in range(2):
            ordinary = build_sample(jpg, entry, SampleRef(epoch, row, row), common, CHANCE)
            settings_of_store = replace(common, mask_store=str(store.folder))
            assert contents(
                store.sample(jpg, SampleRef(epoch, row, row), settings_of_store, CHANCE)
            ) == contents(ordinary)
            assert len(ordinary.masks)


@settings(deadline=None)
@given(
    st.integers(1, 80),
    st.integers(1, 80),
    st.sampled_from([(64, 16), (64, 64), (60, 7), (128, 32)]),
    st.integers(0, 2**32 - 1),
)
def test_a_mirrored_raster_is_the_mirror_where_it_lies_on_the_cells(height, width, square, seed):
    side, grid = square
    runs = RLEMasks.from_dense(np.random.default_rng(seed).random((3, height, width)) < 0.5)
    plain, flipped = (
        ImageTransform.resize_longest_side((height, width), side, flip).apply_masks(runs, grid)
        for flip in (False, True)
    )
    if mask_store_shard.needs_mirrored_copy((height, width), side, grid):
        return
    mirrored = mask_store_shard.mirror(
        plain, ImageTransform.resize_longest_side((height, width), side).resized[1] * grid // side
    )
    assert np.array_equal(mirrored.bounds, flipped.bounds)
    assert np.array_equal(mirrored.offsets, flipped.offsets)
