"""Shares of cells equal overlaps written out, and lie where a transform moves points."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gigamask.masks.rle import RLEMasks
from gigamask.masks.transforms import ImageTransform
from gigamask.plugins.grounding.soft_masks import average, soft_masks


@given(st.integers(1, 17), st.integers(1, 17), st.integers(0, 2**32 - 1))
def test_averages_equal_overlaps_written_out(height, width, seed):
    random = np.random.default_rng(seed)
    masks = random.random((5, height, width)) < np.array([0, 0.05, 0.5, 0.95, 1])[:, None, None]
    row_edges, column_edges = (
        random.uniform(-3, size) + np.cumsum(random.uniform(0.01, 7, random.integers(2, 11)))
        for size in (height, width)
    )

    def shares(edges: np.ndarray, size: int) -> np.ndarray:
        pixels = np.arange(size)
        overlap = np.minimum(edges[1:, None], pixels + 1) - np.maximum(edges[:-1, None], pixels)
        return np.clip(overlap, 0, None) / np.diff(edges)[:, None]

    expected = shares(row_edges, height) @ masks.astype(float) @ shares(column_edges, width).T
    found = average(RLEMasks.from_dense(masks), row_edges, column_edges)
    assert np.allclose(found, expected, rtol=0, atol=1e-6)


@given(st.integers(1, 60), st.integers(1, 60), st.data())
def test_a_marked_pixel_lands_where_points_say(height, width, data):
    transform = ImageTransform.resize_longest_side((height, width), 64)
    x, y = data.draw(st.integers(0, width - 1)), data.draw(st.integers(0, height - 1))
    mask = np.zeros((1, height, width), bool)
    mask[0, y, x] = True
    half = (np.array(transform.scale_xy) - 1) / 2
    expected = transform.points_to_input(np.array([x, y], np.float64)) + half
    seen = soft_masks(transform, RLEMasks.from_dense(mask), 64)[0].astype(float)
    rows, columns = np.indices(seen.shape)
    centre = np.array([(seen * columns).sum(), (seen * rows).sum()]) / seen.sum()
    assert np.abs(centre - expected).max() <= max(1.0, *transform.scale_xy)


@pytest.mark.parametrize("edges", [[0.0, 2.0, 2.0], [0.0], [3.0, 1.0]])
def test_edges_that_do_not_increase_are_refused(edges):
    masks = RLEMasks.from_dense(np.ones((1, 6, 5), bool))
    with pytest.raises(ValueError, match="row edges"):
        average(masks, np.array(edges), np.arange(6.0))
    with pytest.raises(ValueError, match="column edges"):
        average(masks, np.arange(7.0), np.array(edges))
