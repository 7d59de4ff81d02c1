"""Orders that depend on the tar, or the node, that holds each item.

They read the column `tar`, which is ascending.

| order           | an epoch holds                    | in which order   | for                 |
|-----------------|-----------------------------------|------------------|---------------------|
| `TarSubset`     | up to `per_tar` items of each tar | tar by tar       | few open tars       |
| same, `mixed`   | exactly `per_tar` of each tar     | shuffled         | equal weights       |
| `StreamingTars` | the items of `tars` tars          | tar by tar       | tars fetched whole  |
| `Streamed`      | every item once                   | sequential lanes | sequential reads    |
| `Sharded`       | each node's items, equally many   | random           | data on local disks |
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from gigamask.errors import GigamaskError, check_counts
from gigamask.interfaces import Sampler
from gigamask.lazy_numpy import np
from gigamask.rng import make_rng
from gigamask.samplers.feistel import (
    LazyOrder,
    balanced_items,
    cycle,
    group_by_label,
    permute,
    permute_each,
)
from gigamask.samplers.validation import column

if TYPE_CHECKING:
    from jaxtyping import Int64

    from gigamask.interfaces import LossSnapshot, Order, SampleTable
    from gigamask.samplers.feistel import Integers


@dataclass(frozen=True)
class TarSubset(Sampler):
    """Random items of each tar, different ones in every epoch, so that all occur equally often.

    Tars are visited one by one, and a tar with fewer than `per_tar` items contributes all of them.
    With `mixed`, the items of all tars are shuffled together, and a tar with fewer items repeats
    them.
    """

    per_tar: int = 1000
    """items of each tar per epoch"""
    mixed: bool = False
    """take exactly per-tar items of each tar and shuffle all together, instead of tar by tar"""

    def __post_init__(self) -> None:
        check_counts(self, "per_tar")

    def order(self, table: SampleTable, epoch: int, history: LossSnapshot | None) -> Order:
        """Return the order of `epoch`.

        Args:
            table: Items to sample.
            epoch: Number of the epoch.
            history: Losses so far; None unless the sampler learns from them.
        """
        stream = "balanced tars" if self.mixed else "tar aware"
        firsts, sizes = tar_spans(table, self)
        generator = make_rng(table.seed, stream, epoch)
        tars = np.arange(len(sizes)) if self.mixed else generator.permutation(len(sizes))
        lengths = np.full_like(sizes, self.per_tar)
        if not self.mixed:
            lengths = np.minimum(sizes, self.per_tar)[tars]
        ends = np.cumsum(lengths)
        total, key = int(lengths.sum()), (table.seed, f"{stream}, order", epoch)

        def items_at(positions: Integers) -> Integers:
            if self.mixed:
                positions = permute(positions, total, make_rng(*key))
            visits = np.searchsorted(ends, positions, side="right")
            tar, length = tars[visits], lengths[visits]
            places = positions - (ends[visits] - length)
            if not self.mixed:
                places = permute_each(places, length, make_rng(*key), tar)
            chosen = balanced_items(places, epoch, length, sizes[tar], tar, table.seed, stream)
            return firsts[tar] + chosen

        return LazyOrder(total, items_at)


@dataclass(frozen=True)
class StreamingTars(Sampler):
    """Exactly `tars` tars per epoch, one after the other, each shuffled.

    Tars are chosen equally often. All epochs have as many positions as `tars` average tars, divided
    over the chosen tars in proportion to their sizes. Where all tars have the same size, each is
    visited whole; else the items of an epoch's tars are visited equally often, to within one: large
    tars leave some out, or small tars repeat some.
    """

    tars: int = 100
    """tars per epoch"""

    def __post_init__(self) -> None:
        check_counts(self, "tars")

    def order(self, table: SampleTable, epoch: int, history: LossSnapshot | None) -> Order:
        """Return the order of `epoch`.

        Args:
            table: Items to sample.
            epoch: Number of the epoch.
            history: Losses so far; None unless the sampler learns from them.
        """
        firsts, sizes = tar_spans(table, self)
        number = min(self.tars, len(sizes))
        length = round(table.count * number / max(len(sizes), 1))
        key = (table.seed, "streaming tars", epoch)
        visits, same = make_rng(*key).permutation(number), np.ones(number, np.int64)
        tars = balanced_items(
            visits, epoch, same * number, same * len(sizes), same, table.seed, "streaming tars"
        )
        chosen = sizes[tars]
        # Too few positions for all items: every tar has one, so that small tars are not left out.
        first = int(length < chosen.sum())
        rest = np.cumsum(chosen - first)
        ends = first * np.arange(1, number + 1) + (length - first * number) * rest // rest.max(
            initial=1
        )

        def items_at(positions: Integers) -> Integers:
            visits = np.searchsorted(ends, positions, side="right")
            before = np.where(visits > 0, ends[visits - 1], 0)
            passes, places = np.divmod(positions - before, chosen[visits])
            items = permute_each(places, chosen[visits], make_rng(*key), tars[visits], passes)
            return firsts[tars[visits]] + items

        return LazyOrder(length, items_at)


@dataclass(frozen=True)
class Streamed(Sampler):
    """A permutation per epoch that reads the tars in random order, each from front to back.

    The tars' entries, one tar after the other, are cut into `lanes` pieces of equal length that
    take turns: position p belongs to lane p % lanes. So a worker that takes every n-th sample reads
    sequentially, in few places. Within a lane, items are shuffled in blocks of `buffer`.
    """

    lanes: int = 1
    """places read in turn; processes x loader workers x micro-batch gives each worker its own"""
    buffer: int = 1000
    """items shuffled together: larger mixes better, smaller reads more sequentially"""

    def __post_init__(self) -> None:
        check_counts(self, "lanes", "buffer")

    def order(self, table: SampleTable, epoch: int, history: LossSnapshot | None) -> Order:
        """Return the order of `epoch`.

        Args:
            table: Items to sample.
            epoch: Number of the epoch.
            history: Losses so far; None unless the sampler learns from them.
        """
        firsts, sizes = tar_spans(table, self)
        tars = make_rng(table.seed, "streamed", epoch).permutation(len(sizes))
        ends = np.cumsum(sizes[tars])
        # The first lanes have one entry more than the others.
        size, longer = divmod(table.count, self.lanes)
        seed = table.seed

        def items_at(positions: Integers) -> Integers:
            places, lanes = np.divmod(positions, self.lanes)
            lengths = size + (lanes < longer)
            # Blocks of a lane start at a random offset; the one before it is shorter.
            same = np.zeros_like(lanes)
            limits = np.minimum(self.buffer, lengths)
            offsets = permute_each(same, limits, make_rng(seed, "streamed, offsets", epoch), lanes)
            blocks = (places - offsets) // self.buffer
            starts = np.maximum(offsets + blocks * self.buffer, 0)
            stops = np.minimum(offsets + (blocks + 1) * self.buffer, lengths)
            mixing = make_rng(seed, "streamed, blocks", epoch)
            places = permute_each(places - starts, stops - starts, mixing, lanes, blocks + 1)
            entries = lanes * size + np.minimum(lanes, longer) + starts + places
            visits = np.searchsorted(ends, entries, side="right")
            tar = tars[visits]
            return firsts[tar] + entries - (ends[visits] - sizes[tar])

        return LazyOrder(table.count, items_at)


@dataclass(frozen=True)
class Sharded(Sampler):
    """The same number of positions for each node, which hold only the node's own items.

    Position p belongs to node p % nodes, so the global batch must be a multiple of `nodes`, and
    process ranks must alternate between the nodes: rank 0 on node 0, rank 1 on node 1, and so on.

    Every node gets as many positions as the largest one has items. Each goes through its own items
    in an endless sequence of permutations, so smaller nodes start their next pass earlier.
    """

    nodes: int = 1
    """number of nodes that hold the data"""
    column: str | None = None
    """attribute with each item's node, from 0; None: tar t of T is on node t * nodes // T"""

    def __post_init__(self) -> None:
        check_counts(self, "nodes")

    def check(self, batch_size: int, world_size: int, nodes: int) -> None:
        """Check that no node needs items of another.

        Args:
            batch_size: Global batch size.
            world_size: Number of processes of the training.
            nodes: Number of nodes of the training.

        Raises:
            GigamaskError: `batch_size` is not a multiple of `self.nodes`, or `self.nodes` not one
                of `nodes`.
        """
        if batch_size % self.nodes:
            raise GigamaskError(
                f"--batch-size must be a multiple of --sampler.nodes {self.nodes} "
                f"(got {batch_size})"
            )
        if self.nodes % nodes:
            raise GigamaskError(
                f"--sampler.nodes must be a multiple of the {nodes} nodes in use (got {self.nodes})"
            )

    def order(self, table: SampleTable, epoch: int, history: LossSnapshot | None) -> Order:
        """Return the order of `epoch`, which is evaluated on demand.

        Args:
            table: Items to sample.
            epoch: Number of the epoch.
            history: Losses so far; None unless the sampler learns from them.
        """
        if self.column is None:
            members, edges = None, self._edges_by_tar(table)
        else:
            members, edges = self._by_column(table, self.column)
        sizes = np.diff(edges)
        if not sizes.all():
            raise GigamaskError(
                f"node {sizes.argmin()} of {self.nodes} has no items; use fewer, or give it a tar"
            )
        # Node n holds `sizes[n]` items from `edges[n]` on: of `members`, or of all items if None.
        longest = int(sizes.max())

        def items_at(positions: Integers) -> Integers:
            turns, nodes = np.divmod(positions, self.nodes)
            indices = epoch * longest + turns
            items = np.empty(len(positions), np.int64)
            for node, where in group_by_label(nodes):
                local = cycle(indices[where], int(sizes[node]), table.seed, "sharded", node)
                items[where] = edges[node] + local
            return items if members is None else members[items]

        return LazyOrder(self.nodes * longest, items_at)

    def _edges_by_tar(self, table: SampleTable) -> Int64[np.ndarray, "edges"]:
        """Return the start of each node's items, followed by the end of the last node's."""
        # Tars without items count too: filters must not move a tar to another node.
        tar = column(table, "tar", self)
        tars = table.tars or (int(tar[-1]) + 1 if table.count else 0)
        return np.searchsorted(tar, -(-np.arange(self.nodes + 1) * tars // self.nodes))

    def _by_column(
        self, table: SampleTable, name: str
    ) -> tuple[Int64[np.ndarray, "count"], Int64[np.ndarray, "edges"]]:
        """Return the items sorted by node, and the start of each node, then the end of the last."""
        values = column(table, name, self)
        invalid = np.flatnonzero(
            (values < 0) | (values >= self.nodes) | (np.floor(values) != values)
        )
        if len(invalid):
            item = invalid[0]
            raise GigamaskError(
                f"column '{name}' must be from 0 to {self.nodes - 1} "
                f"(got {values[item]} at item {item})"
            )
        # Integers of one or two bytes are sorted by radix.
        nodes = values.astype(np.min_scalar_type(self.nodes - 1))
        members = np.argsort(nodes, kind="stable")
        numbers = np.arange(1, self.nodes, dtype=nodes.dtype)
        inner = np.searchsorted(nodes, numbers, sorter=members)
        return members, np.concatenate([[0], inner, [table.count]])


def tar_spans(
    table: SampleTable, sampler: Sampler
) -> tuple[Int64[np.ndarray, "tars"], Int64[np.ndarray, "tars"]]:
    """Return the first item of each tar, and its number of items; empty tars are left out.

    Args:
        table: Items to sample, with the column `tar`.
        sampler: Sampler to name if the column is missing.
    """
    tar = column(table, "tar", sampler)
    edges = np.flatnonzero(tar[1:] != tar[:-1]) + 1
    firsts = np.concatenate([np.zeros(min(1, table.count), np.int64), edges])
    return firsts, np.diff(firsts, append=table.count)
