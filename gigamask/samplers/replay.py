"""The hardest of the items seen lately, again and again among all items in their usual turn.

In: the ledger's losses and when items were last seen, an epoch. Out: an order whose every batch holds a share of replays.
Prioritised by loss as in Schaul et al. 2015, but by rank alone. The buffer is worked out from the ledger: there is no state beside it.

Not here: how losses get into the ledger (`samplers.ledger`), probabilities by loss (`samplers.loss_weighted`).
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from math import ceil
from typing import TYPE_CHECKING

import numpy as np

from gigamask.faults import Fault
from gigamask.samplers.given import at_least_one
from gigamask.samplers.lazy import cycle
from gigamask.seams import Sampler

if TYPE_CHECKING:
    from jaxtyping import Int64

    from gigamask.seams import Items, Ledger


@dataclass(frozen=True)
class Replay(Sampler):
    """A share of every batch from the hardest recent items; the others are all items in turn, of which none is left out for the replays.

    This is said of whole batches. Replays stand at even distances, so a process may meet more of them or none: of a share of 1/5 on five processes,
    the last one meets all.
    """

    share: float = 0.2
    """of every batch, how much is replayed"""
    size: int = 10_000
    """items the buffer holds at most, the hardest"""
    percentile: float = 90.0
    """only losses above this percentile of the recent ones are replayed"""
    recent: int = 3
    """epochs of this order after which an item that was not seen again is forgotten; with 3 of the default length 10,000 are above the percentile"""
    per_epoch: int = 50_000
    """positions of an epoch, at most what visits every item once; the buffer is renewed once an epoch"""

    def __post_init__(self) -> None:
        if not 0 <= self.share < 1:
            raise Fault(f"the replay order's share is {self.share}, it must be from 0 to below 1; give the part of a batch that is replayed")
        if not 0 <= self.percentile <= 100:
            raise Fault(f"the replay order's percentile is {self.percentile}, it must be from 0 to 100; give such, 90 for the hardest tenth")
        at_least_one("replay", size=self.size, recent=self.recent, per_epoch=self.per_epoch)

    @property
    def decay(self) -> float:
        """The last loss replaces the one before, so that what was learned leaves the buffer."""
        return 0.0

    def order(self, items: Items, epoch: int, ledger: Ledger | None) -> Int64[np.ndarray, "N"]:
        """Returns the order of `epoch`.

        The position P of the whole sequence is a replay where floor((P + 1) * share) is above floor(P * share): each batch of B has B * share of
        them, rounded up or down. While the buffer is empty, replays are further items in a turn of their own.
        """
        if not items.count:
            return np.empty(0, np.int64)
        # In whole numbers, for .29 * 100 is 28.999999999999996.
        share = Fraction(self.share).limit_denominator(1_000_000)
        number = min(self.per_epoch, ceil(items.count / (1 - share)))
        replays = np.arange(epoch * number, (epoch + 1) * number + 1) * share.numerator // share.denominator
        first, last = int(replays[0]), int(replays[-1])
        ordinary = np.arange(epoch * number - first, (epoch + 1) * number - last)
        replayed = np.diff(replays) > 0
        order = np.empty(number, np.int64)
        order[~replayed] = cycle(ordinary, items.count, items.seed, "replay: ordinary")
        buffer = self.buffer(epoch, ledger) if ledger else ordinary[:0]
        if len(buffer):
            order[replayed] = buffer[cycle(np.arange(last - first), len(buffer), items.seed, "replay", epoch)]
        else:
            order[replayed] = cycle(np.arange(first, last), items.count, items.seed, "replay: nothing to replay")
        return order

    def buffer(self, epoch: int, ledger: Ledger) -> Int64[np.ndarray, "b"]:
        """Returns the items that are replayed in `epoch`: of those seen in the epochs just before, the hardest above the percentile."""
        recent = np.flatnonzero((ledger.seen >= max(epoch - self.recent, 0)) & np.isfinite(ledger.losses))
        if not len(recent):
            return recent
        losses = ledger.losses[recent]
        hard = losses > np.percentile(losses, self.percentile)
        recent, losses = recent[hard], losses[hard]
        if len(recent) <= self.size:
            return recent
        return np.sort(recent[np.argpartition(losses, len(losses) - self.size)[-self.size :]])
