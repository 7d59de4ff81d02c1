"""Optimizers with weight decay and layer-wise learning-rate decay: AdamW, 8-bit AdamW and Muon;
and learning-rate schedules, pure functions of the step, so that checkpoints need not store them.

Imports torch only to build an optimizer, so that recipes need no torch.
"""

from __future__ import annotations

import importlib.util
import math
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, Self

from gigamask.errors import GigamaskError, check_positive, check_range
from gigamask.interfaces import LRSchedule, Optimizer
from gigamask.models.lora_config import LoRA

if TYPE_CHECKING:
    import torch
    from torch import nn

    from gigamask.models.model import Model

# Position embeddings and tokens, by their official names; biases and norms have one dimension.
_NO_DECAY = re.compile(
    r"pos_embed|position_embed|position_bias|rel_pos|_tokens?(\.weight)?$|point_embeddings"
    r"|not_a_point_embed|no_mask_embed|no_mem_embed"
)
# The decoder's attention between tokens and image, which learns less with Muon (docs/log.md).
_NO_MUON = re.compile(r"_attn_(token_to_image|image_to_token)\.")
# What precedes the blocks: SAM's patch and position embeddings, and the embeddings of backbones.
_STEM = re.compile(
    r"image_encoder\.((trunk\.)?(patch_embed|pos_embed)|stem\.|backbone\.(\w+\.)?embed)"
)
NO_ADAPTERS = LoRA()
BELOW_ONE = 0.999999999
"""Largest decay rate of a running mean; at 1 it would never change."""


@dataclass(frozen=True)
class AdamW(Optimizer):
    """AdamW (Loshchilov and Hutter 2019), with layer-wise decay of the encoder's learning rate.

    The decay is BEiT's, with ViTDet's numbering of layers.
    """

    lr: float = 8e-4
    """peak learning rate; also --lr"""
    betas: tuple[float, float] = (0.9, 0.999)
    """decay rates of Adam's running means of the gradient and its square"""
    weight_decay: float = 0.1
    """decoupled weight decay; biases, norms, position embeddings and tokens have none"""
    layer_decay: float = 1.0
    """learning rate of an encoder block relative to that of the next block; 1 disables"""
    encoder_lr_scale: float = 1.0
    """multiplier of the image encoder's learning rate"""
    supports_sharding: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive("layer_decay", self.layer_decay)
        for name in ("encoder_lr_scale", "weight_decay"):
            check_range(name, getattr(self, name), 0)
        for beta in self.betas:
            check_range("betas", beta, 0, BELOW_ONE)

    def build(self, model: nn.Module) -> list[torch.optim.Optimizer]:
        """Return a fused AdamW; `lr_scale` of a group multiplies the scheduled learning rate."""
        return self._adamw(model, dict(model.named_parameters()))

    def _adamw(
        self, model: nn.Module, parameters: dict[str, nn.Parameter]
    ) -> list[torch.optim.Optimizer]:
        import torch

        groups = self._groups(model, parameters)
        return (
            [torch.optim.AdamW(groups, lr=self.lr, betas=self.betas, fused=True)] if groups else []
        )

    def _groups(
        self, model: nn.Module, parameters: dict[str, nn.Parameter], lr_scale: float = 1.0
    ) -> list[dict]:
        """Group trainable parameters by learning rate, weight decay and sharding."""
        from gigamask.distributed.fsdp import is_sharded_tensor

        groups: dict[tuple[float, float, bool], list[nn.Parameter]] = {}
        blocks = getattr(model, "encoder_blocks", [])
        depth, layers = 1 + len(blocks), layer_ids(model, blocks)
        for name, parameter in parameters.items():
            if parameter.requires_grad:
                scale = lr_scale * self.layer_decay ** (depth - layers[name])
                if name.startswith("image_encoder."):
                    scale *= self.encoder_lr_scale
                decay = self.weight_decay if has_weight_decay(name, parameter.ndim) else 0.0
                groups.setdefault((scale, decay, is_sharded_tensor(parameter)), []).append(
                    parameter
                )
        return [
            {"params": group, "lr_scale": scale, "weight_decay": decay}
            for (scale, decay, _), group in groups.items()
        ]


