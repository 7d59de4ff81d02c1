"""Tars in random order, each read from front to back: for object stores and spinning disks.

In: the items' `tar` column, which is ascending, and an epoch. Out: a permutation in which neighbours lie near each other.
The tars' entries, one after the other, are cut into `lanes` pieces of equal length, which take turns: position p belongs to lane p % lanes.
Whoever takes every so-manieth sample therefore reads few places, each of them onward. Within a lane, samples are shuffled in blocks of `buffer`.

Not here: other orders that know tars, and which is for what (`samplers.tars`), steps, ranks and micro-batches (`samplers.split`), reading ahead
(`data.shards`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from gigamask.draws import draw
from gigamask.samplers.given import at_least_one
from gigamask.samplers.tars import spans
from gigamask.seams import Sampler

if TYPE_CHECKING:
    from jaxtyping import Int64

    from gigamask.seams import Items, Ledger


@dataclass(frozen=True)
class Streamed(Sampler):
    """A permutation per epoch that goes through the tars."""

    lanes: int = 1
    """places that are read from in turn; with processes x loader workers x micro, each worker goes through places of its own"""
    buffer: int = 1000
    """samples that are shuffled among each other; larger mixes better and reads less in sequence"""

    def __post_init__(self) -> None:
        at_least_one("streamed", lanes=self.lanes, buffer=self.buffer)

    def order(self, items: Items, epoch: int, ledger: Ledger | None) -> Int64[np.ndarray, "N"]:
        """Returns the order of `epoch`."""
        generator = draw(items.seed, "streamed", epoch)
        firsts, sizes = spans(items, "streamed")
        tars = generator.permutation(len(sizes))
        sizes = sizes[tars]
        sequence = np.repeat(firsts[tars] - (np.cumsum(sizes) - sizes), sizes)
        sequence += np.arange(items.count)
        order = np.empty_like(sequence)
        for number, lane in enumerate(np.array_split(sequence, self.lanes)):
            _shuffle(lane, self.buffer, generator)
            order[number :: self.lanes] = lane
        return order


def _shuffle(lane: Int64[np.ndarray, "n"], buffer: int, generator: np.random.Generator) -> None:
    """Shuffles the lane in blocks of `buffer`, whose borders lie elsewhere each time."""
    first = int(generator.integers(min(buffer, len(lane)), endpoint=True))
    last = len(lane) - (len(lane) - first) % buffer
    blocks = lane[first:last].reshape(-1, buffer)
    generator.permuted(blocks, axis=1, out=blocks)
    generator.shuffle(lane[:first])
    generator.shuffle(lane[last:])
