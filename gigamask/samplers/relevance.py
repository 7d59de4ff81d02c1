"""Equal shares for queries of every kind: fine and coarse answers, simple and relational words, one domain and another, in all combinations.

In: the columns `granularity`, `complexity` and `domain`, which queries have (`grounding.data`), an epoch. Out: an order.
Source: the reference's `RelevanceDiversitySampler` ("Sampling for Relevance Diversity"), which names these three attributes.

Not here: how cells are made and dealt out (`samplers.stratified`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from gigamask.samplers.given import at_least_one
from gigamask.samplers.stratified import balanced, joint
from gigamask.seams import Sampler

if TYPE_CHECKING:
    import numpy as np
    from jaxtyping import Int64, Integer

    from gigamask.seams import Items, Ledger

ATTRIBUTES = ("granularity", "complexity", "domain")


@dataclass(frozen=True)
class RelevanceDiversity(Sampler):
    """Equally many queries an epoch from every joint cell of granularity, complexity and domain that has any, shuffled together."""

    per_cell: int | None = None
    """queries of each cell in an epoch; None: so many that an epoch is about as long as the data"""

    def __post_init__(self) -> None:
        at_least_one("relevance diversity", per_cell=self.per_cell)

    def strata(self, items: Items) -> Integer[np.ndarray, "count"]:
        """Returns each query's cell."""
        return joint(items, ATTRIBUTES, "relevance diversity")[0]

    def order(self, items: Items, epoch: int, ledger: Ledger | None) -> Int64[np.ndarray, "N"]:
        """Returns the order of `epoch`: as many positions as there are cells, times `per_cell`."""
        return balanced(items, ATTRIBUTES, self.per_cell, epoch, "relevance diversity")
