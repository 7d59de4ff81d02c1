"""Options of a Hugging Face text model, free of torch so that command-line help stays fast."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from gigamask.errors import GigamaskError


@dataclass(frozen=True)
class HuggingFaceOptions:
    """Location and settings of a Hugging Face text model."""

    name: str = ""
    """a folder, or the id of a model in the local Hugging Face cache"""
    precision: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    """dtype of the weights and of the computation; auto is bf16 on a GPU and fp32 on a CPU"""
    four_bit: bool = False
    """load linear layers as double-quantised 4-bit NormalFloat (QLoRA) with bitsandbytes; needs a
    GPU"""
    layer: int = -1
    """layer whose output is used: 0 is the embeddings, 1 the first block, -1 the last with its
    final norm"""
    max_tokens: int = 64
    """longer texts are truncated to this many tokens, special tokens included"""
    lora_rank: int = 0
    """rank of the trained LoRA adapters (peft); 0 trains none"""
    lora_alpha: int = 16
    """LoRA adapters are scaled by lora_alpha / lora_rank"""
    lora_targets: tuple[str, ...] = ()
    """last names of the linear layers with adapters; empty uses peft's defaults for the
    architecture, mostly query and value projections"""
    recompute: bool = False
    """with adapters: recompute every block in the backward pass (activation checkpointing)"""

    def __post_init__(self) -> None:
        for name, least in (("lora_rank", 0), ("lora_alpha", 1), ("max_tokens", 1)):
            if getattr(self, name) < least:
                raise GigamaskError(f"{name} must be >= {least}, got {getattr(self, name)}")

    @property
    def trainable(self) -> bool:
        """Whether LoRA adapters are trained."""
        return self.lora_rank > 0

    def folder(self) -> Path:
        """Return the model's folder, without using the network.

        Raises:
            GigamaskError: `name` is neither a folder nor a model in the local Hugging Face cache.
        """
        folder = Path(self.name).expanduser()
        if self.name and folder.is_dir():
            return folder
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

        try:
            return Path(snapshot_download(self.name, local_files_only=True))
        except HFValidationError:
            raise GigamaskError(
                f"text model {self.name!r}: no such folder, and not a valid Hugging Face model id"
            ) from None
        except LocalEntryNotFoundError:
            raise GigamaskError(
                f"text model {self.name!r}: no such folder, and not in the Hugging Face cache; "
                f"download it on a machine with a network: hf download {self.name}"
            ) from None
