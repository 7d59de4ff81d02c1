"""Permutations that are worked out where they are looked at: no memory, any position at once.

In: positions, a size, the chance that names the permutation. Out: the items at these positions.
A Feistel network permutes the smallest power of two that holds the size; what falls outside is sent through again until it falls inside
("cycle walking", Black and Rogaway 2002), which keeps it a permutation.

Not here: permutations held in memory (`samplers.uniform`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from gigamask.draws import draw
from gigamask.seams import Sampler

if TYPE_CHECKING:
    from jaxtyping import Int64, UInt64

    from gigamask.seams import Items, Ledger, Order

ROUNDS = 6
SMALL = 2**12
"""Sizes up to this are shuffled: halves of a few bits would make few of the many permutations."""
_FIRST, _SECOND = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xD6E8FEB86659FD93)


def permute(positions: Int64[np.ndarray, "n"], size: int, generator: np.random.Generator) -> Int64[np.ndarray, "n"]:
    """Returns where a random permutation of `size` items, named by the generator, puts these positions."""
    if size <= SMALL:
        return generator.permutation(size)[positions]
    keys = generator.integers(2**63, size=ROUNDS, dtype=np.uint64)
    bits = (size - 1).bit_length()
    values = _mix(positions.astype(np.uint64), bits, keys)
    outside = np.flatnonzero(values >= size)
    while len(outside):
        values[outside] = _mix(values[outside], bits, keys)
        outside = outside[values[outside] >= size]
    return values.astype(np.int64)


def cycle(numbers: Int64[np.ndarray, "n"], size: int, seed: int, purpose: str, *ids: int) -> Int64[np.ndarray, "n"]:
    """Returns the items at these places of an endless sequence of permutations, one after the other: all are visited equally often."""
    turns, positions = np.divmod(numbers, size)
    found = np.empty_like(positions)
    for turn in np.unique(turns):
        there = turns == turn
        found[there] = permute(positions[there], size, draw(seed, purpose, *ids, int(turn)))
    return found


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
    mixed = (half ^ key) * _FIRST
    mixed ^= mixed >> np.uint64(32)
    mixed *= _SECOND
    mixed ^= mixed >> np.uint64(29)
    return mixed


@dataclass(frozen=True)
class Lazy(Sampler):
    """A permutation per epoch that takes no memory and no time before its first batch, however many items there are."""

    seed: int = 0
    """names the orders"""

    def order(self, items: Items, epoch: int, ledger: Ledger | None) -> Order:
        """Returns the permutation of `epoch`, which is worked out position by position."""
        return _Lazily(items.count, self.seed, epoch)


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
