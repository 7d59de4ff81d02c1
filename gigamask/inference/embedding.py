"""Embeddings of resized images, from the cache where it has them, and prompts as the decoder takes them.

Input coordinates are in `predict.transform`, decoding in `model.decoding`.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional

from gigamask.inference.embedding_cache import EmbeddingCache, digest_weights, key
from gigamask.models.sam.sam import Sam


class ImageEmbedder:
    """A model's image encoder, and where its embeddings are kept."""

    def __init__(self, model: Sam, cache: EmbeddingCache | None) -> None:
        self.model, self.cache = model, cache
        self._weights: tuple[tuple, str] = (), ""

    @torch.no_grad()
    def embed(self, resized: Sequence[Tensor]) -> list[Float[Tensor, "1 C E E"]]:
        """Returns the embedding of each image `(1, 3, h, w)` in 0..255; what the cache does not have goes through the encoder together."""
        device, side = self.model.pixel_mean.device, self.model.config.image_size
        if self.cache is None:
            return self._encode(resized, side, device)
        keys = [key(self.weights(), pixels) for pixels in resized]
        found = {each: self.cache.get(each) for each in dict.fromkeys(keys)}
        new = {
            each: pixels for each, pixels in zip(keys, resized, strict=True) if found[each] is None
        }
        if new:
            for each, embedding in zip(
                new, self._encode(list(new.values()), side, device), strict=True
            ):
                found[each] = embedding
                self.cache.put(each, embedding)
        return [embedding.to(device) for each in keys if (embedding := found[each]) is not None]

    def _encode(self, resized: Sequence[Tensor], side: int, device: torch.device) -> list[Tensor]:
        squares = [
            functional.pad(
                pixels.to(device), (0, side - pixels.shape[3], 0, side - pixels.shape[2])
            )
            for pixels in resized
        ]
        sizes = torch.tensor([pixels.shape[2:] for pixels in resized], device=device)
        return list(self.model.encode(torch.cat(squares), sizes).split(1))

    def weights(self) -> str:
        """Returns what names the encoder and how it computes; weights are digested again once they have changed."""
        state = {
            **self.model.image_encoder.state_dict(),
            "mean": self.model.pixel_mean,
            "deviation": self.model.pixel_std,
        }
        versions = tuple((tensor.data_ptr(), tensor._version) for tensor in state.values())
        if versions != self._weights[0]:
            self._weights = (
                versions,
                digest_weights(state, str(replace(self.model.config, drop_path_rate=0.0))),
            )
        kind = self.model.pixel_mean.device.type
        cast = str(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else ""
        return f"{self._weights[1]} {cast}"
