"""Equal or fixed shares of the strata of the data: granularities or combinations of attributes.

Within a stratum, items occur equally often: over any number of epochs from the first on, their
counts differ by at most one. A stratum with fewer items than an epoch takes from it is repeated.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd
from typing import TYPE_CHECKING, Literal

import numpy as np

from gigamask.errors import GigamaskError, check_counts
from gigamask.interfaces import GRANULARITIES, Sampler
from gigamask.rng import make_rng
from gigamask.samplers.feistel import LazyOrder, balanced_items, permute, permute_each
from gigamask.samplers.strata import Strata, stratum_numbers
from gigamask.samplers.validation import check, column

if TYPE_CHECKING:
    from jaxtyping import Int64, Integer

    from gigamask.interfaces import LossSnapshot, Order, SampleTable
    from gigamask.samplers.feistel import Integers

RELEVANCE = ("granularity", "complexity", "domain")
"""Attributes of queries that relevance diversity balances ("Sampling for Relevance Diversity")."""


@dataclass(frozen=True)
class Stratified(Sampler):
    """The same number of items per epoch from every non-empty stratum, shuffled together.

    A stratum is a combination of values of the attributes.
    """

    attributes: tuple[str, ...] = ("granularity",)
    """columns of integers whose combinations are the strata"""
    per_stratum: int | None = None
    """items of each stratum per epoch; None: set by epoch-length"""
    epoch_length: Literal["smallest", "data"] = "smallest"
    """without per-stratum: until the smallest stratum is used up, or about as long as the data"""

    def __post_init__(self) -> None:
        names = "at least one column of integers, such as granularity"
        check(self, "attributes", len(self.attributes) > 0, names)
        check_counts(self, "per_stratum")

    def strata(self, table: SampleTable) -> Integer[np.ndarray, "count"]:
        """Return the stratum of each item."""
        return stratum_numbers(table, self.attributes, self)[0]

    def order(self, table: SampleTable, epoch: int, history: LossSnapshot | None) -> Order:
        """Return the order of `epoch`: `per_stratum` items of each stratum.

        Args:
            table: Items to sample.
            epoch: Number of the epoch.
            history: Losses so far; None unless the sampler learns from them.
        """
        strata = Strata.of(table, self.attributes, self)
        if self.epoch_length == "smallest":
            default, stream = strata.sizes.min(initial=table.count), "stratified"
        else:
            default = table.count // max(len(strata), 1)
            is_relevance = self.attributes == RELEVANCE
            stream = "relevance diversity" if is_relevance else "multi-attribute"
        length = int(self.per_stratum or default)
        total, key = length * len(strata), (table.seed, stream, epoch)

        def items_at(positions: Integers) -> Integers:
            mixed = permute(positions, total, make_rng(*key))
            numbers, places = np.divmod(mixed, length)
            lengths, sizes = np.full_like(places, length), strata.sizes[numbers]
            chosen = balanced_items(places, epoch, lengths, sizes, numbers, table.seed, stream)
            return strata.items(numbers, chosen)

        return LazyOrder(total, items_at)


@dataclass(frozen=True)
class InterleavedStrata(Sampler):
    """Items of each stratum in a given ratio in every batch, on every rank.

    The strata are fine, medium and coarse items, or the values of another attribute.

    The strata take turns in a fixed pattern as long as the sum of the ratio. A batch that is a
    multiple of this length holds the ratio exactly. Any other batch holds each stratum within one
    of its share where all ratios are equal or only two are not 0, else within one and a half.

    Each of `ranks` ranks has its own copy of the pattern, and ranks start at different places in
    it. With fewer `ranks` than processes, the above holds only for the global batch: for 1:1:1 with
    `ranks` 1 on three processes, each process sees a single stratum.
    """

    ratio: tuple[int, ...] | None = (1, 1, 1)
    """fine : medium : coarse, or the shares of the values 0, 1, ... of another attribute; None:
    equal shares of the non-empty ones"""
    ranks: int = 1
    """ranks that each hold the ratio; must be a multiple of the number of processes"""
    per_epoch: int | None = None
    """positions per epoch, rounded up to whole patterns; None: until the first stratum runs out"""
    attribute: str = "granularity"
    """column of integers whose values are the strata"""

    def __post_init__(self) -> None:
        count, words = len(self.ratio or ()), "numbers >= 0, not all 0, or None"
        if self.attribute == "granularity":
            count, words = 3, "three numbers >= 0, fine medium coarse, not all 0, or None"
        valid = self.ratio is None or (
            len(self.ratio) == count and min(self.ratio, default=-1) >= 0 and any(self.ratio)
        )
        check(self, "ratio", valid, words)
        check_counts(self, "ranks", "per_epoch")

    def check(self, batch_size: int, world_size: int, nodes: int) -> None:
        """Check that every process holds the ratio.

        Args:
            batch_size: Global batch size.
            world_size: Number of processes of the training.
            nodes: Number of nodes of the training.

        Raises:
            GigamaskError: `batch_size` is not a multiple of `ranks`, or `ranks` not one of
                `world_size`.
        """
        if self.ranks == 1 and self.ratio is not None:
            return
        if batch_size % self.ranks:
            raise GigamaskError(
                f"--batch-size must be a multiple of --sampler.ranks {self.ranks} "
                f"(got {batch_size})"
            )
        if self.ranks % world_size:
            raise GigamaskError(
                f"--sampler.ranks must be a multiple of {world_size} processes (got {self.ranks})"
            )

    def strata(self, table: SampleTable) -> Integer[np.ndarray, "count"]:
        """Return the value of the attribute of each item."""
        return column(table, self.attribute, self)

    def order(self, table: SampleTable, epoch: int, history: LossSnapshot | None) -> Order:
        """Return the order of `epoch`: whole patterns, which the next epoch continues.

        Args:
            table: Items to sample.
            epoch: Number of the epoch.
            history: Losses so far; None unless the sampler learns from them.
        """
        strata, numbers, ratio = self._strata(table)
        if not len(strata):
            return LazyOrder(0, lambda positions: positions)
        # For each stratum of the ratio: its size, and how many positions a turn of all ranks has.
        sizes, parts = strata.sizes[numbers], ratio * self.ranks
        period = int(ratio.sum())
        turns = max(int((sizes // parts).min()), 1)
        if self.per_epoch is not None:
            turns = -(-self.per_epoch // (period * self.ranks))
        # Rank r is r places further in the pattern than rank 0.
        places = (np.arange(self.ranks)[:, None] + np.arange(period)) % period
        pattern = _pattern(ratio)[places]
        counts = np.empty_like(pattern)
        for number, part in enumerate(parts.tolist()):
            counts[pattern == number] = np.arange(part)
        # In a turn, each place of the pattern is that of all ranks, then comes the next.
        pattern, counts = pattern.T.ravel(), counts.T.ravel()
        key = (table.seed, "multi-level order", epoch)

        def items_at(positions: Integers) -> Integers:
            turn, place = np.divmod(positions, len(pattern))
            number = pattern[place]
            lengths = turns * parts[number]
            chosen = turn * parts[number] + counts[place]
            chosen = permute_each(chosen, lengths, make_rng(*key), number)
            chosen = balanced_items(
                chosen, epoch, lengths, sizes[number], number, table.seed, "multi-level"
            )
            return strata.items(numbers[number], chosen)

        return LazyOrder(turns * len(pattern), items_at)

    def _strata(
        self, table: SampleTable
    ) -> tuple[Strata, Int64[np.ndarray, "parts"], Int64[np.ndarray, "parts"]]:
        """Return the strata, and the numbers and parts of those that the ratio includes."""
        strata = Strata.of(table, (self.attribute,), self)
        if self.ratio is None or not len(strata):
            return strata, np.arange(len(strata)), np.ones(len(strata), np.int64)
        levels = strata.values(column(table, self.attribute, self))
        included = [level for level, part in enumerate(self.ratio) if part]
        for level in included:
            if level not in levels:
                is_usual = self.attribute == "granularity"
                kind = GRANULARITIES[level] if is_usual else f"of {self.attribute} {level}"
                raise GigamaskError(
                    f"no item is {kind}: its ratio must be 0 (got {self.ratio}), or loosen filters"
                )
        numbers = np.array([levels.index(level) for level in included])
        return strata, numbers, np.array(self.ratio)[included] // gcd(*self.ratio)


def _pattern(ratio: Int64[np.ndarray, "parts"]) -> Int64[np.ndarray, "period"]:
    """Return the part at each place: the one furthest below its share, the first in a tie."""
    period, taken = int(ratio.sum()), np.zeros(len(ratio), np.int64)
    pattern = np.empty(period, np.int64)
    for place in range(period):
        pattern[place] = np.argmax((place + 1) * ratio - period * taken)
        taken[pattern[place]] += 1
    return pattern
