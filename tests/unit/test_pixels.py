"""Windows and channels of stored pixels, held against plain float64 arithmetic."""

import numpy as np
import pytest

from gigamask.errors import PixelFormatError
from gigamask.pixels import PixelConfig, to_rgb
from tests.errors import corrupt_sample, error_line


def plain(values: np.ndarray, low: float, high: float) -> np.ndarray:
    """What a window gives, in float64 and one channel."""
    return np.clip(255 * (values.astype(np.float64) - low) / (high - low), 0, 255)


@pytest.mark.parametrize("dtype", ["uint16", "int16", "int32", "uint8", "float16", "float32", "f8"])
def test_a_window_is_a_straight_line(dtype):
    chance = np.random.default_rng(0)
    stored = chance.uniform(0, 250, (20, 30, 1)).astype(dtype)
    seen = PixelConfig(window=(20.0, 200.0)).to_uint8(stored, "x")
    assert (seen.dtype, seen.shape) == (np.uint8, (20, 30, 3))
    expected = stored if dtype == "uint8" else plain(stored, 20, 200)
    assert np.abs(seen - expected.astype(np.float64)).max() <= 0.501
    assert (seen[..., 0] == seen[..., 2]).all()


def test_each_channel_may_have_its_own_window():
    stored = np.random.default_rng(1).integers(0, 4096, (9, 7, 2), dtype=np.uint16)
    seen = PixelConfig(2, window=(0.0, 4095.0, 1000.0, 1100.0)).to_uint8(stored, "x")
    for channel, (low, high) in enumerate(((0, 4095), (1000, 1100))):
        expected = plain(stored[..., channel], low, high)
        assert np.abs(seen[..., channel] - expected).max() <= 0.501


def test_percentiles_are_of_each_channel_and_image():
    stored = np.random.default_rng(2).normal((50, -7), (10, 0.1), (40, 30, 2))
    seen = PixelConfig(2, percentiles=(2.0, 90.0)).to_uint8(stored, "x")
    for channel in range(2):
        low, high = np.percentile(stored[..., channel], (2, 90))
        assert np.abs(seen[..., channel] - plain(stored[..., channel], low, high)).max() <= 0.501
    assert (PixelConfig(2, percentiles=(2.0, 90.0)).to_uint8(stored * 3 + 5, "x") == seen).all()


def test_numbers_that_are_not_finite_and_images_without_contrast():
    stored = np.array([[np.nan, np.inf, -np.inf, 0.5, 1.0]])[..., None]
    seen = PixelConfig(window=(0.0, 1.0)).to_uint8(stored, "x")[0, :, 0]
    assert seen.tolist() == [0, 255, 0, 128, 255]
    assert PixelConfig(percentiles=(0.0, 100.0)).to_uint8(stored, "x")[0, 3:, 0].tolist() == [
        0,
        255,
    ]
    flat = np.full((3, 4, 1), 900, np.uint16)
    assert not PixelConfig(percentiles=(1.0, 99.0)).to_uint8(flat, "x").any()
    with corrupt_sample(r"x: .*finite"):
        PixelConfig(percentiles=(1.0, 99.0)).to_uint8(np.full((3, 4, 1), np.nan), "x")


def test_eight_bits_are_used_as_they_are():
    stored = np.random.default_rng(3).integers(0, 256, (4, 5, 3), dtype=np.uint8)
    for values in ({}, {"window": (0.0, 9.0)}, {"percentiles": (1.0, 99.0)}):
        assert (PixelConfig(**values).to_uint8(stored, "x") == stored).all()


@pytest.mark.parametrize("stored, channels", [(1, 2), (3, 1), (4, 3), (3, 5)])
def test_other_channels_are_refused(stored, channels):
    with pytest.raises(PixelFormatError, match=rf"x: has {stored} .* {channels}.*{stored}"):
        PixelConfig(channels).to_uint8(np.zeros((2, 2, stored), np.uint8), "x")


def test_deep_pixels_need_a_window():
    for pixels in (PixelConfig(), PixelConfig(percentiles=(1.0, 99.0), percentiles_of="data")):
        with pytest.raises(PixelFormatError, match=r"x: has uint16.*--window"):
            pixels.to_uint8(np.zeros((2, 2, 1), np.uint16), "x")


@pytest.mark.parametrize(
    "values, named",
    [
        ({"channels": 0}, "channels"),
        ({"channels": 257}, "257"),
        ({"window": (5.0,)}, "5"),
        ({"window": (9.0, 3.0)}, "9 3"),
        ({"window": (0.0, float("nan"))}, "nan"),
        ({"window": (0.0, 1.0, 0.0, 1.0)}, "3 channels"),
        ({"percentiles": (1.0,)}, "1"),
        ({"percentiles": (-1.0, 99.0)}, "-1 99"),
        ({"percentiles": (99.0, 1.0)}, "99 1"),
        ({"percentiles_of": "data"}, "percentiles"),
        ({"window": (0.0, 1.0), "percentiles": (1.0, 99.0)}, "combined"),
    ],
)
def test_values_that_are_none_are_named(values, named):
    with error_line(named):
        PixelConfig(**values)


def test_a_command_states_a_window_where_the_weights_do_not():
    assert PixelConfig().stated((), ()) == PixelConfig()
    assert PixelConfig(2).stated((0.0, 9.0), ()) == PixelConfig(2, (0.0, 9.0))
    assert PixelConfig().stated((), (1.0, 99.0)) == PixelConfig(percentiles=(1.0, 99.0))
    own = PixelConfig(window=(0.0, 9.0), percentiles=(1.0, 99.0), percentiles_of="data")
    assert own.stated((), ()) == own.stated((0.0, 9.0), ()) == own
    with error_line(r"window 0 9"):
        own.stated((0.0, 8.0), ())
    with error_line(r"percentiles 1 99"):
        PixelConfig(percentiles=(1.0, 99.0)).stated((0.0, 9.0), ())


@pytest.mark.parametrize(
    "image", [np.zeros(4), np.zeros((0, 4)), np.zeros((1, 2, 3, 4)), np.full((2, 2), "a")]
)
def test_arrays_that_are_no_images_are_refused(image):
    with error_line("image 3 must be height x width"):
        PixelConfig().from_array(image, "image 3")


def test_pictures_show_the_first_three_channels():
    pixels = np.arange(2 * 2 * 5, dtype=np.uint8).reshape(2, 2, 5)
    assert (to_rgb(pixels) == pixels[..., :3]).all()
    assert (to_rgb(pixels[..., :1]) == pixels[..., :1]).all()
    two = to_rgb(pixels[..., :2])
    assert (two[..., :2] == pixels[..., :2]).all()
    assert not two[..., 2].any()
