"""Every item once an epoch, in random order.

In: how many items, an epoch. Out: a permutation, held in memory.

Not here: permutations that are not held (`samplers.lazy`, `samplers.chunked`), cutting orders into batches (`samplers.split`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from gigamask.draws import draw
from gigamask.seams import Sampler

if TYPE_CHECKING:
    from jaxtyping import Int

    from gigamask.seams import Items, Ledger

LARGE = 2**21
"""From so many values on a shuffle spends its time waiting for memory, and dealing into buckets first is faster: 0.43 s rather than 0.68 at 11.2M."""
BUCKETS = 256
PIECE = 2**18
"""Values that are dealt together."""


@dataclass(frozen=True)
class Uniform(Sampler):
    """A permutation per epoch."""

    def order(self, items: Items, epoch: int, ledger: Ledger | None) -> Int[np.ndarray, "N"]:
        """Returns the permutation of `epoch`, in numbers of four bytes where they suffice."""
        numbers = np.arange(items.count, dtype=np.int32 if items.count < 2**31 else np.int64)
        return shuffled(numbers, draw(items.seed, "order", epoch))


def shuffled(values: Int[np.ndarray, "n"], generator: np.random.Generator) -> Int[np.ndarray, "n"]:
    """Returns the values in random order; few are shuffled where they are."""
    if len(values) >= LARGE:
        return dealt(values, generator)
    generator.shuffle(values)
    return values


def dealt(values: Int[np.ndarray, "n"], generator: np.random.Generator) -> Int[np.ndarray, "n"]:
    """Returns the values, at least one, in random order, all equally likely (Rao 1961, Sandelius 1962).

    Each falls into a random bucket, and each bucket, which the processor's cache holds, is shuffled.
    """
    buckets = generator.integers(BUCKETS, size=len(values), dtype=np.uint8)
    starts = range(0, len(values), PIECE)
    counts = np.array([np.bincount(buckets[start : start + PIECE], minlength=BUCKETS) for start in starts])
    # A bucket holds what fell into it from the first piece, the second...
    ends = np.cumsum(counts.T).reshape(BUCKETS, -1)
    found = np.empty_like(values)
    for start, held, places in zip(starts, counts, ends.T.tolist(), strict=True):
        there = values[start : start + PIECE][np.argsort(buckets[start : start + PIECE], kind="stable")]
        for part, end in zip(np.split(there, np.cumsum(held)[:-1]), places, strict=True):
            found[end - len(part) : end] = part
    for bucket in np.split(found, ends[:-1, -1]):
        generator.shuffle(bucket)
    return found
