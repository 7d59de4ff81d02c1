"""Permutations that are worked out where they are looked at."""

import time
import tracemalloc

import numpy as np
import pytest

from gigamask.draws import draw
from gigamask.samplers import lazy
from gigamask.samplers.lazy import PIECE, SMALL, Lazy, alike, cycle, permute, share
from gigamask.seams import Items

SIZE = 40_000


def whole(size: int, *name: int) -> np.ndarray:
    return permute(np.arange(size), size, draw(0, "test", *name))


def excess(order: np.ndarray) -> float:
    """How many standard deviations the chi-square statistic of 64 x 64 blocks of positions and items lies above its mean."""
    places = np.arange(len(order)) * 64 // len(order)
    counts = np.bincount(places * 64 + order * 64 // len(order), minlength=64 * 64)
    expected = len(order) / 64**2
    return (((counts - expected) ** 2 / expected).sum() - 63**2) / np.sqrt(2 * 63**2)


def test_what_examples_do_repeats_and_misses_items_and_this_does_not():
    """They multiply by a constant, and take the remainder of a power of two, then that of the number of items."""
    count = 30_000
    hashed = (np.arange(count) * 2654435761 + 42) % 2**32 % count
    counts = np.bincount(hashed, minlength=count)
    assert (counts == 0).sum() > 2000
    assert counts.max() > 1
    assert (np.bincount(Lazy().order(Items(count, {}, 42), 0, None)[np.arange(count)], minlength=count) == 1).all()


def test_it_looks_like_chance():
    """Each figure is held to five of the standard deviations that truly random permutations have."""
    orders = [whole(SIZE, epoch) for epoch in range(20)]
    fixed = [(order == np.arange(SIZE)).sum() for order in orders]
    beside = [(np.abs(np.diff(order)) == 1).sum() for order in orders]
    assert abs(np.mean(fixed) - 1) < 5 / 20**0.5
    assert abs(np.mean(beside) - 2) < 5 * (2 / 20) ** 0.5
    for order in orders:
        assert abs(np.corrcoef(order[:-1], order[1:])[0, 1]) < 5 / SIZE**0.5
        assert abs(np.corrcoef(order, np.arange(SIZE))[0, 1]) < 5 / SIZE**0.5
        assert abs(excess(order)) < 5
    correlations = np.corrcoef(orders)[np.triu_indices(20, 1)]
    assert np.abs(correlations).max() < 5 / SIZE**0.5


def test_seeds_and_epochs_are_unrelated():
    orders = [Lazy().order(Items(SIZE, {}, seed), epoch, None)[np.arange(SIZE)] for seed in (0, 1, 2) for epoch in (0, 1, 2)]
    assert np.abs(np.corrcoef(orders)[np.triu_indices(9, 1)]).max() < 5 / SIZE**0.5


@pytest.mark.parametrize("size", [SMALL + 1, 2**15 + 1])
def test_every_item_may_stand_anywhere(size):
    """Sizes just above a power of two walk the longest, and have halves of unequal length."""
    counts = np.zeros((3, 32))
    for number in range(1000):
        found = permute(np.array([0, 1, size - 1]), size, draw(1, "test", number))
        counts[np.arange(3), found * 32 // size] += 1
    expected = 1000 / 32
    assert (((counts - expected) ** 2 / expected).sum(axis=1) < 31 + 5 * 62**0.5).all()


@pytest.mark.parametrize("size", [SMALL + 1, 2**15, 2**15 + 1, 50_000])
def test_few_passes_find_an_item(size, monkeypatch):
    mixed, passes = lazy._mix, []
    monkeypatch.setattr(lazy, "_mix", lambda values, *rest: passes.append(len(values)) or mixed(values, *rest))
    whole(size)
    assert sum(passes) <= 2 ** (size - 1).bit_length() < 2 * size


@pytest.mark.parametrize("size", [1, SMALL, SMALL + 1, 3 * PIECE + 7])
def test_a_part_is_a_part_of_the_whole(size):
    order = whole(size)
    some = draw(0, "some").integers(size, size=50)
    assert np.array_equal(permute(some, size, draw(0, "test")), order[some])
    empty = permute(np.zeros(0, np.int64), size, draw(0, "test"))
    assert empty.dtype == order.dtype == np.int64
    assert len(empty) == 0


@pytest.mark.parametrize("size", [10, SMALL + 1])
def test_positions_outside_are_refused(size):
    for least, most in ((-1, 0), (0, size)):
        with pytest.raises(IndexError, match=f"positions {least} to {most} are not all in the permutation, it has {size}"):
            permute(np.array([most, least]), size, draw(0, "test"))


def test_a_cycle_is_one_permutation_after_the_other():
    found = cycle(np.arange(35), 7, 3, "test", 5).reshape(5, 7)
    assert np.array_equal(np.sort(found), np.tile(np.arange(7), (5, 1)))
    assert len({turn.tobytes() for turn in found}) > 1
    mixed = draw(0, "mix").permutation(35)
    assert np.array_equal(cycle(mixed, 7, 3, "test", 5), found.ravel()[mixed])
    assert len(cycle(np.zeros(0, np.int64), 7, 3, "test")) == 0


def test_a_share_draws_alike_what_follows_the_border_of_two_permutations():
    """With 30 of 100 every fourth visit crosses a border; what it takes of the next permutation is none of what it had, and else any alike."""
    taken = np.zeros((100, 100))
    for seed in range(400):
        visit = share(3, 30, 100, seed, "test")
        assert len(np.unique(visit)) == 30
        taken[np.ix_(visit, visit)] += 1
    together = taken[np.triu_indices(100, 1)]
    # Pairs are taken together by chance, 30 x 29 / (100 x 99) of the time.
    expected = 400 * 30 * 29 / (100 * 99)
    assert abs(together.mean() - expected) < 1e-9
    assert together.var() < 1.3 * expected


def test_alike_labels_come_together():
    assert [(label, there.tolist()) for label, there in alike(np.array([2, 0, 2, 5]))] == [(0, [1]), (2, [0, 2]), (5, [3])]
    assert list(alike(np.zeros(0, np.int64))) == []


def test_a_billion_items_take_no_memory_and_no_time():
    items = Items(1_100_000_000, {})
    Lazy().order(Items(SIZE, {}), 0, None)[np.arange(256)]
    tracemalloc.start()
    start = time.process_time()
    order = Lazy().order(items, 3, None)
    batch = order[np.arange(256) + 1_099_999_744]
    elapsed_s, (_, peak_bytes) = time.process_time() - start, tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(order) == items.count
    assert len(np.unique(batch)) == 256
    assert batch.max() > 2**29
    assert batch.max() < items.count
    assert elapsed_s < 0.5
    assert peak_bytes < 200_000
