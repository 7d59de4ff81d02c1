"""Equal shares of unequal strata and cells."""

import re
from functools import partial

import numpy as np
import pytest

from gigamask.interfaces import SampleTable
from gigamask.samplers import strata as strata_of
from gigamask.samplers import stratified
from gigamask.samplers.strata import MAX_STRATA
from gigamask.samplers.stratified import RELEVANCE, InterleavedStrata, Stratified
from tests.errors import error_line
from tests.orders import listed

SIZES = (50, 20, 8)
Balanced, Cells = partial(InterleavedStrata, None), partial(Stratified, epoch_length="data")
Relevance = partial(Stratified, RELEVANCE, epoch_length="data")


def strata(*sizes: int, seed: int = 0) -> SampleTable:
    """Return these numbers of fine, medium and coarse items in random order."""
    granularity = np.random.default_rng(seed).permutation(np.repeat(np.arange(len(sizes)), sizes))
    return SampleTable(len(granularity), {"granularity": granularity.astype(np.int32)})


def levels(sampler, items: SampleTable, epoch: int = 0) -> np.ndarray:
    return items.columns["granularity"][listed(sampler.order(items, epoch, None))]


@pytest.mark.parametrize(
    "sampler",
    [
        Stratified(),
        InterleavedStrata(),
        InterleavedStrata(per_epoch=5),
        Balanced(ranks=2),
        Cells(attributes=("granularity",)),
    ],
)
def test_no_items_make_no_positions(sampler):
    assert len(listed(sampler.order(strata(0, 0, 0), 0, None))) == 0


def test_strata_are_shuffled_together():
    found = levels(Stratified(), strata(300, 300, 300))
    assert abs(np.corrcoef(found, np.arange(900))[0, 1]) < 0.15
    assert (np.diff(found) == 0).mean() == pytest.approx(1 / 3, abs=0.08)