@dataclass(frozen=True)
class AdamW8bit(AdamW):
    """AdamW with 8-bit state, 2 bytes per parameter instead of 8 (Dettmers et al. 2022).

    The two moments are quantized in blocks, each with its own scale; tensors with fewer than 4,096
    elements keep them in float32. Requires bitsandbytes (extra `quant`).
    """

    supports_sharding: ClassVar[bool] = False

    def build(self, model: nn.Module) -> list[torch.optim.Optimizer]:
        """Return bitsandbytes' AdamW8bit with the parameter groups of `AdamW`."""
        if importlib.util.find_spec("bitsandbytes") is None:
            raise GigamaskError(
                "--optimizer adamw8bit requires bitsandbytes, which is not installed: "
                "run pip install 'gigamask[quant]', or use --optimizer adamw"
            )
        import bitsandbytes

        groups = self._groups(model, dict(model.named_parameters()))
        return (
            [bitsandbytes.optim.AdamW8bit(groups, lr=self.lr, betas=self.betas)] if groups else []
        )

    def state_bytes(self, numel: int) -> int:
        """Return the state's bytes: the moments, and a float32 scale per 256 quantized elements."""
        return 8 * numel if numel < 4096 else 2 * (numel + 4 * math.ceil(numel / 256))


@dataclass(frozen=True)
class MuonAdamW(AdamW):
    """Muon for the weight matrices of linear layers, AdamW for all other parameters.

    Small models reach the same score in about half the steps (docs/log.md).
    """

    muon_lr: float = 0.02
    """peak learning rate of Muon's matrices, scheduled and decayed by layer like --lr; where --lr
    alone is given, it changes in proportion"""
    momentum: float = 0.95
    """momentum of Muon"""
    muon_kernels: bool = False
    """also train convolution kernels with Muon, flattened to matrices"""
    supports_sharding: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check_positive("lr", self.lr)  # Muon's lr_scale is relative to it
        super().__post_init__()
        check_positive("muon_lr", self.muon_lr)
        check_range("momentum", self.momentum, 0, BELOW_ONE)

    def build(self, model: nn.Module) -> list[torch.optim.Optimizer]:
        """Return Muon for matrices (and kernels) with weight decay, and AdamW for the rest.

        AdamW keeps the decoder's attention between tokens and image.
        """
        from gigamask.training.muon import Muon

        others = dict(model.named_parameters())
        matrices = {
            name: others.pop(name)
            for name, p in model.named_parameters()
            if has_weight_decay(name, p.ndim) and self._uses_muon(name, p)
        }
        muon_groups = self._groups(model, matrices, self.muon_lr / self.lr)
        muon = [Muon(muon_groups, self.muon_lr, self.momentum)] if muon_groups else []
        return [*muon, *self._adamw(model, others)]

    def _uses_muon(self, name: str, parameter: nn.Parameter) -> bool:
        """Return whether a parameter is a matrix, or a kernel that is one when flattened."""
        if parameter.ndim == 4 and self.muon_kernels:
            return min(len(parameter), parameter[0].numel()) > 1
        return parameter.ndim == 2 and not _NO_MUON.search(name)


def has_weight_decay(name: str, ndim: int) -> bool:
    """Return whether weight decay applies: to matrices and convolution kernels.

    Args:
        name: Name of the parameter in the model.
        ndim: Number of its dimensions.

    Returns:
        False for biases, norms, absolute and relative position embeddings, and tokens.
    """
    return ndim > 1 and not _NO_DECAY.search(name)


def select_trained(
    model: nn.Module,
    freeze: Sequence[str],
    unfreeze: Sequence[str] = (),
    lora: LoRA = NO_ADAPTERS,
    seed: int = 0,
) -> None:
    """Freeze what is not trained, and add adapters.

    Args:
        model: The model, changed in place.
        freeze: Names of modules or parameters; adapters freeze the image encoder, too.
        unfreeze: What to train within them: `norms`, `biases`, or names.
        lora: Settings of the adapters.
        seed: Seed of their initial values.

    Raises:
        GigamaskError: A name is unknown or changes nothing, or nothing is left to train.
    """
    for name in (*freeze, *(["image_encoder"] if lora.rank else [])):
        for parameter in _parameters_of(model, "--freeze", name):
            parameter.requires_grad_(False)
    for name in unfreeze:
        parameters = _parameters_of(model, "--unfreeze", name)
        if all(parameter.requires_grad for parameter in parameters):
            raise GigamaskError(
                f"--unfreeze {name}: nothing of it is frozen; freeze it with --freeze, or leave "
                "the name out"
            )
        for parameter in parameters:
            parameter.requires_grad_(True)
    if lora.rank:
        from gigamask.models.lora import add_adapters

        add_adapters(model, lora, seed)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise GigamaskError(f"--freeze {' '.join(freeze)} leaves nothing to train; leave one out")


