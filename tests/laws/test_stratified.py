"""What holds for every order that deals out strata or cells."""

import random
from functools import partial
from math import gcd

import numpy as np
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from gigamask.interfaces import Sampler, SampleTable
from gigamask.samplers.stratified import RELEVANCE, InterleavedStrata, Stratified
from tests.orders import listed


def optional(most: int) -> st.SearchStrategy[int | None]:
    """A number from 1 on, or none."""
    return st.none() | st.integers(1, most)


SIZES = st.tuples(*[st.integers(0, 25)] * 3).filter(any)
RATIOS = st.tuples(*[st.integers(0, 12)] * 3).filter(any)
Strata = partial(Stratified, epoch_length="data")
SAMPLERS = st.one_of(
    st.builds(partial, st.just(Stratified), st.just(("granularity",)), optional(40)),
    st.builds(
        partial, st.just(InterleavedStrata), RATIOS | st.none(), st.integers(1, 5), optional(40)
    ),
    st.builds(
        partial, st.just(Strata), st.permutations(["granularity", "tar"]).map(tuple), optional(9)
    ),
    st.builds(partial, st.just(Strata), st.just(RELEVANCE), optional(9)),
)
"""Not built yet: the checks of types spend numbers of `random`, which strategies must not."""


def mixed(sizes: tuple[int, int, int], tars: int = 3, seed: int = 0) -> SampleTable:
    generator = np.random.default_rng(sum(sizes))
    granularity = generator.permutation(np.repeat(np.arange(3, dtype=np.int32), sizes))
    tar = np.sort(generator.integers(tars, size=len(granularity)))
    return SampleTable(
        len(granularity),
        {"granularity": granularity, "tar": tar, "complexity": tar, "domain": np.zeros_like(tar)},
        seed,
    )


def can(sampler: Sampler, sizes: tuple[int, int, int]) -> bool:
    ratio = getattr(sampler, "ratio", None)
    return ratio is None or all(size or not part for size, part in zip(sizes, ratio, strict=True))


def levels(sampler: Sampler, items: SampleTable, epochs: int) -> np.ndarray:
    return items.columns["granularity"][
        np.concatenate([listed(sampler.order(items, epoch, None)) for epoch in range(epochs)])
    ]


def in_windows(found: np.ndarray, length: int) -> np.ndarray:
    """How many of each stratum stand in each window."""
    sums = np.cumsum(
        np.concatenate([np.zeros((1, 3), int), found[:, None] == np.arange(3)]), axis=0
    )
    return sums[length:] - sums[:-length]


@given(SIZES, SAMPLERS, st.integers(0, 3), st.integers(0, 9))
def test_orders_depend_on_seed_and_epoch_alone_and_their_length_on_neither(
    sizes, make, seed, epoch
):
    sampler = make()
    assume(can(sampler, sizes))
    items = mixed(sizes, seed=seed)
    np.random.seed(1)
    random.seed(1)
    before = np.random.get_state()[1].tobytes()
    order = listed(sampler.order(items, epoch, None))
    assert np.random.get_state()[1].tobytes() == before
    np.random.seed(2)
    random.seed(2)
    assert np.array_equal(listed(sampler.order(mixed(sizes, seed=seed), epoch, None)), order)
    assert len(order) == len(listed(sampler.order(items, 0, None))) > 0
    assert order.dtype == np.int64
    assert 0 <= order.min() <= order.max() < items.count


@given(SIZES, st.integers(0, 3), optional(40), st.integers(0, 5))
def test_strata_are_exactly_equal(sizes, seed, number, epoch):
    items = mixed(sizes, seed=seed)
    order = listed(Stratified(per_stratum=number).order(items, epoch, None))
    counts = np.bincount(items.columns["granularity"][order], minlength=3)
    assert counts.tolist() == [
        (number or min(size for size in sizes if size)) if size else 0 for size in sizes
    ]


