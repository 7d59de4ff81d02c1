"""The samplers that depend on the tar or node of an item."""

import numpy as np
import pytest

from gigamask.interfaces import SampleTable
from gigamask.samplers.shards import Sharded, StreamingTars, TarSubset
from tests.errors import error_line
from tests.orders import listed


def items_of(sizes: list[int]) -> SampleTable:
    return SampleTable(sum(sizes), {"tar": np.repeat(np.arange(len(sizes), dtype=np.int32), sizes)})


FOUR = items_of([50, 3, 0, 20])


def tars_of(order: np.ndarray, items: SampleTable) -> np.ndarray:
    """The tar of each run of neighbours that lie in the same one."""
    numbers = items.columns["tar"][order]
    return numbers[np.flatnonzero(np.diff(numbers, prepend=-1))]


def test_tar_aware_shuffles_a_tar_that_gives_all_of_its_items():
    found = [
        order[order >= 53]
        for order in (listed(TarSubset(40).order(FOUR, epoch, None)) for epoch in (0, 1))
    ]
    assert all(sorted(each) == list(range(53, 73)) for each in found)
    assert all((np.diff(each) == 1).sum() < 6 for each in found)
    assert not np.array_equal(*found)


def test_streaming_shuffles_a_tar_anew_in_each_pass():
    items = items_of([30] * 12)
    first, second = (listed(StreamingTars(12).order(items, epoch, None)) for epoch in (0, 1))
    for tar in range(12):
        assert not np.array_equal(first[first // 30 == tar], second[second // 30 == tar])


def test_balanced_mixes_the_tars():
    assert len(tars_of(listed(TarSubset(10, mixed=True).order(FOUR, 0, None)), FOUR)) > 12


def test_each_streaming_pass_has_its_own_order():
    items = items_of([30] * 12)
    orders = [listed(StreamingTars(12).order(items, epoch, None)) for epoch in range(2)]
    assert not np.array_equal(*(tars_of(order, items) for order in orders))
    assert (np.diff(orders[0]) == 1).mean() < 0.2


@pytest.mark.parametrize(
    "make, line",
    [
        (lambda: TarSubset(per_tar=0), r"per_tar must be .*\(got 0\)"),
        (lambda: TarSubset(per_tar=-1), r"per_tar must be .*\(got -1\)"),
        (lambda: StreamingTars(tars=0), r"tars must be .*\(got 0\)"),
        (
            lambda: listed(TarSubset().order(SampleTable(3, {"scene": np.zeros(3)}), 0, None)),
            "TarSubset needs the column 'tar'.*scene",
        ),
    ],
)
def test_invalid_fields_and_missing_columns_raise(make, line):
    with error_line(line):
        make()


def whole(sampler: Sharded, items: SampleTable, epoch: int = 0) -> np.ndarray:
    return listed(sampler.order(items, epoch, None))


def items_with(sizes: list[int], **columns: list) -> SampleTable:
    return SampleTable(
        sum(sizes),
        {"tar": np.repeat(np.arange(len(sizes)), sizes)}
        | {name: np.array(values) for name, values in columns.items()},
    )


def test_more_nodes_than_a_byte_can_number():
    count = 700
    items = items_with([count], node=list(range(count))[::-1])
    assert np.array_equal(whole(Sharded(count, "node"), items), np.arange(count)[::-1])


@pytest.mark.parametrize(
    "nodes, column, line",
    [
        (0, None, r"nodes must be .*\(got 0\)"),
        (3, None, "node [012] of 3 has no items"),
        (3, "node", "node 2 of 3 has no items"),
        (1, "node", r"column 'node' .*from 0 to 0 \(got 1 at item 1\)"),
        (2, "low", r"column 'low' .*from 0 to 1 \(got -1 at item 0\)"),
        (2, "half", r"column 'half' .*from 0 to 1 \(got 0.5 at item 2\)"),
        (2, "none", "Sharded needs the column 'none'.*tar, node, low, half"),
    ],
)
def test_invalid_nodes_raise(nodes, column, line):
    items = items_with([2, 1], node=[0, 1, 1], low=[-1, 0, 1], half=[0, 1, 0.5])
    with error_line(line):
        Sharded(nodes, column).order(items, 0, None)


def test_a_tar_without_items_still_lies_on_its_node():
    """Filters must not move a tar to another machine: of four tars, the first of which has nothing
    to train on, the third lies on the second node."""
    items = SampleTable(6, {"tar": np.array([1, 1, 2, 2, 3, 3])}, tars=4)
    order = Sharded(nodes=2).order(items, 0, None)[np.arange(8)]
    assert set(items.columns["tar"][order[::2]]) == {1}
    assert set(items.columns["tar"][order[1::2]]) == {2, 3}


@pytest.mark.parametrize(
    "batch, nodes, line",
    [
        (6, 1, r"^--batch-size must be a multiple of --sampler.nodes 4 \(got 6\)$"),
        (8, 3, r"^--sampler.nodes must be a multiple of the 3 nodes in use \(got 4\)"),
    ],
)
def test_machines_that_would_read_what_others_hold_are_refused(batch, nodes, line):
    Sharded(nodes=4).check(8, 8, 2)
    with error_line(line):
        Sharded(nodes=4).check(batch, 12, nodes)
