"""What holds for orders that know tars or nodes, whatever the tars' sizes."""

import numpy as np
from hypothesis import example, given, settings
from hypothesis import strategies as st

from gigamask.interfaces import SampleTable
from gigamask.rng import make_rng
from gigamask.samplers.shards import Sharded, StreamingTars, TarSubset
from tests.errors import error_line
from tests.orders import listed

SIZES = st.lists(st.integers(0, 25) | st.just(1), max_size=9)
SOME = SIZES.filter(lambda sizes: sum(sizes) > 0)
PER_TAR, SEEDS = st.integers(1, 30), st.integers(0, 2**40)


def items_of(sizes: list[int], seed: int = 0) -> SampleTable:
    """Items whose tars' numbers have gaps."""
    return SampleTable(
        sum(sizes), {"tar": np.repeat(3 * np.arange(len(sizes), dtype=np.int32) + 1, sizes)}, seed
    )


def exposures(sampler, items: SampleTable, epochs: int) -> np.ndarray:
    """How often each item was visited up to the end of each epoch."""
    counts = [
        np.bincount(listed(sampler.order(items, epoch, None)), minlength=items.count)
        for epoch in range(epochs)
    ]
    return np.cumsum(counts, axis=0)


def spread(counts: np.ndarray, items: SampleTable) -> int:
    """The largest difference between how often two items of one tar were visited, at the end of any
    epoch."""
    tars = items.columns["tar"]
    return max(
        (int(np.ptp(counts[:, tars == tar], axis=1).max()) for tar in np.unique(tars)), default=0
    )


def runs(labels: np.ndarray) -> np.ndarray:
    """The labels without repetitions that follow each other."""
    return labels[np.flatnonzero(np.diff(labels, prepend=-1))]


@given(SIZES, PER_TAR, SEEDS, st.integers(0, 10**6))
def test_tar_aware_takes_up_to_so_many_of_each_tar_one_after_the_other(sizes, per_tar, seed, epoch):
    items = items_of(sizes, seed)
    order = listed(TarSubset(per_tar).order(items, epoch, None))
    assert order.dtype == np.int64
    assert len(np.unique(order)) == len(order)
    tars = items.columns["tar"][order]
    assert np.bincount(tars, minlength=28)[1::3][: len(sizes)].tolist() == [
        min(size, per_tar) for size in sizes
    ]
    assert len(runs(tars)) == np.count_nonzero(sizes)


@given(SIZES, PER_TAR, SEEDS)
@settings(max_examples=40, deadline=None)
def test_tar_aware_and_balanced_visit_the_items_of_a_tar_equally_often(sizes, per_tar, seed):
    items = items_of(sizes, seed)
    for sampler in (TarSubset(per_tar), TarSubset(per_tar, mixed=True)):
        assert spread(exposures(sampler, items, 12), items) <= 1


@given(SIZES, PER_TAR, SEEDS, st.integers(0, 10**6))
def test_balanced_takes_exactly_so_many_of_each_tar(sizes, per_tar, seed, epoch):
    items = items_of(sizes, seed)
    order = listed(TarSubset(per_tar, mixed=True).order(items, epoch, None))
    assert order.dtype == np.int64
    assert np.bincount(items.columns["tar"][order], minlength=28)[1::3][: len(sizes)].tolist() == [
        per_tar * (size > 0) for size in sizes
    ]
    counts = np.bincount(order, minlength=items.count)
    assert spread(counts[None], items) <= 1


@given(SIZES, st.integers(1, 12), SEEDS)
@example(sizes=[1, 2, 1, 8], number=3, seed=0)
@settings(max_examples=60, deadline=None)
def test_streaming_visits_the_given_number_of_tars_each_equally_often(sizes, number, seed):
    items = items_of(sizes, seed)
    tars = np.count_nonzero(sizes)
    chosen, visits = min(number, tars), np.zeros(28, int)
    for epoch in range(2 * tars + 1):
        order = listed(StreamingTars(number).order(items, epoch, None))
        assert len(order) == round(items.count * chosen / max(tars, 1))
        visited = runs(items.columns["tar"][order])
        assert len(visited) == len(set(visited.tolist())) == chosen
        visits += np.bincount(visited, minlength=28)
        counts = np.bincount(order, minlength=items.count)
        assert spread(counts[None], items) <= 1
        seen = counts[np.isin(items.columns["tar"], visited)]
        assert np.ptp(seen) <= 1 if chosen < tars else (seen == 1).all()
    there = np.unique(items.columns["tar"])
    assert np.ptp(visits[there]) <= 1 if tars else True


@given(st.integers(1, 9), st.integers(1, 20), st.integers(1, 12), SEEDS, st.integers(0, 1000))
def test_streaming_epochs_of_equal_tars_hold_whole_ones(tars, size, number, seed, epoch):
    items = items_of([size] * tars, seed)
    order = listed(StreamingTars(number).order(items, epoch, None))
    counts = np.bincount(items.columns["tar"][order], minlength=3 * tars + 1)[1::3]
    assert counts.sum() == size * min(number, tars)
    assert (counts % size == 0).all()


@given(SOME, st.integers(1, 5), SEEDS, st.booleans())
@settings(max_examples=60, deadline=None)
def test_nodes_get_equally_many_positions_and_their_own_items_equally_often(
    sizes, nodes, seed, named
):
    items = items_of(sizes, seed)
    # Tars without items lie somewhere, too.
    owner = items.columns["tar"] * nodes // (items.columns["tar"][-1] + 1)
    if len(np.unique(owner)) < nodes:
        with error_line(r"^node [0-9] of [0-9]"):
            Sharded(nodes).order(items, 0, None)
        return
    if named:
        owner = (nodes - 1 - owner)[make_rng(seed, "test").permutation(items.count)]
        items = SampleTable(items.count, {"place": owner.astype(np.int16)}, seed)
    sampler = Sharded(nodes, "place" if named else None)
    largest = np.bincount(owner).max()
    epochs = [listed(sampler.order(items, epoch, None)) for epoch in range(4)]
    assert {len(order) for order in epochs} == {nodes * largest}
    for order in epochs:
        visited = listed(order)
        assert np.array_equal(owner[visited], np.arange(len(order)) % nodes)
    counts = exposures(sampler, items, 4)
    for node in range(nodes):
        assert np.ptp(counts[:, owner == node], axis=1).max() <= 1
        if (owner == node).sum() == largest:
            assert (counts[:, owner == node] == np.arange(1, 5)[:, None]).all()
