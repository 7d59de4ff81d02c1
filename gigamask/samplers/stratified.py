"""Equal shares for unequal kinds: so many items from each stratum, or from each cell of several attributes.

In: columns of whole numbers (`granularity`, `tar`, or the user's own), an epoch. Out: an order.
Within a cell, items come up equally often: over any number of epochs from the first on, and within one, their counts differ by at most one. A cell
that has fewer items than its share of an epoch is gone through again.

Not here: cells of queries (`samplers.relevance`), so many items of every tar (`samplers.tars`), weights by loss (`samplers.loss_weighted`).
"""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd
from typing import TYPE_CHECKING

import numpy as np

from gigamask.draws import draw
from gigamask.faults import Fault
from gigamask.samplers.given import at_least_one, column
from gigamask.samplers.lazy import share
from gigamask.samplers.uniform import shuffled
from gigamask.seams import GRANULARITIES, Sampler

if TYPE_CHECKING:
    from collections.abc import Sequence

    from jaxtyping import Int64, Integer, Shaped

    from gigamask.seams import Items, Ledger

CELLS = 2**16
"""Cells are gone through one by one, some 50 us each, and up to this many have numbers of two bytes, which numpy sorts by radix."""


@dataclass(frozen=True)
class Stratified(Sampler):
    """Equally many fine, medium and coarse items an epoch, shuffled together; strata without items are left out."""

    per_stratum: int | None = None
    """items of each stratum in an epoch; None: as many as the smallest stratum has"""

    def __post_init__(self) -> None:
        at_least_one("stratified", per_stratum=self.per_stratum)

    def strata(self, items: Items) -> Integer[np.ndarray, "count"]:
        """Returns each item's granularity."""
        return column(items, "granularity", "stratified")

    def order(self, items: Items, epoch: int, ledger: Ledger | None) -> Int64[np.ndarray, "N"]:
        """Returns the order of `epoch`: as many positions as there are strata, times `per_stratum`."""
        strata = cells(items, ("granularity",), "stratified")
        number = self.per_stratum or min(map(len, strata), default=0)
        return shuffled(_picked(strata, number, epoch, items.seed, "stratum").ravel(), draw(items.seed, "stratified", epoch))


