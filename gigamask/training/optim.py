"""Optimizers: parameter groups (weight decay, layer-wise learning-rate decay), AdamW, 8-bit AdamW and Muon over them.

Imports torch only where an optimizer is built, so that recipes can hold the values.

Not here: schedules (`train.schedule`), clipping and the update itself (`train.step`).
"""

from __future__ import annotations

import importlib.util
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from gigamask.errors import GigamaskError, check_range
from gigamask.interfaces import Optimizer

if TYPE_CHECKING:
    import torch
    from torch import nn

# Official names of what is a position or a token; biases and norms are the parameters of one dimension.
_NO_DECAY = re.compile(
    r"pos_embed|rel_pos|_token|mask_tokens|point_embeddings|not_a_point_embed|no_mask_embed"
)
BELOW_ONE = 0.999999999
"""The longest memory of a running mean: with 1 nothing would ever come into it."""


@dataclass(frozen=True)
class AdamW(Optimizer):
    """AdamW (Loshchilov and Hutter 2019) with layer-wise learning-rate decay over the encoder (BEiT; ViTDet's numbering)."""

    lr: float = 8e-4
    """peak learning rate; also --lr"""
    betas: tuple[float, float] = (0.9, 0.999)
    weight_decay: float = 0.1
    """decoupled; not applied to biases, norms, positions and tokens"""
    layer_decay: float = 1.0
    """factor from one encoder block to the one before it; 1 is off"""
    encoder_lr_scale: float = 1.0
    """factor of the image encoder's learning rate"""
    supports_sharding: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_positive("layer_decay", self.layer_decay)
        check_range("encoder_factor", self.encoder_lr_scale, 0, None)
        check_range("weight_decay", self.weight_decay, 0, None)
        for beta in self.betas:
            check_range("betas", beta, 0, BELOW_ONE)

    def build(self, model: nn.Module) -> list[torch.optim.Optimizer]:
        """Returns a fused AdamW whose groups carry `lr_scale`, what the scheduled learning rate is multiplied by."""
        import torch

        groups = self._groups(model, dict(model.named_parameters()))
        return (
            [torch.optim.AdamW(groups, lr=self.lr, betas=self.betas, fused=True)] if groups else []
        )

    def _groups(
        self, model: nn.Module, members: dict[str, nn.Parameter], factor: float = 1.0
    ) -> list[dict]:
        """Returns the trainable ones of `members` in groups of equal learning rate and decay, those that are shared out apart."""
        from gigamask.distributed.fsdp import is_sharded_tensor

        groups: dict[tuple[float, float, bool], list[nn.Parameter]] = {}
        blocks = getattr(model, "encoder_blocks", [])
        depth, layers = 1 + len(blocks), layers_of(model, blocks)
        for name, parameter in members.items():
            if parameter.requires_grad:
                scale = factor * self.layer_decay ** (depth - layers[name])
                if name.startswith("image_encoder."):
                    scale *= self.encoder_lr_scale
                decay = self.weight_decay if decays(name, parameter.ndim) else 0.0
                groups.setdefault((scale, decay, is_sharded_tensor(parameter)), []).append(
                    parameter
                )
        return [
            {"params": group, "lr_scale": scale, "weight_decay": decay}
            for (scale, decay, _), group in groups.items()
        ]


@dataclass(frozen=True)
class AdamW8bit(AdamW):
    """AdamW that keeps its two moments in 8 bits, in blocks with a scale of their own (Dettmers et al. 2022): 2 bytes a parameter instead of 8.

    Tensors of less than 4,096 elements keep theirs in float32. From bitsandbytes, the extra `quant`.
    """

    supports_sharding: ClassVar[bool] = False

    def build(self, model: nn.Module) -> list[torch.optim.Optimizer]:
        """Returns bitsandbytes' AdamW8bit over the same groups."""
        if importlib.util.find_spec("bitsandbytes") is None:
            raise GigamaskError(
                "--optimizer adamw8bit wants bitsandbytes, which is not installed; run pip install 'gigamask[quant]', or give adamw"
            )
        import bitsandbytes

        groups = self._groups(model, dict(model.named_parameters()))
        return (
            [bitsandbytes.optim.AdamW8bit(groups, lr=self.lr, betas=self.betas)] if groups else []
        )

    def state_bytes(self, numel: int) -> int:
        """Returns the bytes kept of a parameter: with 8 bits a float32 scale for every 256 elements."""
        return 8 * numel if numel < 4096 else 2 * (numel + 4 * math.ceil(numel / 256))


@dataclass(frozen=True)
class MuonAdamW(AdamW):
    """Muon for the matrices of linear layers, AdamW for all else: the same score in about half the steps on small models (docs/measurements.md)."""

    muon_lr: float = 0.02
    """peak learning rate of the matrices; the schedule and the layer decay apply to it as well"""
    momentum: float = 0.95
    """Muon's momentum"""
    supports_sharding: ClassVar[bool] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_positive("lr", self.lr)  # the scale of Muon's rate is a ratio to it
        _check_positive("muon_lr", self.muon_lr)
        check_range("momentum", self.momentum, 0, BELOW_ONE)

    def build(self, model: nn.Module) -> list[torch.optim.Optimizer]:
        """Returns Muon over the matrices that decay, and AdamW over the rest."""
        import torch

        from gigamask.training.muon import Muon

        matrices = {
            name: p for name, p in model.named_parameters() if p.ndim == 2 and decays(name, p.ndim)
        }
        others = {name: p for name, p in model.named_parameters() if name not in matrices}
        by_muon, by_adam = (
            self._groups(model, matrices, self.muon_lr / self.lr),
            self._groups(model, others),
        )
        return [
            *([Muon(by_muon, self.muon_lr, self.momentum)] if by_muon else []),
            *(
                [torch.optim.AdamW(by_adam, lr=self.lr, betas=self.betas, fused=True)]
                if by_adam
                else []
            ),
        ]


def _check_positive(name: str, value: int | float) -> None:
    """Raises `GigamaskError` unless a number is above 0."""
    if not 0 < value < math.inf:
        raise GigamaskError(f"{name} is {value}, it must be above 0; give another value")


def decays(name: str, ndim: int) -> bool:
    """Tells whether weight decay applies: to matrices and kernels, not to biases, norms, positions, relative positions and tokens."""
    return ndim > 1 and not _NO_DECAY.search(name)


def layers_of(model: nn.Module, blocks: Sequence[nn.Module]) -> dict[str, int]:
    """Return every parameter's depth: 0 for patch embedding and positions, i + 1 for encoder block i.

    All else, the neck included, is one deeper than the last block, as in detectron2's ViTDet, whose
    numbers SAM's recipe matches.
    """
    of_block = {id(p): index + 1 for index, block in enumerate(blocks) for p in block.parameters()}
    stem = ("image_encoder.patch_embed", "image_encoder.pos_embed")
    return {
        name: of_block.get(id(parameter), 0 if name.startswith(stem) else len(blocks) + 1)
        for name, parameter in model.named_parameters()
    }
