"""The sampler whose items lie on several machines."""

import re

import numpy as np
import pytest

from gigamask.faults import Fault
from gigamask.samplers.sharded import Sharded
from gigamask.seams import Items
from tests.orders import listed


def whole(sampler: Sharded, items: Items, epoch: int = 0) -> np.ndarray:
    return listed(sampler.order(items, epoch, None))


def items_of(sizes: list[int], **columns: list) -> Items:
    return Items(sum(sizes), {"tar": np.repeat(np.arange(len(sizes)), sizes)} | {name: np.array(values) for name, values in columns.items()})


def test_tars_are_dealt_out_in_blocks():
    items = items_of([4, 3, 2, 5, 1])
    order = whole(Sharded(2), items).reshape(-1, 2)
    # 0, 1, 2 lie on node 0 and 3, 4 on node 1: t * 2 // 5.
    assert len(order) == 9
    assert sorted(order[:, 0]) == list(range(9))
    assert sorted(set(order[:, 1])) == list(range(9, 15))
    assert sorted(order[:6, 1]) == list(range(9, 15))


def test_a_column_may_say_where_items_lie():
    items = items_of([6], node=[1, 0, 1, 1, 0, 1])
    order = whole(Sharded(2, "node"), items).reshape(-1, 2)
    assert len(order) == 4
    assert sorted(order[:, 1]) == [0, 2, 3, 5]
    assert set(order[:, 0]) == {1, 4}


def test_a_node_with_fewer_items_goes_on_where_it_was():
    items = items_of([10, 3])
    sampler = Sharded(2)
    visits = np.concatenate([whole(sampler, items, epoch)[1::2] for epoch in range(3)])
    assert np.array_equal(np.sort(visits.reshape(10, 3)), np.tile([10, 11, 12], (10, 1)))


def test_ranks_numbered_across_nodes_meet_their_own_items_only():
    items, nodes, world = items_of([5, 9, 2, 7, 4, 4]), 3, 6
    sequence = np.concatenate([whole(Sharded(nodes), items, epoch) for epoch in range(4)])
    for rank in range(world):
        node = rank % nodes
        assert set(items.columns["tar"][sequence[rank::world]]) == {2 * node, 2 * node + 1}


def test_one_node_has_all():
    assert np.array_equal(np.sort(whole(Sharded(), items_of([3, 4]))), np.arange(7))


def test_more_nodes_than_a_byte_can_number():
    count = 700
    items = items_of([count], node=list(range(count))[::-1])
    assert np.array_equal(whole(Sharded(count, "node"), items), np.arange(count)[::-1])


@pytest.mark.parametrize(
    ("nodes", "column", "line"),
    [
        (0, None, "the sharded order's nodes is 0, it must be at least 1"),
        (3, None, "node 0 of 3 has no items, each must have some|node 1 of 3 has no items|node 2 of 3 has no items"),
        (3, "node", "node 2 of 3 has no items, each must have some; train on fewer nodes, or give it a tar"),
        (1, "node", "column 'node': item 1 lies on node 1, nodes are 0 to 0; mend it, or change the nodes"),
        (2, "low", "column 'low': item 0 lies on node -1, nodes are 0 to 1"),
        (2, "half", "column 'half': item 2 lies on node 0.5, nodes are 0 to 1"),
        (2, "none", "the sharded order reads the column 'none'.*tar, node, low, half"),
    ],
)
def test_faults(nodes, column, line):
    items = items_of([2, 1], node=[0, 1, 1], low=[-1, 0, 1], half=[0, 1, 0.5])
    with pytest.raises(Fault, match=line):
        Sharded(nodes, column).order(items, 0, None)


def test_a_tar_without_items_still_lies_on_its_node():
    """Filters must not move a tar to another machine: of four tars, the first of which has nothing to train on, the third lies on the second node."""
    items = Items(6, {"tar": np.array([1, 1, 2, 2, 3, 3])}, tars=4)
    order = Sharded(nodes=2).order(items, 0, None)[np.arange(8)]
    assert set(items.columns["tar"][order[::2]]) == {1}
    assert set(items.columns["tar"][order[1::2]]) == {2, 3}


@pytest.mark.parametrize(
    ("batch", "nodes", "line"),
    [
        (6, 1, "--batch is 6, the sharded order of 4 nodes needs a multiple of that; change --batch, or --sampler.nodes"),
        (8, 3, "--sampler.nodes is 4, training runs on 3 machines; give a multiple of that, or all data to each of them"),
    ],
)
def test_machines_that_would_read_what_others_hold_are_refused(batch, nodes, line):
    Sharded(nodes=4).check(8, 8, 2)
    with pytest.raises(Fault, match=f"^{re.escape(line)}$"):
        Sharded(nodes=4).check(batch, 12, nodes)
