"""Samplers that prefer items with a high loss."""

import time

import numpy as np
import pytest

from gigamask.interfaces import LossSnapshot, SampleTable
from gigamask.samplers.hard_examples import LossWeighted, Replay
from gigamask.samplers.loss_history import LossHistory
from tests.errors import error_line

SIXTY = SampleTable(60, {})
LOSSES = np.random.default_rng(0).gamma(1.5, 1.0, 60).astype(np.float32)


def ledger(losses) -> LossSnapshot:
    losses = np.asarray(losses, np.float32)
    return LossSnapshot(losses, np.where(np.isnan(losses), -1, 0).astype(np.int32), np.empty(0))


def probabilities(losses, temperature: float = 1.0, floor: float = 0.1) -> np.ndarray:
    """Written down plainly."""
    powers = np.asarray(losses, np.float64) ** (1 / temperature)
    return (1 - floor) * powers / powers.sum() + floor / len(powers)


def test_probabilities_are_what_they_are_said_to_be():
    for sampler in (
        LossWeighted(),
        LossWeighted(temperature=0.2, floor=0.0),
        LossWeighted(temperature=7.0, floor=0.5),
    ):
        found = sampler.relative(LOSSES) / len(LOSSES)
        np.testing.assert_allclose(
            found, probabilities(LOSSES, sampler.temperature, sampler.floor), rtol=1e-4
        )


def test_temperatures_reach_from_all_alike_to_the_hardest_only():
    assert np.ptp(LossWeighted(temperature=float("inf")).relative(LOSSES)) < 1e-5
    assert np.ptp(LossWeighted(temperature=1e6).relative(LOSSES)) < 1e-4
    for temperature in (1e-3, 1e-30, 1e-320):
        order = LossWeighted(temperature=temperature, floor=0.0).order(SIXTY, 0, ledger(LOSSES))
        assert set(order.tolist()) == {int(LOSSES.argmax())}


def test_without_a_floor_items_without_loss_are_never_drawn():
    losses = np.where(np.arange(60) % 7 == 3, 1.0, 0.0)
    drawn = LossWeighted(floor=0.0, per_epoch=600).order(SIXTY, 0, ledger(losses))
    assert np.array_equal(np.unique(drawn), np.flatnonzero(losses))


def test_unseen_items_count_as_the_mean_of_the_seen_ones():
    losses = np.array([1.0, 3.0, np.nan, np.nan, np.inf], np.float32)
    np.testing.assert_allclose(
        LossWeighted(floor=0.0).relative(losses), np.array([1, 3, 2, 2, 2]) / 2, rtol=1e-6
    )
    np.testing.assert_allclose(
        LossWeighted(floor=0.0, temperature=0.5).relative(losses),
        np.array([1, 9, 4, 4, 4]) / 4.4,
        rtol=1e-6,
    )


@pytest.mark.parametrize(
    "losses", [[np.nan] * 4, [0.0] * 4, [0.0, np.nan, -1.0, np.inf], [-3.0] * 4]
)
def test_where_no_loss_says_anything_all_items_are_alike(losses):
    assert (
        LossWeighted(temperature=0.5).relative(np.array(losses, np.float32)).tolist() == [1.0] * 4
    )
    assert sorted(LossWeighted().order(SampleTable(4, {}), 0, ledger(losses)).tolist()) == [
        0,
        1,
        2,
        3,
    ]


def test_negative_losses_count_as_none():
    np.testing.assert_allclose(
        LossWeighted(floor=0.0).relative(np.array([-5.0, 1.0, 1.0], np.float32)), [0, 1.5, 1.5]
    )


def test_huge_and_tiny_losses_neither_overflow_nor_vanish():
    for scale in (1e-44, 1e-30, 1e38):
        losses = np.array([1.0, 2.0, 2.0], np.float32) * np.float32(scale)
        np.testing.assert_allclose(
            LossWeighted(floor=0.0, temperature=0.5).relative(losses),
            np.array([1, 4, 4]) / 3,
            rtol=0.4,
        )


def test_weights_belong_to_the_drawn_items_and_are_bounded_by_the_floor():
    order = LossWeighted(importance=True).order(SIXTY, 0, ledger(LOSSES))
    np.testing.assert_allclose(
        order.weights, 1 / (60 * probabilities(LOSSES)[order.items]), rtol=1e-4
    )
    assert order.weights.max() <= 10
    plain = LossWeighted().order(SIXTY, 0, ledger(LOSSES))
    assert np.array_equal(order.items, plain)


def test_draws_are_mixed():
    order = LossWeighted().order(SampleTable(1000, {}), 0, ledger(np.ones(1000)))
    assert abs(np.corrcoef(order, np.arange(1000))[0, 1]) < 0.15


def test_an_epoch_is_as_long_as_said_or_as_the_data():
    assert len(LossWeighted().order(SIXTY, 0, ledger(LOSSES))) == 60
    assert len(LossWeighted(per_epoch=7).order(SIXTY, 0, ledger(LOSSES))) == 7
    assert len(LossWeighted(importance=True).order(SampleTable(0, {}), 0, ledger([]))) == 0


