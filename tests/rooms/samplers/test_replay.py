"""The replay buffer: what is in it, and where its items stand."""

import re

import numpy as np
import pytest

from gigamask.faults import Fault
from gigamask.samplers.ledger import Book
from gigamask.samplers.replay import Replay
from gigamask.seams import Items, Ledger

ITEMS = Items(100, {})


def ledger(losses: dict[int, float], seen: dict[int, int] | int = 0, count: int = 100) -> Ledger:
    found, when = np.full(count, np.nan, np.float32), np.full(count, -1, np.int32)
    for item, loss in losses.items():
        found[item] = loss
        when[item] = seen if isinstance(seen, int) else seen[item]
    return Ledger(found, when, np.empty(0))


NOTHING = ledger({})


@pytest.mark.parametrize("told", [NOTHING, ledger(dict.fromkeys(range(100), 2.5)), ledger({3: 1.0})])
def test_an_empty_buffer_makes_ordinary_full_batches(told):
    """Where batches without replays are short and short batches are dropped, nothing is ever yielded and the buffer never fills."""
    sampler = Replay()
    orders = [sampler.order(ITEMS, epoch, told) for epoch in range(20)]
    assert {len(order) for order in orders} == {125}
    counts = np.bincount(np.concatenate(orders), minlength=100)
    assert counts.min() >= 24
    assert counts.max() <= 26


def test_a_training_fills_the_buffer_and_items_leave_it_when_they_are_learned():
    """An item is in the buffer once, with its latest loss, however often it was hard."""
    sampler, book = Replay(per_epoch=100, percentile=80.0, recent=2), Book.empty("", 100, 0.0)
    assert sampler.decay == 0.0
    hard = set(range(10))
    for epoch in range(12):
        book.freeze(epoch)
        buffer = sampler.buffer(epoch, book.frozen).tolist()
        assert len(set(buffer)) == len(buffer)
        if epoch >= 2:
            # From the sixth epoch on nothing is hard any more; what was is refreshed by being replayed.
            assert set(buffer) == (hard if epoch <= 6 else set())
        order = sampler.order(ITEMS, epoch, book.frozen)
        losses = np.array([2.0 if item in hard and epoch < 6 else 1.0 for item in order.tolist()])
        book.note(order, np.full(len(order), epoch), losses)


def test_replays_stand_in_every_batch_and_come_from_the_buffer():
    losses = {item: float(item) for item in range(50)}
    sampler = Replay(share=0.25, per_epoch=40)
    order = sampler.order(ITEMS, 1, ledger(losses))
    assert sampler.buffer(1, ledger(losses)).tolist() == [45, 46, 47, 48, 49]
    replays = order[3::4]
    counts = np.bincount(replays)
    assert counts[45:].tolist() == [2] * 5
    assert counts[:45].sum() == 0


def test_more_entries_than_places_are_replayed_at_random():
    losses = {item: float(item) for item in range(100)}
    sampler = Replay(share=0.5, percentile=0.0, per_epoch=20)
    orders = [sampler.order(ITEMS, epoch, ledger(losses, epoch - 1))[1::2] for epoch in range(1, 100)]
    assert all(len(set(order.tolist())) == 10 for order in orders)
    counts = np.bincount(np.concatenate(orders), minlength=100)[1:]
    assert counts.min() > 0
    assert abs(np.corrcoef(counts, np.arange(99))[0, 1]) < 0.35


def test_nothing_is_lost_to_the_replays():
    sampler = Replay(share=0.29, per_epoch=37)
    told = ledger({0: 1.0, 1: 9.0}, 10**6)
    orders = [sampler.order(ITEMS, epoch, told) for epoch in range(60)]
    sequence = np.concatenate(orders)
    places = np.arange(len(sequence) + 1) * 29 // 100
    assert set(sequence[np.diff(places) > 0].tolist()) == {1}
    ordinary = sequence[np.diff(places) == 0]
    for start in range(0, len(ordinary) - 99, 100):
        assert np.array_equal(np.sort(ordinary[start : start + 100]), np.arange(100))


def test_the_buffer_holds_the_hardest_of_those_above_the_percentile():
    values = np.random.default_rng(0).random(100)
    told = ledger(dict(enumerate(values.tolist())))
    ranking = np.argsort(values)
    assert np.array_equal(Replay(percentile=70.0).buffer(1, told), np.sort(ranking[70:]))
    assert np.array_equal(Replay(percentile=70.0, size=12).buffer(1, told), np.sort(ranking[-12:]))
    assert len(Replay(percentile=100.0).buffer(1, told)) == 0
    assert len(Replay(percentile=0.0).buffer(1, told)) == 99


def test_items_that_were_not_seen_lately_are_forgotten():
    told = ledger({item: float(item) for item in range(100)}, {item: item % 10 for item in range(100)})
    for epoch, recent in ((10, 1), (10, 3), (10, 10), (25, 3)):
        buffer = Replay(percentile=0.0, recent=recent).buffer(epoch, told)
        easiest = min((item for item in range(100) if item % 10 >= epoch - recent), default=-1)
        assert buffer.tolist() == [item for item in range(100) if item % 10 >= epoch - recent and item != easiest]


def test_losses_that_are_no_numbers_are_not_replayed():
    assert Replay(percentile=0.0).buffer(1, ledger({0: np.inf, 1: np.nan, 2: 1.0, 3: 2.0})).tolist() == [3]


@pytest.mark.parametrize(("share", "count", "per_epoch", "number"), [(0.2, 100, 50, 50), (0.2, 100, 50_000, 125), (0.0, 7, 10, 7), (0.3, 10, 99, 15)])
def test_an_epoch_is_as_long_as_said_or_visits_every_item(share, count, per_epoch, number):
    sampler = Replay(share=share, per_epoch=per_epoch)
    orders = [sampler.order(Items(count, {}), epoch, ledger({}, count=count)) for epoch in range(5)]
    assert {len(order) for order in orders} == {number}
    if number < per_epoch:
        assert len(set(orders[0].tolist())) == count


def test_no_items_make_no_positions():
    assert len(Replay().order(Items(0, {}), 0, ledger({}, count=0))) == 0


def test_without_a_share_there_are_no_replays():
    order = Replay(share=0.0).order(ITEMS, 0, ledger({1: 1.0, 2: 2.0}))
    assert np.array_equal(np.sort(order), np.arange(100))


@pytest.mark.parametrize(
    ("field", "value", "limit"),
    [
        ("share", 1.0, "it must be from 0 to below 1; give the part of a batch that is replayed"),
        ("share", -0.1, "it must be from 0 to below 1"),
        ("share", float("nan"), "it must be from 0 to below 1"),
        ("percentile", 101.0, "it must be from 0 to 100; give such, 90 for the hardest tenth"),
        ("percentile", float("nan"), "it must be from 0 to 100"),
        ("size", 0, "it must be at least 1; give another value"),
        ("recent", 0, "it must be at least 1; give another value"),
        ("per_epoch", 0, "it must be at least 1; give another value"),
    ],
)
def test_fields_have_limits(field, value, limit):
    with pytest.raises(Fault, match=re.escape(f"the replay order's {field} is {value}, {limit}")):
        Replay(**{field: value})
