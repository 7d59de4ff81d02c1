"""The endless sequence of items."""

import math
from dataclasses import dataclass, field

import numpy as np
import pytest

from gigamask.faults import Fault
from gigamask.samplers.sequence import Sequence
from gigamask.seams import Items, Sampler, Weighted


@dataclass(frozen=True)
class Counting(Sampler):
    """Visits the items in turn and remembers which epochs were asked for."""

    asked: list = field(default_factory=list)
    shrinking: int = 0
    weighted: bool = False

    def order(self, items, epoch, ledger):
        self.asked.append(epoch)
        order = np.arange(items.count - self.shrinking * epoch)
        return Weighted(order, (order + epoch / 4).astype(np.float32)) if self.weighted else order


def test_orders_are_asked_for_once_an_epoch():
    sampler = Counting()
    sequence = Sequence(sampler, Items(5, {}))
    for start in range(10, 30, 4):
        sequence.visits(np.arange(start, start + 4), start)
    assert sampler.asked == [0, 2, 3, 4, 5]


def test_without_learning_everything_is_known():
    assert Sequence(Counting(), Items(5, {})).open(0, 4) == math.inf


def test_weights_and_places_travel_with_visits():
    sequence = Sequence(Counting(weighted=True), Items(3, {}), locate=lambda items: (items + 10, items * 0 + 7))
    assert [visit[2:] for visit in sequence.visits(np.array([2, 4]), 2)] == [(12, 7, 0, 2.0, -1), (11, 7, 2, 1.25, -1)]


def test_an_order_without_positions_is_refused():
    with pytest.raises(Fault, match="the sampler's order has no positions, training needs at least one"):
        Sequence(Counting(), Items(0, {}))


def test_an_order_that_changes_its_length_is_refused():
    with pytest.raises(Fault, match="epoch 1: the sampler's order has 4 positions, 5 were expected"):
        Sequence(Counting(shrinking=1), Items(5, {})).visits(np.arange(4, 8), 4)
