"""Mask filters and each mask sampler; what all samplers share is in
tests/laws/test_mask_sampling.py.
"""

import numpy as np
import pytest

from gigamask.data.mask_sampling import (
    BestMasks,
    CandidateMasks,
    DiverseMasks,
    MaskFilters,
    RandomMasks,
    SizeBalancedMasks,
    features,
    quarters,
)
from gigamask.rng import make_rng
from tests.errors import error_line

AREAS = np.array([10, 500, 899, 900, 901, 1000])
IOU = np.array([0.5, 0.9, 0.95, 0.99, 0.7, 1.0], np.float32)
STABILITY = np.array([0.9, 0.91, 0.92, 0.93, 0.94, 0.95], np.float32)


@pytest.mark.parametrize(
    "filters, kept",
    [
        (MaskFilters(), [0, 1, 2, 3]),
        (MaskFilters(max_area=None), [0, 1, 2, 3, 4, 5]),
        (MaskFilters(max_area=None, min_area=900), [3, 4, 5]),
        (MaskFilters(max_area=None, min_predicted_iou=0.9), [1, 2, 3, 5]),
        (MaskFilters(max_area=None, min_stability=0.935), [4, 5]),
        (MaskFilters(max_area=0.5, min_area=11, min_predicted_iou=0.5, min_stability=0.0), [1]),
    ],
)
def test_each_filter_alone_and_together(filters, kept):
    assert np.flatnonzero(filters.keep(AREAS, 1000, IOU, STABILITY)).tolist() == kept


def test_filters_take_the_masks_of_many_images():
    image_area = np.array([10_000, 10_000, 10_000, 1000, 1000, 1000])
    assert MaskFilters().keep(AREAS, image_area, IOU, STABILITY).tolist() == [
        True,
        True,
        True,
        True,
        False,
        False,
    ]


@pytest.mark.parametrize("share", [0.0, -1.0, 1.01, 90.0])
def test_invalid_fraction_is_rejected(share):
    with error_line(rf"max_area.*{share}"):
        MaskFilters(max_area=share)


def candidates(areas, predicted_iou=None, boxes=None, size=(1000, 1000)):
    n = len(areas)
    scores = (
        np.full(n, 0.9, np.float32)
        if predicted_iou is None
        else np.array(predicted_iou, np.float32)
    )
    boxes = np.tile(np.array([0, 0, 9, 9]), (n, 1)) if boxes is None else np.array(boxes)
    return CandidateMasks(size, np.array(areas, np.int64), boxes, scores, np.ones(n, np.float32))


@pytest.mark.slow
def test_random_choice_is_uniform_and_named():
    ten, fifty = candidates([100] * 10), candidates([100] * 50)
    taken = np.zeros(10)
    for position in range(3000):
        taken[RandomMasks().choose(ten, 3, make_rng(0, "masks", 0, position))] += 1
    # Each is taken 900 times, with a standard deviation of 25.
    assert np.abs(taken - 900).max() < 125
    again = [RandomMasks().choose(fifty, 8, make_rng(0, "masks", 0, 7)).tolist() for _ in range(2)]
    assert again[0] == again[1]
    assert again[0] != RandomMasks().choose(fifty, 8, make_rng(0, "masks", 1, 7)).tolist()


def test_quality_takes_the_best_and_the_first_of_equals():
    scores = [0.9, 0.99, 0.95, 0.99, 0.95, 0.95, 0.2]
    assert BestMasks().choose(candidates([5] * 7, scores), 4, make_rng(0, "masks")).tolist() == [
        1,
        2,
        3,
        4,
    ]


def test_the_largest_and_the_smallest_mask_lie_in_the_outer_quarters():
    assert quarters(np.array([1, 11, 110, 1100, 10_000])).tolist() == [0, 1, 2, 3, 3]
    assert quarters(np.array([7, 7, 7])).tolist() == [0, 0, 0]
    assert quarters(np.zeros(0, np.int64)).tolist() == []


def test_size_balance_takes_rare_sizes_and_varies():
    areas = [10] * 90 + [150] * 4 + [1500] * 4 + [100_000] * 2
    held = candidates(areas)
    takes = [
        SizeBalancedMasks().choose(held, 16, make_rng(0, "masks", 0, position))
        for position in range(20)
    ]
    for taken in takes:
        assert np.bincount(quarters(held.areas)[taken], minlength=4).tolist() == [6, 4, 4, 2]
    assert len({taken.tobytes() for taken in takes}) == 20


def test_what_does_not_divide_evenly_comes_from_any_quarter():
    held = candidates([10] * 50 + [100] * 5 + [1000] * 5 + [10_000] * 5)
    counts = sum(
        np.bincount(
            quarters(held.areas)[SizeBalancedMasks().choose(held, 6, make_rng(0, "masks", 0, i))],
            minlength=4,
        )
        for i in range(400)
    )
    # Each of the four gives one mask always and a second one in half of the samples: 600, standard
    # deviation 10.
    assert np.abs(counts - 600).max() < 50


def test_diverse_takes_the_best_of_each_cluster():
    # Four places, five masks in each, of which the third has the best score.
    corners = [(0, 0), (900, 0), (0, 900), (900, 900)]
    boxes = [(x + i, y + i, x + i + 50, y + i + 50) for x, y in corners for i in range(5)]
    held = candidates([2000] * 20, [0.9, 0.91, 0.97, 0.92, 0.93] * 4, boxes)
    for position in range(5):
        assert DiverseMasks().choose(held, 4, make_rng(0, "masks", 0, position)).tolist() == [
            2,
            7,
            12,
            17,
        ]


def test_diverse_fills_up_where_masks_are_alike():
    held = candidates([100] * 9, [0.1, 0.9, 0.3, 0.8, 0.2, 0.7, 0.6, 0.5, 0.4])
    assert DiverseMasks().choose(held, 4, make_rng(0, "masks")).tolist() == [1, 3, 5, 6]


def test_features_lie_in_the_unit_cube():
    held = candidates(
        [1, 4000, 100 * 900], boxes=[(0, 0, 0, 0), (10, 20, 409, 29), (900, 50, 999, 949)]
    )
    assert np.allclose(
        features(held).T,
        [
            [0.0005, 0.0005, 0, 0.5],
            [0.21, 0.025, np.log(4000) / 15, 400 / 410],
            [0.95, 0.5, np.log(90_000) / 15, 0.1],
        ],
    )
