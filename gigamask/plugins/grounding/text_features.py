"""Tokens and token features of texts, the interface of text models, and a store of computed
features.

Shapes: B texts, T tokens of the longest text, D channels of a feature.
"""

import json
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from gigamask.models.embedding_cache import read_checked, write_checked

SUFFIX = ".words"


@dataclass(frozen=True, eq=False)
class Tokens:
    """Token ids with special tokens, padded at the end."""

    input_ids: Int64[Tensor, "B T"]
    attention_mask: Bool[Tensor, "B T"]

    def to(self, device: torch.device | str) -> "Tokens":
        """Move both tensors to `device`."""
        return Tokens(
            self.input_ids.to(device, non_blocking=True),
            self.attention_mask.to(device, non_blocking=True),
        )


@dataclass(frozen=True, eq=False)
class TextFeatures:
    """Token features in float32; those of padding are undefined."""

    features: Float[Tensor, "B T D"]
    attention_mask: Bool[Tensor, "B T"]

    def to(self, device: torch.device | str) -> "TextFeatures":
        """Move both tensors to `device`."""
        return TextFeatures(
            self.features.to(device, non_blocking=True),
            self.attention_mask.to(device, non_blocking=True),
        )


class TextModel(nn.Module, ABC):
    """Computes token features; a text's features do not depend on the rest of the batch, up to
    rounding."""

    dim: int
    """channels of a feature, D"""
    trainable: bool
    """whether it has trained parameters; features of a frozen model may be stored"""
    dtype: torch.dtype
    """dtype of the computation, in which features can be stored without loss"""

    is_warned = False
    """whether it has been said that texts are cut, or each answer says so"""

    @property
    @abstractmethod
    def digest(self) -> str:
        """Identifier of the function: frozen models with equal digests compute equal features."""

    @abstractmethod
    def tokenize(self, texts: Sequence[str]) -> Tokens:
        """Return the tokens of texts, on the CPU."""

    def cut_note(self, text: str) -> str:
        """Return how much of a text is read; "" if all of it is."""
        return ""

    def warn_cut(self, text: str) -> None:
        """Warn once that a text is cut."""
        if not self.is_warned:
            self.is_warned = True
            warnings.warn(f"a text is cut: {self.cut_note(text)}: {text[:60]!r}", stacklevel=3)

    @abstractmethod
    def forward(self, tokens: Tokens) -> TextFeatures:
        """Return the token features, on the model's device."""


class TextFeatureStore:
    """Computes the features of each text once and keeps them in memory and in one file per model.

    The file has a checksum; a damaged file is recomputed. If several processes write it, the last
    one wins. If the folder cannot be written, a warning is issued.
    """

    def __init__(self, model: TextModel, folder: Path | None = None, batch_size: int = 64) -> None:
        """Load the stored features of a model.

        Args:
            model: A frozen text model.
            folder: Folder of the file; None keeps features in memory only.
            batch_size: Texts per forward pass; texts of similar length are batched together.

        Raises:
            ValueError: The model is trainable.
        """
        if model.trainable:
            raise ValueError("the features of a trainable text model change and cannot be stored")
        self._model, self._batch_size = model, batch_size
        self._path = folder / f"{model.digest}{SUFFIX}" if folder else None
        self._features = self._read()
        self._written = len(self._features)

    def __len__(self) -> int:
        return len(self._features)

    def get(self, texts: Sequence[str]) -> TextFeatures:
        """Return the features of texts on the CPU, padded to the longest text."""
        self.fill(texts)
        features = [self._features[text] for text in texts]
        lengths = torch.tensor(list(map(len, features)), dtype=torch.int64)
        mask = torch.arange(int(lengths.max()) if features else 0) < lengths[:, None]
        if not features:
            return TextFeatures(torch.zeros(0, 0, self._model.dim), mask)
        return TextFeatures(pad_sequence(features, batch_first=True).float(), mask)

    def fill(
        self, texts: Sequence[str], progress: Callable[[int, int], object] | None = None
    ) -> None:
        """Compute and store the features of texts that are not stored yet.

        Args:
            texts: Texts in any order, possibly repeated.
            progress: Called as `progress(done, missing)` after each batch.
        """
        missing = sorted(set(texts) - self._features.keys(), key=lambda text: (len(text), text))
        for start in range(0, len(missing), self._batch_size):
            batch = missing[start : start + self._batch_size]
            with torch.inference_mode():
                output = self._model(self._model.tokenize(batch))
            features = output.features.to(self._model.dtype).cpu()
            masks = output.attention_mask.cpu()
            self._features |= {
                text: feature[mask]
                for text, feature, mask in zip(batch, features, masks, strict=True)
            }
            # Write only when the number has doubled, which bounds the total bytes written by a few
            # times the last write.
            if len(self._features) >= 2 * self._written:
                self._write()
            if progress:
                progress(start + len(batch), len(missing))
        if len(self._features) > self._written:
            self._write()

    def _read(self) -> dict[str, Float[Tensor, "T D"]]:
        try:
            tensors = read_checked(self._path) if self._path else None
        except OSError:
            tensors = None
        if tensors is None:
            return {}
        texts = json.loads(tensors["texts"].numpy().tobytes())
        features = tensors["features"].split(tensors["lengths"].tolist())
        return dict(zip(texts, features, strict=True))

    def _write(self) -> None:
        self._written = len(self._features)
        if self._path is None:
            return
        texts = json.dumps(list(self._features)).encode()
        tensors = {
            "texts": torch.frombuffer(bytearray(texts), dtype=torch.uint8),
            "lengths": torch.tensor(list(map(len, self._features.values()))),
            "features": torch.cat(list(self._features.values())),
        }
        write_checked(self._path, tensors, f"{self._path}: no features")
