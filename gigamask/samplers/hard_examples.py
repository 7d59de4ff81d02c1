"""Orders that prefer items with a high loss: drawn by loss, or replayed from a buffer."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from math import ceil
from typing import TYPE_CHECKING

import numpy as np

from gigamask.errors import check_counts
from gigamask.interfaces import Sampler, WeightedOrder
from gigamask.rng import make_rng
from gigamask.samplers.feistel import cycle
from gigamask.samplers.validation import check

if TYPE_CHECKING:
    from jaxtyping import Float32, Float64, Int64

    from gigamask.interfaces import LossSnapshot, Order, SampleTable

BLOCK = 2**15
"""Number of items whose weights are summed together."""


@dataclass(frozen=True)
class LossWeighted(Sampler):
    """Items drawn with replacement, with a probability proportional to `loss ** (1 / temperature)`.

    No probability is less than `floor / items`. Importance sampling as in Katharopoulos and Fleuret
    2018, with each item's loss from the last time it was visited.
    """

    temperature: float = 1.0
    """above 1 flattens the distribution, below 1 sharpens it"""
    floor: float = 0.1
    """share of the positions drawn uniformly from all items"""
    ema: float = 0.99
    """decay of the moving average of an item's losses"""
    importance: bool = False
    """weight losses by 1 / (items x probability), so that gradients stay unbiased"""
    per_epoch: int = 200_000
    """positions per epoch, at most as many as there are items; losses are read once per epoch"""

    def __post_init__(self) -> None:
        check(self, "temperature", self.temperature > 0, "> 0")
        check(self, "floor", 0 <= self.floor <= 1, "from 0 to 1")
        check(self, "ema", 0 <= self.ema < 1, ">= 0 and < 1")
        drawable = self.floor > 0 or not self.importance
        check(self, "floor", drawable, "> 0 with importance, so that every item can be drawn")
        check_counts(self, "per_epoch")

    @property
    def decay(self) -> float:
        """Decay of the moving average of an item's losses."""
        return self.ema

    def order(self, table: SampleTable, epoch: int, history: LossSnapshot | None) -> Order:
        """Return the order of `epoch`, drawn by loss; a `WeightedOrder` with `importance`.

        One item is drawn from each of N equal parts of the cumulative probability, so an item
        occurs as often as expected, to within one or two. Estimates have the same mean as with N
        independent draws, but a lower variance.

        Args:
            table: Items to sample.
            epoch: Number of the epoch.
            history: Losses so far; None unless the sampler learns from them.
        """
        if not table.count:
            return np.empty(0, np.int64)
        length = min(self.per_epoch, table.count)
        uniform = np.ones(table.count, np.float32)
        relative = self.relative(history.losses) if history else uniform
        generator = make_rng(table.seed, "loss-weighted", epoch)
        quantiles = (np.arange(length) + generator.random(length)) / length
        drawn = _at_quantiles(relative, quantiles)
        generator.shuffle(drawn)
        return WeightedOrder(drawn, 1 / relative[drawn]) if self.importance else drawn

    def relative(self, losses: Float32[np.ndarray, "count"]) -> Float32[np.ndarray, "count"]:
        """Return each item's probability as a multiple of `1 / items`.

        Items without a finite loss get the mean of the others, and negative losses count as 0. If
        no loss is above 0, all items are equal.

        Args:
            losses: Average loss of each item, NaN where it was never trained on.

        Returns:
            Values of at least `floor`, with mean 1.
        """
        unseen = ~np.isfinite(losses)
        relative = np.where(unseen, np.float32(0), losses)
        np.maximum(relative, 0, out=relative)
        highest = relative.max(initial=0)
        if not highest:
            return np.ones(len(losses), np.float32)
        # With the highest scaled to 1, powers cannot overflow.
        relative /= highest
        seen = len(losses) - np.count_nonzero(unseen)
        np.putmask(relative, unseen, relative.sum(dtype=np.float64) / seen)
        if self.temperature != 1:
            relative **= np.float32(1 / self.temperature)
        relative *= np.float32((1 - self.floor) / relative.mean(dtype=np.float64))
        relative += np.float32(self.floor)
        return relative


