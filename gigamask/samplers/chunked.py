"""Chunks in random order, each shuffled: what follows each other in an epoch lies near each other in the data, and no list of the items is held.

In: how many items, an epoch. Out: a permutation that is worked out where it is looked at.

Not here: whole tars one after the other (`samplers.tars`), a permutation without neighbourhood (`samplers.lazy`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from gigamask.draws import draw
from gigamask.samplers.given import at_least_one
from gigamask.samplers.lazy import alike, permute
from gigamask.seams import Sampler

if TYPE_CHECKING:
    from jaxtyping import Int64

    from gigamask.seams import Items, Ledger, Order


@dataclass(frozen=True)
class Chunked(Sampler):
    """A permutation per epoch that visits one chunk of the items after the other."""

    chunk: int = 100_000
    """items of a chunk; larger mixes better, smaller stays nearer together"""

    def __post_init__(self) -> None:
        at_least_one("chunked", chunk=self.chunk)

    def order(self, items: Items, epoch: int, ledger: Ledger | None) -> Order:
        """Returns the permutation of `epoch`, of which only the chunks that are looked at are worked out."""
        return _Chunks(items.count, self.chunk, items.seed, epoch)


@dataclass(frozen=True)
class _Chunks:
    """The permutation of one epoch."""

    count: int
    chunk: int
    seed: int
    epoch: int

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, positions: Int64[np.ndarray, "n"]) -> Int64[np.ndarray, "n"]:
        if not len(positions):
            return np.empty(0, np.int64)
        # The last chunk may be short: its place is drawn first, and the others take the places that are left in random order.
        last = (self.count - 1) // self.chunk
        generator = draw(self.seed, "chunks", self.epoch)
        place_of_last = int(generator.integers(last, endpoint=True))
        lacking = (last + 1) * self.chunk - self.count
        behind = positions >= (place_of_last + 1) * self.chunk - lacking
        places, offsets = np.divmod(positions + behind * lacking, self.chunk)
        chunks = np.full(len(positions), last)
        others = places != place_of_last
        chunks[others] = permute((places - behind)[others], last, generator)
        for chunk, there in alike(chunks):
            first = chunk * self.chunk
            size = min(self.chunk, self.count - first)
            chunks[there] = first + permute(offsets[there], size, draw(self.seed, "chunk", self.epoch, chunk))
        return chunks
