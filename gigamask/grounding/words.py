"""Texts as a model sees them and as it understands them: `Tokens` enter a `TextModel`, `Words` leave.

Letters in shapes: B texts, T tokens of the longest, D width of a feature.

Not here: models that exist (`grounding.text`), features computed once and kept (`grounding.features`).
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor, nn


@dataclass(frozen=True, eq=False)
class Tokens:
    """Texts cut into numbered pieces, the special ones that a model adds among them; padding, at the end, is not present."""

    ids: Int64[Tensor, "B T"]
    present: Bool[Tensor, "B T"]

    def to(self, device: torch.device | str) -> "Tokens":
        """Moves both tensors."""
        return Tokens(self.ids.to(device, non_blocking=True), self.present.to(device, non_blocking=True))


@dataclass(frozen=True, eq=False)
class Words:
    """What a text model makes of each token, float32; features of what is not present mean nothing."""

    features: Float[Tensor, "B T D"]
    present: Bool[Tensor, "B T"]

    def to(self, device: torch.device | str) -> "Words":
        """Moves both tensors."""
        return Words(self.features.to(device, non_blocking=True), self.present.to(device, non_blocking=True))


class TextModel(nn.Module, ABC):
    """Turns tokens into words. What else stands in a batch changes a text's features by rounding only."""

    dim: int
    """D"""
    learns: bool
    """whether it has parameters of its own to train; else features of a text are always the same, and may be kept"""
    dtype: torch.dtype
    """what features are computed in, and lose nothing when kept in"""

    @property
    @abstractmethod
    def digest(self) -> str:
        """Names what it computes: two models of one digest give the same features, as long as they do not learn."""

    @abstractmethod
    def tokenise(self, texts: Sequence[str]) -> Tokens:
        """Returns the texts' tokens, on the CPU."""

    @abstractmethod
    def forward(self, tokens: Tokens) -> Words:
        """Returns the tokens' features, where the model is."""
