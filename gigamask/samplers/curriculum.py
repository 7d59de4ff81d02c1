"""Curricula: training starts with the easiest items and adds harder ones over time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from gigamask.errors import check_counts
from gigamask.interfaces import Sampler
from gigamask.samplers.feistel import LazyOrder, cycle, group_by_label
from gigamask.samplers.validation import check, column

if TYPE_CHECKING:
    from jaxtyping import Float64, Int64, Shaped

    from gigamask.interfaces import LossSnapshot, Order, SampleTable
    from gigamask.samplers.feistel import Integers

BLOCK = 2**16
"""Number of items whose sort keys are computed together, in the CPU cache."""


@dataclass(frozen=True)
class Curriculum(Sampler):
    """The easiest share of the items, which grows with time until it includes all of them.

    An epoch has as many positions as there are items.
    """

    start: float = 0.3
    """share of the items, easiest first, that training starts with"""
    epochs: float = 5.0
    """epochs until all items are included; may be fractional"""
    stages: int = 10
    """number of times per epoch that the share grows"""

    def __post_init__(self) -> None:
        check(self, "start", 0 < self.start <= 1, "a share > 0 and <= 1")
        check(self, "epochs", 0 <= self.epochs < float("inf"), "finite and >= 0")
        check_counts(self, "stages")

    def share(self, epochs: float) -> float:
        """Return the share of the items that is included after this many epochs."""
        if epochs >= self.epochs:
            return 1.0
        return min(1.0, self.start + (1 - self.start) * epochs / self.epochs)

    def order(self, table: SampleTable, epoch: int, history: LossSnapshot | None) -> Order:
        """Return the order of `epoch`: in each stage, passes over the included items.

        Stages that include the same number of items are merged.

        Args:
            table: Items to sample.
            epoch: Number of the epoch.
            history: Losses so far; None unless the sampler learns from them.
        """
        reached = [
            _count_of(self.share(epoch + stage / self.stages), table.count)
            for stage in range(self.stages)
        ]
        passes = [
            _Passes(stage * table.count // self.stages, count, ("curriculum", epoch, stage))
            for stage, count in enumerate(reached)
            if stage == 0 or count != reached[stage - 1]
        ]
        by_difficulty = _by_difficulty(table, reached[0], self)
        return _order_of(table.count, table.seed, by_difficulty, passes)


@dataclass(frozen=True)
class AdaptiveCurriculum(Sampler):
    """The easiest share of the items, which grows when the loss of recent epochs is low enough."""

    start: float = 0.3
    """share of the items, easiest first, that training starts with"""
    growth: float = 0.05
    """how much the share grows each time"""
    threshold: float = 0.1
    """mean epoch loss below which the share grows; depends on the scale of the run's loss"""
    window: int = 3
    """number of epochs averaged; after each growth, this many new epochs must pass"""
    per_epoch: int | None = None
    """positions per epoch, after which the share can grow; None: as many as there are items"""

    def __post_init__(self) -> None:
        check(self, "start", 0 < self.start <= 1, "a share > 0 and <= 1")
        check(self, "growth", 0 < self.growth <= 1, "a share > 0 and <= 1")
        check(self, "threshold", self.threshold > 0, "> 0")
        check_counts(self, "window", "per_epoch")

    @property
    def decay(self) -> float:
        """Only epoch losses are used, so the losses of items are not averaged."""
        return 0.0

    def share(self, epoch_losses: Float64[np.ndarray, "epochs"]) -> float:
        """Return the share that is included after these epochs; NaN losses are skipped."""
        growths, recent = 0, []
        for loss in epoch_losses[~np.isnan(epoch_losses)].tolist():
            recent.append(loss)
            mean = sum(recent[-self.window :]) / self.window
            if len(recent) >= self.window and mean < self.threshold:
                growths, recent = growths + 1, []
        return min(1.0, self.start + growths * self.growth)

    def order(self, table: SampleTable, epoch: int, history: LossSnapshot | None) -> Order:
        """Return the order of `epoch`: passes over the included items.

        Epochs that include the same number of items continue the same passes.

        Args:
            table: Items to sample.
            epoch: Number of the epoch.
            history: Losses so far; None unless the sampler learns from them.
        """
        length = (self.per_epoch or table.count) if table.count else 0
        share = self.share(history.epoch_losses) if history else self.start
        reached = _count_of(share, table.count)
        passes = _Passes(-epoch * length, reached, ("adaptive curriculum", reached))
        by_difficulty = _by_difficulty(table, reached, self)
        return _order_of(length, table.seed, by_difficulty, [passes])


class _Passes(NamedTuple):
    """Endless passes over the `reached` easiest items, which start at position `start`.

    The start may lie before the epoch.
    """

    start: int
    reached: int
    stream: tuple[str, *tuple[int, ...]]


def _order_of(
    length: int, seed: int, by_difficulty: Int64[np.ndarray, "items"], passes: Sequence[_Passes]
) -> LazyOrder:
    """Return the order of one epoch: each position belongs to the passes that started last."""
    starts = [each.start for each in passes]

    def items_at(positions: Integers) -> Integers:
        numbers = np.searchsorted(starts, positions, side="right") - 1
        items = np.empty(len(positions), np.int64)
        for number, where in group_by_label(numbers):
            start, reached, stream = passes[number]
            ranks = cycle(positions[where] - start, reached, seed, *stream)
            items[where] = by_difficulty[ranks]
        return items

    return LazyOrder(length, items_at)


def argsort_stable(values: Shaped[np.ndarray, "count"]) -> Int64[np.ndarray, "count"]:
    """Return the indices that sort the values in single precision; ties by index, NaN last.

    Value and index are sorted as one integer: numpy's stable sort of floats takes five times
    as long.
    """
    keys = np.empty(len(values), np.int64)
    for start in range(0, len(values), BLOCK):
        # Adding 0 turns -0 into 0. Bits of positive floats ascend with them, bits of negative
        # floats descend, and NaN may have either sign.
        single = values[start : start + BLOCK].astype(np.float32) + np.float32(0)
        bits = single.view(np.int32).astype(np.int64)
        bits ^= (bits >> 63) & 0x7FFFFFFF
        bits[np.isnan(single)] = 0x7FFFFFFF
        keys[start : start + BLOCK] = bits << 32 | np.arange(start, start + len(bits))
    keys.sort()
    keys &= 0xFFFFFFFF
    return keys


def _count_of(share: float, count: int) -> int:
    """Return a share of the items as a number, rounded up; 0.1 * 3 counts as 0.3."""
    return max(ceil(round(share * count, 6)), 1)


def _by_difficulty(table: SampleTable, fewest: int, sampler: Sampler) -> Int64[np.ndarray, "count"]:
    """Return the items, easiest first; in any order if all of them are included."""
    difficulty = column(table, "difficulty", sampler)
    if fewest >= table.count:
        return np.arange(table.count)
    if ("by difficulty",) not in table.derived:
        table.derived["by difficulty",] = argsort_stable(difficulty)
    return table.derived["by difficulty",]
