"""What holds for every order that goes from easy to hard or learns from losses, whatever the loss
history holds.
"""

import random
from fractions import Fraction

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from gigamask.interfaces import LossSnapshot, Order, Sampler, SampleTable, WeightedOrder
from gigamask.samplers.curriculum import AdaptiveCurriculum, Curriculum
from gigamask.samplers.hard_examples import LossWeighted, Replay
from tests.orders import listed

SEEDS, COUNTS, EPOCHS = st.integers(0, 3), st.integers(1, 60), st.integers(0, 9)
SHARES = st.floats(0.01, 1.0)
LENGTHS = st.integers(1, 90)
CURRICULA = st.builds(Curriculum, SHARES, st.floats(0, 12), st.integers(1, 12))
ADAPTIVE = st.builds(
    AdaptiveCurriculum, SHARES, SHARES, st.floats(0.01, 2), st.integers(1, 4), st.none() | LENGTHS
)
WEIGHTED = st.builds(
    LossWeighted, st.floats(0.05, 20), SHARES, st.just(0.99), st.booleans(), LENGTHS
)
REPLAYS = st.builds(
    Replay, st.floats(0, 0.9), st.integers(1, 20), st.floats(0, 100), st.integers(1, 9), LENGTHS
)
LOSSES = st.floats(0, 100, width=32) | st.just(float("nan"))


@st.composite
def ledgers(draw, count: int, epochs: int = 9) -> LossSnapshot:
    losses = np.array(draw(st.lists(LOSSES, min_size=count, max_size=count)), np.float32)
    seen = np.array(
        draw(st.lists(st.integers(0, epochs), min_size=count, max_size=count)), np.int32
    )
    history = draw(st.lists(st.floats(0, 3) | st.just(float("nan")), max_size=30))
    return LossSnapshot(
        losses, np.where(np.isnan(losses), np.int32(-1), seen), np.array(history, np.float64)
    )


def items_of(count: int, seed: int = 0) -> SampleTable:
    # Some are equally difficult.
    return SampleTable(
        count,
        {"difficulty": np.random.default_rng(count).integers(30, size=count).astype(np.float32)},
        seed,
    )


def nothing(count: int) -> LossSnapshot:
    return LossSnapshot(
        np.full(count, np.nan, np.float32), np.full(count, -1, np.int32), np.empty(0)
    )


@given(st.one_of(CURRICULA, ADAPTIVE, WEIGHTED, REPLAYS), COUNTS, SEEDS, EPOCHS, st.data())
@settings(max_examples=120)
def test_orders_depend_only_on_seed_epoch_and_loss_history_and_their_length_on_the_items(
    sampler: Sampler, count, seed, epoch, data
):
    items, told = items_of(count, seed), data.draw(ledgers(count))
    before = [each.copy() for each in (told.losses, told.seen, told.epoch_losses)]
    np.random.seed(1)
    random.seed(1)
    state = np.random.get_state()[1].tobytes()
    order = sampler.order(items, epoch, told)
    visited = listed(order)
    assert np.random.get_state()[1].tobytes() == state
    np.random.seed(2)
    random.seed(2)
    again = sampler.order(items_of(count, seed), epoch, LossSnapshot(*before))
    assert np.array_equal(visited, listed(again))
    assert isinstance(order, WeightedOrder) == isinstance(again, WeightedOrder)
    if isinstance(order, WeightedOrder):
        assert np.array_equal(order.weights, again.weights)
        assert np.isfinite(order.weights).all()
        assert (order.weights > 0).all()
    assert all(
        np.array_equal(*pair, equal_nan=True)
        for pair in zip(before, (told.losses, told.seen, told.epoch_losses), strict=True)
    )
    assert len(order) == len(sampler.order(items, 0, nothing(count))) > 0
    assert isinstance(order, Order)
    assert 0 <= listed(order).min() <= listed(order).max() < count
    assert listed(order).dtype == np.int64


@given(CURRICULA, st.lists(st.floats(0, 40), min_size=2, max_size=20))
def test_curriculum_fraction_never_shrinks(sampler, times):
    shares = [sampler.share(time) for time in sorted(times)]
    assert shares == sorted(shares)
    assert 0 < shares[0] <= shares[-1] <= 1
    assert sampler.share(0.0) == (sampler.start if sampler.epochs else 1.0)
    assert sampler.share(sampler.epochs) == sampler.share(sampler.epochs + 100) == 1.0


@given(CURRICULA, COUNTS, SEEDS)
def test_curriculum_visits_the_included_items_and_finally_every_item_once(sampler, count, seed):
    items = items_of(count, seed)
    rank = np.empty(count, int)
    rank[np.argsort(items.columns["difficulty"], kind="stable")] = np.arange(count)
    for epoch in (0, 1, 5, 13):
        order = rank[listed(sampler.order(items, epoch, None))]
        for position, place in enumerate(order.tolist()):
            # A position belongs to the last stage that begins at it or before.
            stage = max(
                stage
                for stage in range(sampler.stages)
                if stage * count // sampler.stages <= position
            )
            assert place < np.ceil(round(sampler.share(epoch + stage / sampler.stages) * count, 6))
    assert np.array_equal(np.sort(order), np.arange(count))


