"""Every item once per epoch, in random order that is evaluated on demand."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from gigamask.errors import check_range
from gigamask.interfaces import Sampler
from gigamask.lazy_numpy import np
from gigamask.rng import make_rng
from gigamask.samplers.feistel import LazyOrder, group_by_label, permute

if TYPE_CHECKING:
    from gigamask.interfaces import LossSnapshot, Order, SampleTable
    from gigamask.samplers.feistel import Integers


@dataclass(frozen=True)
class Random(Sampler):
    """A random permutation per epoch."""

    def order(self, table: SampleTable, epoch: int, history: LossSnapshot | None) -> Order:
        """Return the permutation of `epoch`; only requested positions are evaluated.

        Args:
            table: Items to sample.
            epoch: Number of the epoch.
            history: Losses so far; None unless the sampler learns from them.
        """
        count, seed = table.count, table.seed
        return LazyOrder(count, lambda at: permute(at, count, make_rng(seed, "order", epoch)))


@dataclass(frozen=True)
class LazyShuffle(Sampler):
    """A random permutation per epoch that is evaluated on demand, in constant memory.

    With `chunk`, the items are cut into chunks of consecutive items. Chunks are visited in random
    order, and items are shuffled within each chunk.
    """

    chunk: int | None = None
    """items per chunk: larger mixes better, smaller reads more locally; None: no chunks"""

    def __post_init__(self) -> None:
        check_range("LazyShuffle.chunk", self.chunk, 1)

    def order(self, table: SampleTable, epoch: int, history: LossSnapshot | None) -> Order:
        """Return the permutation of `epoch`; only requested positions are evaluated.

        Args:
            table: Items to sample.
            epoch: Number of the epoch.
            history: Losses so far; None unless the sampler learns from them.
        """
        count, size, seed = table.count, self.chunk, table.seed

        def items_at(positions: Integers) -> Integers:
            if size is None or not len(positions):
                return permute(positions, count, make_rng(seed, "lazy", epoch))
            chunks, offsets = _locate(positions, size, count, make_rng(seed, "chunks", epoch))
            items = np.empty_like(offsets)
            for chunk, where in group_by_label(chunks):
                first = chunk * size
                generator = make_rng(seed, "chunk", epoch, chunk)
                items[where] = first + permute(offsets[where], min(size, count - first), generator)
            return items

        return LazyOrder(count, items_at)


def _locate(
    positions: Integers, size: int, count: int, generator: np.random.Generator
) -> tuple[Integers, Integers]:
    """Return the chunk at each position, and the position within that chunk.

    Args:
        positions: The positions.
        size: Items per chunk.
        count: Number of items.
        generator: Fresh generator that determines the order of the chunks.
    """
    # The last chunk may be short, so its place is drawn first; the other chunks take the
    # remaining places in random order.
    last = (count - 1) // size
    place_of_last = int(generator.integers(last, endpoint=True))
    missing = (last + 1) * size - count
    after = positions >= (place_of_last + 1) * size - missing
    places, offsets = np.divmod(positions + after * missing, size)
    chunks = np.full(len(positions), last)
    others = places != place_of_last
    chunks[others] = permute((places - after)[others], last, generator)
    return chunks, offsets
