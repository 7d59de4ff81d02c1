"""Embeddings of a frozen image encoder, kept for every later visit of an image."""

from pathlib import Path

import torch
from jaxtyping import Float
from torch import Tensor

from gigamask.distributed.precision import Precision, autocast
from gigamask.distributed.profile_ranges import profile_range
from gigamask.models.embedding_cache import EmbeddingCache, ImageEmbedder
from gigamask.models.promptable import PromptableModel
from gigamask.types import Batch


class FrozenEncoder:
    """Embeds images with a frozen encoder, and keeps the embeddings in a cache.

    Args:
        folder: Folder of the cache.
    """

    def __init__(self, folder: Path) -> None:
        self._cache = EmbeddingCache(folder, limit_bytes=None, half=True)
        self._embedder: ImageEmbedder | None = None

    def __call__(
        self, model: PromptableModel, batch: Batch, precision: Precision
    ) -> Float[Tensor, "B C E E"]:
        """Return the embeddings of a batch's images.

        Args:
            model: The model.
            batch: The batch.
            precision: Precision of the model.
        """
        if self._embedder is None or self._embedder.model is not model:
            self._embedder = ImageEmbedder(model, self._cache, watched=False)
        with profile_range("encode"), torch.no_grad(), autocast(precision, batch.images.device):
            return self._embedder.embed_batch(batch.images, batch.input_sizes)