def _parameters_of(model: nn.Module, flag: str, name: str) -> list[nn.Parameter]:
    """Return the parameters that a flag names: of a module, one, all norms or all biases."""
    parameters = dict(model.named_parameters())
    if flag == "--unfreeze" and name == "norms":
        found = [
            parameter
            for module in model.modules()
            if "norm" in type(module).__name__.lower()
            for parameter in module.parameters(recurse=False)
        ]
    elif flag == "--unfreeze" and name == "biases":
        found = [p for full, p in parameters.items() if full.endswith("bias")]
    else:
        found = [p for full, p in parameters.items() if f"{full}.".startswith(f"{name}.")]
    if not found:
        modules = ", ".join(name for name, _ in model.named_children())
        more = "norms, biases, " if flag == "--unfreeze" else ""
        raise GigamaskError(
            f"{flag} {name}: the model has no such module or parameter; choose from {more}"
            f"{modules}, or a name within them such as {next(iter(parameters))}"
        )
    return found


def check_frozen(model: Model, loaded: Collection[str], init: str | None) -> None:
    """Check that every frozen parameter has trained weights, which training cannot give it.

    Args:
        model: The model before the first step.
        loaded: Names of the parameters that were loaded.
        init: Path of the initial weights, for the error; None if there are none.

    Raises:
        GigamaskError: A frozen parameter has its random initial value.
    """
    from gigamask.models.convert import format_names
    from gigamask.models.lora import plain_name

    frozen = [
        plain_name(name)
        for name, parameter in model.named_parameters()
        if not parameter.requires_grad
    ]
    untrained = [
        name
        for name in frozen
        if name not in loaded and not name.startswith(model.pretrained_names)
    ]
    if untrained:
        fix = f"; --init {init} has no weights for them" if init else "; pass weights with --init"
        raise GigamaskError(
            f"--freeze would keep the random values of {format_names(untrained)}{fix}, or freeze "
            "only what has weights (--freeze without a value: nothing)"
        )


def layer_ids(model: nn.Module, blocks: Sequence[nn.Module]) -> dict[str, int]:
    """Return the depth of each parameter for layer-wise learning-rate decay.

    Args:
        model: The model.
        blocks: The blocks of its image encoder, from input to output.

    Returns:
        Depth by parameter name: 0 for patch and position embeddings, i + 1 for encoder block i, and
        one more than the last block's for all others, including the neck, as in detectron2's
        ViTDet, whose settings SAM's recipe matches.
    """
    of_block = {id(p): index + 1 for index, block in enumerate(blocks) for p in block.parameters()}
    return {
        name: of_block.get(id(parameter), 0 if _STEM.match(name) else len(blocks) + 1)
        for name, parameter in model.named_parameters()
    }


@dataclass(frozen=True)
class Warmup(LRSchedule):
    """Base class of schedules that begin with a linear warm-up."""

    warmup_steps: int = 250
    """steps of linear warm-up; unless set, at most a quarter of --steps if these are fewer than the
    recipe's"""

    def __post_init__(self) -> None:
        check_range("warmup_steps", self.warmup_steps, 0)

    def shortened(self, warmup: int) -> Self:
        return replace(self, warmup_steps=min(self.warmup_steps, max(0, warmup)))

    def _warmup_factor(self, step: int) -> float:
        return min(1.0, (step + 1) / self.warmup_steps) if self.warmup_steps else 1.0


@dataclass(frozen=True)
class WarmupMultiStep(Warmup):
    """Linear warm-up, then a constant rate with drops.

    The defaults are those of SAM's run of 90,000 steps: warm-up of 250 steps, rate divided by 10 at
    steps 60,000 and 86,666 (paper, appendix A).
    """

    milestones: tuple[float, ...] = (2 / 3, 26 / 27)
    """fractions of --steps at which the learning rate drops"""
    gamma: float = 0.1
    """multiplier of the learning rate at each milestone"""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range("gamma", self.gamma, 0, 1)
        for milestone in self.milestones:
            check_range("milestones", milestone, 0, 1)

    def factor(self, step: int, steps: int) -> float:
        """Return the multiplier of the peak learning rate.

        Args:
            step: Number of the step, from 0.
            steps: Number of steps of the whole run.
        """
        drops = sum(step >= int(milestone * steps) for milestone in self.milestones)
        return self._warmup_factor(step) * self.gamma**drops


@dataclass(frozen=True)
class WarmupCosine(Warmup):
    """Linear warm-up, then half a cosine down to `min_lr_ratio` after the last step."""

    min_lr_ratio: float = 0.0
    """learning rate after the last step relative to the peak"""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range("min_lr_ratio", self.min_lr_ratio, 0, 1)

    def factor(self, step: int, steps: int) -> float:
        """Return the multiplier of the peak learning rate.

        Args:
            step: Number of the step, from 0.
            steps: Number of steps of the whole run.
        """
        progress = min(
            1.0, max(0.0, (step - self.warmup_steps) / max(1, steps - self.warmup_steps))
        )
        return self._warmup_factor(step) * (
            self.min_lr_ratio + (1 - self.min_lr_ratio) * (1 + math.cos(math.pi * progress)) / 2
        )
