"""Edge maps of masks whose edges are where they are put."""

import numpy as np
import pytest

from gigamask.evaluate.edge_maps import edge_map, ridges, scale, slope

SIZE = (40, 50)


def square(y0: int, y1: int, x0: int, x1: int) -> np.ndarray:
    mask = np.zeros(SIZE, bool)
    mask[y0:y1, x0:x1] = True
    return mask


def logits(mask: np.ndarray, height: float) -> np.ndarray:
    return np.where(mask, height, -height).astype(np.float32)


def rim(y0: int, y1: int, x0: int, x1: int) -> np.ndarray:
    return square(y0 - 1, y1 + 1, x0 - 1, x1 + 1) & ~square(y0, y1, x0, x1)


def test_only_what_touches_a_mask_from_outside_is_an_edge():
    corners = (10, 20, 15, 30)
    edges = edge_map([(square(*corners), logits(square(*corners), 8))], SIZE, thin=False)
    assert np.array_equal(edges > 0, rim(*corners))
    assert edges.max() == 1
    straight = edges[9, 16:29]
    assert np.array_equal(straight, np.full(13, straight[0]))


def test_slopes_away_from_the_masks_outline_do_not_count():
    """The logits rise at another place than the mask ends: nothing to see there."""
    edges = edge_map([(square(10, 20, 15, 30), logits(square(2, 5, 40, 46), 8))], SIZE, thin=False)
    assert not edges.any()


def test_the_strongest_mask_wins_and_a_doubtful_one_is_faint():
    sure, doubtful = (5, 15, 5, 15), (25, 35, 30, 45)
    edges = edge_map([(square(*sure), logits(square(*sure), 9)), (square(*doubtful), logits(square(*doubtful), 0.2))], SIZE, thin=False)
    assert edges[rim(*sure)].max() == 1
    # Sigmoid steps of 0.9998 and 0.0997 at the same Sobel weights.
    assert edges[24, 37] / edges[4, 10] == pytest.approx(0.0997 / 0.9998, abs=1e-3)
    both = edge_map([(square(*sure), logits(square(*sure), 0.2)), (square(*sure), logits(square(*sure), 9))], SIZE, thin=False)
    assert both[4, 10] == edges[4, 10]


def test_no_masks_and_masks_without_an_outside_have_no_edges():
    assert not edge_map([], SIZE).any()
    assert edge_map([], SIZE).shape == SIZE
    assert not edge_map([(np.ones(SIZE, bool), np.full(SIZE, 3.0, np.float32))], SIZE).any()


def test_logits_of_half_precision_and_of_any_height():
    mask = square(10, 20, 15, 30)
    plain = edge_map([(mask, logits(mask, 50))], SIZE)
    assert np.array_equal(edge_map([(mask, logits(mask, 50).astype(np.float16))], SIZE), plain)
    assert np.allclose(edge_map([(mask, logits(mask, 1e30))], SIZE), plain)


def test_thinning_leaves_the_rims_sides():
    corners = (10, 25, 10, 40)
    edges = edge_map([(square(*corners), logits(square(*corners), 8))], SIZE)
    assert (edges[9, 13:37] > 0).all()
    assert (edges[13:22, 40] > 0).all()
    assert not edges[~rim(*corners)].any()


def test_sobel_of_a_slope():
    x = np.tile(np.arange(9, dtype=np.float32), (7, 1))
    assert np.array_equal(slope(x)[:, 1:-1], np.full((7, 7), 8, np.float32))
    y = np.mgrid[:7, :9][0].astype(np.float32)
    assert np.allclose(slope(3 * x + 4 * y)[1:-1, 1:-1], 40)


def test_scaling_is_linear_from_least_to_most():
    assert scale(np.array([[2.0, 4.0, 3.0]], np.float32)).tolist() == [[0, 1, 0.5]]
    assert scale(np.full((2, 3), 7, np.float32)).tolist() == [[0] * 3] * 2


@pytest.mark.parametrize("angle", [0, 30, 45, 90, 120, 135])
def test_ridges_stay_where_they_are_highest(angle):
    """A roof along a line through the centre: what stays is within half a pixel of the line, and the line is whole."""
    y, x = np.mgrid[:61, :61] - 30
    away = x * np.sin(np.radians(angle)) - y * np.cos(np.radians(angle))
    kept = ridges(np.exp(-((away / 3) ** 2)).astype(np.float32)) > 0.5
    inner = np.hypot(x, y) < 22
    assert np.abs(away[kept & inner]).max() < 0.75
    assert kept[inner & (np.abs(away) < 0.25)].all()


def test_equal_neighbours_both_stay():
    edges = np.zeros((20, 20), np.float32)
    edges[:, 9:11] = 1
    assert np.array_equal(ridges(edges), edges)
