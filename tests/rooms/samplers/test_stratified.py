"""Equal shares of unequal strata and cells."""

import re
import time

import numpy as np
import pytest

from gigamask.faults import Fault
from gigamask.samplers.stratified import CELLS, DistributedBalanced, MultiAttribute, MultiLevel, Stratified
from gigamask.seams import Items

SIZES = (50, 20, 8)


def strata(*sizes: int, seed: int = 0) -> Items:
    """So many fine, medium and coarse items, mixed."""
    granularity = np.random.default_rng(seed).permutation(np.repeat(np.arange(len(sizes)), sizes))
    return Items(len(granularity), {"granularity": granularity.astype(np.int32)})


def levels(sampler, items: Items, epoch: int = 0) -> np.ndarray:
    return items.columns["granularity"][sampler.order(items, epoch, None)]


@pytest.mark.parametrize("number", [1, 10, 100])
def test_strata_are_as_large_as_is_asked_for_and_small_ones_repeat(number):
    items = strata(*SIZES)
    assert np.bincount(levels(Stratified(per_stratum=number), items)).tolist() == [number] * 3
    assert np.bincount(levels(DistributedBalanced(ranks=1, per_stratum=number), items)).tolist() == [number] * 3


@pytest.mark.parametrize("sizes", [(0, 5, 9), (5, 0, 9), (0, 0, 4)])
def test_empty_strata_are_left_out(sizes):
    items, fewest = strata(*sizes), min(size for size in sizes if size)
    for sampler in (Stratified(), DistributedBalanced()):
        assert np.bincount(levels(sampler, items), minlength=3).tolist() == [fewest if size else 0 for size in sizes]


@pytest.mark.parametrize(
    "sampler", [Stratified(), MultiLevel(), MultiLevel(per_epoch=5), DistributedBalanced(ranks=2), MultiAttribute(attributes=("granularity",))]
)
def test_no_items_make_no_positions(sampler):
    assert len(sampler.order(strata(0, 0, 0), 0, None)) == 0


def test_strata_are_shuffled_together():
    found = levels(Stratified(), strata(300, 300, 300))
    assert abs(np.corrcoef(found, np.arange(900))[0, 1]) < 0.15
    assert (np.diff(found) == 0).mean() == pytest.approx(1 / 3, abs=0.08)


@pytest.mark.parametrize(("ratio", "period"), [((1, 1, 1), [0, 1, 2]), ((2, 1, 1), [0, 1, 2, 0]), ((3, 0, 1), [0, 0, 2, 0]), ((0, 5, 0), [1])])
def test_the_strata_take_turns_in_the_given_ratio(ratio, period):
    items = strata(40, 40, 40)
    found = np.concatenate([levels(MultiLevel(ratio=ratio), items, epoch) for epoch in range(2)])
    assert found.tolist() == period * (len(found) // len(period))


def test_an_epoch_ends_where_the_first_stratum_has_run_out():
    order = MultiLevel(ratio=(4, 2, 1)).order(strata(*SIZES), 0, None)
    assert len(order) == 7 * min(50 // 4, 20 // 2, 8 // 1)
    assert len(set(order.tolist())) == len(order)


def test_an_epoch_can_be_given_a_length_in_whole_turns():
    items = strata(*SIZES)
    assert [len(MultiLevel(per_epoch=number).order(items, 0, None)) for number in (1, 3, 4, 1000)] == [3, 3, 6, 1002]
    counts = np.bincount(MultiLevel(per_epoch=1000).order(items, 0, None), minlength=items.count)
    for level in range(3):
        assert np.ptp(counts[items.columns["granularity"] == level]) <= 1


def test_a_stratum_smaller_than_its_part_of_the_ratio_repeats():
    assert np.bincount(levels(MultiLevel(ratio=(1, 1, 3)), strata(9, 9, 2))).tolist() == [1, 1, 3]


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("sizes", [(40, 20, 16), (40, 0, 16)])
def test_every_rank_is_balanced_for_itself(ranks, sizes):
    """Contiguous pieces of a shuffled order, as one often finds, are balanced on average only."""
    items, sampler = strata(*sizes), DistributedBalanced(ranks=ranks)
    found = np.concatenate([levels(sampler, items, epoch) for epoch in range(3)])
    there = np.flatnonzero(sizes)
    assert len(found) % (ranks * len(there)) == 0
    for rank in range(ranks):
        mine = found[rank::ranks]
        assert len(mine) == len(found) // ranks
        windows = np.lib.stride_tricks.sliding_window_view(mine, len(there))
        assert (np.sort(windows, axis=1) == there).all()


def test_ranks_round_the_strata():
    items = strata(*SIZES)
    assert len(DistributedBalanced(ranks=3).order(items, 0, None)) == 3 * 6
    assert len(DistributedBalanced(ranks=9).order(items, 0, None)) == 3 * 9
    assert len(DistributedBalanced(ranks=3, per_stratum=7).order(items, 0, None)) == 3 * 9


def test_all_joint_cells_are_met_equally_often_and_not_just_the_first_attribute():
    generator = np.random.default_rng(0)
    granularity, tar, region = (generator.choice(4, 3000, p=(0.7, 0.2, 0.08, 0.02)) for _ in range(3))
    items = Items(3000, {"granularity": granularity, "tar": tar, "region": region})
    order = MultiAttribute(attributes=("granularity", "tar", "region")).order(items, 0, None)
    joint = granularity * 16 + tar * 4 + region
    there = np.unique(joint)
    counts = np.bincount(joint[order])
    assert set(counts[there].tolist()) == {3000 // len(there)}
    assert counts.sum() == len(order) == 3000 // len(there) * len(there)


def test_values_of_attributes_may_be_anything_whole():
    values = np.array([-(2**62), 2**62, 7, 7, -128, 127], np.int64)
    for column in (values, values.astype(np.int8), values.astype(np.uint64), values > 0):
        items = Items(6, {"kind": column})
        order = MultiAttribute(attributes=("kind",), per_cell=4).order(items, 0, None)
        assert np.unique(column[order], return_counts=True)[1].tolist() == [4] * len(np.unique(column))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Stratified(per_stratum=0), "the stratified order's per_stratum is 0, it must be at least 1; give another value"),
        (lambda: MultiLevel(per_epoch=-1), "the multi-level order's per_epoch is -1, it must be at least 1; give another value"),
        (lambda: DistributedBalanced(ranks=0), "the distributed balanced order's ranks is 0, it must be at least 1; give another value"),
        (lambda: DistributedBalanced(per_stratum=0), "the distributed balanced order's per_stratum is 0, it must be at least 1"),
        (lambda: MultiAttribute(per_cell=0), "the multi-attribute order's per_cell is 0, it must be at least 1; give another value"),
        (lambda: MultiAttribute(attributes=()), "the multi-attribute order's attributes are none, it needs at least one; name columns"),
    ]
    + [
        (
            lambda ratio=ratio: MultiLevel(ratio=ratio),
            f"the multi-level order's ratio is {':'.join(map(str, ratio))}, it must be three numbers from 0 up",
        )
        for ratio in ((0, 0, 0), (1, -1, 1))
    ],
)
def test_fields_have_limits(make, message):
    with pytest.raises(Fault, match=re.escape(message)):
        make()


