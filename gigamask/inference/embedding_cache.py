"""Embeddings kept on disk: what an encoder saw and its weights make a key, and the embedding that is kept under it leaves.

One file an embedding, which begins with its own digest, so that a damaged one is noticed, dropped and computed anew. Files appear whole under
their names, and what is used last goes last once all together pass the limit; several processes may share a folder. A folder that cannot be
written costs nothing but the reuse, and a warning.

Not here: what is embedded (`predict.embedding`), what else is kept so (`grounding.mask_features`, `grounding.text_features`).
"""

import contextlib
import os
import tempfile
import time
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

import torch
from safetensors.torch import load, save
from torch import Tensor

from gigamask.errors import GigamaskError

SUFFIX, PARTIAL = ".embedding", ".partial"
STALE_S = 3600.0
"""A file half-written for this long was left by a process that was killed."""
DIGEST_BYTES = 16


@dataclass(frozen=True)
class EmbeddingCache:
    """A folder of at most `limit_bytes` of embeddings; ViT-B's, L's and H's have 4.2 MB each. Without a limit nothing is ever removed."""

    folder: Path
    limit_bytes: int | None = 10 * 10**9

    def __post_init__(self) -> None:
        if self.limit_bytes is not None and self.limit_bytes < 1:
            raise GigamaskError(
                f"an embedding cache of {self.limit_bytes} bytes holds nothing; give at least the bytes of one embedding, or no cache"
            )

    def get(self, key: str) -> Tensor | None:
        """Returns the embedding of that key, on the CPU; None where there is none, or a damaged one, which is dropped."""
        path = self._path(key)
        try:
            held = read_checked(path)
        except OSError:
            return None
        if held is None:
            with contextlib.suppress(OSError):
                path.unlink()
            return None
        with contextlib.suppress(OSError):  # gone meanwhile, or not ours to touch
            os.utime(path)
        return held["embedding"]

    def put(self, key: str, embedding: Tensor) -> None:
        """Keeps an embedding, and lets go of those that were used longest ago; warns where it cannot be written."""
        write_checked(
            self._path(key),
            {"embedding": embedding.detach().cpu().contiguous()},
            f"{self.folder}: no embedding",
        )
        if self.limit_bytes is not None:
            self._make_room(self.limit_bytes)

    def _make_room(self, limit: int) -> None:
        """Removes what is oldest above the limit, and what killed processes left; other processes may do the same at the same time."""
        held, now = [], time.time()
        with contextlib.suppress(OSError), os.scandir(self.folder) as entries:
            for entry in entries:
                with contextlib.suppress(FileNotFoundError):
                    status = entry.stat()
                    if entry.name.endswith(SUFFIX):
                        held.append((status.st_mtime_ns, status.st_size, entry.path))
                    elif entry.name.endswith(PARTIAL) and now - status.st_mtime > STALE_S:
                        os.unlink(entry.path)
        total = sum(size for _, size, _ in held)
        for _, size, path in sorted(held):
            if total <= limit:
                break
            with contextlib.suppress(OSError):
                os.unlink(path)
            total -= size

    def _path(self, key: str) -> Path:
        return self.folder / f"{key}{SUFFIX}"


def read_checked(path: Path) -> dict[str, Tensor] | None:
    """Returns what `write_sealed` wrote, on the CPU; None where it is damaged."""
    raw = path.read_bytes()
    told, content = raw[:DIGEST_BYTES], raw[DIGEST_BYTES:]
    return load(content) if _digest(content) == told else None


def write_checked(path: Path, tensors: dict[str, Tensor], lost: str) -> None:
    """Writes tensors into a file that begins with its own digest and appears whole; warns, where it cannot be written, that what is `lost` cannot be
    kept there."""
    content = save(tensors)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor, partial = tempfile.mkstemp(PARTIAL, f".{path.stem}.", path.parent)
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(_digest(content) + content)
            os.replace(partial, path)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(partial)
            raise
    except OSError as error:
        warnings.warn(
            f"{lost} can be kept there ({error.strerror}); free space or give another folder",
            stacklevel=3,
        )


def digest_weights(state: Mapping[str, Tensor], about: str) -> str:
    """Returns what names an encoder: its tensors, byte for byte, and `about`, which says what shapes do not."""
    told = blake2b(about.encode(), digest_size=DIGEST_BYTES)
    for name, tensor in sorted(state.items()):
        told.update(f"\0{name} {tensor.dtype} {tuple(tensor.shape)}\0".encode())
        told.update(_bytes(tensor))
    return told.hexdigest()


def key(weights: str, pixels: Tensor) -> str:
    """Returns what one embedding is kept under: the name of the encoder and of how it computed, and the pixels it saw."""
    told = blake2b(
        f"{weights} {pixels.dtype} {tuple(pixels.shape)}\0".encode(), digest_size=DIGEST_BYTES
    )
    told.update(_bytes(pixels))
    return told.hexdigest()


def _bytes(tensor: Tensor) -> memoryview:
    return tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data


def _digest(content: bytes) -> bytes:
    return blake2b(content, digest_size=DIGEST_BYTES).digest()
