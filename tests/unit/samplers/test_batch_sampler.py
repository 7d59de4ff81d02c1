"""The sequence of samples, and how it is cut into steps."""

import math
from dataclasses import dataclass, field
from itertools import islice

import numpy as np
import pytest

from gigamask.interfaces import Sampler, SampleTable, WeightedOrder
from gigamask.records import SampleRef, StepPlan
from gigamask.samplers.batch_sampler import SampleSequence
from tests.errors import error_line
from tests.orders import iter_steps


@dataclass(frozen=True)
class Counting(Sampler):
    """Visits the items in turn and remembers which epochs were requested."""

    asked: list = field(default_factory=list)
    shrinking: int = 0
    weighted: bool = False

    def order(self, table, epoch, history):
        self.asked.append(epoch)
        order = np.arange(table.count - self.shrinking * epoch)
        return (
            WeightedOrder(order, (order + epoch / 4).astype(np.float32)) if self.weighted else order
        )


def test_orders_are_computed_once_per_epoch():
    sampler = Counting()
    sequence = SampleSequence(sampler, SampleTable(5, {}))
    for start in range(10, 30, 4):
        sequence.sample_refs(np.arange(start, start + 4), start)
    assert sampler.asked == [0, 2, 3, 4, 5]


def test_without_learning_everything_is_known():
    assert SampleSequence(Counting(), SampleTable(5, {})).prepare(0, 4) == math.inf


def test_weights_and_places_travel_with_visits():
    sequence = SampleSequence(
        Counting(weighted=True),
        SampleTable(3, {}),
        locate=lambda items: (items + 10, items * 0 + 7),
    )
    assert [ref[2:] for ref in sequence.sample_refs(np.array([2, 4]), 2)] == [
        (12, 7, 0, 2.0, -1),
        (11, 7, 2, 1.25, -1),
    ]


def test_an_order_without_positions_is_refused():
    with error_line("order is empty"):
        SampleSequence(Counting(), SampleTable(0, {}))


def test_an_order_that_changes_its_length_is_refused():
    with error_line(r"epoch 1 must have 5 positions .*\(got 4\)"):
        SampleSequence(Counting(shrinking=1), SampleTable(5, {})).sample_refs(np.arange(4, 8), 4)
    sequence = SampleSequence(Counting(shrinking=1), SampleTable(5, {}))
    for samples, epoch in ((4, 1), (11, 2)):  # before the first step
        with error_line(f"epoch {epoch} must have 5 positions"):
            sequence.check_lengths(samples)


@dataclass(frozen=True)
class Returning(Sampler):
    """Returns what it was made with."""

    found: object

    def order(self, table, epoch, history):
        return self.found


@pytest.mark.parametrize("found", [None, [0, 1], np.zeros((2, 2), np.int64), 3])
def test_what_is_no_order_is_refused(found, no_shape_checks):
    with error_line(r"^Returning\.order must return an array of integers"):
        SampleSequence(Returning(found), SampleTable(5, {}))


@pytest.mark.parametrize("found", [np.arange(5) - 1, np.arange(5) + 1, np.arange(5) + 0.5])
def test_an_order_of_items_that_are_not_in_the_table_is_refused(found, no_shape_checks):
    sequence = SampleSequence(Returning(found), SampleTable(5, {}))
    with error_line(r"^Returning: .*from 0 to 4, .*got"):
        sequence.sample_refs(np.arange(5), 0)


@dataclass(frozen=True)
class Ordered(Sampler):
    """Says which epoch an item is of."""

    def order(self, table, epoch, history):
        return (np.arange(table.count) + epoch) % table.count


@pytest.fixture
def ordered():
    return SampleSequence(Ordered(), SampleTable(5, {}))


def test_a_step_reaches_over_the_end_of_an_epoch(ordered):
    first, second = islice(iter_steps(ordered, 0, batch_size=4, micro_batch_size=4), 2)
    assert first == StepPlan(
        (tuple(SampleRef(0, k, k, batch_index=k) for k in range(4)),),
        samples_before=0,
        samples_after=4,
    )
    others = tuple(SampleRef(1, k, 1 + k, batch_index=1 + k) for k in range(3))
    assert second == StepPlan(((SampleRef(0, 4, 4), *others),), samples_before=4, samples_after=8)


def test_micro_batches_leave_the_last_one_smaller(ordered):
    step = next(iter_steps(ordered, 0, batch_size=5, micro_batch_size=2))
    assert [[ref.row for ref in micro] for micro in step.micro_batches] == [[0, 1], [2, 3], [4]]


def test_every_rank_has_as_many_micro_batches_as_the_others(ordered):
    steps = [
        next(iter_steps(ordered, 0, batch_size=5, micro_batch_size=1, rank=rank, world_size=2))
        for rank in range(2)
    ]
    assert [[[ref.row for ref in micro] for micro in step.micro_batches] for step in steps] == [
        [[0], [2], [4]],
        [[1], [3], []],
    ]
