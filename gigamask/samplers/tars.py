"""Orders that know which tar each item lies in.

In: the items' `tar` column, which is ascending, and an epoch. Out: the items of the epoch.

| order               | an epoch holds                    | in which order                             | for                                    |
|---------------------|-----------------------------------|--------------------------------------------|----------------------------------------|
| `TarAware`          | up to `per_tar` items of each tar | tar by tar                                 | few open tars, yet all of them in turn |
| `BalancedTars`      | `per_tar` items of each tar       | mixed together                             | tars that count alike, large or small  |
| `StreamingTars`     | all items of about `tars` tars    | tar by tar                                 | tars fetched whole, short epochs       |
| `streamed.Streamed` | every item once                   | `lanes` tars at a time, nearly as they lie | where only reading onward is fast      |

The first two take other items in each epoch, so that all items of a tar come up equally often; so does the third with the tars.

Not here: items that only some machines hold (`samplers.sharded`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from gigamask.draws import draw
from gigamask.samplers.given import at_least_one, column
from gigamask.samplers.lazy import share
from gigamask.samplers.uniform import shuffled
from gigamask.seams import Sampler

if TYPE_CHECKING:
    from jaxtyping import Int64

    from gigamask.seams import Items, Ledger


@dataclass(frozen=True)
class TarAware(Sampler):
    """Up to `per_tar` random items of each tar, one tar after the other."""

    per_tar: int = 1000
    """items of a tar in an epoch; a tar with fewer gives all of its"""

    def __post_init__(self) -> None:
        at_least_one("tar-aware", per_tar=self.per_tar)

    def order(self, items: Items, epoch: int, ledger: Ledger | None) -> Int64[np.ndarray, "N"]:
        """Returns the order of `epoch`."""
        generator = draw(items.seed, "tar aware", epoch)
        firsts, sizes = spans(items, "tar-aware")
        taken = np.minimum(sizes, self.per_tar)
        found, end = np.empty(taken.sum(), np.int64), 0
        for tar in generator.permutation(len(sizes)):
            start, end = end, end + int(taken[tar])
            found[start:end] = firsts[tar] + share(epoch, end - start, int(sizes[tar]), items.seed, "tar aware", int(tar))
            generator.shuffle(found[start:end])
        return found


@dataclass(frozen=True)
class BalancedTars(Sampler):
    """Exactly `per_tar` random items of each tar, all shuffled together."""

    per_tar: int = 100
    """items of a tar in an epoch; a tar with fewer repeats its own"""

    def __post_init__(self) -> None:
        at_least_one("balanced-tars", per_tar=self.per_tar)

    def order(self, items: Items, epoch: int, ledger: Ledger | None) -> Int64[np.ndarray, "N"]:
        """Returns the order of `epoch`."""
        firsts, sizes = spans(items, "balanced-tars")
        found = np.empty((len(sizes), self.per_tar), np.int64)
        for tar, (first, size) in enumerate(zip(firsts, sizes.tolist(), strict=True)):
            found[tar] = first + share(epoch, self.per_tar, size, items.seed, "balanced tars", tar)
        return shuffled(found.ravel(), draw(items.seed, "balanced tars", epoch))


@dataclass(frozen=True)
class StreamingTars(Sampler):
    """About `tars` tars an epoch, one after the other, each shuffled.

    Epochs are equally long pieces of an endless sequence of passes, each of which visits all tars in an order of its own. So an epoch holds as many
    items as `tars` average tars; where tars are equally large, it holds that many whole ones.
    """

    tars: int = 100
    """tars in an epoch"""

    def __post_init__(self) -> None:
        at_least_one("streaming-tars", tars=self.tars)

    def order(self, items: Items, epoch: int, ledger: Ledger | None) -> Int64[np.ndarray, "N"]:
        """Returns the order of `epoch`; only the tars that it visits are looked at."""
        firsts, sizes = spans(items, "streaming-tars")
        if not items.count:
            return np.empty(0, np.int64)
        length = max(1, round(items.count * min(self.tars, len(sizes)) / len(sizes)))
        start, end = epoch * length, (epoch + 1) * length
        passes = range(start // items.count, (end - 1) // items.count + 1)
        pieces = (_visits(items.seed, turn, firsts, sizes, start - turn * items.count, length) for turn in passes)
        return np.concatenate([piece for turn in pieces for piece in turn])


def spans(items: Items, sampler: str) -> tuple[Int64[np.ndarray, "tars"], Int64[np.ndarray, "tars"]]:
    """Returns each tar's first item, and how many it has; tars without items are left out."""
    numbers = column(items, "tar", sampler)
    edges = np.flatnonzero(numbers[1:] != numbers[:-1]) + 1
    firsts = np.concatenate([np.zeros(min(1, items.count), np.int64), edges])
    return firsts, np.diff(firsts, append=items.count)


def _visits(
    seed: int, turn: int, firsts: Int64[np.ndarray, "tars"], sizes: Int64[np.ndarray, "tars"], start: int, length: int
) -> Iterator[Int64[np.ndarray, "n"]]:
    """Yields what one pass visits at the `length` positions from `start` on; those outside of the pass are left out."""
    visited = draw(seed, "streaming tars", turn).permutation(len(sizes))
    ends = np.cumsum(sizes[visited])
    for place in range(int(np.searchsorted(ends, start, side="right")), len(visited)):
        tar = int(visited[place])
        before = int(ends[place] - sizes[tar])
        if before >= start + length:
            return
        mixed = draw(seed, "streaming tars", turn, tar).permutation(sizes[tar])
        yield firsts[tar] + mixed[max(0, start - before) : start + length - before]