def test_loss_history_keeps_a_moving_average():
    assert LossWeighted().decay == 0.99
    assert LossWeighted(ema=0.5).decay == 0.5


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"temperature": 0.0}, r"temperature must be > 0 \(got 0.0\)"),
        ({"temperature": float("nan")}, r"temperature .*got nan"),
        ({"floor": -0.1}, r"floor must be from 0 to 1 \(got -0.1\)"),
        ({"floor": 1.5}, r"floor .*got 1.5"),
        ({"ema": 1.0}, r"ema must be >= 0 and < 1 \(got 1.0\)"),
        ({"floor": 0.0, "importance": True}, r"floor must be > 0 with importance, .*\(got 0.0\)"),
        ({"per_epoch": 0}, r"per_epoch must be at least 1 \(got 0\)"),
    ],
)
def test_fields_of_loss_weighted_have_limits(fields, message):
    with error_line(f"^LossWeighted.{message}"):
        LossWeighted(**fields)


@pytest.mark.slow
def test_an_order_costs_no_more_than_a_shuffle_of_all_items():
    """At 11.2 million items that is .2 s for 100,000 draws, 2 ms for 1,024."""

    def cost(make) -> float:
        start = time.process_time()
        make()
        return time.process_time() - start

    items, losses = SampleTable(1_000_000, {}), ledger(np.random.default_rng(0).random(1_000_000))
    shuffle = min(cost(lambda: np.random.default_rng(0).permutation(items.count)) for _ in range(3))
    assert (
        min(cost(lambda: LossWeighted(per_epoch=9000).order(items, 0, losses)) for _ in range(3))
        < 3 * shuffle
    )


ITEMS = SampleTable(100, {})


def replayable(
    losses: dict[int, float], seen: dict[int, int] | int = 0, count: int = 100
) -> LossSnapshot:
    values, when = np.full(count, np.nan, np.float32), np.full(count, -1, np.int32)
    for item, loss in losses.items():
        values[item] = loss
        when[item] = seen if isinstance(seen, int) else seen[item]
    return LossSnapshot(values, when, np.empty(0))


def test_a_training_fills_the_buffer_and_items_leave_it_when_they_are_learned():
    """An item is in the buffer once, with its latest loss, however often it was hard."""
    sampler, history = (
        Replay(per_epoch=100, percentile=80.0, recent=2),
        LossHistory.empty("", 100, 0.0),
    )
    assert sampler.decay == 0.0
    hard = set(range(10))
    for epoch in range(12):
        history.take_snapshot(epoch)
        buffer = sampler.buffer(epoch, history.snapshot).tolist()
        assert len(set(buffer)) == len(buffer)
        if epoch >= 2:
            # From the sixth epoch on nothing is hard any more; what was is refreshed by being
            # replayed.
            assert set(buffer) == (hard if epoch <= 6 else set())
        order = sampler.order(ITEMS, epoch, history.snapshot)
        losses = np.array([2.0 if item in hard and epoch < 6 else 1.0 for item in order.tolist()])
        history.update(order, np.full(len(order), epoch), losses)


def test_of_equal_losses_the_first_items_are_replayed():
    """On every processor: partial sorts leave open which of equal values they take."""
    losses = {item: 2.0 if item % 2 else 1.0 for item in range(80)} | {80: 3.0, 81: 0.5}
    buffer = Replay(size=10, percentile=10.0).buffer(1, replayable(losses))
    assert buffer.tolist() == [1, 3, 5, 7, 9, 11, 13, 15, 17, 80]


def test_more_entries_than_places_are_replayed_at_random():
    losses = {item: float(item) for item in range(100)}
    sampler = Replay(share=0.5, percentile=0.0, per_epoch=20)
    orders = [
        sampler.order(ITEMS, epoch, replayable(losses, epoch - 1))[1::2] for epoch in range(1, 100)
    ]
    assert all(len(set(order.tolist())) == 10 for order in orders)
    counts = np.bincount(np.concatenate(orders), minlength=100)[1:]
    assert counts.min() > 0
    assert abs(np.corrcoef(counts, np.arange(99))[0, 1]) < 0.35


def test_losses_that_are_no_numbers_are_not_replayed():
    assert Replay(percentile=0.0).buffer(
        1, replayable({0: np.inf, 1: np.nan, 2: 1.0, 3: 2.0})
    ).tolist() == [3]


@pytest.mark.parametrize(
    "share, count, per_epoch, number",
    [(0.2, 100, 50, 50), (0.2, 100, 50_000, 125), (0.0, 7, 10, 7), (0.3, 10, 99, 15)],
)
def test_an_epoch_is_as_long_as_said_or_visits_every_item(share, count, per_epoch, number):
    sampler = Replay(share=share, per_epoch=per_epoch)
    orders = [
        sampler.order(SampleTable(count, {}), epoch, replayable({}, count=count))
        for epoch in range(5)
    ]
    assert {len(order) for order in orders} == {number}
    if number < per_epoch:
        assert len(set(orders[0].tolist())) == count


def test_no_items_make_no_replays():
    assert len(Replay().order(SampleTable(0, {}), 0, replayable({}, count=0))) == 0


@pytest.mark.parametrize(
    "field, value, limit",
    [
        ("share", 1.0, ">= 0 and < 1"),
        ("share", -0.1, ">= 0 and < 1"),
        ("share", float("nan"), ">= 0 and < 1"),
        ("percentile", 101.0, "from 0 to 100"),
        ("percentile", float("nan"), "from 0 to 100"),
        ("size", 0, "at least 1"),
        ("recent", 0, "at least 1"),
        ("per_epoch", 0, "at least 1"),
    ],
)
def test_fields_of_replay_have_limits(field, value, limit):
    with error_line(rf"^Replay.{field} must be {limit} \(got {value}\)"):
        Replay(**{field: value})
