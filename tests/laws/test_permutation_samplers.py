"""What holds for every order that visits each item once an epoch, and for what such orders are made
of; and that any order depends on its arguments alone.
"""

import random
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gigamask.interfaces import LossSnapshot, Sampler, SampleTable
from gigamask.rng import make_rng
from gigamask.samplers.curriculum import AdaptiveCurriculum, Curriculum
from gigamask.samplers.feistel import SMALL, balanced_items, cycle, permute
from gigamask.samplers.hard_examples import LossWeighted, Replay
from gigamask.samplers.random import LazyShuffle, Random
from gigamask.samplers.shards import Sharded, Streamed, StreamingTars, TarSubset
from gigamask.samplers.stratified import RELEVANCE, InterleavedStrata, Stratified
from tests.orders import listed

SEEDS, EPOCHS = st.integers(0, 2**63), st.integers(0, 2**31)
NEAR_POWERS = st.builds(
    lambda power, beside: 2**power + beside, st.integers(14, 16), st.integers(1, 9)
) | st.integers(SMALL + 1, 70_000)
SAMPLERS = [
    Random(),
    LazyShuffle(),
    LazyShuffle(17),
    Streamed(2, 9),
    TarSubset(10),
    TarSubset(10, mixed=True),
    StreamingTars(2),
    Sharded(2),
]
OTHERS = [
    Stratified(),
    Stratified(("granularity", "tar"), epoch_length="data"),
    Stratified(RELEVANCE, epoch_length="data"),
    InterleavedStrata(),
    InterleavedStrata(None),
    Curriculum(),
    AdaptiveCurriculum(),
    LossWeighted(),
    Replay(),
]
PLACES = np.arange(190)
ITEMS = SampleTable(
    190,
    {
        "tar": np.repeat(np.arange(5), [40, 30, 50, 60, 10]),
        **{name: PLACES * (2 + at) % 3 for at, name in enumerate(RELEVANCE)},
        "granularity": PLACES % 3,
        "difficulty": PLACES.astype(np.float32),
    },
    3,
)
LOSSES = LossSnapshot(PLACES.astype(np.float32), np.zeros(190, np.int32), np.empty(0))


def whole(sampler: Sampler, items: SampleTable, epoch: int) -> np.ndarray:
    return listed(sampler.order(items, epoch, LOSSES))


def is_permutation(order: np.ndarray, count: int) -> bool:
    return order.dtype.kind == "i" and np.array_equal(np.sort(order), np.arange(count))


@given(st.integers(0, 300), EPOCHS, SEEDS, st.integers(1, 320))
def test_random_lazy_and_chunked_orders_are_permutations(count, epoch, seed, chunk):
    for sampler in (Random(), LazyShuffle(), LazyShuffle(chunk)):
        assert is_permutation(whole(sampler, SampleTable(count, {}, seed), epoch), count)


@given(NEAR_POWERS, SEEDS)
@settings(max_examples=25, deadline=None)
def test_networks_permute_any_size(size, seed):
    assert is_permutation(permute(np.arange(size), size, make_rng(seed, "test")), size)


@given(st.integers(1, 2**40), SEEDS, st.data())
@settings(deadline=None)
def test_different_positions_hold_different_items_at_any_size(size, seed, data):
    positions = np.array(
        data.draw(st.lists(st.integers(0, size - 1), unique=True, max_size=60)), np.int64
    )
    items = permute(positions, size, make_rng(seed, "test"))
    assert len(np.unique(items)) == len(positions)
    assert ((items >= 0) & (items < size)).all()
    for at in range(0, len(positions), 13):
        assert permute(positions[at : at + 1], size, make_rng(seed, "test"))[0] == items[at]


@given(st.integers(1, 10**10), st.integers(1, 10**6), EPOCHS, SEEDS, st.data())
@settings(deadline=None)
def test_chunks_of_any_size_hold_each_item_once(count, chunk, epoch, seed, data):
    order = LazyShuffle(chunk).order(SampleTable(count, {}, seed), epoch, None)
    start = data.draw(st.integers(0, count - 1))
    items = order[np.arange(start, min(start + 40, count))]
    assert len(np.unique(items)) == len(items)
    assert ((items >= 0) & (items < count)).all()
    borders = np.flatnonzero(np.diff(items // chunk)) + 1
    # Forty neighbours lie in few chunks: the one they begin in, full ones, and perhaps the short
    # last one.
    assert len(borders) <= 40 // chunk + 2


@given(st.integers(1, 30), st.integers(0, 10**9), st.integers(0, 80), SEEDS)
def test_a_cycle_visits_all_equally_often_from_its_beginning(size, turn, length, seed):
    found = cycle(np.arange(turn * size, turn * size + length), size, seed, "test", 4)
    for start in range(0, length - size + 1, size):
        assert is_permutation(found[start : start + size], size)
    counts = np.bincount(found, minlength=size)
    assert counts.max() - counts.min() <= 1


@given(st.integers(1, 40), st.integers(0, 90), SEEDS)
@settings(max_examples=60, deadline=None)
def test_subsets_are_balanced_and_visit_all_items_equally_often(size, taken, seed):
    total = np.zeros(size, np.int64)
    for draw in range(2 * size):
        same = np.ones(taken, np.int64)
        chosen = balanced_items(
            np.arange(taken), draw, taken * same, size * same, same, seed, "test"
        )
        counts = np.bincount(chosen, minlength=size)
        assert counts.sum() == taken
        assert counts.max() - counts.min() <= 1
        total += counts
        assert total.max() - total.min() <= 1


@pytest.mark.parametrize("sampler", SAMPLERS + OTHERS, ids=lambda each: type(each).__name__)
def test_an_order_depends_on_seed_and_epoch_only(sampler, monkeypatch):
    first = [whole(sampler, ITEMS, epoch) for epoch in (0, 1, 7)]

    def refused(*_, **__):
        raise AssertionError("global random state was touched")

    random.seed(5)
    np.random.seed(5)
    drawn = "seed random shuffle sample choice choices randint randrange getrandbits setstate"
    of_numpy = "seed rand random shuffle permutation choice randint uniform set_state default_rng"
    for module, names in ((random, drawn), (np.random, of_numpy)):
        for name in names.split():
            monkeypatch.setattr(module, name, refused)
    # Whatever was asked for before changes nothing.
    again = [whole(sampler, ITEMS, epoch) for epoch in (7, 1, 0)][::-1]
    assert all(map(np.array_equal, first, again))
    assert len({order.tobytes() for order in first}) == 3
    assert len({len(order) for order in first}) == 1
    other = whole(sampler, replace(ITEMS, seed=4), 0)
    assert not np.array_equal(other, first[0])
    # Seeds and epochs are not added up.
    assert not np.array_equal(other, first[1])
    assert sampler in OTHERS or sampler.decay is None


@pytest.mark.parametrize("sampler", SAMPLERS, ids=lambda each: type(each).__name__)
def test_any_positions_can_be_indexed(sampler):
    order, plain = sampler.order(ITEMS, 2, None), whole(sampler, ITEMS, 2)
    some = make_rng(0, "test").integers(len(order), size=70)
    assert np.array_equal(order[some], plain[some])
    assert np.array_equal(
        np.concatenate([order[some[start : start + 9]] for start in range(0, 70, 9)]), plain[some]
    )
    assert len(order[some[:0]]) == 0
