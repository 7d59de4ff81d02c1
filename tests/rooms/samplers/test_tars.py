"""The samplers that know which tar an item lies in."""

import numpy as np
import pytest

from gigamask.faults import Fault
from gigamask.samplers import tars
from gigamask.samplers.tars import BalancedTars, StreamingTars, TarAware, spans
from gigamask.seams import Items


def items_of(sizes: list[int]) -> Items:
    return Items(sum(sizes), {"tar": np.repeat(np.arange(len(sizes), dtype=np.int32), sizes)})


FOUR = items_of([50, 3, 0, 20])


def tars_of(order: np.ndarray, items: Items) -> np.ndarray:
    """The tar of each run of neighbours that lie in the same one."""
    numbers = items.columns["tar"][order]
    return numbers[np.flatnonzero(np.diff(numbers, prepend=-1))]


def test_spans_leave_out_tars_without_items():
    firsts, sizes = spans(FOUR, "test")
    assert firsts.tolist() == [0, 50, 53]
    assert sizes.tolist() == [50, 3, 20]
    assert [len(each) for each in spans(items_of([]), "test")] == [0, 0]


def test_tar_aware_goes_tar_by_tar_and_takes_some_of_each():
    orders = [TarAware(10).order(FOUR, epoch, None) for epoch in range(12)]
    for order in orders:
        assert sorted(tars_of(order, FOUR)) == [0, 1, 3]
        assert np.bincount(FOUR.columns["tar"][order]).tolist() == [10, 3, 0, 10]
        assert len(np.unique(order)) == 23
    assert len({tuple(tars_of(order, FOUR)) for order in orders}) > 2
    assert any((np.diff(order) < 0).sum() > 5 for order in orders)


def test_tar_aware_shuffles_a_tar_that_gives_all_of_its_items():
    found = [order[order >= 53] for order in (TarAware(40).order(FOUR, epoch, None) for epoch in (0, 1))]
    assert all(sorted(each) == list(range(53, 73)) for each in found)
    assert all((np.diff(each) == 1).sum() < 6 for each in found)
    assert not np.array_equal(*found)


def test_streaming_shuffles_a_tar_anew_in_each_pass():
    items = items_of([30] * 12)
    first, second = (StreamingTars(12).order(items, epoch, None) for epoch in (0, 1))
    for tar in range(12):
        assert not np.array_equal(first[first // 30 == tar], second[second // 30 == tar])


def test_balanced_mixes_the_tars():
    assert len(tars_of(BalancedTars(10).order(FOUR, 0, None), FOUR)) > 12


def test_streaming_passes_have_an_order_of_their_own():
    items = items_of([30] * 12)
    orders = [StreamingTars(12).order(items, epoch, None) for epoch in range(2)]
    assert not np.array_equal(*(tars_of(order, items) for order in orders))
    assert (np.diff(orders[0]) == 1).mean() < 0.2


def test_streaming_has_a_position_even_where_the_average_tar_is_small():
    assert len(StreamingTars(1).order(items_of([1, 1, 1]), 0, None)) == 1


def test_streaming_looks_at_the_tars_it_visits_only(monkeypatch):
    drawn, before = [], tars.draw
    monkeypatch.setattr(tars, "draw", lambda *name: drawn.append(name) or before(*name))
    StreamingTars(3).order(items_of([20] * 500), 7, None)
    assert len(drawn) == 1 + 3


@pytest.mark.parametrize(
    ("make", "line"),
    [
        (lambda: TarAware(per_tar=0), "the tar-aware order's per_tar is 0, it must be at least 1"),
        (lambda: BalancedTars(per_tar=-1), "the balanced-tars order's per_tar is -1, it must be at least 1"),
        (lambda: StreamingTars(tars=0), "the streaming-tars order's tars is 0, it must be at least 1"),
        (lambda: TarAware().order(Items(3, {"scene": np.zeros(3)}), 0, None), "the tar-aware order reads the column 'tar'.*scene"),
    ],
)
def test_faults(make, line):
    with pytest.raises(Fault, match=line):
        make()