@dataclass(frozen=True)
class Replay(Sampler):
    """All items in turn, with a share of every batch replayed from the hardest recent items.

    Items are prioritized by loss as in Schaul et al. 2015, but by rank only. The buffer is computed
    from the loss history, so there is no other state.

    The share holds for global batches. Replays are evenly spaced, so a process may get more of them
    or none: with a share of 1/5 on five processes, the last one gets all.
    """

    share: float = 0.2
    """share of every batch that is replayed"""
    size: int = 10_000
    """maximum number of items in the buffer, the hardest ones"""
    percentile: float = 90.0
    """only items with losses above this percentile of the recent ones are replayed"""
    recent: int = 3
    """epochs after which an item that was not visited again is dropped"""
    per_epoch: int = 50_000
    """positions per epoch, at most one visit of every item; then the buffer is recomputed"""

    def __post_init__(self) -> None:
        check(self, "share", 0 <= self.share < 1, ">= 0 and < 1")
        check(self, "percentile", 0 <= self.percentile <= 100, "from 0 to 100")
        check_counts(self, "size", "recent", "per_epoch")

    @property
    def decay(self) -> float:
        """The last loss replaces the previous one, so that learned items leave the buffer."""
        return 0.0

    def order(
        self, table: SampleTable, epoch: int, history: LossSnapshot | None
    ) -> Int64[np.ndarray, "N"]:
        """Return the order of `epoch`.

        Position P of the sequence of all epochs is a replay where `floor((P + 1) * share)` is above
        `floor(P * share)`: each batch of B holds B * share replays, rounded up or down. While the
        buffer is empty, replays take items from a separate sequence.

        Args:
            table: Items to sample.
            epoch: Number of the epoch.
            history: Losses so far; None unless the sampler learns from them.
        """
        if not table.count:
            return np.empty(0, np.int64)
        # Exact fractions, because 0.29 * 100 is 28.999999999999996.
        share = Fraction(self.share).limit_denominator(1_000_000)
        length = min(self.per_epoch, ceil(table.count / (1 - share)))
        positions = np.arange(epoch * length, (epoch + 1) * length + 1)
        replays = positions * share.numerator // share.denominator
        first, last = int(replays[0]), int(replays[-1])
        ordinary = np.arange(epoch * length - first, (epoch + 1) * length - last)
        replayed = np.diff(replays) > 0
        order = np.empty(length, np.int64)
        order[~replayed] = cycle(ordinary, table.count, table.seed, "replay: ordinary")
        buffer = self.buffer(epoch, history) if history else ordinary[:0]
        if len(buffer):
            indices = cycle(np.arange(last - first), len(buffer), table.seed, "replay", epoch)
            order[replayed] = buffer[indices]
        else:
            indices = np.arange(first, last)
            order[replayed] = cycle(indices, table.count, table.seed, "replay: nothing to replay")
        return order

    def buffer(self, epoch: int, history: LossSnapshot) -> Int64[np.ndarray, "b"]:
        """Return the items that are replayed in `epoch`, in ascending order.

        Args:
            epoch: Epoch in which they are replayed.
            history: Losses, and the epochs in which the items were last visited.

        Returns:
            The hardest items above the percentile among those visited in the last `recent` epochs.
        """
        recent = np.flatnonzero(
            (history.seen >= max(epoch - self.recent, 0)) & np.isfinite(history.losses)
        )
        if not len(recent):
            return recent
        losses = history.losses[recent]
        hard = losses > np.percentile(losses, self.percentile)
        recent, losses = recent[hard], losses[hard]
        if len(recent) <= self.size:
            return recent
        # Stable: which of equal losses `argpartition` takes depends on the processor.
        return np.sort(recent[np.argsort(-losses, kind="stable")[: self.size]])


def _at_quantiles(
    weights: Float32[np.ndarray, "count"], quantiles: Float64[np.ndarray, "n"]
) -> Int64[np.ndarray, "n"]:
    """Return the items at ascending quantiles of the cumulative weight.

    Weights are summed in blocks that fit the CPU cache.
    """
    firsts = np.arange(0, len(weights), BLOCK)
    ends = np.cumsum(np.add.reduceat(weights, firsts, dtype=np.float64))
    # Rounding may move the last point to the very end, where only items of weight 0 follow.
    points = np.minimum(quantiles * ends[-1], np.nextafter(ends[-1], 0))
    items, edges = np.empty(len(points), np.int64), np.searchsorted(points, np.append(0, ends))
    for block in np.flatnonzero(np.diff(edges)):
        where = slice(edges[block], edges[block + 1])
        first, before = firsts[block], ends[block - 1] if block else 0
        sums = np.cumsum(weights[first : first + BLOCK], dtype=np.float64) + before
        last = np.searchsorted(sums, sums[-1])
        offsets = np.searchsorted(sums, points[where], side="right")
        items[where] = first + np.minimum(offsets, last)
    return items