def test_a_stratum_that_is_asked_for_must_have_items():
    items = strata(5, 0, 5)
    with pytest.raises(Fault, match=r"ratio is 1:1:1, but no item is medium, at least one must be; give 0 for medium, or loosen the filters"):
        MultiLevel().order(items, 0, None)
    assert levels(MultiLevel(ratio=(1, 0, 1)), items).tolist() == [0, 2] * 5


def test_a_column_that_is_not_there_is_named_with_those_that_are():
    items = Items(2, {"tar": np.zeros(2, np.int64), "masks": np.ones(2, np.int64)})
    for name, sampler in {"stratified": Stratified(), "multi-level": MultiLevel(), "multi-attribute": MultiAttribute()}.items():
        with pytest.raises(Fault, match=f"the {name} order reads the column 'granularity', which the items lack; choose one of tar, masks, or add"):
            sampler.order(items, 0, None)
    with pytest.raises(Fault, match="choose one of none"):
        Stratified().order(Items(2, {}), 0, None)


def test_cells_need_whole_numbers():
    with pytest.raises(
        Fault, match="the multi-attribute order's attribute 'share' holds float32 numbers, cells need whole ones; name columns of kinds"
    ):
        MultiAttribute(attributes=("share",)).order(Items(2, {"share": np.zeros(2, np.float32)}), 0, None)


@pytest.mark.parametrize("attributes", [("item",), ("item", "half"), ("half", "rest")])
def test_cells_must_not_be_too_many(attributes):
    count = CELLS + 2
    items = Items(count, {"item": np.arange(count), "half": np.arange(count) // 2, "rest": np.arange(count) % 2})
    with pytest.raises(
        Fault, match=f"{', '.join(attributes)} make {count} cells or more of {count} items, at most {CELLS} can be balanced; leave out"
    ):
        MultiAttribute(attributes=attributes).order(items, 0, None)


def test_an_epoch_costs_a_few_shuffles_of_all_items():
    """At 11.2 million items in 3,000 cells that is one second and a half."""

    def cost(make) -> float:
        start = time.process_time()
        make()
        return time.process_time() - start

    generator, count = np.random.default_rng(0), 400_000
    items = Items(count, {"granularity": generator.choice(3, count, p=(0.2, 0.5, 0.3)), "tar": np.sort(generator.integers(30, size=count))})
    shuffle = min(cost(lambda: np.random.default_rng(0).permutation(count)) for _ in range(3))
    assert min(cost(lambda: MultiAttribute().order(items, 3, None)) for _ in range(2)) < 30 * shuffle


def test_processes_that_would_not_be_balanced_are_refused():
    DistributedBalanced(ranks=8).check(16, 4, 1)
    with pytest.raises(Fault, match=r"^--batch is 12, an order balanced on 8 ranks needs a multiple of that; change --batch, or --sampler.ranks$"):
        DistributedBalanced(ranks=8).check(12, 4, 1)
    with pytest.raises(Fault, match=r"^--sampler.ranks is 8, training has 3 processes; give a multiple of that$"):
        DistributedBalanced(ranks=8).check(16, 3, 1)
