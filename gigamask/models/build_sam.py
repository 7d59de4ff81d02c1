"""Meta's three SAM models by name, as in its repository's `build_sam.py`."""

from collections.abc import Callable
from pathlib import Path

from gigamask.models import configs
from gigamask.models.init import build_model
from gigamask.models.promptable import PromptableModel


def build_sam_vit_b(checkpoint: str | Path | None = None) -> PromptableModel:
    """Build SAM ViT-B in evaluation mode, from a checkpoint or with random weights."""
    return _build(configs.vit_b(), checkpoint)


def build_sam_vit_l(checkpoint: str | Path | None = None) -> PromptableModel:
    """Build SAM ViT-L in evaluation mode, from a checkpoint or with random weights."""
    return _build(configs.vit_l(), checkpoint)


def build_sam_vit_h(checkpoint: str | Path | None = None) -> PromptableModel:
    """Build SAM ViT-H in evaluation mode, from a checkpoint or with random weights."""
    return _build(configs.vit_h(), checkpoint)


sam_model_registry: dict[str, Callable[[str | Path | None], PromptableModel]] = {
    "default": build_sam_vit_h,
    "vit_h": build_sam_vit_h,
    "vit_l": build_sam_vit_l,
    "vit_b": build_sam_vit_b,
}


def _build(config: configs.SamConfig, checkpoint: str | Path | None) -> PromptableModel:
    if checkpoint is None:
        return build_model(config, seed=0).eval()
    return PromptableModel.from_pretrained(checkpoint, config)


build_sam = build_sam_vit_h
