"""Drawn transforms, and color changes against Pillow's, which torchvision's are defined to equal.

That image, masks, points and boxes agree in a transform is in tests/laws/test_augment.py.
"""

from itertools import permutations

import numpy as np
import pytest
from PIL import Image, ImageEnhance

from gigamask.data.augment import (
    ColorJitter,
    HorizontalFlip,
    LargeScaleJitter,
    NoAugment,
    RandomCrop,
    RandomResizedCrop,
    ScaleJitter,
    adjust_brightness,
    adjust_contrast,
    adjust_saturation,
)
from gigamask.data.sample_config import SampleConfig
from gigamask.masks.transforms import ImageTransform
from gigamask.rng import make_rng
from tests.errors import error_line


def test_plain_is_the_whole_image():
    assert NoAugment().get_transform(
        (300, 400), 128, make_rng(0, "frame")
    ) == ImageTransform.resize_longest_side((300, 400), 128)


def test_a_crop_has_the_stored_scale_and_the_center_of_some_mask():
    boxes = np.array([[5, 5, 9, 9], [700, 200, 899, 399], [1990, 990, 1999, 999.0]])
    seen = np.zeros(3, int)
    for position in range(200):
        random = make_rng(0, "frame", position)
        transform = RandomCrop(128).get_transform_with_objects((1000, 2000), 128, boxes, random)
        assert transform.crop_size == transform.resized == (128, 128)
        y0, x0, y1, x1 = transform.crop
        x, y = (boxes[:, :2] + boxes[:, 2:]).T // 2
        inside = (x0 <= x) & (x < x1) & (y0 <= y) & (y < y1)
        assert inside.any()
        seen += inside
    assert (seen > 40).all()  # each of the masks has a third


def test_crops_without_masks_are_anywhere():
    transforms = [
        RandomCrop(100, flip=0.0).get_transform((300, 90), 50, make_rng(0, "frame", position))
        for position in range(200)
    ]
    assert {transform.crop_size for transform in transforms} == {(100, 90)}
    assert {transform.resized for transform in transforms} == {(50, 45)}
    starts = [transform.crop[0] for transform in transforms]
    assert 0 <= min(starts) < 10
    assert 190 < max(starts) <= 200


def test_an_image_smaller_than_a_crop_is_shown_whole():
    transform = RandomCrop(1024, flip=0.0).get_transform((300, 400), 128, make_rng(0, "frame"))
    assert transform == ImageTransform.resize_longest_side((300, 400), 128)


def test_the_boxes_of_stretched_images_are_stretched():
    config = SampleConfig(image_size=64, mask_size=16, augment=RandomCrop(10), stretch=True)
    boxes = np.array([[90, 20, 91, 21]])
    for position in range(50):
        y0, x0, y1, x1 = config.get_transform((50, 100), boxes, make_rng(0, "f", position)).crop
        assert (y1 - y0, x1 - x0) in {(5, 10), (6, 10)}
        assert y0 - 1 <= 20 <= y1
        assert x0 - 1 <= 90 <= x1


@pytest.mark.slow
def test_flip_mirrors_its_fraction_of_the_visits():
    transforms = [
        HorizontalFlip(0.25).get_transform((300, 400), 128, make_rng(0, "frame", 0, position))
        for position in range(2000)
    ]
    # 500 expected, standard deviation 19.
    assert abs(sum(transform.flip for transform in transforms) - 500) < 95
    assert {
        (transform.original, transform.crop, transform.resized, transform.image_size)
        for transform in transforms
    } == {((300, 400), (0, 0, 300, 400), (96, 128), 128)}


@pytest.mark.parametrize("kind", [LargeScaleJitter, ScaleJitter])
def test_scales_are_uniform_between_their_ends(kind):
    augment = kind()
    transforms = [
        augment.get_transform((1500, 2250), 1024, make_rng(0, "frame", 0, position))
        for position in range(1000)
    ]
    scales = np.array(
        [transform.resized[1] / transform.crop_size[1] * 2250 / 1024 for transform in transforms]
    )
    assert augment.low - 0.01 <= scales.min() < augment.low + 0.02
    assert augment.high - 0.02 < scales.max() <= augment.high + 0.01
    # The mean of a thousand uniform numbers has a standard deviation of 0.009 of the range.
    assert abs(scales.mean() - (augment.low + augment.high) / 2) < 0.04 * (
        augment.high - augment.low
    )
    assert abs(np.mean([transform.flip for transform in transforms]) - 0.5) < 0.08


