"""Assembling one sample from bytes and annotation."""

import json
from dataclasses import replace

import numpy as np
import pytest
import simplejpeg
import torch
from torch.nn import functional

from gigamask.data.annotation import parse
from gigamask.data.augment import ColorJitter, HorizontalFlip, LargeScaleJitter
from gigamask.data.dataset import build_sample
from gigamask.data.mask_sampling import BestMasks, MaskFilters
from gigamask.data.sample_config import SampleConfig
from gigamask.masks.rle import RLEMasks
from gigamask.records import ImageAnnotation, SampleRef
from gigamask.synthetic.scenes import compose_scene, record
from gigamask.types import RandomSpec
from tests.errors import corrupt_sample

CHANCE = RandomSpec(seed=5, clicks=3, blocks=4)
PLAIN = SampleConfig(image_size=128, mask_size=32, max_masks=8)


@pytest.fixture(scope="module")
def scene():
    return compose_scene(0, 7)


@pytest.fixture(scope="module")
def jpg(scene):
    return simplejpeg.encode_jpeg(scene.pixels, quality=95)


@pytest.fixture(scope="module")
def entry(scene):
    return parse(json.dumps(record(scene, 7)).encode(), "sa_000000.tar:sa_7")


def flat_jpg(size):
    return simplejpeg.encode_jpeg(np.full((*size, 3), 90, np.uint8))


def entry_of(masks):
    runs = RLEMasks.from_dense(masks)
    scores = np.full(len(masks), 0.95, np.float32)
    return ImageAnnotation("x.tar:a", masks.shape[1:], runs, scores, scores)


def sample_of(masks, config=PLAIN, position=0):
    """The sample of these masks on a gray image."""
    ref = SampleRef(0, position, 0)
    return build_sample(flat_jpg(masks.shape[1:]), entry_of(masks), ref, config, CHANCE)


