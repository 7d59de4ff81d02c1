"""What samplers draw of an index: a sampler's name, an epoch and a position enter, images leave; or what a whole epoch visits.

Not here: the images (`serve.shelf`), the orders (`samplers`), what is counted of them (`prepare.sampler_stats`).
"""

from functools import lru_cache
from typing import Any

import numpy as np

from gigamask import names
from gigamask.data.choose import Filters
from gigamask.data.index import Index
from gigamask.data.items import Catalogue, open_items
from gigamask.prepare import sampler_stats
from gigamask.seams import Ledger, Sampler
from gigamask.serve.shelf import MOST_ROWS, told
from gigamask.serve.studio import Unknown

KEPT_ORDERS = 4
ITEMS_A_PIECE, LEAST_PIECES, MOST_PIECES = 12, 5, 50
"""Of what an epoch visits: pieces of fewer items would jump."""


class Orders:
    """The orders of samplers over one index, their fields at their defaults, before any loss is known; the last few are kept."""

    def __init__(self, index: Index) -> None:
        self.index = index
        self._order = lru_cache(KEPT_ORDERS)(self._ordered)

    def drawn(self, sampler: str, epoch: int, position: int, count: int, seed: int) -> dict[str, Any]:
        """Returns the images that a sampler visits from a position of an epoch on."""
        rows = self._order(sampler, epoch, seed)
        position = max(0, min(position, len(rows) - 1))
        images = [told(self.index, int(row)) for row in rows[position : position + min(count, MOST_ROWS)]]
        return {"positions": len(rows), "position": position, "images": images}

    def exposed(self, sampler: str, seed: int) -> dict[str, Any]:
        """Returns what one epoch of a sampler visits, in pieces, beside what the data hold."""
        items = self._catalogue(seed).items
        return sampler_stats.describe(items, _part(sampler), pieces=min(max(items.count // ITEMS_A_PIECE, LEAST_PIECES), MOST_PIECES))

    def _catalogue(self, seed: int) -> Catalogue:
        return open_items(self.index, Filters(), "image", None, seed)

    def _ordered(self, sampler: str, epoch: int, seed: int) -> np.ndarray:
        """Returns the rows of one epoch."""
        part, catalogue = _part(sampler), self._catalogue(seed)
        order = part.order(catalogue.items, epoch, Ledger.empty(catalogue.items.count) if part.decay is not None else None)
        return catalogue.locate(np.asarray(order[np.arange(len(order))], np.int64))[0]


def _part(sampler: str) -> Sampler:
    """Returns a sampler of ours by its name; a file of one's own is not loaded because a page says so."""
    if sampler not in names.SEAMS["sampler"][1]:
        raise Unknown(f"no sampler is called {sampler!r}")
    return names.make("sampler", sampler)
