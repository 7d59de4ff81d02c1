"""Random permutations that are evaluated on demand, in constant memory.

A Feistel network permutes the smallest power of two that holds the size. Values outside the size
pass through the network again until they are inside ("cycle walking", Black and Rogaway 2002). The
result is still a permutation and takes fewer than two passes on average.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gigamask.lazy_numpy import np
from gigamask.rng import make_rng

if TYPE_CHECKING:
    from jaxtyping import Int64, Integer, UInt64

    Integers, Words = Int64[np.ndarray, "n"], UInt64[np.ndarray, "n"]

ROUNDS = 6
FEW_BITS = 8
"""Networks of fewer bits need twice as many rounds for all permutations to be equally likely."""
SMALL = 2**14
"""Sizes up to this are shuffled in memory: that is as fast, and a network of only a few bits
reaches a small part of all permutations."""
PIECE = 2**14
"""Number of positions evaluated together, so that all intermediate values stay in the CPU cache."""
_FIRST, _SECOND = 0x9E3779B97F4A7C15, 0xD6E8FEB86659FD93


@dataclass(frozen=True, eq=False)
class LazyOrder:
    """An order whose items are computed when they are requested."""

    length: int
    items_at: Callable[[Integers], Integers]
    """returns the items at some positions"""

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, positions: Integers) -> Integers:
        return self.items_at(positions)


def permute(positions: Integers, size: int, generator: np.random.Generator) -> Integers:
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


def cycle(indices: Integers, size: int, seed: int, purpose: str, *ids: int) -> Integers:
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


def permute_each(
    positions: Integers,
    sizes: Integers,
    generator: np.random.Generator,
    *labels: Integers,
) -> Integers:
    """Evaluate many random permutations, each at some positions.

    Args:
        positions: Positions, each in `[0, size)` of its permutation.
        sizes: Number of items of each position's permutation.
        generator: Fresh generator that determines the permutations.
        *labels: Numbers >= 0 that select each position's permutation.

    Returns:
        The items at these positions.
    """
    items = np.empty(len(positions), np.int64)
    keys = generator.integers(2**64, size=2 * ROUNDS + len(labels), dtype=np.uint64)
    for start in range(0, len(positions), PIECE):
        piece = slice(start, start + PIECE)
        values, size = positions[piece].astype(np.uint64), sizes[piece].astype(np.uint64)
        tweaks = np.zeros_like(values)
        for label, key in zip(labels, keys[2 * ROUNDS :], strict=True):
            tweaks = _hash(tweaks ^ label[piece].astype(np.uint64), key)
        # The exponent of a floating-point number is the bit length of its integer part.
        bits = np.maximum(np.frexp((size - np.uint64(1)).astype(np.float64))[1], 1)
        few = bits < FEW_BITS
        for outside, rounds in ((np.flatnonzero(few), 2 * ROUNDS), (np.flatnonzero(~few), ROUNDS)):
            while len(outside):
                round_keys = keys[:rounds, None] ^ tweaks[outside]
                values[outside] = _mix(values[outside], bits[outside], round_keys)
                outside = outside[values[outside] >= size[outside]]
        items[piece] = values
    return items


def balanced_items(
    positions: Integers,
    draw: int,
    lengths: Integers,
    sizes: Integers,
    labels: Integers,
    seed: int,
    purpose: str,
) -> Integers:
    """Return items of one draw from each of many sets, chosen equally often over all draws.

    An item is repeated within a draw only after all items of its set have been chosen. Over any
    number of draws from the first on, the counts of a set's items differ by at most one.

    A draw is a window of an endless sequence of passes over the set, or all but this window if it
    takes more than half of the set. Every pass visits one fixed half of the set, then the other, so
    a window that spans two passes holds no item twice.

    Args:
        positions: Positions in the draw, each in `[0, length)` of its set.
        draw: Number of the draw, from 0.
        lengths: Number of items that a draw takes from each position's set.
        sizes: Number of items of each position's set, at least 1.
        labels: Number of each position's set.
        seed: Random seed.
        purpose: Name of the random stream.

    Returns:
        The items at these positions, numbered within their set, in no particular order.
    """
    repeats, rests = np.divmod(lengths, sizes)
    items, partial = positions % sizes, np.flatnonzero(positions >= repeats * sizes)
    if not len(partial):
        return items
    places, rest, size = (values[partial] for values in (positions, rests, sizes))
    places = places - repeats[partial] * size
    half = (size + 1) // 2
    window = np.minimum(rest, size - rest)
    passes, start = np.divmod(draw * window, size)
    after = start + window
    # The positions that are left out are also a window: what lies around it is taken. A window
    # that spans two passes leaves the middle of the first, and of the second what follows.
    spans, left = after > size, start - half
    around = np.where(spans & (places < left), half + places, after + places)
    around -= np.where(spans & (places >= left), size + left, 0)
    ahead = np.where(spans, places >= left, 0)
    is_left_out = 2 * rest > size
    passes += np.where(is_left_out, ahead, (start + places) // size)
    places = np.where(is_left_out, around, start + places) % size
    second = (places >= half).astype(np.int64)
    offsets, halves = second * half, np.where(second, size - half, half)
    label = labels[partial]
    order = make_rng(seed, purpose)
    places = offsets + permute_each(places - offsets, halves, order, label, passes, second)
    items[partial] = permute_each(places, size, make_rng(seed, f"{purpose}, halves"), label)
    return items


def group_by_label(labels: Integers) -> Iterator[tuple[int, Int64[np.ndarray, "m"]]]:
    """Yield each distinct label, in ascending order, with the indices at which it occurs."""
    indices = np.argsort(labels, kind="stable")
    for group in np.split(indices, np.flatnonzero(np.diff(labels[indices])) + 1):
        if len(group):
            yield int(labels[group[0]]), group


def _mix(
    values: Words,
    bits: int | Integer[np.ndarray, "n"],
    keys: UInt64[np.ndarray, "r"] | UInt64[np.ndarray, "r n"],
) -> Words:
    """Permute all numbers of `bits` bits; each round changes one half depending on the other."""
    one, low = np.uint64(1), np.asarray(bits // 2, np.uint64)
    low_mask = (one << low) - one
    high_mask = (one << np.asarray(bits - bits // 2, np.uint64)) - one
    left, right = values >> low, values & low_mask
    for number, key in enumerate(keys):
        if number % 2:
            right ^= _hash(left, key) & low_mask
        else:
            left ^= _hash(right, key) & high_mask
    return (left << low) | right


def _hash(half: Words, key: np.uint64 | Words) -> Words:
    """Return 64 bits that each depend on all of `half` and `key`; products wrap around."""
    mixed = half ^ key
    mixed *= _FIRST
    mixed ^= mixed >> np.uint64(32)
    mixed *= _SECOND
    mixed ^= mixed >> np.uint64(29)
    return mixed
