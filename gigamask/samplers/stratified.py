"""Equal or fixed shares of the strata of the data: granularities or combinations of attributes.

Within a stratum, items occur equally often: over any number of epochs from the first on, their
counts differ by at most one. A stratum with fewer items than an epoch takes from it is repeated.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd
from typing import TYPE_CHECKING, Literal

import numpy as np

from gigamask.errors import GigamaskError
from gigamask.interfaces import GRANULARITIES, Sampler
from gigamask.rng import make_rng
from gigamask.samplers.feistel import balanced_subset
from gigamask.samplers.random import shuffled
from gigamask.samplers.validation import check, check_positive, column

if TYPE_CHECKING:
    from collections.abc import Sequence

    from jaxtyping import Int64, Integer, Shaped

    from gigamask.interfaces import LossSnapshot, SampleTable

RELEVANCE = ("granularity", "complexity", "domain")
"""Attributes of queries that relevance diversity balances ("Sampling for Relevance Diversity")."""
MAX_STRATA = 2**16
"""Each stratum costs about 50 us, and NumPy sorts two-byte stratum numbers by radix."""


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
        check_positive(self, "per_stratum")

    def strata(self, table: SampleTable) -> Integer[np.ndarray, "count"]:
        """Return the stratum of each item."""
        return _number_strata(table, self.attributes, self)[0]

    def order(
        self, table: SampleTable, epoch: int, history: LossSnapshot | None
    ) -> Int64[np.ndarray, "N"]:
        """Return the order of `epoch`: `per_stratum` items of each stratum.

        Args:
            table: Items to sample.
            epoch: Number of the epoch.
            history: Losses so far; None unless the sampler learns from them.
        """
        strata = _members(table, self.attributes, self)
        if self.epoch_length == "smallest":
            default, streams = min(map(len, strata), default=0), ("stratum", "stratified")
        else:
            mix = "relevance diversity" if self.attributes == RELEVANCE else "multi-attribute"
            default, streams = table.count // max(len(strata), 1), ("cell", mix)
        chosen = _choose(strata, self.per_stratum or default, epoch, table.seed, streams[0])
        return shuffled(chosen.ravel(), make_rng(table.seed, streams[1], epoch))


@dataclass(frozen=True)
class InterleavedStrata(Sampler):
    """Fine, medium and coarse items in a given ratio in every batch, on every rank.

    The strata take turns in a fixed pattern as long as the sum of the ratio. A batch that is a
    multiple of this length holds the ratio exactly. Any other batch holds each stratum within one
    of its share where all ratios are equal or only two are not 0, else within one and a half.

    Each of `ranks` ranks has its own copy of the pattern, and ranks start at different places in
    it. With fewer `ranks` than processes, the above holds only for the global batch: for 1:1:1 with
    `ranks` 1 on three processes, each process sees a single stratum.
    """

    ratio: tuple[int, int, int] | None = (1, 1, 1)
    """fine : medium : coarse; None: equal shares of the non-empty ones"""
    ranks: int = 1
    """ranks that each hold the ratio; must be a multiple of the number of processes"""
    per_epoch: int | None = None
    """positions per epoch, rounded up to whole patterns; None: until the first stratum runs out"""

    def __post_init__(self) -> None:
        valid = self.ratio is None or (
            len(self.ratio) == 3 and min(self.ratio) >= 0 and any(self.ratio)
        )
        check(self, "ratio", valid, "three numbers >= 0, fine medium coarse, not all 0, or None")
        check_positive(self, "ranks", "per_epoch")

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
        """Return the granularity of each item."""
        return column(table, "granularity", self)

    def order(
        self, table: SampleTable, epoch: int, history: LossSnapshot | None
    ) -> Int64[np.ndarray, "N"]:
        """Return the order of `epoch`: whole patterns, which the next epoch continues.

        Args:
            table: Items to sample.
            epoch: Number of the epoch.
            history: Losses so far; None unless the sampler learns from them.
        """
        if not table.count:
            return np.empty(0, np.int64)
        strata, ratio = self._strata(table)
        period = sum(ratio)
        fewest = min(len(strata[i]) // (part * self.ranks) for i, part in enumerate(ratio) if part)
        turns = max(fewest, 1)
        if self.per_epoch is not None:
            turns = -(-self.per_epoch // (period * self.ranks))
        # Rank r is r places further in the pattern than rank 0.
        places = (np.arange(self.ranks)[:, None] + np.arange(period)) % period
        pattern = _pattern(ratio)[places]
        order = np.empty((turns, self.ranks, period), np.int64)
        purpose = "balanced" if self.ratio is None else "multi-level"
        shared = make_rng(table.seed, "distributed balanced", epoch)
        for number, part in enumerate(ratio):
            if not part:
                continue
            members, length = strata[number], turns * part * self.ranks
            subset = balanced_subset(epoch, length, len(members), table.seed, purpose, number)
            chosen = members[subset]
            if self.ratio is None:
                shared.shuffle(chosen)
            else:
                chosen = shuffled(chosen, make_rng(table.seed, "multi-level order", epoch, number))
            order[:, pattern == number] = chosen.reshape(turns, -1)
        return order.transpose(0, 2, 1).ravel()

    def _strata(self, table: SampleTable) -> tuple[list[Int64[np.ndarray, "_"]], list[int]]:
        """Return the items of each stratum, and its part of the ratio."""
        if self.ratio is None:
            strata = _members(table, ("granularity",), self)
            return strata, [1] * len(strata)
        granularity = column(table, "granularity", self)
        strata = [np.flatnonzero(granularity == level) for level in range(3)]
        for level, part in enumerate(self.ratio):
            if part and not len(strata[level]):
                kind = GRANULARITIES[level]
                raise GigamaskError(
                    f"no item is {kind}: its ratio must be 0 (got {self.ratio}), or loosen filters"
                )
        return strata, [part // gcd(*self.ratio) for part in self.ratio]


def _members(
    table: SampleTable, attributes: Sequence[str], sampler: Sampler
) -> list[Int64[np.ndarray, "_"]]:
    """Return the items of each non-empty stratum, in ascending order."""
    labels, count = _number_strata(table, attributes, sampler)
    if not count:
        return []
    sizes = np.bincount(labels, minlength=count)
    return np.split(np.argsort(labels, kind="stable"), np.cumsum(sizes)[:-1])


def _number_strata(
    table: SampleTable, attributes: Sequence[str], sampler: Sampler
) -> tuple[Integer[np.ndarray, "count"], int]:
    """Return the stratum of each item, numbered without gaps, and the number of strata."""
    labels, count = np.zeros(table.count, np.uint8), min(table.count, 1)
    for name in attributes:
        values = column(table, name, sampler)
        if values.dtype.kind not in "iub":
            raise GigamaskError(
                f"attribute '{name}' must hold integers (got {values.dtype}); bin it"
            )
        ranks, distinct = _dense_ranks(values)
        if count > 1 and distinct <= MAX_STRATA:
            labels, count = _dense_ranks(labels.astype(np.int64) * distinct + ranks)
        elif count == 1:
            labels, count = ranks, distinct
        if max(distinct, count) > MAX_STRATA:
            raise GigamaskError(
                f"attributes {', '.join(attributes)} of {type(sampler).__name__} must make at most "
                f"{MAX_STRATA} strata (got {max(distinct, count)} or more of {table.count} items); "
                f"leave out '{name}' or make its values coarser"
            )
    return labels, count


def _choose(
    strata: list[Int64[np.ndarray, "_"]], length: int, epoch: int, seed: int, purpose: str
) -> Int64[np.ndarray, "strata length"]:
    """Return the `length` items of each stratum that are visited in `epoch`."""
    chosen = np.empty((len(strata), length), np.int64)
    for number, (row, members) in enumerate(zip(chosen, strata, strict=True)):
        subset = balanced_subset(epoch, length, len(members), seed, purpose, number)
        np.take(members, subset, out=row)
    return chosen


def _dense_ranks(values: Shaped[np.ndarray, "n"]) -> tuple[Integer[np.ndarray, "n"], int]:
    """Return each value's rank among the distinct values, and how many are distinct."""
    if not len(values):
        return np.zeros(0, np.uint8), 0
    low = values.min()
    span = int(values.max()) - int(low) + 1
    if span > max(2 * len(values), MAX_STRATA):
        distinct, ranks = np.unique(values, return_inverse=True)
        return ranks.astype(np.min_scalar_type(len(distinct) - 1)), len(distinct)
    # Small signed integers could not hold their own differences.
    offsets = values - low if values.dtype.kind == "u" else values.astype(np.int64) - int(low)
    present = np.zeros(span, bool)
    present[offsets] = True
    count = int(present.sum())
    return (np.cumsum(present) - 1).astype(np.min_scalar_type(count - 1))[offsets], count


def _pattern(ratio: Sequence[int]) -> Int64[np.ndarray, "period"]:
    """Return the stratum at each place: the one furthest below its share, the first in a tie."""
    period, taken = sum(ratio), np.zeros(len(ratio), np.int64)
    pattern = np.empty(period, np.int64)
    for place in range(period):
        pattern[place] = np.argmax((place + 1) * np.array(ratio) - period * taken)
        taken[pattern[place]] += 1
    return pattern