@given(SIZES, RATIOS, optional(40), st.integers(1, 70))
def test_every_batch_holds_the_ratio(sizes, ratio, per_epoch, batch):
    """Also across the end of an epoch, whichever sample a batch begins with."""
    sampler = InterleavedStrata(ratio=ratio, per_epoch=per_epoch)
    assume(can(sampler, sizes))
    found = levels(sampler, mixed(sizes), 6)
    batch = min(batch, len(found))
    windows, shares = in_windows(found, batch), batch * np.array(ratio) / sum(ratio)
    if batch % (sum(ratio) // gcd(*ratio)) == 0:
        assert (windows == shares).all()
    even = len({part for part in ratio if part}) == 1 or min(ratio) == 0
    assert np.abs(windows - shares).max() < (1 if even else 1.5)


@given(SIZES, RATIOS, st.integers(1, 4), optional(40))
def test_every_rank_holds_the_ratio(sizes, ratio, ranks, per_epoch):
    sampler = InterleavedStrata(ratio, ranks, per_epoch)
    assume(can(sampler, sizes))
    period = sum(ratio) // gcd(*ratio)
    found = levels(sampler, mixed(sizes), 3)
    assert len(found) % (3 * period * ranks) == 0
    for rank in range(ranks):
        assert (in_windows(found[rank::ranks], period) * gcd(*ratio) == ratio).all()


def balanced(sizes: tuple[int, int, int], ranks: int, number: int | None):
    """The strata of four balanced epochs, and which strata have items."""
    return levels(InterleavedStrata(None, ranks, number), mixed(sizes), 4), np.array(sizes) > 0


@given(SIZES, st.integers(1, 6), optional(30), st.integers(1, 12), st.integers(0, 5))
def test_each_rank_and_all_together_hold_the_strata_alike(sizes, ranks, number, steps, start):
    found, there = balanced(sizes, ranks, number)
    assert len(found) % (4 * ranks * there.sum()) == 0
    for world in (world for world in range(1, ranks + 1) if ranks % world == 0):
        for rank in range(world):
            mine = found[start * ranks :][rank::world][: steps * ranks // world]
            counts = np.bincount(mine, minlength=3)
            assert counts[~there].sum() == 0
            if world == ranks or len(mine) % (there.sum() * ranks // world) == 0:
                assert np.ptp(counts[there]) <= (len(mine) % there.sum() > 0)


@given(SIZES, st.integers(1, 6), optional(30), st.integers(1, 12))
def test_the_ranks_of_a_step_hold_different_strata(sizes, ranks, number, steps):
    """Ranks that are balanced each for itself could all be at the same stratum at the same time."""
    found, there = balanced(sizes, ranks, number)
    batch = min(steps * ranks, len(found))
    assert np.abs(in_windows(found, batch)[::ranks][:, there] - batch / there.sum()).max() < 1


@given(SIZES, st.integers(1, 9), st.permutations(["granularity", "tar"]), optional(9))
def test_joint_cells_are_exactly_equal(sizes, tars, attributes, number):
    items = mixed(sizes, tars)
    order = listed(Strata(attributes=tuple(attributes), per_stratum=number).order(items, 2, None))
    cells = items.columns["granularity"] * tars + items.columns["tar"]
    there = np.unique(cells)
    assert set(np.bincount(cells[order])[there].tolist()) == {number or items.count // len(there)}


@given(SIZES, SAMPLERS, st.integers(0, 3), st.integers(1, 8))
@settings(max_examples=60)
def test_items_of_a_cell_come_up_equally_often(sizes, make, seed, epochs):
    sampler = make()
    assume(can(sampler, sizes))
    items = mixed(sizes, seed=seed)
    counts = sum(
        np.bincount(listed(sampler.order(items, epoch, None)), minlength=items.count)
        for epoch in range(epochs)
    )
    cells = items.columns["granularity"] * 3 + (
        items.columns["tar"] if getattr(sampler, "epoch_length", None) == "data" else 0
    )
    assert all(np.ptp(counts[cells == cell]) <= 1 for cell in np.unique(cells))
