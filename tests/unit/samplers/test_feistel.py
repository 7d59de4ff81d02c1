"""Permutations that are evaluated on demand."""

import math

import numpy as np
import pytest

from gigamask.rng import make_rng
from gigamask.samplers import feistel
from gigamask.samplers.feistel import SMALL, balanced_items, group_by_label, permute, permute_each

SIZE = 40_000


def whole(size: int, *name: int) -> np.ndarray:
    return permute(np.arange(size), size, make_rng(0, "test", *name))


def excess(order: np.ndarray) -> float:
    """How many standard deviations the chi-square statistic of 64 x 64 blocks of positions and
    items lies above its mean."""
    places = np.arange(len(order)) * 64 // len(order)
    counts = np.bincount(places * 64 + order * 64 // len(order), minlength=64 * 64)
    expected = len(order) / 64**2
    return (((counts - expected) ** 2 / expected).sum() - 63**2) / np.sqrt(2 * 63**2)


@pytest.mark.slow
def test_permutation_looks_random():
    """Each figure is held to five of the standard deviations that truly random
    permutations have."""
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


@pytest.mark.parametrize("size", [SMALL + 1, 2**15, 2**15 + 1, 50_000])
def test_few_passes_find_an_item(size, monkeypatch):
    mixed, passes = feistel._mix, []
    monkeypatch.setattr(
        feistel, "_mix", lambda values, *rest: passes.append(len(values)) or mixed(values, *rest)
    )
    whole(size)
    assert sum(passes) <= 2 ** (size - 1).bit_length() < 2 * size


@pytest.mark.parametrize("size", [10, SMALL + 1])
def test_positions_outside_are_refused(size):
    for least, most in ((-1, 0), (0, size)):
        with pytest.raises(IndexError, match=rf"\[0, {size}\), got {least} to {most}"):
            permute(np.array([most, least]), size, make_rng(0, "test"))


@pytest.mark.parametrize("size", [1, 2, 3, 5, 8, 200, 70_000])
def test_each_label_has_its_own_permutation(size):
    labels, positions = np.repeat(np.arange(4), size), np.tile(np.arange(size), 4)
    sizes = np.full(4 * size, size)
    found = permute_each(positions, sizes, make_rng(0, "test"), labels, labels // 2)
    assert np.array_equal(np.sort(found.reshape(4, size)), np.tile(np.arange(size), (4, 1)))
    assert size < 8 or len({each.tobytes() for each in found.reshape(4, size)}) == 4
    some = make_rng(0, "some").integers(4 * size, size=50)
    part = (values[some] for values in (positions, sizes))
    again = permute_each(*part, make_rng(0, "test"), labels[some], labels[some] // 2)
    assert np.array_equal(again, found[some])


@pytest.mark.parametrize("size", [3, 4, 5])
def test_all_small_permutations_are_equally_likely(size):
    count = 200 * math.factorial(size)
    labels, positions = np.repeat(np.arange(count), size), np.tile(np.arange(size), count)
    found = permute_each(positions, np.full(len(labels), size), make_rng(0, "test"), labels)
    numbers = found.reshape(count, size) @ size ** np.arange(size)
    frequencies = np.unique(numbers, return_counts=True)[1]
    kinds = math.factorial(size)
    assert len(frequencies) == kinds
    assert ((frequencies - 200) ** 2 / 200).sum() < kinds + 5 * (2 * kinds) ** 0.5


def draw_of(number: int, length: int, size: int, seed: int = 0) -> np.ndarray:
    same = np.ones(length, np.int64)
    labels, purpose = 7 * same, "test"
    return balanced_items(
        np.arange(length), number, length * same, size * same, labels, seed, purpose
    )


@pytest.mark.slow
def test_a_draw_that_spans_two_passes_is_uniform():
    """With 30 of 100 every fourth draw crosses a border; over seeds, all pairs are taken alike."""
    taken = np.zeros((100, 100))
    for seed in range(400):
        draw = draw_of(3, 30, 100, seed)
        assert len(np.unique(draw)) == 30
        taken[np.ix_(draw, draw)] += 1
    together = taken[np.triu_indices(100, 1)]
    # Pairs are taken together by chance, 30 x 29 / (100 x 99) of the time.
    expected = 400 * 30 * 29 / (100 * 99)
    assert abs(together.mean() - expected) < 1e-9
    assert together.var() < 1.3 * expected


def test_equal_labels_are_grouped():
    assert [(label, there.tolist()) for label, there in group_by_label(np.array([2, 0, 2, 5]))] == [
        (0, [1]),
        (2, [0, 2]),
        (5, [3]),
    ]
    assert list(group_by_label(np.zeros(0, np.int64))) == []
