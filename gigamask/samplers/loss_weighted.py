"""Items drawn more often where the loss is high, with replacement.

In: the ledger's losses, an epoch. Out: an order, with weights where estimates shall stay those of the mean over all items.
Importance sampling as in Katharopoulos and Fleuret 2018, with losses that are as old as an item's last visit.

Not here: how losses get into the ledger (`samplers.ledger`), the hardest few among ordinary items (`samplers.replay`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from gigamask.draws import draw
from gigamask.faults import Fault
from gigamask.samplers.given import at_least_one
from gigamask.seams import Sampler, Weighted

if TYPE_CHECKING:
    from jaxtyping import Float32, Float64, Int64

    from gigamask.seams import Items, Ledger, Order


BLOCK = 2**15
"""Items whose weights are summed together."""


@dataclass(frozen=True)
class LossWeighted(Sampler):
    """Each item with a probability proportional to `loss ** (1 / temperature)`, and not below `floor / items`."""

    temperature: float = 1.0
    """above 1 evens the probabilities out, below 1 sharpens them"""
    floor: float = 0.1
    """share of the positions that is drawn from all items alike"""
    ema: float = 0.99
    """how much of an item's earlier loss stays when it is trained on again"""
    importance: bool = False
    """weigh losses by 1 / (items x probability), so that they estimate the mean over all items as ordinary batches do"""
    per_epoch: int = 200_000
    """positions of an epoch, at most as many as there are items; losses are looked at once an epoch"""

    def __post_init__(self) -> None:
        if not self.temperature > 0:
            raise Fault(
                f"the loss-weighted order's temperature is {self.temperature}, it must be above 0; give such, 1 for probabilities like losses"
            )
        if not 0 <= self.floor <= 1:
            raise Fault(f"the loss-weighted order's floor is {self.floor}, it must be from 0 to 1; give the share that is drawn from all items alike")
        if not 0 <= self.ema < 1:
            raise Fault(f"the loss-weighted order's ema is {self.ema}, it must be from 0 to below 1; give what stays of an earlier loss")
        if self.importance and not self.floor:
            raise Fault(
                "the loss-weighted order's floor is 0, with importance it must be above 0, for what is never drawn cannot be weighed; give such"
            )
        at_least_one("loss-weighted", per_epoch=self.per_epoch)

    @property
    def decay(self) -> float:
        """How much of an item's earlier loss the ledger keeps."""
        return self.ema

    def order(self, items: Items, epoch: int, ledger: Ledger | None) -> Order:
        """Returns the order of `epoch`, drawn from the probabilities of the ledger it is given; `Weighted` with importance.

        One draw is made in each of N equal parts of the probability: an item comes as often as expected, up to one or two, so estimates vary less
        than with N free draws and have the same mean.
        """
        if not items.count:
            return np.empty(0, np.int64)
        number = min(self.per_epoch, items.count)
        relative = self.relative(ledger.losses) if ledger else np.ones(items.count, np.float32)
        generator = draw(items.seed, "loss-weighted", epoch)
        drawn = _found(relative, (np.arange(number) + generator.random(number)) / number)
        generator.shuffle(drawn)
        return Weighted(drawn, 1 / relative[drawn]) if self.importance else drawn

    def relative(self, losses: Float32[np.ndarray, "count"]) -> Float32[np.ndarray, "count"]:
        """Returns each item's probability as a multiple of `1 / items`; they are `floor` or more and their mean is 1.

        An unseen item counts as the mean of the seen ones. A loss that is not finite says nothing, so its item is as one unseen; negative ones
        count as 0. Where all are 0, all items are alike.
        """
        unseen = ~np.isfinite(losses)
        relative = np.where(unseen, np.float32(0), losses)
        np.maximum(relative, 0, out=relative)
        highest = relative.max(initial=0)
        if not highest:
            return np.ones(len(losses), np.float32)
        # The highest counts as 1: a power of it cannot overflow.
        relative /= highest
        np.putmask(relative, unseen, relative.sum(dtype=np.float64) / (len(losses) - np.count_nonzero(unseen)))
        if self.temperature != 1:
            relative **= np.float32(1 / self.temperature)
        relative *= np.float32((1 - self.floor) / relative.mean(dtype=np.float64))
        relative += np.float32(self.floor)
        return relative


def _found(weights: Float32[np.ndarray, "count"], points: Float64[np.ndarray, "n"]) -> Int64[np.ndarray, "n"]:
    """Returns the items in which these shares of all weights end, ascending; sums are made block by block, where a processor's cache holds them."""
    firsts = np.arange(0, len(weights), BLOCK)
    ends = np.cumsum(np.add.reduceat(weights, firsts, dtype=np.float64))
    # Rounding may lift the last point to the very end, behind which there are only items of weight 0.
    points = np.minimum(points * ends[-1], np.nextafter(ends[-1], 0))
    found, edges = np.empty(len(points), np.int64), np.searchsorted(points, np.append(0, ends))
    for block in np.flatnonzero(np.diff(edges)):
        there = slice(edges[block], edges[block + 1])
        sums = np.cumsum(weights[firsts[block] : firsts[block] + BLOCK], dtype=np.float64) + (ends[block - 1] if block else 0)
        last = np.searchsorted(sums, sums[-1])
        found[there] = firsts[block] + np.minimum(np.searchsorted(sums, points[there], side="right"), last)
    return found
