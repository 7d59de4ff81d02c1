"""Every choice of masks is exact, distinct and a function of its generator; and each is good at
what it is for.
"""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gigamask.data.mask_sampling import (
    BestMasks,
    CandidateMasks,
    DiverseMasks,
    RandomMasks,
    SizeBalancedMasks,
    features,
    quarters,
)
from gigamask.rng import make_rng

CHOICES = [RandomMasks(), DiverseMasks(), BestMasks(), SizeBalancedMasks()]


def scattered(n, seed, size=(300, 400)):
    """Masks of log-normal sizes and shapes anywhere in the image."""
    random = make_rng(seed, "candidates")
    height, width = size
    side, shape = np.exp(random.normal(3, 1, n)), np.exp(random.normal(0, 0.6, n))
    w, h = np.clip(side * shape, 1, width).astype(int), np.clip(side / shape, 1, height).astype(int)
    x, y = (
        (random.random(n) * (width - w + 1)).astype(int),
        (random.random(n) * (height - h + 1)).astype(int),
    )
    scores = random.uniform(0.88, 1, (2, n)).astype(np.float32)
    return CandidateMasks(
        size, np.maximum(w * h * 2 // 3, 1), np.stack([x, y, x + w - 1, y + h - 1], 1), *scores
    )


@st.composite
def images(draw_one):
    """Candidates among which equal ones may be, down to all of them."""
    distinct = scattered(draw_one(st.integers(1, 60)), draw_one(st.integers(0, 2**32 - 1)))
    n = draw_one(st.integers(0, 60))
    return distinct[
        np.array(
            draw_one(st.lists(st.integers(0, len(distinct) - 1), min_size=n, max_size=n)), np.int64
        )
    ]


@given(images(), st.integers(1, 70), st.sampled_from(CHOICES), st.integers(0, 2**32 - 1))
def test_exactly_as_many_as_wanted_distinct_ascending_and_named(held, most, choice, seed):
    chosen = choice.choose(held, most, make_rng(seed, "masks"))
    assert chosen.dtype == np.int64
    assert len(chosen) == min(len(held), most)
    assert (np.diff(chosen) > 0).all()
    assert ((chosen >= 0) & (chosen < len(held))).all()
    assert np.array_equal(chosen, choice.choose(held, most, make_rng(seed, "masks")))


@given(images(), st.integers(1, 70))
def test_no_other_choice_has_a_higher_sum_of_scores(held, most):
    chosen = BestMasks().choose(held, most, make_rng(0, "masks"))
    rest = np.delete(held.predicted_iou, chosen)
    assert held.predicted_iou[chosen].min(initial=np.inf) >= rest.max(initial=-np.inf)


@given(images(), st.integers(1, 70), st.integers(0, 2**32 - 1))
def test_quarters_differ_by_one_at_most_unless_one_is_short(held, most, seed):
    quarter = quarters(held.areas)
    there = np.bincount(quarter, minlength=4)
    taken = np.bincount(
        quarter[SizeBalancedMasks().choose(held, most, make_rng(seed, "masks"))], minlength=4
    )
    enough = taken < there
    assert np.ptp(taken[enough]) <= 1 if enough.any() else True
    # A quarter that gave all it had gave no more than the others.
    assert taken[~enough].max(initial=0) <= taken[enough].min(initial=len(held)) + 1


@pytest.mark.parametrize("n, most", [(100, 16), (100, 64), (300, 32)])
def test_diverse_masks_lie_further_apart_than_random_ones(n, most):
    def gaps(choice):
        apart = []
        for image in range(12):
            held = scattered(n, image)
            points = features(held)[:, choice.choose(held, most, make_rng(0, "masks", image))]
            distances = np.sqrt(((points[:, :, None] - points[:, None]) ** 2).sum(0))
            np.fill_diagonal(distances, np.inf)
            apart.append(distances.min(1).mean())
        return np.mean(apart)

    assert gaps(DiverseMasks()) > 1.08 * gaps(RandomMasks())


def test_diverse_prefers_good_masks():
    better = 0
    for image in range(20):
        held = scattered(200, image)
        means = [
            held.predicted_iou[choice.choose(held, 32, make_rng(0, "masks", image))].mean()
            for choice in (DiverseMasks(), RandomMasks())
        ]
        better += means[0] > means[1]
    assert better >= 19
