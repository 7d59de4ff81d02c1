"""Deepest pixels and boundaries of masks, compared with plain definitions."""

import math

import cv2
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gigamask.masks.boundary import dilate, farthest_point, inner_band, outline


def test_the_border_of_the_image_is_boundary():
    assert farthest_point(np.ones((5, 9), bool)) == (2, 2, 3.0)
    corner = np.zeros((20, 20), bool)
    corner[:5, :9] = True
    assert farthest_point(corner) == (2, 2, 3.0)


@given(st.integers(0, 2**32 - 1))
def test_the_distance_is_exactly_euclidean(seed):
    random = np.random.default_rng(seed)
    error = random.random(random.integers(1, 25, 2)) < random.choice([0.5, 0.9, 0.99])
    outside = np.argwhere(~np.pad(error, 1))
    inside = np.argwhere(np.pad(error, 1))
    x, y, distance = farthest_point(error)
    if not error.any():
        assert distance == 0
        return
    nearest = np.sqrt(((inside[:, None] - outside[None]) ** 2).sum(-1).min(1))
    assert distance == pytest.approx(nearest.max(), rel=1e-6)
    assert nearest[(inside == [y + 1, x + 1]).all(1)].item() == pytest.approx(
        nearest.max(), rel=1e-6
    )


def disc(
    radius: int, shape: tuple[int, int] = (21, 25), centre: tuple[int, int] = (10, 12)
) -> np.ndarray:
    y, x = np.mgrid[: shape[0], : shape[1]]
    return (y - centre[0]) ** 2 + (x - centre[1]) ** 2 <= radius**2


def test_a_point_grows_to_a_disc():
    for radius in (0, 1, 4, 9):
        assert np.array_equal(dilate(disc(0), radius), disc(radius))
    assert np.array_equal(dilate(disc(0, centre=(0, 0)), 5), disc(5, centre=(0, 0)))


def test_a_squares_outline_lies_half_a_pixel_towards_the_origin():
    mask = np.zeros((8, 8), bool)
    mask[3:6, 3:6] = True
    expected = np.zeros((8, 8), bool)
    expected[2:6, 2:6] = True
    expected[3:5, 3:5] = False
    assert np.array_equal(outline(mask), expected)
    assert not outline(np.ones((4, 5), bool)).any()


def test_the_band_lies_inside():
    mask = np.zeros((12, 14), bool)
    mask[3:10, 4:11] = True
    band = inner_band(mask, 2)
    assert band.sum() == 7**2 - 3**2
    assert (band & ~mask).sum() == 0
    assert not inner_band(np.zeros((3, 4), bool), 2).any()
    assert inner_band(np.ones((7, 9), bool), 3).sum() == 7 * 9 - 1 * 3


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(12))
def test_the_deepest_parts_alone_give_the_same_pixel(seed):
    random = np.random.default_rng(seed)
    noise = cv2.GaussianBlur(random.normal(size=(301, 420)), (0, 0), 3 * 2 ** (seed % 4))
    region = noise > (0.0 if seed % 2 else 0.5 * noise.std())
    if seed == 0:
        region[:] = True
    padded = np.pad(region, 1).astype(np.uint8)
    squared = np.rint(cv2.distanceTransform(padded, cv2.DIST_L2, 0).astype(float) ** 2)[1:-1, 1:-1]
    clicked = np.zeros((0, 2), int)
    for _ in range(8):
        y, x = divmod(int(squared.argmax()), 420)
        expected = (x, y, math.sqrt(squared[y, x]))
        assert farthest_point(region, clicked) == expected
        assert farthest_point(region, clicked, expected[2]) == expected
        assert farthest_point(region, clicked, expected[2] + 1e-3)[2] in (0.0, expected[2])
        # The pixels around, too, so that the deepest parts are soon all taken.
        near = np.argwhere(np.hypot(*(np.indices(region.shape) - [[[y]], [[x]]])) < 9)[:, ::-1]
        clicked = np.concatenate([clicked, near])
        squared[near[:, 1], near[:, 0]] = 0