@pytest.mark.parametrize("augment", [HorizontalFlip(0.0), LargeScaleJitter(1.0, 1.0, flip=0.0)])
def test_a_stretched_sample_fills_the_square(scene, jpg, entry, augment):
    settings = replace(PLAIN, max_masks=100, stretch=True, augment=augment)
    sample = build_sample(jpg, entry, SampleRef(1, 3, 0), settings, CHANCE)
    tall, wide = scene.masks.size
    assert tall != wide
    assert sample.image.shape == (3, 128, 128)
    pixels = torch.from_numpy(simplejpeg.decode_jpeg(jpg)).permute(2, 0, 1)[None]
    square = functional.interpolate(pixels, (128, 128), mode="bilinear", antialias=True)[0]
    assert torch.equal(sample.image, square)
    rows, columns = (((2 * np.arange(32) + 1) * side) // 64 for side in (tall, wide))
    expected = scene.masks.to_dense()[:, rows][:, :, columns]
    visible = expected.any((1, 2))
    assert np.array_equal(sample.masks.to_dense(), expected[visible])
    boxes = entry.masks.boxes()[visible] * np.tile([128 / wide, 128 / tall], 2)
    assert np.abs(sample.boxes_input - boxes).max() <= 128 / 32


def test_at_most_max_masks_are_taken_anew_each_epoch(jpg, entry):
    assert len(entry.masks) > 8
    samples = [
        build_sample(jpg, entry, SampleRef(epoch, 3, 0), PLAIN, CHANCE) for epoch in range(6)
    ]
    assert {len(sample.masks) for sample in samples} == {8}
    assert len({sample.boxes_input.tobytes() for sample in samples}) > 1


def test_filters_are_applied_before_the_choice():
    masks = np.zeros((4, 40, 60), bool)
    masks[0] = True
    masks[1:, 10:30, 10:30] = True
    settings = replace(PLAIN, max_masks=3)
    assert len(sample_of(masks, settings).masks) == 3
    assert len(sample_of(masks, replace(settings, filters=MaskFilters(min_area=401))).masks) == 0


def test_a_mask_without_a_cell_is_left_out():
    masks = np.zeros((3, 400, 600), bool)
    masks[0, 100:200, 100:200] = True
    masks[1, 0, 0] = True
    masks[2, 300:390, 50:80] = True
    sample = sample_of(masks)
    assert len(sample.masks) == 2
    assert (sample.masks.areas() > 0).all()
    assert sample.boxes_input.shape == (2, 4)
    assert sample.random_inputs.clicks.shape == (2, 3, 2)


def test_draws_have_their_shapes_and_ranges(jpg, entry):
    draws = build_sample(jpg, entry, SampleRef(1, 3, 0), PLAIN, CHANCE).random_inputs
    shapes = {
        "first_prompt": (8,),
        "clicks": (8, 3, 2),
        "box_noise": (8, 4),
        "drop_path": (1, 4, 2),
    }
    assert {name: tuple(getattr(draws, name).shape) for name in shapes} == shapes
    assert {getattr(draws, name).dtype for name in shapes} == {torch.float32}
    for name in ("first_prompt", "clicks", "drop_path"):
        assert 0 <= getattr(draws, name).min() <= getattr(draws, name).max() < 1
    assert draws.box_noise.min() < 0


def test_random_numbers_depend_on_seed_epoch_and_position(jpg, entry):
    settings = replace(PLAIN, augment=HorizontalFlip())

    def spent(seed, epoch, position):
        ref = SampleRef(epoch, position, 0)
        draws = build_sample(jpg, entry, ref, settings, replace(CHANCE, seed=seed)).random_inputs
        tensors = (draws.first_prompt, draws.clicks, draws.box_noise, draws.drop_path)
        return b"".join(tensor.numpy().tobytes() for tensor in tensors)

    names = [(0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1)]
    assert len({spent(*name) for name in names}) == 4
    assert spent(0, 1, 2) == spent(0, 1, 2)


def test_masks_are_chosen_among_those_the_crop_may_show():
    masks = np.zeros((100, 100, 200), bool)
    for number in range(100):
        masks[number, number : number + 3, 2 * number : 2 * number + 3] = True
    settings = SampleConfig(
        image_size=64, mask_size=64, max_masks=20, augment=LargeScaleJitter(2.0, 2.0)
    )
    for position in range(5):
        sample = sample_of(masks, settings, position)
        # A crop of 100 x 100 shows about half of them, of which 20 are taken.
        assert len(sample.masks) == 20
        assert sample.boxes_input.min() >= 0
        assert sample.boxes_input.max() <= 64 - min(sample.transform.scale_xy)


@pytest.mark.slow
def test_a_mask_whose_box_alone_meets_the_crop_is_left_out():
    bow = np.zeros((1, 90, 90), bool)
    bow[0, 0, :] = bow[0, :, 89] = True
    settings = SampleConfig(
        image_size=32, mask_size=32, augment=LargeScaleJitter(3.0, 3.0, flip=0.0)
    )
    samples = [sample_of(bow, settings, position) for position in range(40)]
    for sample in samples:
        y0, _, _, x1 = sample.transform.crop
        assert len(sample.masks) == len(sample.boxes_input) == (y0 == 0 or x1 == 90)
    assert {len(sample.masks) for sample in samples} == {0, 1}


def test_an_empty_mask_takes_no_ones_place():
    masks = np.zeros((6, 40, 60), bool)
    masks[:3, 10:30, 10:30] = True
    assert len(sample_of(masks, replace(PLAIN, max_masks=3)).masks) == 3


def test_the_choice_of_the_settings_is_made(jpg, entry):
    best = np.sort(np.argsort(-entry.predicted_iou, kind="stable")[:8])
    expected = entry.masks[best].boxes().astype(np.float32)
    sample = build_sample(
        jpg, entry, SampleRef(0, 3, 0), replace(PLAIN, mask_sampler=BestMasks()), CHANCE
    )
    assert np.array_equal(sample.boxes_input, sample.transform.boxes_to_input(expected))


def test_colours_vary_with_the_visit_and_touch_nothing_else(jpg, entry):
    plain, first, again, second = (
        build_sample(
            jpg,
            entry,
            SampleRef(epoch, 3, 0),
            replace(PLAIN, color_jitter=ColorJitter(amount, amount, amount)),
            CHANCE,
        )
        for amount, epoch in ((0.0, 0), (0.2, 0), (0.2, 0), (0.2, 1))
    )
    assert torch.equal(first.image, again.image)
    assert not torch.equal(first.image, second.image)
    assert not torch.equal(first.image, plain.image)
    assert first.image.float().sub(plain.image.float()).abs().mean() < 60
    assert np.array_equal(first.masks.bounds, plain.masks.bounds)
    assert torch.equal(first.random_inputs.clicks, plain.random_inputs.clicks)


def test_half_scale_is_taken_only_where_nothing_is_enlarged():
    big = compose_scene(0, 2, long_side=(600, 600))
    jpg = simplejpeg.encode_jpeg(big.pixels, quality=95)
    entry = parse(json.dumps(record(big, 2)).encode(), "x.tar:sa_2")
    for side, same in ((300, False), (301, True)):
        settings = SampleConfig(image_size=side, mask_size=32)
        full, half = (
            build_sample(
                jpg, entry, SampleRef(0, 0, 0), replace(settings, half_scale=half), CHANCE
            ).image
            for half in (False, True)
        )
        assert half.shape == full.shape
        assert torch.equal(half, full) == same
        error = (half.float() - full.float()).square().mean()
        assert 10 * torch.log10(255**2 / (error + 1e-9)) > 35


def test_half_scale_follows_odd_sizes():
    pixels = np.zeros((401, 601, 3), np.uint8)
    pixels[:, 301:] = 255
    masks = np.zeros((1, 401, 601), bool)
    masks[0, :, 301:] = True
    raw = simplejpeg.encode_jpeg(pixels, quality=95)
    image = build_sample(
        raw,
        entry_of(masks),
        SampleRef(0, 0, 0),
        SampleConfig(image_size=100, mask_size=100, half_scale=True),
        CHANCE,
    ).image
    assert image.shape == (3, 67, 100)
    assert image[:, :, :49].max() < 40
    assert image[:, :, 52:].min() > 215


def test_a_photograph_of_another_size_than_its_annotation_is_refused(entry):
    with corrupt_sample(r"sa_000000.tar:sa_7.*JPEG.*100 x 200"):
        build_sample(flat_jpg((100, 200)), entry, SampleRef(0, 0, 0), PLAIN, CHANCE)