def test_a_large_scale_shows_a_crop_that_fills_the_square():
    transforms = [
        LargeScaleJitter(2.0, 2.0).get_transform((1500, 2250), 1024, make_rng(0, "frame", position))
        for position in range(50)
    ]
    assert {transform.crop_size for transform in transforms} == {(1125, 1125)}
    assert {transform.resized for transform in transforms} == {(1024, 1024)}
    assert len({transform.crop[0] for transform in transforms}) > 30
    assert len({transform.crop[1] for transform in transforms}) > 30
    assert all(transform.crop[0] <= 375 and transform.crop[1] <= 1125 for transform in transforms)


def test_sizes_are_multiples_and_what_is_shown_keeps_its_scale():
    for size in ((321, 481), (480, 640), (100, 90), (20, 900)):
        for i in range(50):
            drawn = [
                LargeScaleJitter(0.9, 1.4, multiple=multiple).get_transform(
                    size, 256, make_rng(i, "frame")
                )
                for multiple in (1, 32)
            ]
            scale = 256 * (0.9 + 0.5 * make_rng(i, "frame").random()) / max(size)
            for whole, shown, crop in zip(
                drawn[0].resized, drawn[1].resized, drawn[1].crop_size, strict=True
            ):
                assert shown == (whole - whole % 32 if whole > 32 else whole)
                assert shown / crop == pytest.approx(scale, abs=(0.51 + scale) / crop)
            y0, x0, y1, x1 = drawn[1].crop
            assert 0 <= y0 < y1 <= size[0]
            assert 0 <= x0 < x1 <= size[1]
    with error_line(r"LargeScaleJitter\.multiple must be at least 1 .got 0"):
        LargeScaleJitter(multiple=0)


def test_a_small_scale_shows_the_whole_image_small():
    transform = LargeScaleJitter(0.5, 0.5, flip=0.0).get_transform(
        (1500, 2250), 1024, make_rng(0, "frame")
    )
    assert transform == ImageTransform((1500, 2250), (0, 0, 1500, 2250), (341, 512), 1024)


def test_a_scale_of_one_is_the_plain_frame():
    for size in ((300, 400), (400, 300), (1, 700), (33, 32)):
        assert ScaleJitter(1.0, 1.0, flip=0.0).get_transform(
            size, 128, make_rng(0, "frame")
        ) == ImageTransform.resize_longest_side(size, 128)


@pytest.mark.slow
def test_random_crops_fill_the_square_with_areas_and_aspects_in_their_ranges():
    transforms = [
        RandomResizedCrop().get_transform((900, 1200), 224, make_rng(0, "frame", 0, position))
        for position in range(2000)
    ]
    heights, widths = np.array([transform.crop_size for transform in transforms]).T
    areas, aspects = heights * widths / (900 * 1200), np.log(widths / heights)
    assert {(transform.resized, transform.image_size) for transform in transforms} == {
        ((224, 224), 224)
    }
    assert 0.199 < areas.min() < 0.21
    assert 0.9 < areas.max() <= 1
    assert np.log(3 / 4) - 0.003 < aspects.min() < np.log(3 / 4) + 0.01
    assert np.log(4 / 3) - 0.01 < aspects.max() < np.log(4 / 3) + 0.003
    # Parts that fit whatever their aspect: even in area and in the logarithm of the aspect.
    # Deviations of the means are below 0.01.
    small = areas < 0.5
    assert abs(areas[small].mean() - 0.35) < 0.02
    assert abs(aspects[small].mean()) < 0.03
    assert abs(np.mean([transform.flip for transform in transforms]) - 0.5) < 0.06
    assert len({transform.crop[:2] for transform in transforms}) > 1500


@pytest.mark.parametrize(
    "size, crop",
    [
        ((300, 900), (0, 250, 300, 650)),
        ((900, 300), (250, 0, 650, 300)),
        ((1, 700), (0, 350, 1, 351)),
        ((300, 310), (0, 0, 300, 310)),
    ],
)
def test_where_no_part_fits_the_largest_in_the_middle_is_taken(size, crop):
    """A share of the whole area fits only where the aspect is the image's own."""
    transform = RandomResizedCrop(area=(1.0, 1.0), flip=0.0).get_transform(
        size, 64, make_rng(0, "frame")
    )
    assert transform == ImageTransform(size, crop, (64, 64), 64)


@pytest.fixture(scope="module")
def pixels():
    random = np.random.default_rng(0)
    coarse = random.integers(0, 256, (3, 6, 8), dtype=np.uint8).repeat(8, 1).repeat(8, 2)
    return np.clip(coarse + random.integers(-20, 20, coarse.shape), 0, 255).astype(np.uint8)


