"""Random permutations that are evaluated on demand, in constant memory.

A Feistel network permutes the smallest power of two that holds the size. Values outside the size
pass through the network again until they are inside ("cycle walking", Black and Rogaway 2002). The
result is still a permutation and takes fewer than two passes on average.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from gigamask.rng import make_rng

if TYPE_CHECKING:
    from jaxtyping import Int64, UInt64

ROUNDS = 6
SMALL = 2**14
"""Sizes up to this are shuffled in memory: that is as fast, and a network of only a few bits
reaches a small part of all permutations."""
PIECE = 2**14
"""Number of positions evaluated together, so that all intermediate values stay in the CPU cache."""
_FIRST, _SECOND = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xD6E8FEB86659FD93)


def permute(
    positions: Int64[np.ndarray, "n"], size: int, generator: np.random.Generator
) -> Int64[np.ndarray, "n"]:
    """Evaluate a random permutation at some positions.

    Args:
        positions: Positions in `[0, size)`.
        size: Number of items.
        generator: Fresh generator that determines the permutation.

    Returns:
        The items at these positions.

    Raises:
        IndexError: A position is outside the permutation.
    """
    if len(positions) and not 0 <= positions.min() <= positions.max() < size:
        raise IndexError(
            f"positions must be in [0, {size}), got {positions.min()} to {positions.max()}"
        )
    if size <= SMALL:
        return generator.permutation(size)[positions]
    keys = generator.integers(2**64, size=ROUNDS, dtype=np.uint64)
    bits = (size - 1).bit_length()
    items = np.empty(len(positions), np.int64)
    for start in range(0, len(positions), PIECE):
        values = _mix(positions[start : start + PIECE].astype(np.uint64), bits, keys)
        outside = np.flatnonzero(values >= size)
        while len(outside):
            mixed = _mix(values[outside], bits, keys)
            values[outside] = mixed
            outside = outside[mixed >= size]
        items[start : start + PIECE] = values
    return items


def cycle(
    indices: Int64[np.ndarray, "n"], size: int, seed: int, purpose: str, *ids: int
) -> Int64[np.ndarray, "n"]:
    """Index an endless sequence of permutations, one after the other.

    Args:
        indices: Indices into the sequence.
        size: Number of items.
        seed: Random seed.
        purpose: Name of the random stream.
        *ids: Further numbers that select the random stream.

    Returns:
        The items at these indices; every `size` indices visit each item once.
    """
    passes, positions = np.divmod(indices, size)
    items = np.empty_like(positions)
    for number, where in group_by_label(passes):
        items[where] = permute(positions[where], size, make_rng(seed, purpose, *ids, number))
    return items


def balanced_subset(
    draw: int, length: int, size: int, seed: int, purpose: str, *ids: int
) -> Int64[np.ndarray, "length"]:
    """Choose the items of one draw so that over draws, all items are chosen equally often.

    An item is repeated within a draw only after all have been chosen. Over any number of draws
    from the first on, the items' counts differ by at most one.

    Args:
        draw: Number of the draw, from 0.
        length: Number of items to choose in every draw.
        size: Number of items to choose from, at least 1.
        seed: Random seed.
        purpose: Name of the random stream.
        *ids: Further numbers that select the random stream.

    Returns:
        The chosen items, in no particular order.
    """
    repeats, rest = divmod(length, size)
    if 2 * rest > size:
        # Leaving out few items equally often chooses the others equally often.
        chosen = np.ones(size, bool)
        chosen[_distinct(draw, size - rest, size, seed, purpose, *ids)] = False
        items = np.flatnonzero(chosen)
    else:
        items = _distinct(draw, rest, size, seed, purpose, *ids)
    return np.concatenate([np.tile(np.arange(size), repeats), items]) if repeats else items


def group_by_label(labels: Int64[np.ndarray, "n"]) -> Iterator[tuple[int, Int64[np.ndarray, "m"]]]:
    """Yield each distinct label, in ascending order, with the indices at which it occurs."""
    indices = np.argsort(labels, kind="stable")
    for group in np.split(indices, np.flatnonzero(np.diff(labels[indices])) + 1):
        if len(group):
            yield int(labels[group[0]]), group


def _distinct(
    draw: int, length: int, size: int, seed: int, purpose: str, *ids: int
) -> Int64[np.ndarray, "length"]:
    """Return one draw's distinct items from an endless sequence of permutations.

    `length` is at most half of `size`. A draw that spans two permutations could contain an item
    twice. Therefore, among the first `length` items of the second permutation, those already in the
    draw are moved to the end. There are enough others, and no later item moves.
    """
    start, end = draw * length, (draw + 1) * length
    first = start // size * size
    if end > first + size:
        head = _slice(start, first + size, size, seed, purpose, *ids)
        tail = _slice(first + size, first + size + length, size, seed, purpose, *ids)
        return np.concatenate([head, _move_last(tail, head, size)[: length - len(head)]])
    met = first % length if start < first + length else 0
    if not met:
        return _slice(start, end, size, seed, purpose, *ids)
    items = _slice(first, end, size, seed, purpose, *ids)
    before = _slice(first - met, first, size, seed, purpose, *ids)
    items[:length] = _move_last(items[:length], before, size)
    return items[start - first :]


def _slice(
    start: int, end: int, size: int, seed: int, purpose: str, *ids: int
) -> Int64[np.ndarray, "n"]:
    """Return a slice of the sequence of permutations that lies within one of them."""
    number = start // size
    positions = np.arange(start - number * size, end - number * size)
    return permute(positions, size, make_rng(seed, purpose, *ids, number))


def _move_last(
    items: Int64[np.ndarray, "n"], met: Int64[np.ndarray, "m"], size: int
) -> Int64[np.ndarray, "n"]:
    """Return the items with those in `met` moved to the end, otherwise in the same order."""
    is_met = np.zeros(size, bool)
    is_met[met] = True
    last = is_met[items]
    return np.concatenate([items[~last], items[last]])


def _mix(
    values: UInt64[np.ndarray, "n"], bits: int, keys: UInt64[np.ndarray, "r"]
) -> UInt64[np.ndarray, "n"]:
    """Permute all numbers of `bits` bits; each round changes one half depending on the other."""
    low = np.uint64(bits // 2)
    low_mask, high_mask = np.uint64(2 ** (bits // 2) - 1), np.uint64(2 ** (bits - bits // 2) - 1)
    left, right = values >> low, values & low_mask
    for number, key in enumerate(keys):
        if number % 2:
            right ^= _hash(left, key) & low_mask
        else:
            left ^= _hash(right, key) & high_mask
    return (left << low) | right


def _hash(half: UInt64[np.ndarray, "n"], key: np.uint64) -> UInt64[np.ndarray, "n"]:
    """Return 64 bits that each depend on all of `half` and `key`; products wrap around."""
    mixed = half ^ key
    mixed *= _FIRST
    mixed ^= mixed >> np.uint64(32)
    mixed *= _SECOND
    mixed ^= mixed >> np.uint64(29)
    return mixed
