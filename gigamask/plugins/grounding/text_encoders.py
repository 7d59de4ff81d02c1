"""Configurations of text encoders, free of torch so that command-line help stays fast."""

from __future__ import annotations

import importlib.util
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gigamask.errors import GigamaskError, check_range
from gigamask.plugins.grounding.text_options import HuggingFaceOptions

if TYPE_CHECKING:
    import torch

    from gigamask.plugins.grounding.text_features import TextModel


@dataclass(frozen=True)
class TextEncoder(ABC):
    """Interface of a text encoder's configuration."""

    @property
    @abstractmethod
    def trainable(self) -> bool:
        """Whether the text model has parameters that are trained."""

    @abstractmethod
    def build(self, device: torch.device | str = "cpu", seed: int = 0) -> TextModel:
        """Load the text model.

        Args:
            device: Device of the model.
            seed: Seed of the initial values of trained parameters.

        Returns:
            The model in evaluation mode.
        """


@dataclass(frozen=True)
class HuggingFace(HuggingFaceOptions, TextEncoder):
    """Encoder (BERT, T5, CLIP or SigLIP text tower) or causal language model without its head."""

    def build(self, device: torch.device | str = "cpu", seed: int = 0) -> TextModel:
        """Load the model from its files.

        Args:
            device: Device of the model.
            seed: Seed of the LoRA adapters' initial values.

        Returns:
            The model, frozen except for its adapters.

        Raises:
            GigamaskError: A file or a required package is missing, or there is no text model.
        """
        require("transformers", f"text model {self.name!r}", "grounding")
        if self.lora_rank:
            require("peft", f"lora_rank {self.lora_rank}", "grounding")
        if self.four_bit:
            require("bitsandbytes", "four_bit", "quant")
        import torch

        from gigamask.plugins.grounding.text_models import load

        return load(self, self.folder(), torch.device(device), seed)


MINILM = HuggingFace(
    name="sentence-transformers/all-MiniLM-L6-v2",
    revision="1110a243fdf4706b3f48f1d95db1a4f5529b4d41",
    sha256="53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
    precision="fp32",
)
"""A sentence encoder with 22.7 M parameters and 384 channels (Apache-2.0)."""


@dataclass(frozen=True)
class WordTransformer(TextEncoder):
    """Small transformer over words, trained from scratch with the model; needs no download."""

    dim: int = 128
    """width, which is also --model.text-dim"""
    layers: int = 2
    """layers in which words attend to each other"""
    heads: int = 4
    """attention heads; must divide dim"""
    max_tokens: int = 64
    """longer texts are truncated to this many words"""

    def __post_init__(self) -> None:
        for name in ("dim", "layers", "heads", "max_tokens"):
            check_range(name, getattr(self, name), 1)
        if self.dim % self.heads or self.dim % 4:
            raise GigamaskError(
                f"dim must be a multiple of 4 and of heads {self.heads}, got {self.dim}"
            )

    @property
    def trainable(self) -> bool:
        """Always true: the words are learned."""
        return True

    def build(self, device: torch.device | str = "cpu", seed: int = 0) -> TextModel:
        """Build the model with random weights.

        Args:
            device: Device of the model.
            seed: Seed of the weights.
        """
        from gigamask.models.init import materialize
        from gigamask.plugins.grounding.word_model import WordModel

        return materialize(
            lambda: WordModel(self.dim, self.layers, self.heads, self.max_tokens), seed, device
        )


def require(package: str, feature: str, extra: str) -> None:
    """Check that an optional package is installed.

    Args:
        package: Import name of the package.
        feature: What needs it, for the error message.
        extra: The extra of gigamask that installs it.

    Raises:
        GigamaskError: The package is not installed.
    """
    if importlib.util.find_spec(package) is None:
        raise GigamaskError(
            f"{feature} needs {package}, which is not installed; pip install 'gigamask[{extra}]'"
        )
