"""Options of a Hugging Face text model, free of torch so that command-line help stays fast."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

from gigamask.errors import GigamaskError, check_range, first_line

DOWNLOADED = ("*.json", "*.jinja", "*.model", "*.safetensors", "*.txt")
"""Files of a model that are downloaded: configuration, tokenizer and weights."""


@dataclass(frozen=True)
class HuggingFaceOptions:
    """Location and settings of a Hugging Face text model."""

    name: str = ""
    """a folder, or the id of a model of the Hugging Face Hub, downloaded unless it is cached"""
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
    revision: str = ""
    """commit hash of the model on the Hub; required with an id"""
    sha256: str = ""
    """SHA-256 of the weights (*.safetensors in the order of their names); empty checks nothing"""

    def __post_init__(self) -> None:
        for name, least in (("lora_rank", 0), ("lora_alpha", 1), ("max_tokens", 1)):
            check_range(name, getattr(self, name), least)

    @property
    def trainable(self) -> bool:
        """Whether LoRA adapters are trained."""
        return self.lora_rank > 0

    def folder(self) -> Path:
        """Return the model's folder; a model of the Hub is downloaded unless it is cached.

        Raises:
            GigamaskError: There is no such model, or its weights have another SHA-256.
        """
        folder = Path(self.name).expanduser()
        if not (self.name and folder.is_dir()):
            folder = self._hub_folder()
        if self.sha256 and (found := _sha256(folder)) != self.sha256:
            raise GigamaskError(
                f"text model {self.name!r}: the weights in {folder} have the SHA-256 {found}, not "
                f"{self.sha256}; download them again, or pass --text.sha256 {found}"
            )
        return folder

    def _hub_folder(self) -> Path:
        if not re.fullmatch(r"[\w.-]+/[\w.-]+", self.name):
            raise GigamaskError(
                f"text model {self.name!r}: no such folder, and not an id of the Hugging Face Hub; "
                "pass --text.name FOLDER"
            )
        if not re.fullmatch(r"[0-9a-f]{40}", self.revision):
            raise GigamaskError(
                f"text model {self.name!r}: no such folder; a model of the Hugging Face Hub needs "
                f"--text.revision, a commit hash of 40 digits (got {self.revision!r}), from "
                f"https://huggingface.co/{self.name}/commits/main"
            )
        return _download(self.name, self.revision)


def _sha256(folder: Path) -> str:
    """Return the SHA-256 of the weights in a folder, concatenated in the order of their names."""
    digest = hashlib.sha256()
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb") as file:
            hashlib.file_digest(file, lambda: digest)
    return digest.hexdigest()


def _download(hub_id: str, revision: str) -> Path:
    """Return the folder of a model of the Hugging Face Hub, which is asked unless it is cached."""
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    get = partial(snapshot_download, hub_id, revision=revision, allow_patterns=DOWNLOADED)
    try:
        return Path(get(local_files_only=True))
    except LocalEntryNotFoundError:
        pass
    try:
        HfApi().model_info(hub_id, revision=revision)  # fails at once without a network
        return Path(get())
    except Exception as error:  # of the Hub's client or of the HTTP library
        raise GigamaskError(
            f"text model {hub_id}: no such folder, and it cannot be downloaded "
            f"({type(error).__name__}: {first_line(error)}); download it on a machine with a "
            f"network (hf download {hub_id} --revision {revision}), or pass --text.name FOLDER"
        ) from None
