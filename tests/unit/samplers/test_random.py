"""Random permutations that are evaluated on demand."""

import time
import tracemalloc

import numpy as np
import pytest

from gigamask.interfaces import SampleTable
from gigamask.samplers.random import LazyShuffle, Random
from tests.errors import error_line
from tests.orders import listed

ITEMS = SampleTable(1000, {})
SIZE = 40_000


def test_nothing_is_left_of_the_order_of_the_items():
    order = listed(Random().order(ITEMS, 0, None))
    # A random permutation's correlation with the identity has a standard deviation of 1/sqrt(n) =
    # .03.
    assert abs(np.corrcoef(order, np.arange(1000))[0, 1]) < 0.15


def test_seeds_and_epochs_are_unrelated():
    orders = [
        LazyShuffle().order(SampleTable(SIZE, {}, seed), epoch, None)[np.arange(SIZE)]
        for seed in (0, 1, 2)
        for epoch in (0, 1, 2)
    ]
    assert np.abs(np.corrcoef(orders)[np.triu_indices(9, 1)]).max() < 5 / SIZE**0.5


@pytest.mark.parametrize(
    "sampler, first, most_bytes",
    [(LazyShuffle(), 1_099_999_744, 200_000), (LazyShuffle(100_000), 99_900, 800_000)],
)
def test_a_billion_items_take_the_memory_of_a_chunk_and_no_time(sampler, first, most_bytes):
    items = SampleTable(1_100_000_000, {})
    sampler.order(SampleTable(1_000_000, {}), 0, None)[np.arange(256)]
    tracemalloc.start()
    start = time.process_time()
    order = sampler.order(items, 3, None)
    batch = order[np.arange(256) + first]
    elapsed_s, (_, peak_bytes) = time.process_time() - start, tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(order) == items.count
    assert len(np.unique(batch)) == 256
    assert batch.max() < items.count
    assert not sampler.chunk or 1 <= len(np.unique(batch // sampler.chunk)) <= 2
    assert elapsed_s < 0.5
    assert peak_bytes < most_bytes


def chunked(count: int, chunk: int, epoch: int = 0, seed: int = 0) -> np.ndarray:
    return LazyShuffle(chunk).order(SampleTable(count, {}, seed), epoch, None)[np.arange(count)]


def test_chunks_follow_each_other_whole_and_shuffled():
    chunks = chunked(20_000, 1000).reshape(20, 1000)
    assert (chunks // 1000 == chunks[:, :1] // 1000).all()
    visited = chunks[:, 0] // 1000
    assert sorted(visited) == list(range(20))
    assert visited.tolist() != list(range(20))
    within = chunks % 1000
    # Correlations of random permutations of 1,000 have a standard deviation of .03.
    assert np.abs(np.corrcoef([*within, np.arange(1000)])[np.triu_indices(21, 1)]).max() < 0.16


def test_a_short_last_chunk_comes_at_any_place():
    places = [int(np.flatnonzero(chunked(45, 10, epoch) >= 40)[0]) for epoch in range(200)]
    counts = np.bincount(places, minlength=41)
    assert counts[::10].sum() == 200
    assert counts[::10].min() > 20  # 40 are expected
    for epoch in range(20):
        order = chunked(45, 10, epoch)
        short = np.flatnonzero(order >= 40)
        assert np.array_equal(short, np.arange(short[0], short[0] + 5))


def test_a_chunk_has_an_item():
    with error_line("chunk must be at least 1 .got 0"):
        LazyShuffle(chunk=0)
