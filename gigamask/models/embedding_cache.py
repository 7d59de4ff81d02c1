"""Image embedding, with a cache on disk that is keyed by weights and pixels.

Each embedding is a file that starts with its own digest, so that a damaged one is detected, deleted
and recomputed. Files are written atomically; once their total size exceeds the limit, the least
recently used are deleted. Several processes may share a folder. If the folder is not writable, a
warning is raised and nothing is cached.
"""

import contextlib
import os
import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from pathlib import Path

import torch
from jaxtyping import Float, Int64, UInt8
from safetensors.torch import load, save
from torch import Tensor
from torch.nn import functional

from gigamask import files
from gigamask.errors import GigamaskError
from gigamask.masks.devices import no_autocast
from gigamask.models.promptable import PromptableModel, warn_of_replaced

SUFFIX = ".embedding"
STALE_S = 3600.0
"""Age in seconds from which a partial file counts as left by a killed process."""
DIGEST_BYTES = 16


@dataclass(frozen=True)
class EmbeddingCache:
    """A folder of embeddings, 4.2 MB each for ViT-B, L and H."""

    folder: Path
    """folder of the files, created when needed"""
    limit_bytes: int | None = 10 * 10**9
    """total size above which the least recently used embeddings are deleted; None deletes
    nothing"""
    half: bool = False
    """store embeddings in float16; they are rounded to it when they are computed, too"""

    def __post_init__(self) -> None:
        object.__setattr__(self, "folder", Path(self.folder))
        if self.limit_bytes is not None and self.limit_bytes < 1:
            raise GigamaskError(
                f"EmbeddingCache.limit_bytes must be at least 1 (got {self.limit_bytes} bytes): "
                "allow room for one embedding, or pass None for no limit"
            )

    def get(self, key: str) -> Tensor | None:
        """Return the embedding of a key, on the CPU; None if it is missing or damaged."""
        path = self._path(key)
        try:
            tensors = read_checked(path)
        except OSError:
            return None
        if tensors is None:
            with contextlib.suppress(OSError):
                path.unlink()
            return None
        with contextlib.suppress(OSError):  # deleted meanwhile, or owned by another user
            os.utime(path)
        return tensors["embedding"]

    def put(self, key: str, embedding: Tensor) -> None:
        """Store an embedding, and delete the least recently used; warn if it cannot be written.

        Args:
            key: Key from `embedding_key`.
            embedding: Embedding of one image.
        """
        write_checked(
            self._path(key),
            {"embedding": self.rounded(embedding.detach()).cpu().contiguous()},
            f"{self.folder}: no embedding",
        )
        if self.limit_bytes is not None:
            self._delete_oldest(self.limit_bytes)

    def rounded(self, embedding: Tensor) -> Tensor:
        """Return an embedding with the values that the cache stores."""
        return embedding.half() if self.half else embedding

    def _delete_oldest(self, limit: int) -> None:
        """Delete the oldest files above the limit, and the leftovers of killed processes.

        Other processes may do the same at the same time.
        """
        found, now = [], time.time()
        with contextlib.suppress(OSError), os.scandir(self.folder) as entries:
            for entry in entries:
                with contextlib.suppress(FileNotFoundError):
                    status = entry.stat()
                    if entry.name.endswith(SUFFIX):
                        found.append((status.st_mtime_ns, status.st_size, entry.path))
                    is_partial = files.is_partial(entry.name, rf".*\{SUFFIX}")
                    if is_partial and now - status.st_mtime > STALE_S:
                        os.unlink(entry.path)
        total = sum(size for _, size, _ in found)
        for _, size, path in sorted(found):
            if total <= limit:
                break
            with contextlib.suppress(OSError):
                os.unlink(path)
            total -= size

    def _path(self, key: str) -> Path:
        return self.folder / f"{key}{SUFFIX}"


def read_checked(path: Path) -> dict[str, Tensor] | None:
    """Read the tensors of `write_checked`, on the CPU; return None for any other file.

    That is one that is damaged, was written under another name, or is a pipe or a device.
    """
    if path.exists() and not path.is_file():
        return None
    raw = path.read_bytes()
    digest, content = raw[:DIGEST_BYTES], raw[DIGEST_BYTES:]
    return load(content) if _digest(path.name, content) == digest else None


def write_checked(path: Path, tensors: dict[str, Tensor], subject: str) -> None:
    """Write tensors atomically to a file that starts with its own digest; warn on failure.

    The digest is that of its name and its content.

    Args:
        path: File to write; its folder is created when needed.
        tensors: Tensors by name.
        subject: Start of the warning, as in "FOLDER: no embedding".
    """
    content = save(tensors)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        files.write_bytes(path, _digest(path.name, content) + content)
    except OSError as error:
        warnings.warn(
            f"{subject} can be stored ({error.strerror}); free space or use another folder",
            stacklevel=3,
        )


def digest_weights(state: Mapping[str, Tensor], description: str) -> str:
    """Return a digest of the bytes of weights.

    Args:
        state: Tensors by name.
        description: Anything else that changes the model's output, such as its configuration.
    """
    digest = blake2b(description.encode(), digest_size=DIGEST_BYTES)
    for name, tensor in sorted(state.items()):
        digest.update(f"\0{name} {tensor.dtype} {tuple(tensor.shape)}\0".encode())
        digest.update(_bytes(tensor))
    return digest.hexdigest()