@dataclass(frozen=True)
class MultiLevel(Sampler):
    """Fine, medium and coarse items in a given ratio in every batch.

    The strata take turns in a fixed pattern as long as the ratio's sum: a batch of a multiple of it holds the ratio exactly, any other holds each
    stratum within one of its share where ratios are equal or only two are not 0, and within one and a half else.
    This is said of whole batches. Where the number of processes has a factor in common with the pattern's length, each process meets a part of the
    pattern only: of 1:1:1 on three processes, one stratum each. `DistributedBalanced` balances processes, too.
    """

    ratio: tuple[int, int, int] = (1, 1, 1)
    """fine : medium : coarse"""
    per_epoch: int | None = None
    """positions of an epoch, rounded up to whole patterns; None: until the first stratum runs out"""

    def __post_init__(self) -> None:
        if len(self.ratio) != 3 or min(self.ratio) < 0 or not any(self.ratio):
            raise Fault(
                f"the multi-level order's ratio is {':'.join(map(str, self.ratio))}, it must be three numbers from 0 up that are not all 0, "
                "fine:medium:coarse; give such, 1 1 1 for equal shares"
            )
        at_least_one("multi-level", per_epoch=self.per_epoch)

    def strata(self, items: Items) -> Integer[np.ndarray, "count"]:
        """Returns each item's granularity."""
        return column(items, "granularity", "multi-level")

    def order(self, items: Items, epoch: int, ledger: Ledger | None) -> Int64[np.ndarray, "N"]:
        """Returns the order of `epoch`: a whole number of patterns, so that the next epoch goes on where this one ends."""
        granularity = column(items, "granularity", "multi-level")
        ratio = [each // gcd(*self.ratio) for each in self.ratio]
        strata = {level: np.flatnonzero(granularity == level) for level in range(3) if ratio[level]}
        for level, members in strata.items():
            if items.count and not len(members):
                kind = GRANULARITIES[level]
                raise Fault(
                    f"the multi-level order's ratio is {':'.join(map(str, self.ratio))}, but no item is {kind}, at least one must be; "
                    f"give 0 for {kind}, or loosen the filters"
                )
        whole = min(len(members) // ratio[level] for level, members in strata.items())
        turns = max(whole, 1) if self.per_epoch is None else -(-self.per_epoch // sum(ratio))
        order = np.empty((turns if items.count else 0, sum(ratio)), np.int64)
        pattern = _pattern(ratio)
        for level, members in strata.items():
            number = len(order) * ratio[level]
            if number:
                taken = members[share(epoch, number, len(members), items.seed, "multi-level", level)]
                taken = shuffled(taken, draw(items.seed, "multi-level order", epoch, level))
                order[:, pattern == level] = taken.reshape(len(order), ratio[level])
        return order.ravel()


@dataclass(frozen=True)
class DistributedBalanced(Sampler):
    """Equally many fine, medium and coarse items on every rank, step by step; strata without items are left out.

    The strata take turns on each rank, and the ranks begin with different ones: with a global batch that is a multiple of `ranks`, any three items
    that follow each other on a rank are of the three strata.
    """

    ranks: int = 1
    """processes that are balanced each for itself; training may have any number of processes that divides it"""
    per_stratum: int | None = None
    """items of each stratum in an epoch, rounded up to a multiple of `ranks`; None: as many such as the smallest stratum has"""

    def __post_init__(self) -> None:
        at_least_one("distributed balanced", ranks=self.ranks, per_stratum=self.per_stratum)

    def check(self, batch: int, processes: int, nodes: int) -> None:
        """Raises `Fault` where a process would not be balanced for itself."""
        if batch % self.ranks:
            raise Fault(f"--batch is {batch}, an order balanced on {self.ranks} ranks needs a multiple of that; change --batch, or --sampler.ranks")
        if self.ranks % processes:
            raise Fault(f"--sampler.ranks is {self.ranks}, training has {processes} processes; give a multiple of that")

    def strata(self, items: Items) -> Integer[np.ndarray, "count"]:
        """Returns each item's granularity."""
        return column(items, "granularity", "distributed balanced")

    def order(self, items: Items, epoch: int, ledger: Ledger | None) -> Int64[np.ndarray, "N"]:
        """Returns the order of `epoch`: a multiple of ranks times strata, so that the next epoch goes on where this one ends."""
        strata = cells(items, ("granularity",), "distributed balanced")
        if not strata:
            return np.empty(0, np.int64)
        rounds = max(min(map(len, strata)) // self.ranks, 1) if self.per_stratum is None else -(-self.per_stratum // self.ranks)
        picked = _picked(strata, rounds * self.ranks, epoch, items.seed, "balanced")
        draw(items.seed, "distributed balanced", epoch).permuted(picked, axis=1, out=picked)
        order, ranks = np.empty((rounds, len(strata), self.ranks), np.int64), np.arange(self.ranks)
        for stratum, members in enumerate(picked):
            order[:, (stratum - ranks) % len(strata), ranks] = members.reshape(rounds, self.ranks)
        return order.ravel()


@dataclass(frozen=True)
class MultiAttribute(Sampler):
    """Equally many items an epoch from every joint cell of several attributes that has any, shuffled together."""

    attributes: tuple[str, ...] = ("granularity", "tar")
    """columns of whole numbers whose combinations are the cells"""
    per_cell: int | None = None
    """items of each cell in an epoch; None: so many that an epoch is about as long as the data"""

    def __post_init__(self) -> None:
        if not self.attributes:
            raise Fault("the multi-attribute order's attributes are none, it needs at least one; name columns of whole numbers, such as granularity")
        at_least_one("multi-attribute", per_cell=self.per_cell)

    def strata(self, items: Items) -> Integer[np.ndarray, "count"]:
        """Returns each item's cell."""
        return joint(items, self.attributes, "multi-attribute")[0]

    def order(self, items: Items, epoch: int, ledger: Ledger | None) -> Int64[np.ndarray, "N"]:
        """Returns the order of `epoch`: as many positions as there are cells, times `per_cell`."""
        return balanced(items, self.attributes, self.per_cell, epoch, "multi-attribute")


def balanced(items: Items, attributes: Sequence[str], per_cell: int | None, epoch: int, sampler: str) -> Int64[np.ndarray, "N"]:
    """Returns the order of `epoch`: as many positions as there are joint cells of these attributes, times `per_cell`, all shuffled together."""
    members = cells(items, attributes, sampler)
    number = per_cell or items.count // max(len(members), 1)
    return shuffled(_picked(members, number, epoch, items.seed, "cell").ravel(), draw(items.seed, sampler, epoch))


def cells(items: Items, attributes: Sequence[str], sampler: str) -> list[Int64[np.ndarray, "_"]]:
    """Returns the items of each joint cell of these attributes that has any, in ascending order."""
    owner, number = joint(items, attributes, sampler)
    if not number:
        return []
    return np.split(np.argsort(owner, kind="stable"), np.cumsum(np.bincount(owner, minlength=number))[:-1])


def joint(items: Items, attributes: Sequence[str], sampler: str) -> tuple[Integer[np.ndarray, "count"], int]:
    """Returns the number of each item's joint cell, counted among those that have any, and how many these are."""
    owner, number = np.zeros(items.count, np.uint8), min(items.count, 1)
    for name in attributes:
        values = column(items, name, sampler)
        if values.dtype.kind not in "iub":
            raise Fault(
                f"the {sampler} order's attribute '{name}' holds {values.dtype} numbers, cells need whole ones; name columns of kinds, or bin it"
            )
        kinds, several = _numbered(values)
        if number > 1 and several <= CELLS:
            owner, number = _numbered(owner.astype(np.int64) * several + kinds)
        elif number == 1:
            owner, number = kinds, several
        if max(several, number) > CELLS:
            raise Fault(
                f"the {sampler} order's attributes {', '.join(attributes)} make {max(several, number)} cells or more of {items.count} items, "
                f"at most {CELLS} can be balanced; leave out '{name}' or make its values coarser"
            )
    return owner, number


def _picked(members: list[Int64[np.ndarray, "_"]], number: int, epoch: int, seed: int, purpose: str) -> Int64[np.ndarray, "cells n"]:
    """Returns the `number` items of each cell whose turn it is in `epoch`."""
    picked = np.empty((len(members), number), np.int64)
    for cell, (row, these) in enumerate(zip(picked, members, strict=True)):
        np.take(these, share(epoch, number, len(these), seed, purpose, cell), out=row)
    return picked


def _numbered(values: Shaped[np.ndarray, "n"]) -> tuple[Integer[np.ndarray, "n"], int]:
    """Returns the values' ranks among the different ones, and how many these are."""
    if not len(values):
        return np.zeros(0, np.uint8), 0
    low = values.min()
    span = int(values.max()) - int(low) + 1
    if span > max(2 * len(values), CELLS):
        kinds, ranks = np.unique(values, return_inverse=True)
        return ranks.astype(np.min_scalar_type(len(kinds) - 1)), len(kinds)
    # Small signed numbers could not hold their own differences.
    places = values - low if values.dtype.kind == "u" else values.astype(np.int64) - int(low)
    there = np.zeros(span, bool)
    there[places] = True
    number = int(there.sum())
    return (np.cumsum(there) - 1).astype(np.min_scalar_type(number - 1))[places], number


def _pattern(ratio: Sequence[int]) -> Int64[np.ndarray, "period"]:
    """Returns the turns of strata, each always the one that lags most behind its share; the first of several."""
    period, taken = sum(ratio), np.zeros(len(ratio), np.int64)
    pattern = np.empty(period, np.int64)
    for place in range(period):
        pattern[place] = np.argmax((place + 1) * np.array(ratio) - period * taken)
        taken[pattern[place]] += 1
    return pattern
