"""From easy to hard: training begins with the easiest items and reaches ever more of them, never fewer again.

In: the column `difficulty`, an epoch, and for the adaptive one the ledger's epoch losses. Out: an order over the easiest share of the items.

Not here: how difficult an item is (`data.items`), items that were hard to this very model (`samplers.loss_weighted`, `samplers.replay`).
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from gigamask.faults import Fault
from gigamask.samplers.given import at_least_one, column
from gigamask.samplers.lazy import alike, cycle
from gigamask.seams import Sampler

if TYPE_CHECKING:
    from jaxtyping import Float64, Int64, Shaped

    from gigamask.seams import Items, Ledger, Order


@dataclass(frozen=True)
class Curriculum(Sampler):
    """The easiest share of the items, which grows with time until it is all of them; an epoch is as long as the data."""

    start: float = 0.3
    """share of the items, the easiest, that training begins with"""
    epochs: float = 5.0
    """epochs until all items are reached; may be a fraction"""
    stages: int = 10
    """times an epoch that the share grows"""

    def __post_init__(self) -> None:
        _check_share("curriculum", "start", self.start)
        if not 0 <= self.epochs < float("inf"):
            raise Fault(f"the curriculum order's epochs is {self.epochs}, it must be 0 or more; give the epochs until all items are reached")
        at_least_one("curriculum", stages=self.stages)

    def share(self, epochs: float) -> float:
        """Returns the share of the items that is reached after so many epochs."""
        return min(1.0, self.start + (1 - self.start) * epochs / self.epochs) if epochs < self.epochs else 1.0

    def order(self, items: Items, epoch: int, ledger: Ledger | None) -> Order:
        """Returns the order of `epoch`: in each stage, passes over the items that are reached; stages that reach equally many are one."""
        reached = [_reached(self.share(epoch + stage / self.stages), items.count) for stage in range(self.stages)]
        begins = [stage for stage in range(self.stages) if stage == 0 or reached[stage] != reached[stage - 1]]
        passes = [_Passes(stage * items.count // self.stages, reached[stage], ("curriculum", epoch, stage)) for stage in begins]
        return _InPasses(items.count, items.seed, _easiest(items, reached[0], "curriculum"), passes)


@dataclass(frozen=True)
class AdaptiveCurriculum(Sampler):
    """The easiest share of the items, which grows whenever the last epochs' losses are low enough."""

    start: float = 0.3
    """share of the items, the easiest, that training begins with"""
    growth: float = 0.05
    """by how much the share grows each time"""
    threshold: float = 0.1
    """mean loss of an epoch below which the share grows; on the scale of the run's own loss, so look at a curve of it first"""
    window: int = 3
    """epochs whose mean is compared; after each growth as many new ones are waited for"""
    per_epoch: int | None = None
    """positions of an epoch: the share can grow once an epoch; None: as many as there are items"""

    def __post_init__(self) -> None:
        _check_share("adaptive curriculum", "start", self.start)
        _check_share("adaptive curriculum", "growth", self.growth)
        if not self.threshold > 0:
            raise Fault(f"the adaptive curriculum order's threshold is {self.threshold}, it must be above 0; give a loss that training reaches")
        at_least_one("adaptive curriculum", window=self.window, per_epoch=self.per_epoch)

    @property
    def decay(self) -> float:
        """The ledger's epoch losses are all that is looked at, so losses of items are not averaged."""
        return 0.0

    def share(self, epoch_losses: Float64[np.ndarray, "epochs"]) -> float:
        """Returns the share of the items that is reached after these epochs; those without a loss, NaN, are passed over."""
        growths, recent = 0, []
        for loss in epoch_losses[~np.isnan(epoch_losses)].tolist():
            recent.append(loss)
            if len(recent) >= self.window and sum(recent[-self.window :]) / self.window < self.threshold:
                growths, recent = growths + 1, []
        return min(1.0, self.start + growths * self.growth)

    def order(self, items: Items, epoch: int, ledger: Ledger | None) -> Order:
        """Returns the order of `epoch`: passes over the items that are reached, which go on across epochs that reach equally many."""
        length = (self.per_epoch or items.count) if items.count else 0
        reached = _reached(self.share(ledger.epoch_losses) if ledger else self.start, items.count)
        passes = _Passes(-epoch * length, reached, ("adaptive curriculum", reached))
        return _InPasses(length, items.seed, _easiest(items, reached, "adaptive curriculum"), [passes])


def _reached(share: float, count: int) -> int:
    """Returns how many items that share is, rounded up; .1 * 3 is .30000000000000004 and means .3."""
    return max(ceil(round(share * count, 6)), 1)


def _easiest(items: Items, fewest: int, sampler: str) -> Int64[np.ndarray, "count"]:
    """Returns the items from the easiest on; in any order where no less than all are reached, which spares the sorting."""
    difficulty = column(items, "difficulty", sampler)
    return np.arange(items.count) if fewest >= items.count else ranked(difficulty)


class _Passes(NamedTuple):
    """An endless sequence of passes over the `reached` easiest items, whose beginning lies at position `start`, before the epoch's or in it."""

    start: int
    reached: int
    name: tuple[str, *tuple[int, ...]]


@dataclass(frozen=True, eq=False)
class _InPasses:
    """The order of one epoch: at each position, what the passes that began last hold there."""

    count: int
    seed: int
    easiest: Int64[np.ndarray, "items"]
    passes: list[_Passes]

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, positions: Int64[np.ndarray, "n"]) -> Int64[np.ndarray, "n"]:
        which = np.searchsorted([each.start for each in self.passes], positions, side="right") - 1
        found = np.empty(len(positions), np.int64)
        for number, there in alike(which):
            start, reached, name = self.passes[number]
            found[there] = self.easiest[cycle(positions[there] - start, reached, self.seed, *name)]
        return found


def ranked(values: Shaped[np.ndarray, "count"]) -> Int64[np.ndarray, "count"]:
    """Returns the items from the lowest value on, equal ones by number, NaN last; values are compared in single precision.

    Sorts value and number in one integer: numpy's stable sort of floats takes five times as long.
    """
    # Adding 0 turns -0 into 0. The bits of positive floats ascend with them, of negative ones descend; NaN has either sign.
    single = values.astype(np.float32) + np.float32(0)
    bits = single.view(np.int32).astype(np.int64)
    bits ^= (bits >> 63) & 0x7FFFFFFF
    bits[np.isnan(single)] = 0x7FFFFFFF
    bits <<= 32
    bits |= np.arange(len(values))
    bits.sort()
    bits &= 0xFFFFFFFF
    return bits


def _check_share(sampler: str, name: str, share: float) -> None:
    if not 0 < share <= 1:
        raise Fault(f"the {sampler} order's {name} is {share}, it must be above 0 and at most 1; give a share of the items")
