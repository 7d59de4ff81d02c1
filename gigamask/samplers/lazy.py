"""Permutations that are worked out where they are looked at: no memory, any position at once.

In: positions, a size, the chance that names the permutation. Out: the items at these positions.
A Feistel network permutes the smallest power of two that holds the size; what falls outside is sent through again until it falls inside
("cycle walking", Black and Rogaway 2002), which keeps it a permutation and takes less than two passes on average.

Not here: permutations held in memory (`samplers.uniform`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from gigamask.draws import draw
from gigamask.seams import Sampler

if TYPE_CHECKING:
    from jaxtyping import Int64, UInt64

    from gigamask.seams import Items, Ledger, Order

ROUNDS = 6
SMALL = 2**14
"""Sizes up to this are shuffled, which takes no longer there; halves of a few bits would make few of the many permutations."""
PIECE = 2**14
"""Positions that are worked out together; they and what they become on the way stay in the processor's cache."""
_FIRST, _SECOND = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xD6E8FEB86659FD93)


def permute(positions: Int64[np.ndarray, "n"], size: int, generator: np.random.Generator) -> Int64[np.ndarray, "n"]:
    """Returns where a random permutation of `size` items, named by the generator, puts these positions."""
    if len(positions) and not 0 <= positions.min() <= positions.max() < size:
        raise IndexError(f"positions {positions.min()} to {positions.max()} are not all in the permutation, it has {size}")
    if size <= SMALL:
        return generator.permutation(size)[positions]
    keys = generator.integers(2**64, size=ROUNDS, dtype=np.uint64)
    bits = (size - 1).bit_length()
    found = np.empty(len(positions), np.int64)
    for start in range(0, len(positions), PIECE):
        values = _mix(positions[start : start + PIECE].astype(np.uint64), bits, keys)
        outside = np.flatnonzero(values >= size)
        while len(outside):
            again = _mix(values[outside], bits, keys)
            values[outside] = again
            outside = outside[again >= size]
        found[start : start + PIECE] = values
    return found


def cycle(numbers: Int64[np.ndarray, "n"], size: int, seed: int, purpose: str, *ids: int) -> Int64[np.ndarray, "n"]:
    """Returns the items at these places of an endless sequence of permutations, one after the other: all are visited equally often."""
    turns, positions = np.divmod(numbers, size)
    found = np.empty_like(positions)
    for turn, there in alike(turns):
        found[there] = permute(positions[there], size, draw(seed, purpose, *ids, turn))
    return found


def share(visit: int, taken: int, size: int, seed: int, purpose: str, *ids: int) -> Int64[np.ndarray, "taken"]:
    """Returns the items, in no order, of one of the visits that take `taken` of `size` items each.

    A visit takes an item a second time only when it has taken all. Over visits all are taken equally often: their counts differ by at most one.
    """
    rounds, rest = divmod(taken, size)
    if 2 * rest > size:
        # Whoever leaves out few items, each equally often, takes the others equally often.
        left = np.ones(size, bool)
        left[_fresh(visit, size - rest, size, seed, purpose, *ids)] = False
        last = np.flatnonzero(left)
    else:
        last = _fresh(visit, rest, size, seed, purpose, *ids)
    return np.concatenate([np.tile(np.arange(size), rounds), last]) if rounds else last


def alike(labels: Int64[np.ndarray, "n"]) -> Iterator[tuple[int, Int64[np.ndarray, "m"]]]:
    """Yields each label once, ascending, with the places where it stands."""
    places = np.argsort(labels, kind="stable")
    for there in np.split(places, np.flatnonzero(np.diff(labels[places])) + 1):
        if len(there):
            yield int(labels[there[0]]), there


def _fresh(visit: int, taken: int, size: int, seed: int, purpose: str, *ids: int) -> Int64[np.ndarray, "taken"]:
    """Returns one visit's items, all different, from an endless sequence of permutations; `taken` is at most half of `size`.

    A visit that begins in one permutation and ends in the next could meet an item twice. So in the next those of its first `taken` items
    that the visit had already come last among these; their number suffices, and nothing behind them moves.
    """
    first, end = visit * taken, (visit + 1) * taken
    begin = first // size * size
    if end > begin + size:
        had = _stretch(first, begin + size, size, seed, purpose, *ids)
        fresh = _had_last(_stretch(begin + size, begin + size + taken, size, seed, purpose, *ids), had, size)
        return np.concatenate([had, fresh[: taken - len(had)]])
    before = begin % taken if first < begin + taken else 0
    if not before:
        return _stretch(first, end, size, seed, purpose, *ids)
    found = _stretch(begin, end, size, seed, purpose, *ids)
    found[:taken] = _had_last(found[:taken], _stretch(begin - before, begin, size, seed, purpose, *ids), size)
    return found[first - begin :]


def _stretch(first: int, end: int, size: int, seed: int, purpose: str, *ids: int) -> Int64[np.ndarray, "n"]:
    """Returns the items at the places from `first` on of the sequence of permutations; all of them belong to one."""
    turn = first // size
    return permute(np.arange(first - turn * size, end - turn * size), size, draw(seed, purpose, *ids, turn))


def _had_last(items: Int64[np.ndarray, "n"], had: Int64[np.ndarray, "h"], size: int) -> Int64[np.ndarray, "n"]:
    """Returns these of `size` items as they are, but those that were had behind the others."""
    known = np.zeros(size, bool)
    known[had] = True
    late = known[items]
    return np.concatenate([items[~late], items[late]])


def _mix(values: UInt64[np.ndarray, "n"], bits: int, keys: UInt64[np.ndarray, "r"]) -> UInt64[np.ndarray, "n"]:
    """Returns a permutation of all numbers of so many bits; each round changes one half by what the other is."""
    low = np.uint64(bits // 2)
    low_mask, high_mask = np.uint64(2 ** (bits // 2) - 1), np.uint64(2 ** (bits - bits // 2) - 1)
    left, right = values >> low, values & low_mask
    for number, key in enumerate(keys):
        if number % 2:
            right ^= _scrambled(left, key) & low_mask
        else:
            left ^= _scrambled(right, key) & high_mask
    return (left << low) | right


def _scrambled(half: UInt64[np.ndarray, "n"], key: np.uint64) -> UInt64[np.ndarray, "n"]:
    """Returns 64 bits of which each depends on all of `half` and `key`; multiplications wrap around."""
    mixed = half ^ key
    mixed *= _FIRST
    mixed ^= mixed >> np.uint64(32)
    mixed *= _SECOND
    mixed ^= mixed >> np.uint64(29)
    return mixed


@dataclass(frozen=True)
class Lazy(Sampler):
    """A permutation per epoch that takes no memory and no time before its first batch, however many items there are."""

    def order(self, items: Items, epoch: int, ledger: Ledger | None) -> Order:
        """Returns the permutation of `epoch`, which is worked out position by position."""
        return _Lazily(items.count, items.seed, epoch)


@dataclass(frozen=True)
class _Lazily:
    """The permutation of one epoch."""

    count: int
    seed: int
    epoch: int

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, positions: Int64[np.ndarray, "n"]) -> Int64[np.ndarray, "n"]:
        return permute(positions, self.count, draw(self.seed, "lazy", self.epoch))
