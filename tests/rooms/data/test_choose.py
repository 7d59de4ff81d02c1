"""Filters and the random choice."""

import numpy as np
import pytest

from gigamask.data.choose import Filters, RandomChoice
from gigamask.draws import draw
from gigamask.faults import Fault

AREAS = np.array([10, 500, 899, 900, 901, 1000])
IOU = np.array([0.5, 0.9, 0.95, 0.99, 0.7, 1.0], np.float32)
STABILITY = np.array([0.9, 0.91, 0.92, 0.93, 0.94, 0.95], np.float32)


@pytest.mark.parametrize(
    ("filters", "kept"),
    [
        (Filters(), [0, 1, 2, 3]),
        (Filters(max_area=None), [0, 1, 2, 3, 4, 5]),
        (Filters(max_area=None, min_area=900), [3, 4, 5]),
        (Filters(max_area=None, min_predicted_iou=0.9), [1, 2, 3, 5]),
        (Filters(max_area=None, min_stability=0.935), [4, 5]),
        (Filters(max_area=0.5, min_area=11, min_predicted_iou=0.5, min_stability=0.0), [1]),
    ],
)
def test_each_filter_alone_and_together(filters, kept):
    assert np.flatnonzero(filters.keep(AREAS, 1000, IOU, STABILITY)).tolist() == kept


def test_filters_take_the_masks_of_many_images():
    image_area = np.array([10_000, 10_000, 10_000, 1000, 1000, 1000])
    assert Filters().keep(AREAS, image_area, IOU, STABILITY).tolist() == [True, True, True, True, False, False]


@pytest.mark.parametrize("share", [0.0, -1.0, 1.01, 90.0])
def test_a_share_that_is_none_is_refused(share):
    with pytest.raises(Fault, match=rf"max_area is {share}, a share of the image lies in \(0, 1\]"):
        Filters(max_area=share)


@pytest.mark.parametrize(("n", "most"), [(0, 5), (3, 5), (5, 5), (100, 5), (100, 1)])
def test_choice_is_exact_distinct_and_sorted(n, most):
    chosen = RandomChoice().choose(n, most, draw(0, "masks", 1, 2))
    assert chosen.dtype == np.int64
    assert len(chosen) == min(n, most)
    assert (np.diff(chosen) > 0).all()
    assert ((chosen >= 0) & (chosen < n)).all()


def test_choice_is_uniform_and_named():
    taken = np.zeros(10)
    for position in range(3000):
        taken[RandomChoice().choose(10, 3, draw(0, "masks", 0, position))] += 1
    # Each is taken 900 times, with a standard deviation of 25.
    assert np.abs(taken - 900).max() < 125
    again = [RandomChoice().choose(50, 8, draw(0, "masks", 0, 7)).tolist() for _ in range(2)]
    assert again[0] == again[1]
    assert again[0] != RandomChoice().choose(50, 8, draw(0, "masks", 1, 7)).tolist()