@pytest.mark.parametrize(
    "change, enhance",
    [
        (adjust_brightness, ImageEnhance.Brightness),
        (adjust_contrast, ImageEnhance.Contrast),
        (adjust_saturation, ImageEnhance.Color),
    ],
)
@pytest.mark.parametrize("factor", [0.0, 0.8, 1.0, 1.2, 3.0])
def test_each_change_is_pillows(pixels, change, enhance, factor):
    expected = np.asarray(
        enhance(Image.fromarray(pixels.transpose(1, 2, 0))).enhance(factor)
    ).transpose(2, 0, 1)
    # Pillow cuts values and rounds grey to a whole number first; what a blend multiplies by a
    # factor, it multiplies that by, too.
    assert np.abs(change(pixels, factor).astype(int) - expected).max() <= 1 + abs(1 - factor)
    assert np.array_equal(change(pixels, 1.0), pixels)


def test_nothing_is_changed_by_default(pixels):
    assert ColorJitter().adjust(pixels, make_rng(0, "colour")) is pixels
    assert not np.array_equal(
        ColorJitter(0.2, 0.2, 0.2).adjust(pixels, make_rng(0, "colour")), pixels
    )


@pytest.mark.slow
def test_factors_are_uniform_within_their_amounts():
    grey = np.full((3, 2, 2), 100, np.uint8)
    seen = np.array(
        [
            ColorJitter(brightness=0.2).adjust(grey, make_rng(0, "colour", i))[0, 0, 0]
            for i in range(2000)
        ]
    )
    assert (seen.min(), seen.max()) == (80, 120)
    assert abs(seen.mean() - 100) < 1.5
    # Above 1 the factor would be negative; it stops at black.
    dark = np.array(
        [
            ColorJitter(brightness=2.0).adjust(grey, make_rng(0, "colour", i))[0, 0, 0]
            for i in range(500)
        ]
    )
    assert dark.min() < 5
    assert dark.max() == 255


def test_the_order_of_changes_is_drawn(pixels):
    found = set()
    for position in range(30):
        factors = 0.2 + 1.6 * make_rng(0, "colour", position).random(3)
        adjusted = ColorJitter(0.8, 0.8, 0.8).adjust(pixels, make_rng(0, "colour", position))
        for order in permutations(
            zip(
                (adjust_brightness, adjust_contrast, adjust_saturation),
                factors.tolist(),
                strict=True,
            )
        ):
            changed = pixels
            for change, factor in order:
                changed = change(changed, factor)
            if np.array_equal(changed, adjusted):
                found.add(tuple(change for change, _ in order))
                break
        else:
            pytest.fail(f"position {position} matches no order of the three changes")
    assert len(found) == 6


NAN, INFINITY = float("nan"), float("inf")


@pytest.mark.parametrize(
    "kind, values, named",
    [
        (RandomCrop, {"side": -3}, r"RandomCrop\.side.*-3"),
        (RandomCrop, {"flip": 1.5}, r"RandomCrop\.flip.*1\.5"),
        *((HorizontalFlip, {"probability": p}, f"probability.*{p}") for p in (-0.1, 1.5)),
        *(
            (kind, {"flip": 2.0}, r"probability.*2\.0")
            for kind in (LargeScaleJitter, ScaleJitter, RandomResizedCrop)
        ),
        *(
            (kind, {"low": low, "high": high}, f"scales.*{low}.*{high}")
            for kind in (LargeScaleJitter, ScaleJitter)
            for low, high in ((0.0, 1.0), (-1.0, 1.0), (1.5, 1.0), (1.0, INFINITY), (NAN, 1.0))
        ),
        *(
            (RandomResizedCrop, {name: (low, high)}, f"{name}.*{low}.*{high}")
            for name, low, high in (
                *(("area", *ends) for ends in ((0.0, 1.0), (0.5, 0.2), (0.5, 1.1), (NAN, 1.0))),
                *(("aspect", *ends) for ends in ((0.0, 1.0), (2.0, 1.0), (1.0, INFINITY))),
            )
        ),
        *(
            (ColorJitter, {name: amount}, f"{name}.*{amount}")
            for name in ("brightness", "contrast", "saturation")
            for amount in (-0.1, INFINITY, NAN)
        ),
    ],
)
def test_values_that_cannot_be_are_refused(kind, values, named):
    with error_line(named):
        kind(**values)