def embedding_key(encoder_digest: str, pixels: Tensor) -> str:
    """Return the key of an embedding.

    Args:
        encoder_digest: Digest of the encoder and its compute dtype.
        pixels: Resized image that the encoder sees.
    """
    header = f"{encoder_digest} {pixels.dtype} {tuple(pixels.shape)}\0"
    digest = blake2b(header.encode(), digest_size=DIGEST_BYTES)
    digest.update(_bytes(pixels))
    return digest.hexdigest()


def _bytes(tensor: Tensor) -> memoryview:
    return tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data


def _digest(name: str, content: bytes) -> bytes:
    digest = blake2b(f"{name}\0".encode(), digest_size=DIGEST_BYTES)
    digest.update(content)
    return digest.digest()


class ImageEmbedder:
    """Embeds images with a model's encoder.

    Args:
        model: Model whose encoder is used.
        cache: Cache of embeddings; None embeds every image.
        watched: Whether a program may change the model's `Parameter.data`, as peft does when it
            merges, which torch does not count: then each image reads all weights.
    """

    def __init__(
        self, model: PromptableModel, cache: EmbeddingCache | None, watched: bool = True
    ) -> None:
        self.model, self.cache, self.watched = model, cache, watched
        self._versions: tuple = ()
        self._digest = ""

    @torch.no_grad()
    def embed(self, resized: Sequence[Tensor]) -> list[Float[Tensor, "1 C E E"]]:
        """Return the embedding of each image; those not in the cache are encoded in one pass.

        Args:
            resized: Images `(1, 3, h, w)` in 0..255 whose long side is the model's image size.
        """
        warn_of_replaced(self.model, "preprocess", "postprocess_masks")
        if self.cache is None:
            return self._encode(resized)
        kind = self.encoder_digest() + " half" * self.cache.half
        keys = [embedding_key(kind, pixels) for pixels in resized]
        embeddings = {key: self.cache.get(key) for key in dict.fromkeys(keys)}
        missing = {
            key: pixels
            for key, pixels in zip(keys, resized, strict=True)
            if embeddings[key] is None
        }
        if missing:
            encoded = self._encode(list(missing.values()))
            for key, embedding in zip(missing, encoded, strict=True):
                embeddings[key] = self.cache.rounded(embedding)
                self.cache.put(key, embedding)
        wide = self.model.pixel_mean.dtype if self.cache.half else None  # else it is as computed
        found = [embeddings[key] for key in keys]
        return [each.to(self.model.device, wide) for each in found if each is not None]

    def embed_batch(
        self, images: UInt8[Tensor, "B N S S"], input_sizes: Int64[Tensor, "B 2"]
    ) -> Float[Tensor, "B C E E"]:
        """Return the embeddings of a batch of padded images.

        Args:
            images: The channels in 0..255.
            input_sizes: Height and width of each image without padding.
        """
        if self.cache is None:
            return self.model.encode(images, input_sizes)
        pixels = [
            image[None, :, :height, :width]
            for image, (height, width) in zip(images, input_sizes.tolist(), strict=True)
        ]
        embeddings = self.embed(pixels)
        with no_autocast(embeddings[0]):  # a CPU's has no float16 beside bfloat16
            return torch.cat(embeddings)

    def _encode(self, resized: Sequence[Tensor]) -> list[Tensor]:
        device, side = self.model.device, self.model.config.image_size
        squares = [
            functional.pad(
                pixels.to(device), (0, side - pixels.shape[3], 0, side - pixels.shape[2])
            )
            for pixels in resized
        ]
        sizes = torch.tensor([pixels.shape[2:] for pixels in resized], device=device)
        return list(self.model.encode(torch.cat(squares), sizes).split(1))

    def encoder_digest(self) -> str:
        """Return a digest of the weights that make the embedding, and of its compute dtype.

        Weights are digested again only after they have changed.
        """
        decoder = self.model.mask_decoder.state_dict()
        state = {
            **self.model.image_encoder.state_dict(),
            **{n: decoder[n] for n in decoder if n.startswith(self.model.embedding_parts)},
            "mean": self.model.pixel_mean,
            "deviation": self.model.pixel_std,
        }
        floats = [each for each in state.values() if each.is_floating_point()]
        wide = torch.promote_types(floats[0].dtype, torch.float32)
        norms = (
            torch.stack(torch._foreach_norm(floats, dtype=wide)).tolist() if self.watched else ()
        )
        counts = (0 if each.is_inference() else each._version for each in state.values())
        versions = (*norms, *counts, *(each.data_ptr() for each in state.values()))
        if versions != self._versions:
            config = replace(self.model.config, drop_path_rate=0.0)
            self._versions, self._digest = versions, digest_weights(state, str(config))
        device_type = self.model.device.type
        enabled = torch.is_autocast_enabled(device_type)
        return f"{self._digest} {torch.get_autocast_dtype(device_type) if enabled else ''}"
