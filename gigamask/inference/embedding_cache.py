"""Image embeddings on disk, by the weights and the pixels they were computed from.

Each embedding is a file that starts with its own digest, so that a damaged one is detected, deleted
and computed again. Files appear whole under their names, and once all together exceed the limit,
those used longest ago are deleted; several processes may share a folder. If the folder cannot be
written, a warning says so and nothing is reused.
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
"""A half-written file this old was left by a process that was killed."""
DIGEST_BYTES = 16


@dataclass(frozen=True)
class EmbeddingCache:
    """A folder of embeddings; one of ViT-B, L or H has 4.2 MB."""

    folder: Path
    """folder of the files, made when needed"""
    limit_bytes: int | None = 10 * 10**9
    """delete the embeddings used longest ago above this size; None deletes nothing"""

    def __post_init__(self) -> None:
        if self.limit_bytes is not None and self.limit_bytes < 1:
            raise GigamaskError(
                f"EmbeddingCache.limit_bytes must be at least 1 (got {self.limit_bytes} bytes): "
                "give room for one embedding, or None for no limit"
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
        with contextlib.suppress(OSError):  # deleted meanwhile, or of another user
            os.utime(path)
        return tensors["embedding"]

    def put(self, key: str, embedding: Tensor) -> None:
        """Store an embedding, and delete those used longest ago; warn if it cannot be written.

        Args:
            key: Key as `embedding_key` returns it.
            embedding: Embedding of one image.
        """
        write_checked(
            self._path(key),
            {"embedding": embedding.detach().cpu().contiguous()},
            f"{self.folder}: no embedding",
        )
        if self.limit_bytes is not None:
            self._delete_oldest(self.limit_bytes)

    def _delete_oldest(self, limit: int) -> None:
        """Delete the oldest files above the limit, and what killed processes left.

        Other processes may do the same at the same time.
        """
        files, now = [], time.time()
        with contextlib.suppress(OSError), os.scandir(self.folder) as entries:
            for entry in entries:
                with contextlib.suppress(FileNotFoundError):
                    status = entry.stat()
                    if entry.name.endswith(SUFFIX):
                        files.append((status.st_mtime_ns, status.st_size, entry.path))
                    elif entry.name.endswith(PARTIAL) and now - status.st_mtime > STALE_S:
                        os.unlink(entry.path)
        total = sum(size for _, size, _ in files)
        for _, size, path in sorted(files):
            if total <= limit:
                break
            with contextlib.suppress(OSError):
                os.unlink(path)
            total -= size

    def _path(self, key: str) -> Path:
        return self.folder / f"{key}{SUFFIX}"


def read_checked(path: Path) -> dict[str, Tensor] | None:
    """Return the tensors that `write_checked` wrote, on the CPU; None if the file is damaged."""
    raw = path.read_bytes()
    digest, content = raw[:DIGEST_BYTES], raw[DIGEST_BYTES:]
    return load(content) if _digest(content) == digest else None


def write_checked(path: Path, tensors: dict[str, Tensor], subject: str) -> None:
    """Write tensors into a file that starts with its own digest and appears whole, or warn.

    Args:
        path: File to write; its folder is made when needed.
        tensors: Tensors by name.
        subject: Start of the warning, as in "FOLDER: no embedding".
    """
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
            f"{subject} can be stored ({error.strerror}); free space or give another folder",
            stacklevel=3,
        )


def digest_weights(state: Mapping[str, Tensor], description: str) -> str:
    """Return a digest of weights, byte for byte.

    Args:
        state: Tensors by name.
        description: Whatever else changes the model's output, such as its configuration.
    """
    digest = blake2b(description.encode(), digest_size=DIGEST_BYTES)
    for name, tensor in sorted(state.items()):
        digest.update(f"\0{name} {tensor.dtype} {tuple(tensor.shape)}\0".encode())
        digest.update(_bytes(tensor))
    return digest.hexdigest()


def embedding_key(encoder_digest: str, pixels: Tensor) -> str:
    """Return the key of an embedding.

    Args:
        encoder_digest: Digest of the encoder and of the type it computes in.
        pixels: Resized image that the encoder sees.
    """
    header = f"{encoder_digest} {pixels.dtype} {tuple(pixels.shape)}\0"
    digest = blake2b(header.encode(), digest_size=DIGEST_BYTES)
    digest.update(_bytes(pixels))
    return digest.hexdigest()


def _bytes(tensor: Tensor) -> memoryview:
    return tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data


def _digest(content: bytes) -> bytes:
    return blake2b(content, digest_size=DIGEST_BYTES).digest()
