"""Embeddings of resized images, read from the cache where it has them."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional

from gigamask.inference.embedding_cache import EmbeddingCache, digest_weights, embedding_key
from gigamask.models.sam.sam import Sam


class ImageEmbedder:
    """Embeds images with a model's encoder.

    Args:
        model: Model whose encoder is used.
        cache: Stores the embeddings; None embeds every image.
    """

    def __init__(self, model: Sam, cache: EmbeddingCache | None) -> None:
        self.model, self.cache = model, cache
        self._versions: tuple = ()
        self._digest = ""

    @torch.no_grad()
    def embed(self, resized: Sequence[Tensor]) -> list[Float[Tensor, "1 C E E"]]:
        """Return the embedding of each image; those not in the cache are encoded in one pass.

        Args:
            resized: Images `(1, 3, h, w)` in 0..255 whose long side is the model's image size.
        """
        if self.cache is None:
            return self._encode(resized)
        keys = [embedding_key(self.encoder_digest(), pixels) for pixels in resized]
        embeddings = {key: self.cache.get(key) for key in dict.fromkeys(keys)}
        missing = {
            key: pixels
            for key, pixels in zip(keys, resized, strict=True)
            if embeddings[key] is None
        }
        if missing:
            encoded = self._encode(list(missing.values()))
            for key, embedding in zip(missing, encoded, strict=True):
                embeddings[key] = embedding
                self.cache.put(key, embedding)
        device = self.model.pixel_mean.device
        return [embedding.to(device) for key in keys if (embedding := embeddings[key]) is not None]

    def _encode(self, resized: Sequence[Tensor]) -> list[Tensor]:
        device, side = self.model.pixel_mean.device, self.model.config.image_size
        squares = [
            functional.pad(
                pixels.to(device), (0, side - pixels.shape[3], 0, side - pixels.shape[2])
            )
            for pixels in resized
        ]
        sizes = torch.tensor([pixels.shape[2:] for pixels in resized], device=device)
        return list(self.model.encode(torch.cat(squares), sizes).split(1))

    def encoder_digest(self) -> str:
        """Return a digest of the encoder's weights and of the type it computes in.

        Weights are digested again only after they have changed.
        """
        state = {
            **self.model.image_encoder.state_dict(),
            "mean": self.model.pixel_mean,
            "deviation": self.model.pixel_std,
        }
        versions = tuple((tensor.data_ptr(), tensor._version) for tensor in state.values())
        if versions != self._versions:
            config = replace(self.model.config, drop_path_rate=0.0)
            self._versions, self._digest = versions, digest_weights(state, str(config))
        device_type = self.model.pixel_mean.device.type
        dtype = ""
        if torch.is_autocast_enabled(device_type):
            dtype = str(torch.get_autocast_dtype(device_type))
        return f"{self._digest} {dtype}"
