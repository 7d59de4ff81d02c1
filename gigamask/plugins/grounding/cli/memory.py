"""`gigamask ground memory`: memory of grounding training with a language model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True)
class GroundMemoryCommand:
    """plan the memory of grounding training with a language model, part by part"""

    vision: Literal["vit_b", "vit_l", "vit_h", "none"] = "vit_h"
    """frozen image encoder; none: embeddings are read from disk"""
    language: str = "7b"
    """language model: 7b (Llama 2's shapes), or the folder of a Hugging Face model, of which only
    config.json is read"""
    rank: int = 16
    """LoRA rank of the language model's adapters; 0 freezes the language model"""
    four_bit: bool = True
    """store the language model's linear layers in 4 bits"""
    precision: Literal["bf16", "fp16", "fp32"] = "bf16"
    """number format of the encoders; the grounding model and the adapters are float32"""
    recompute: bool = True
    """recompute the language model's blocks in the backward pass (activation checkpointing)"""
    optimizer: Literal["adamw", "adamw8bit"] = "adamw"
    """optimizer: 8 (adamw) or 2 (adamw8bit) bytes of state per trained parameter"""
    images: int = 1
    """images per batch"""
    queries: int = 1
    """texts per image"""
    tokens: int = 64
    """tokens per text"""
    masks: int = 16
    """masks per image, in float16 at the encoder's image size"""
    dim: int = 128
    """width of the grounding model, as --model.dim of 'gigamask ground train'"""
    layers: int = 3
    """layers of the grounding model, as --model.layers of 'gigamask ground train'"""
    spare_gib: float = 1.5
    """GiB of a GPU to keep free, as in 'gigamask plan'"""
    json: str | None = None
    """write the results to this JSON file"""

    def run(self) -> dict[str, Any]:
        """Compute, print and return the memory."""
        from gigamask.models import configs
        from gigamask.plugins.grounding import memory
        from gigamask.plugins.grounding.model_config import GroundingModelConfig
        from gigamask.plugins.grounding.text_encoders import HuggingFace
        from gigamask.training.optim import AdamW, AdamW8bit

        text = HuggingFace(
            self.language,
            self.precision,
            self.four_bit,
            max_tokens=self.tokens,
            lora_rank=self.rank,
            recompute=self.recompute and self.rank > 0,
        )
        setup = memory.GroundingSetup(
            text,
            None if self.vision == "none" else getattr(configs, self.vision)(),
            self.images,
            self.queries,
            self.masks,
            GroundingModelConfig(dim=self.dim, layers=self.layers),
            AdamW() if self.optimizer == "adamw" else AdamW8bit(),
        )
        result = memory.plan(setup, self.spare_gib)
        print(memory.table(result))
        return {"vision": self.vision, "language": self.language} | result