@given(ADAPTIVE, st.lists(st.floats(0, 3) | st.just(float("nan")), max_size=60))
def test_adaptive_fraction_never_shrinks_for_any_losses(sampler, history):
    losses = np.array(history, np.float64)
    shares = [sampler.share(losses[:length]) for length in range(len(losses) + 1)]
    assert shares == sorted(shares)
    assert shares[0] == sampler.start
    assert shares[-1] <= 1
    grown = np.diff(shares) > 0
    assert all(sum(grown[start : start + sampler.window]) <= 1 for start in range(len(grown)))


@given(ADAPTIVE, COUNTS, SEEDS, st.integers(1, 8))
def test_items_are_visited_equally_often_while_the_adaptive_fraction_is_constant(
    sampler, count, seed, epochs
):
    items = items_of(count, seed)
    orders = [listed(sampler.order(items, epoch, nothing(count))) for epoch in range(epochs)]
    easiest = np.argsort(items.columns["difficulty"], kind="stable")[
        : int(np.ceil(round(sampler.start * count, 6)))
    ]
    counts = np.bincount(np.concatenate(orders), minlength=count)
    assert counts.sum() == counts[easiest].sum()
    assert np.ptp(counts[easiest]) <= 1


@given(WEIGHTED, COUNTS, st.data())
def test_probabilities_respect_the_floor_sum_to_one_and_follow_the_losses(sampler, count, data):
    losses = data.draw(ledgers(count)).losses
    relative = sampler.relative(losses)
    assert relative.min() >= np.float32(sampler.floor) * 0.999999
    assert abs(relative.mean(dtype=np.float64) - 1) < 1e-5
    seen = np.flatnonzero(~np.isnan(losses))
    assert (np.diff(relative[seen[np.argsort(losses[seen], kind="stable")]]) >= 0).all()


@given(WEIGHTED, COUNTS, SEEDS, EPOCHS, st.data())
def test_an_item_is_drawn_as_often_as_expected_up_to_two(sampler, count, seed, epoch, data):
    told = data.draw(ledgers(count))
    order = listed(sampler.order(SampleTable(count, {}, seed), epoch, told))
    wanted = sampler.relative(told.losses) / count * len(order)
    assert np.abs(np.bincount(order, minlength=count) - wanted).max() < 2.001


@given(REPLAYS, COUNTS, SEEDS, st.integers(1, 70), st.data())
@settings(max_examples=60)
def test_every_batch_has_its_fraction_of_replays_and_the_rest_cycles_through_all_items(
    sampler, count, seed, batch, data
):
    """Batches begin anywhere, also in one epoch to end in the next."""
    told = data.draw(ledgers(count))
    share = Fraction(sampler.share).limit_denominator(1_000_000)
    epochs = [
        (sampler.order(SampleTable(count, {}, seed), epoch, told), sampler.buffer(epoch, told))
        for epoch in range(6)
    ]
    sequence = np.concatenate([order for order, _ in epochs])
    replayed = np.array(
        [int((place + 1) * share) > int(place * share) for place in range(len(sequence))]
    )
    in_batches = np.convolve(replayed, np.ones(min(batch, len(sequence)), int), "valid")
    assert all(
        abs(held - min(batch, len(sequence)) * share) < 1 for held in set(in_batches.tolist())
    )
    ordinary = sequence[~replayed]
    for start in range(0, len(ordinary) - count + 1, count):
        assert np.array_equal(np.sort(ordinary[start : start + count]), np.arange(count))
    for number, (order, buffer) in enumerate(epochs):
        mine = order[replayed[number * len(order) : (number + 1) * len(order)]]
        if len(buffer):
            counts = np.bincount(mine, minlength=count)
            assert counts.sum() == counts[buffer].sum()
            assert np.ptp(counts[buffer]) <= 1
    if not any(len(buffer) for _, buffer in epochs):
        assert np.ptp(np.bincount(sequence[replayed], minlength=count)) <= 1


@given(REPLAYS, COUNTS, EPOCHS, st.data())
def test_the_buffer_is_what_it_is_said_to_be(sampler, count, epoch, data):
    told = data.draw(ledgers(count))
    buffer = sampler.buffer(epoch, told)
    recent = [
        item
        for item in range(count)
        if told.seen[item] >= 0 and told.seen[item] >= epoch - sampler.recent
    ]
    assert len(buffer) <= sampler.size
    assert len(set(buffer.tolist())) == len(buffer)
    assert set(buffer.tolist()) <= set(recent)
    if recent:
        hard = told.losses[recent] > np.percentile(told.losses[recent], sampler.percentile)
        assert len(buffer) == min(hard.sum(), sampler.size)
        left = sorted(set(np.array(recent)[hard].tolist()) - set(buffer.tolist()))
        assert not left or told.losses[left].max() <= told.losses[buffer].min()
