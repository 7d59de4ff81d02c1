"""Tars in random order, each read from front to back: for object stores and spinning disks.

In: the items' `shard` column, which is ascending, and an epoch. Out: a permutation in which neighbours lie near each other.
The tars' entries, one after the other, are cut into `lanes` pieces of equal length, which take turns: position p belongs to lane p % lanes.
Whoever takes every so-manieth sample therefore reads few places, each of them onward. Within a lane, samples are shuffled in blocks of `buffer`.

Not here: cutting orders into steps, ranks and micro-batches (`samplers.split`), reading ahead (`data.shards`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from gigamask.draws import draw
from gigamask.faults import Fault
from gigamask.seams import Sampler

if TYPE_CHECKING:
    from jaxtyping import Int64

    from gigamask.seams import Items, Ledger


@dataclass(frozen=True)
class Streamed(Sampler):
    """A permutation per epoch that goes through the tars."""

    seed: int = 0
    """names the orders"""
    lanes: int = 1
    """places that are read from in turn; with processes x loader workers x micro, each worker goes through places of its own"""
    buffer: int = 1000
    """samples that are shuffled among each other; larger mixes better and reads less in sequence"""

    def __post_init__(self) -> None:
        for name in ("lanes", "buffer"):
            if getattr(self, name) < 1:
                raise Fault(f"the streamed order's {name} is {getattr(self, name)}, it must be at least 1; give such")

    def order(self, items: Items, epoch: int, ledger: Ledger | None) -> Int64[np.ndarray, "N"]:
        """Returns the order of `epoch`."""
        generator = draw(self.seed, "streamed", epoch)
        edges = np.concatenate([[0], np.flatnonzero(np.diff(items.columns["shard"])) + 1, [items.count]])
        tars = generator.permutation(len(edges) - 1)
        sequence = np.concatenate([np.arange(edges[tar], edges[tar + 1]) for tar in tars])
        lanes = [_shuffled(lane, self.buffer, generator) for lane in np.array_split(sequence, self.lanes)]
        # The first lanes may be one longer than the others.
        turns = np.full((len(lanes[0]), self.lanes), -1, np.int64)
        for lane, column in zip(lanes, turns.T, strict=True):
            column[: len(lane)] = lane
        flat = turns.ravel()
        return flat[flat >= 0]


def _shuffled(lane: Int64[np.ndarray, "n"], buffer: int, generator: np.random.Generator) -> Int64[np.ndarray, "n"]:
    """Returns the lane shuffled in blocks of `buffer`, whose borders lie elsewhere each time."""
    first = int(generator.integers(min(buffer, len(lane)), endpoint=True))
    last = len(lane) - (len(lane) - first) % buffer
    blocks = generator.permuted(lane[first:last].reshape(-1, buffer), axis=1).ravel()
    return np.concatenate([generator.permutation(lane[:first]), blocks, generator.permutation(lane[last:])])
