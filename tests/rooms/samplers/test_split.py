"""Cutting orders into steps."""

from itertools import islice

import numpy as np
import pytest

from gigamask.faults import Fault
from gigamask.samplers.split import Group, Visit, groups


def ordered(epoch: int) -> np.ndarray:
    return np.arange(5) + 100 * epoch


def test_a_step_reaches_over_the_end_of_an_epoch():
    first, second = islice(groups(ordered, 5, 0, batch=4, micro=4), 2)
    assert first == Group(((Visit(0, 0, 0), Visit(0, 1, 1), Visit(0, 2, 2), Visit(0, 3, 3)),), start=0, samples=4)
    assert second == Group(((Visit(0, 4, 4), Visit(1, 0, 100), Visit(1, 1, 101), Visit(1, 2, 102)),), start=4, samples=8)


def test_micro_batches_leave_the_last_one_smaller():
    step = next(groups(ordered, 5, 0, batch=5, micro=2))
    assert [[visit.item for visit in micro] for micro in step.micros] == [[0, 1], [2, 3], [4]]


def test_every_rank_has_as_many_micro_batches_as_the_others():
    steps = [next(groups(ordered, 5, 0, batch=5, micro=1, rank=rank, world=2)) for rank in range(2)]
    assert [[[visit.item for visit in micro] for micro in step.micros] for step in steps] == [[[0], [2], [4]], [[1], [3], []]]


def test_orders_are_asked_for_once_an_epoch():
    asked = []

    def order(epoch: int) -> np.ndarray:
        asked.append(epoch)
        return ordered(epoch)

    list(islice(groups(order, 5, 10, batch=4, micro=4), 5))
    assert asked == [2, 3, 4, 5]


def test_an_order_without_positions_is_refused():
    with pytest.raises(Fault, match="the sampler's order has no positions, training needs at least one"):
        next(groups(lambda epoch: np.arange(0), 0, 0, batch=4, micro=4))


def test_an_order_that_changes_its_length_is_refused():
    with pytest.raises(Fault, match="epoch 1: the sampler's order has 4 positions, 5 were expected"):
        list(islice(groups(lambda epoch: np.arange(5 - epoch), 5, 0, batch=4, micro=4), 2))
