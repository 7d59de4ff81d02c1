"""Colours against Pillow's, which torchvision's are defined to equal, and against the definition itself."""

from itertools import permutations

import numpy as np
import pytest
from PIL import Image, ImageEnhance

from gigamask.data.color_jitter import ColorJitter, brighten, saturate, stretch
from gigamask.errors import GigamaskError
from gigamask.rng import make_rng


@pytest.fixture(scope="module")
def pixels():
    random = np.random.default_rng(0)
    coarse = random.integers(0, 256, (3, 6, 8), dtype=np.uint8).repeat(8, 1).repeat(8, 2)
    return np.clip(coarse + random.integers(-20, 20, coarse.shape), 0, 255).astype(np.uint8)


@pytest.mark.parametrize(
    ("change", "enhance"),
    [
        (brighten, ImageEnhance.Brightness),
        (stretch, ImageEnhance.Contrast),
        (saturate, ImageEnhance.Color),
    ],
)
@pytest.mark.parametrize("factor", [0.0, 0.8, 1.0, 1.2, 3.0])
def test_each_change_is_pillows(pixels, change, enhance, factor):
    expected = np.asarray(
        enhance(Image.fromarray(pixels.transpose(1, 2, 0))).enhance(factor)
    ).transpose(2, 0, 1)
    # Pillow cuts values and rounds grey to a whole number first; what a blend multiplies by a factor, it multiplies that by, too.
    assert np.abs(change(pixels, factor).astype(int) - expected).max() <= 1 + abs(1 - factor)
    assert np.array_equal(change(pixels, 1.0), pixels)


def test_nothing_is_changed_unless_asked_for(pixels):
    assert ColorJitter().adjust(pixels, make_rng(0, "colour")) is pixels
    assert not np.array_equal(
        ColorJitter(0.2, 0.2, 0.2).adjust(pixels, make_rng(0, "colour")), pixels
    )


def test_the_same_name_gives_the_same_colours(pixels):
    jitter = ColorJitter(0.2, 0.2, 0.2)
    adjusted = [jitter.adjust(pixels, make_rng(0, "colour", 1, position)) for position in (0, 0, 1)]
    assert np.array_equal(adjusted[0], adjusted[1])
    assert not np.array_equal(adjusted[0], adjusted[2])


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
            zip((brighten, stretch, saturate), factors.tolist(), strict=True)
        ):
            changed = pixels
            for change, factor in order:
                changed = change(changed, factor)
            if np.array_equal(changed, adjusted):
                found.add(tuple(change for change, _ in order))
                break
        else:
            pytest.fail(f"position {position} is no order of the three changes")
    assert len(found) == 6


@pytest.mark.parametrize("name", ["brightness", "contrast", "saturation"])
@pytest.mark.parametrize("amount", [-0.1, float("inf"), float("nan")])
def test_an_amount_that_is_none_is_refused(name, amount):
    with pytest.raises(GigamaskError, match=rf"{name}.*{amount}"):
        ColorJitter(**{name: amount})
