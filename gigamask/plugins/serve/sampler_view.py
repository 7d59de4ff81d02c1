"""What samplers draw from an index: images at a position of an epoch, and statistics of an epoch.

The images come from `dataset_view`, the orders from `samplers`, and the statistics from
`datatools.sampler_stats`.
"""

from functools import lru_cache

import numpy as np

from gigamask import registry
from gigamask.data.index import Index
from gigamask.data.mask_sampling import MaskFilters
from gigamask.data.sample_table import IndexSamples, open_sample_table
from gigamask.datatools import sampler_stats
from gigamask.interfaces import LossSnapshot, Sampler
from gigamask.plugins.serve.dataset_view import MAX_ROWS, image_to_json
from gigamask.plugins.serve.open_images import Json, NotFoundError
from gigamask.samplers.batch_sampler import items_at, order_of

CACHED_ORDERS = 4
ITEMS_PER_CHUNK, MIN_CHUNKS, MAX_CHUNKS = 12, 5, 50
"""An epoch's statistics are computed chunk by chunk; smaller chunks would be noisy."""


class SamplerView:
    """Orders of samplers over one index, with default parameters and an empty loss history."""

    def __init__(self, index: Index) -> None:
        self.index = index
        self._order = lru_cache(CACHED_ORDERS)(self._make_order)

    def images(self, sampler: str, epoch: int, position: int, count: int, seed: int) -> Json:
        """Return the images that a sampler draws.

        Args:
            sampler: Name of the sampler.
            epoch: Number of the epoch.
            position: Start position in the epoch, clipped to its length.
            count: Number of images, at most `MAX_ROWS`.
            seed: Random seed.
        """
        rows = self._order(sampler, epoch, seed)
        position = max(0, min(position, len(rows) - 1))
        chosen = rows[position : position + min(count, MAX_ROWS)]
        images = [image_to_json(self.index, int(row)) for row in chosen]
        return {"positions": len(rows), "position": position, "images": images}

    def statistics(self, sampler: str, seed: int) -> Json:
        """Return statistics of one epoch, chunk by chunk, and of the whole index.

        Args:
            sampler: Name of the sampler.
            seed: Random seed.
        """
        items = self._catalogue(seed).items
        chunks = min(max(items.count // ITEMS_PER_CHUNK, MIN_CHUNKS), MAX_CHUNKS)
        return sampler_stats.describe(items, _make_sampler(sampler), pieces=chunks)

    def _catalogue(self, seed: int) -> IndexSamples:
        return open_sample_table(self.index, MaskFilters(), "image", None, seed)

    def _make_order(self, name: str, epoch: int, seed: int) -> np.ndarray:
        """Return the rows of one epoch."""
        sampler, catalogue = _make_sampler(name), self._catalogue(seed)
        history = LossSnapshot.empty(catalogue.items.count) if sampler.decay is not None else None
        order = order_of(sampler, catalogue.items, epoch, history)
        items = items_at(order, np.arange(len(order)), sampler, catalogue.items)
        return catalogue.locate(items)[0]


def _make_sampler(name: str) -> Sampler:
    """Return a built-in sampler; a browser must not be able to load Python files."""
    if name not in registry.names("sampler"):
        raise NotFoundError(f"no sampler is called {name!r}")
    return registry.make_component("sampler", name)