@pytest.mark.parametrize(
    "ratio, period",
    [
        ((1, 1, 1), [0, 1, 2]),
        ((2, 1, 1), [0, 1, 2, 0]),
        ((3, 0, 1), [0, 0, 2, 0]),
        ((0, 5, 0), [1]),
    ],
)
def test_the_strata_take_turns_in_the_given_ratio(ratio, period):
    items = strata(40, 40, 40)
    found = np.concatenate(
        [levels(InterleavedStrata(ratio=ratio), items, epoch) for epoch in range(2)]
    )
    assert found.tolist() == period * (len(found) // len(period))


def test_values_of_another_attribute_take_turns():
    source = np.repeat([0, 1, 2], [90, 30, 7])
    items = SampleTable(len(source), {"source": source})
    sampler = InterleavedStrata((3, 1, 0), attribute="source")
    found = source[listed(sampler.order(items, 0, None))]
    assert found.tolist() == [0, 0, 1, 0] * 30
    assert sampler.strata(items).tolist() == source.tolist()
    with error_line(r"^no item is of source 3: "):
        InterleavedStrata((1, 1, 1, 1), attribute="source").order(items, 0, None)


def test_an_epoch_ends_where_the_first_stratum_has_run_out():
    order = listed(InterleavedStrata(ratio=(4, 2, 1)).order(strata(*SIZES), 0, None))
    assert len(order) == 7 * min(50 // 4, 20 // 2, 8 // 1)
    assert len(set(order.tolist())) == len(order)


def test_an_epoch_can_be_given_a_length_in_whole_turns():
    items = strata(*SIZES)
    assert [
        len(InterleavedStrata(per_epoch=number).order(items, 0, None)) for number in (1, 3, 4, 1000)
    ] == [3, 3, 6, 1002]
    counts = np.bincount(
        listed(InterleavedStrata(per_epoch=1000).order(items, 0, None)), minlength=items.count
    )
    for level in range(3):
        assert np.ptp(counts[items.columns["granularity"] == level]) <= 1


def test_a_stratum_smaller_than_its_part_of_the_ratio_repeats():
    assert np.bincount(levels(InterleavedStrata(ratio=(1, 1, 3)), strata(9, 9, 2))).tolist() == [
        1,
        1,
        3,
    ]


def test_ranks_round_the_strata():
    items = strata(*SIZES)
    assert len(listed(Balanced(ranks=3).order(items, 0, None))) == 3 * 6
    assert len(listed(Balanced(ranks=9).order(items, 0, None))) == 3 * 9
    assert len(listed(Balanced(ranks=3, per_epoch=21).order(items, 0, None))) == 3 * 9


def test_values_of_attributes_may_be_anything_whole():
    values = np.array([-(2**62), 2**62, 7, 7, -128, 127], np.int64)
    for column in (values, values.astype(np.int8), values.astype(np.uint64), values > 0):
        items = SampleTable(6, {"kind": column})
        order = listed(Cells(attributes=("kind",), per_stratum=4).order(items, 0, None))
        assert np.unique(column[order], return_counts=True)[1].tolist() == [4] * len(
            np.unique(column)
        )


@pytest.mark.parametrize(
    "sampler, fields",
    [
        (Stratified, {"per_stratum": 0}),
        (Stratified, {"attributes": ()}),
        (InterleavedStrata, {"per_epoch": -1}),
        (InterleavedStrata, {"ranks": 0}),
        (InterleavedStrata, {"ratio": (0, 0, 0)}),
        (InterleavedStrata, {"ratio": (1, -1, 1)}),
        (InterleavedStrata, {"ratio": (3, 1)}),
    ],
)
def test_fields_have_limits(sampler, fields):
    ((name, value),) = fields.items()
    with error_line(rf"^{sampler.__name__}\.{name} must be .*got {re.escape(str(value))}"):
        sampler(**fields)


def test_a_stratum_of_the_ratio_must_have_items():
    items = strata(5, 0, 5)
    with error_line(r"no item is medium.*ratio"):
        listed(InterleavedStrata().order(items, 0, None))
    assert levels(InterleavedStrata(ratio=(1, 0, 1)), items).tolist() == [0, 2] * 5


@pytest.mark.parametrize("sampler", [Stratified(), InterleavedStrata(), Balanced()])
def test_a_missing_column_is_named_with_the_existing_ones(sampler):
    items = SampleTable(2, {"tar": np.zeros(2, np.int64), "masks": np.ones(2, np.int64)})
    with error_line(f"^{type(sampler).__name__} needs the column 'granularity', .*tar, masks"):
        listed(sampler.order(items, 0, None))
    with error_line("the items have none"):
        listed(sampler.order(SampleTable(2, {}), 0, None))


def test_attributes_must_be_integers():
    with error_line(r"'share' .*must hold integers \(got float32\)"):
        listed(
            Cells(attributes=("share",)).order(
                SampleTable(2, {"share": np.zeros(2, np.float32)}), 0, None
            )
        )


@pytest.mark.parametrize("attributes", [("item",), ("item", "half"), ("half", "rest")])
def test_strata_must_not_be_too_many(attributes):
    count = MAX_STRATA + 2
    items = SampleTable(
        count,
        {"item": np.arange(count), "half": np.arange(count) // 2, "rest": np.arange(count) % 2},
    )
    with error_line(
        rf"{', '.join(attributes)} .*at most {MAX_STRATA} strata \(got {count} or more of "
        rf"{count} items\)"
    ):
        listed(Cells(attributes=attributes).order(items, 0, None))


@pytest.mark.parametrize("sampler", [Stratified(), Balanced(), InterleavedStrata()])
def test_strata_are_found_once_for_all_epochs(sampler, monkeypatch):
    made, plain = [], strata_of.stratum_numbers
    monkeypatch.setattr(
        strata_of, "stratum_numbers", lambda *given: made.append(1) or plain(*given)
    )
    items = strata(*SIZES)
    first = [listed(sampler.order(items, epoch, None)) for epoch in range(3)]
    assert len(made) == 1
    again = [listed(sampler.order(strata(*SIZES), epoch, None)) for epoch in (2, 1, 0)]
    assert all(np.array_equal(*pair) for pair in zip(first, again[::-1], strict=True))


def test_an_order_looks_only_at_the_requested_positions(monkeypatch):
    order = Cells(attributes=("granularity",)).order(strata(5000, 3000, 100), 3, None)
    drawn, plain = [], stratified.balanced_items
    monkeypatch.setattr(
        stratified, "balanced_items", lambda *given: drawn.append(len(given[0])) or plain(*given)
    )
    some = np.array([7, 4000, 11])
    assert np.array_equal(order[some], listed(order)[some])
    assert drawn == [3, len(order)]


@pytest.mark.parametrize("block", [1, 7, 64])
def test_strata_do_not_depend_on_the_size_of_a_block(block, monkeypatch):
    monkeypatch.setattr(strata_of, "BLOCK", block)
    items = strata(*SIZES)
    found = strata_of.Strata.of(items, ("granularity",), Stratified())
    assert found.sizes.tolist() == list(SIZES)
    for stratum, size in enumerate(SIZES):
        members = found.items(np.full(size, stratum), np.arange(size))
        assert np.array_equal(members, np.flatnonzero(items.columns["granularity"] == stratum))


def test_processes_that_would_not_be_balanced_are_refused():
    Balanced(ranks=8).check(16, 4, 1)
    InterleavedStrata().check(16, 3, 1)
    with error_line(r"^--batch-size must be a multiple of --sampler.ranks 8 \(got 12\)$"):
        Balanced(ranks=8).check(12, 4, 1)
    for sampler in (Balanced(ranks=8), InterleavedStrata(ranks=8)):
        with error_line(r"^--sampler.ranks must be a multiple of 3 processes \(got 8\)$"):
            sampler.check(16, 3, 1)
    with error_line(r"^--sampler.ranks must be a multiple of 2 processes"):
        Balanced().check(16, 2, 1)


def test_strata_are_the_combinations():
    values = np.random.default_rng(0).integers(2, size=(len(RELEVANCE), 60))
    strata = Relevance().strata(SampleTable(60, dict(zip(RELEVANCE, values, strict=True))))
    kinds = list(map(tuple, values.T.tolist()))
    pairs = {*zip(strata.tolist(), kinds, strict=True)}
    assert len(pairs) == strata.max() + 1 == len({*kinds})
