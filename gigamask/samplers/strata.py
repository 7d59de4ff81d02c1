"""The items of a table by stratum, found in blocks that fit the CPU cache.

A stratum is a combination of values of some columns of integers. Items are neither listed nor
sorted as a whole: each block of items is sorted by stratum, two bytes per item, and the numbers of
each stratum's items in the blocks tell where its n-th item is.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from gigamask.errors import GigamaskError
from gigamask.samplers.validation import column

if TYPE_CHECKING:
    from jaxtyping import Int, Int64, Integer, Shaped, UInt16

    from gigamask.interfaces import Sampler, SampleTable
    from gigamask.samplers.feistel import Integers

MAX_STRATA = 2**16
"""Numbers of strata have two bytes: NumPy sorts those by radix."""
BLOCK = 2**16
"""Items sorted together; their places in the block have two bytes."""


@dataclass(frozen=True, eq=False)
class Strata:
    """The items of each non-empty stratum.

    Attributes:
        sizes: Number of items of each stratum.
        places: Places of the items in their block, sorted by stratum, block after block.
        ends: For each stratum and block, number of items up to its end, counted stratum by stratum.
        starts: For each stratum and block, where in `places` its items start.
    """

    sizes: Int64[np.ndarray, "strata"]
    places: UInt16[np.ndarray, "count"]
    ends: Int64[np.ndarray, "cells"]
    starts: Int64[np.ndarray, "cells"]

    def __len__(self) -> int:
        return len(self.sizes)

    @classmethod
    def of(cls, table: SampleTable, attributes: Sequence[str], sampler: Sampler) -> Strata:
        """Return the strata of a table, computed once for all epochs.

        Args:
            table: Items to sample.
            attributes: Columns whose combinations of values are the strata.
            sampler: Sampler that needs them, for error messages.
        """
        key = ("strata", *attributes)
        if key not in table.derived:
            table.derived[key] = cls._build(*stratum_numbers(table, attributes, sampler))
        return table.derived[key]

    @classmethod
    def _build(cls, strata: Integer[np.ndarray, "count"], count: int) -> Strata:
        places = np.empty(len(strata), np.uint16)
        counts = [np.zeros((0, count), np.int64)]
        for block in _blocks(len(strata)):
            places[block] = np.argsort(strata[block], kind="stable")
            counts.append(np.bincount(strata[block], minlength=count)[None])
        sizes = np.concatenate(counts)
        ends = np.cumsum(sizes.T.ravel())
        starts = (np.cumsum(sizes.ravel()) - sizes.ravel()).reshape(sizes.shape)
        return cls(sizes.sum(0), places, ends, starts.T.ravel())

    def values(self, values: Shaped[np.ndarray, "count"]) -> list[int]:
        """Return the value of each stratum, for strata of a single column."""
        numbers = np.arange(len(self.sizes))
        return values[self.items(numbers, np.zeros_like(numbers))].tolist()

    def items(self, strata: Integers, numbers: Integers) -> Integers:
        """Return items by stratum and number within it; items of a stratum ascend.

        Args:
            strata: Stratum of each item.
            numbers: Number of each item within its stratum.
        """
        firsts = np.cumsum(self.sizes) - self.sizes
        positions = firsts[strata] + numbers
        cells = np.searchsorted(self.ends, positions, side="right")
        before = np.where(cells > 0, self.ends[cells - 1], 0)
        blocks = cells % max(len(self.ends) // max(len(self.sizes), 1), 1)
        return blocks * BLOCK + self.places[self.starts[cells] + positions - before]


def stratum_numbers(
    table: SampleTable, attributes: Sequence[str], sampler: Sampler
) -> tuple[Integer[np.ndarray, "count"], int]:
    """Return the stratum of each item, numbered without gaps, and the number of strata.

    Args:
        table: Items to sample.
        attributes: Columns whose combinations of values are the strata.
        sampler: Sampler that needs them, for error messages.

    Raises:
        GigamaskError: A column is missing or does not hold integers, or there are too many strata.
    """
    strata, count = np.zeros(table.count, np.uint16), min(table.count, 1)
    for name in attributes:
        values = column(table, name, sampler)
        if values.dtype.kind not in "iub":
            raise GigamaskError(
                f"attribute '{name}' must hold integers (got {values.dtype}); bin it"
            )
        strata, count = _refine(strata, count, values)
        if count > MAX_STRATA:
            raise GigamaskError(
                f"attributes {', '.join(attributes)} of {type(sampler).__name__} must make at most "
                f"{MAX_STRATA} strata (got {count} or more of {table.count} items); "
                f"leave out '{name}' or make its values coarser"
            )
    return strata, count


def _refine(
    strata: Integer[np.ndarray, "n"], count: int, values: Shaped[np.ndarray, "n"]
) -> tuple[Integer[np.ndarray, "n"], int]:
    """Divide strata by further values; return new numbers, and how many there are.

    The new numbers are not valid if there are more than `MAX_STRATA`.
    """
    if not len(values):
        return strata, 0
    limit, low = max(2 * len(values), MAX_STRATA), int(values.min())
    span = int(values.max()) - low + 1
    if span * count > limit:
        distinct, values = np.unique(values, return_inverse=True)
        low, span = 0, len(distinct)
        if span > MAX_STRATA:
            return strata, span
    if span * count > limit:
        cells, numbers = np.unique(_cells(strata, values, low, span), return_inverse=True)
        return numbers.astype(np.uint16), len(cells)
    present, numbers = np.zeros(count * span, bool), np.empty(len(values), np.uint16)
    for block in _blocks(len(values)):
        present[_cells(strata[block], values[block], low, span)] = True
    ranks = (np.cumsum(present) - 1).astype(np.uint16)
    for block in _blocks(len(values)):
        numbers[block] = ranks[_cells(strata[block], values[block], low, span)]
    return numbers, int(np.count_nonzero(present))


def _cells(
    strata: Integer[np.ndarray, "n"], values: Shaped[np.ndarray, "n"], low: int, span: int
) -> Int[np.ndarray, "n"]:
    """Return the number of each pair of stratum and value."""
    # Unsigned values may not fit a signed integer, but their differences from the lowest do.
    signed = values.dtype.kind != "u"
    offsets = values.astype(np.int64) - low if signed else values - values.dtype.type(low)
    return strata.astype(np.int64) * span + offsets.astype(np.int64)


def _blocks(count: int) -> Iterator[slice]:
    return (slice(start, start + BLOCK) for start in range(0, count, BLOCK))
