"""Every item once an epoch, in random order.

In: how many items, an epoch. Out: a permutation.

Not here: cutting orders into batches (`samplers.split`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from gigamask.draws import draw
from gigamask.seams import Sampler

if TYPE_CHECKING:
    import numpy as np
    from jaxtyping import Int64

    from gigamask.seams import Items, Ledger


@dataclass(frozen=True)
class Uniform(Sampler):
    """A permutation per epoch."""

    seed: int = 0
    """names the orders"""

    def order(self, items: Items, epoch: int, ledger: Ledger | None) -> Int64[np.ndarray, "N"]:
        """Returns the permutation of `epoch`."""
        return draw(self.seed, "order", epoch).permutation(items.count)
