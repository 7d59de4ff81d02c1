"""The deepest pixel, against every distance written out."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gigamask.geometry.boundary import farthest_point


def test_the_centre_of_a_square():
    error = np.zeros((20, 30), bool)
    error[4:11, 8:15] = True
    assert farthest_point(error) == (11, 7, 4.0)


def test_the_border_of_the_image_is_boundary():
    assert farthest_point(np.ones((5, 9), bool)) == (2, 2, 3.0)
    corner = np.zeros((20, 20), bool)
    corner[:5, :9] = True
    assert farthest_point(corner) == (2, 2, 3.0)


def test_nothing_has_no_depth():
    assert farthest_point(np.zeros((3, 4), bool)) == (0, 0, 0.0)


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
    assert nearest[(inside == [y + 1, x + 1]).all(1)].item() == pytest.approx(nearest.max(), rel=1e-6)
