"""Each node (machine) visits only what lies on it: for data that is dealt out to the nodes' own disks.

In: the items' `tar` column, which is ascending, or a column that names nodes, and an epoch. Out: an order in which position p is node p % nodes'.
It needs a global batch that is a multiple of the nodes, and processes that are numbered across the nodes first: process 0 on node 0, 1 on node 1...
Since rank r takes every so-manieth position from the r-th on, each rank then meets items of its own node only.

All nodes get as many positions as the one with the most items. Each goes through its own items in an endless sequence of permutations, of which
the others have begun a further one by then; over epochs every item of a node is visited equally often.

Not here: which process runs where (`parallel.world`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from gigamask.faults import Fault
from gigamask.samplers.given import at_least_one, column
from gigamask.samplers.lazy import alike, cycle
from gigamask.seams import Sampler

if TYPE_CHECKING:
    from jaxtyping import Int64

    from gigamask.seams import Items, Ledger, Order


@dataclass(frozen=True)
class Sharded(Sampler):
    """Equally many positions for each node, and only its own items there."""

    nodes: int = 1
    """machines that hold a share of the data each"""
    column: str | None = None
    """items' attribute that says which node, from 0 on, holds them; None: of the index's T tars, the t-th (from 0) lies on node t * nodes // T"""

    def __post_init__(self) -> None:
        at_least_one("sharded", nodes=self.nodes)

    def check(self, batch: int, processes: int, nodes: int) -> None:
        """Raises `Fault` where a machine would be asked for items of others'."""
        if batch % self.nodes:
            raise Fault(f"--batch is {batch}, the sharded order of {self.nodes} nodes needs a multiple of that; change --batch, or --sampler.nodes")
        if self.nodes % nodes:
            raise Fault(f"--sampler.nodes is {self.nodes}, training runs on {nodes} machines; give a multiple of that, or all data to each of them")

    def order(self, items: Items, epoch: int, ledger: Ledger | None) -> Order:
        """Returns the order of `epoch`, which is worked out position by position."""
        members, edges = self._by_tars(items) if self.column is None else self._by_column(items, self.column)
        sizes = np.diff(edges)
        if not sizes.all():
            raise Fault(f"node {sizes.argmin()} of {self.nodes} has no items, each must have some; train on fewer nodes, or give it a tar")
        return _Dealt(members, edges[:-1], sizes, items.seed, epoch)

    def _by_tars(self, items: Items) -> tuple[None, Int64[np.ndarray, "edges"]]:
        # Tars without items count, too: which tar lies where must not depend on the filters.
        tar = column(items, "tar", "sharded")
        tars = items.tars or (int(tar[-1]) + 1 if items.count else 0)
        return None, np.searchsorted(tar, -(-np.arange(self.nodes + 1) * tars // self.nodes))

    def _by_column(self, items: Items, name: str) -> tuple[Int64[np.ndarray, "count"], Int64[np.ndarray, "edges"]]:
        values = column(items, name, "sharded")
        odd = np.flatnonzero((values < 0) | (values >= self.nodes) | (np.floor(values) != values))
        if len(odd):
            raise Fault(
                f"column '{name}': item {odd[0]} lies on node {values[odd[0]]}, nodes are 0 to {self.nodes - 1}; mend it, or change the nodes"
            )
        # Numbers of one byte or two are sorted by radix.
        nodes = values.astype(np.min_scalar_type(self.nodes - 1))
        members = np.argsort(nodes, kind="stable")
        inner = np.searchsorted(nodes, np.arange(1, self.nodes, dtype=nodes.dtype), sorter=members)
        return members, np.concatenate([[0], inner, [items.count]])


@dataclass(frozen=True, eq=False)
class _Dealt:
    """The order of one epoch; a node's items are `sizes` from `firsts` on, in `members` where they do not lie together."""

    members: Int64[np.ndarray, "count"] | None
    firsts: Int64[np.ndarray, "nodes"]
    sizes: Int64[np.ndarray, "nodes"]
    seed: int
    epoch: int

    def __len__(self) -> int:
        return len(self.sizes) * int(self.sizes.max())

    def __getitem__(self, positions: Int64[np.ndarray, "n"]) -> Int64[np.ndarray, "n"]:
        turns, nodes = np.divmod(positions, len(self.sizes))
        numbers = self.epoch * int(self.sizes.max()) + turns
        found = np.empty(len(positions), np.int64)
        for node, there in alike(nodes):
            found[there] = self.firsts[node] + cycle(numbers[there], int(self.sizes[node]), self.seed, "sharded", node)
        return found if self.members is None else self.members[found]
