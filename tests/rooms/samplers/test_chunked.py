"""The chunked sampler."""

import time
import tracemalloc

import numpy as np
import pytest

from gigamask.faults import Fault
from gigamask.samplers.chunked import Chunked
from gigamask.seams import Items


def whole(count: int, chunk: int, epoch: int = 0, seed: int = 0) -> np.ndarray:
    return Chunked(chunk).order(Items(count, {}, seed), epoch, None)[np.arange(count)]


def test_chunks_follow_each_other_whole_and_shuffled():
    chunks = whole(20_000, 1000).reshape(20, 1000)
    assert (chunks // 1000 == chunks[:, :1] // 1000).all()
    visited = chunks[:, 0] // 1000
    assert sorted(visited) == list(range(20))
    assert visited.tolist() != list(range(20))
    within = chunks % 1000
    # Correlations of random permutations of 1,000 have a standard deviation of .03.
    assert np.abs(np.corrcoef([*within, np.arange(1000)])[np.triu_indices(21, 1)]).max() < 0.16


def test_a_short_last_chunk_comes_at_any_place():
    places = [int(np.flatnonzero(whole(45, 10, epoch) >= 40)[0]) for epoch in range(200)]
    counts = np.bincount(places, minlength=41)
    assert counts[::10].sum() == 200
    assert counts[::10].min() > 20  # 40 are expected
    for epoch in range(20):
        order = whole(45, 10, epoch)
        short = np.flatnonzero(order >= 40)
        assert np.array_equal(short, np.arange(short[0], short[0] + 5))


def test_every_chunk_comes_at_any_place():
    counts = np.zeros((4, 4))
    for epoch in range(400):
        counts[np.arange(4), whole(38, 10, epoch)[[0, 37, 9, 28]] // 10] += 1
    assert counts[0].min() > 65  # 100 are expected
    assert counts[1].min() > 65


def test_a_billion_items_take_the_memory_of_a_chunk_at_most():
    items = Items(1_100_000_000, {})
    Chunked().order(Items(1_000_000, {}), 0, None)[np.arange(256)]
    tracemalloc.start()
    start = time.process_time()
    order = Chunked().order(items, 2, None)
    straddling = order[np.arange(256) + 99_900]
    elapsed_s, (_, peak_bytes) = time.process_time() - start, tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(order) == items.count
    assert 1 <= len(np.unique(straddling // 100_000)) <= 2
    assert elapsed_s < 0.5
    assert peak_bytes < 8 * 100_000


def test_a_chunk_has_an_item():
    with pytest.raises(Fault, match="the chunked order's chunk is 0, it must be at least 1"):
        Chunked(chunk=0)
