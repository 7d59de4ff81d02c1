"""Cutting orders into steps."""

from dataclasses import dataclass
from itertools import islice

import numpy as np
import pytest

from gigamask.contracts import Group, Visit
from gigamask.samplers.sequence import Sequence
from gigamask.samplers.split import groups
from gigamask.seams import Items, Sampler


@dataclass(frozen=True)
class Ordered(Sampler):
    """Says which epoch an item is of."""

    def order(self, items, epoch, ledger):
        return np.arange(items.count) + 100 * epoch


@pytest.fixture
def ordered():
    return Sequence(Ordered(), Items(5, {}))


def test_a_step_reaches_over_the_end_of_an_epoch(ordered):
    first, second = islice(groups(ordered, 0, batch=4, micro=4), 2)
    assert first == Group((tuple(Visit(0, k, k, place=k) for k in range(4)),), start=0, samples=4)
    others = tuple(Visit(1, k, 100 + k, place=1 + k) for k in range(3))
    assert second == Group(((Visit(0, 4, 4), *others),), start=4, samples=8)


def test_micro_batches_leave_the_last_one_smaller(ordered):
    step = next(groups(ordered, 0, batch=5, micro=2))
    assert [[visit.row for visit in micro] for micro in step.micros] == [[0, 1], [2, 3], [4]]


def test_every_rank_has_as_many_micro_batches_as_the_others(ordered):
    steps = [next(groups(ordered, 0, batch=5, micro=1, rank=rank, world=2)) for rank in range(2)]
    assert [[[visit.row for visit in micro] for micro in step.micros] for step in steps] == [[[0], [2], [4]], [[1], [3], []]]
