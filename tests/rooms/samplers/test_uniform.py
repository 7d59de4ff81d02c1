"""The uniform sampler."""

import time
from itertools import permutations

import numpy as np
import pytest

from gigamask.draws import draw
from gigamask.samplers import uniform
from gigamask.samplers.uniform import LARGE, Uniform, dealt
from gigamask.seams import Items

ITEMS = Items(1000, {})


def excess(counts: np.ndarray) -> float:
    """How many standard deviations the chi-square statistic of equally likely counts lies above its mean."""
    expected = counts.sum() / counts.size
    return (((counts - expected) ** 2 / expected).sum() - counts.size) / np.sqrt(2 * counts.size)


def test_nothing_is_left_of_the_order_of_the_items():
    order = Uniform().order(ITEMS, 0, None)
    # A random permutation's correlation with the identity has a standard deviation of 1/sqrt(n) = .03.
    assert abs(np.corrcoef(order, np.arange(1000))[0, 1]) < 0.15


@pytest.mark.parametrize(("buckets", "piece"), [(2, 2**18), (256, 2**18), (2, 3)])
def test_all_permutations_are_equally_likely_when_dealt(buckets, piece, monkeypatch):
    monkeypatch.setattr(uniform, "BUCKETS", buckets)
    monkeypatch.setattr(uniform, "PIECE", piece)
    generator = draw(0, "test")
    numbers = {each: number for number, each in enumerate(permutations(range(4)))}
    counts = np.bincount([numbers[tuple(dealt(np.arange(4), generator).tolist())] for _ in range(2400 if buckets == 256 else 6000)], minlength=24)
    assert excess(counts) < 4


def test_large_orders_are_dealt_and_are_as_good():
    orders = [Uniform().order(Items(LARGE, {}), epoch, None) for epoch in (0, 1)]
    for order in orders:
        assert order.dtype == np.int32
        assert np.array_equal(np.bincount(order, minlength=LARGE), np.ones(LARGE))
        # As many items stay at their place as would by chance, 1 on average.
        assert (order == np.arange(LARGE)).sum() < 7
        blocks = np.bincount(np.arange(LARGE) * 64 // LARGE * 64 + order * 64 // LARGE, minlength=64 * 64)
        assert excess(blocks) < 4
        assert abs(np.corrcoef(order[:-1], order[1:])[0, 1]) < 5 / LARGE**0.5
    assert abs(np.corrcoef(*orders)[0, 1]) < 5 / LARGE**0.5
    assert np.array_equal(orders[1], Uniform().order(Items(LARGE, {}), 1, None))


@pytest.mark.parametrize("count", [1_000_000, LARGE])
def test_an_epoch_costs_about_what_numpy_needs_to_shuffle(count):
    """At SA-1B's 11.2 million images that is 0.4 seconds."""

    def cost(make):
        times = []
        for _ in range(3):
            start = time.process_time()
            make()
            times.append(time.process_time() - start)
        return min(times)

    items = Items(count, {})
    assert cost(lambda: Uniform().order(items, 0, None)) < 3 * cost(lambda: np.random.default_rng(0).permutation(items.count))
