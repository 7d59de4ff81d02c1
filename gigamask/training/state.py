"""What a training carries from step to step, and exactly what a checkpoint holds: weights, optimizer state, the step, the cursor, the book of
losses where the sampler learns from them, and fp16's scale.

There is nothing else to save: chance is named (`draws`), schedules are functions of the step, and the loader's state is the cursor.

Not here: files (`train.checkpoint`).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from gigamask.distributed import fsdp
from gigamask.distributed.precision import HALVES, LossScaler, choose_precision
from gigamask.distributed.world import World
from gigamask.errors import GigamaskError
from gigamask.models import state_dict
from gigamask.models.init import build_model
from gigamask.models.mae import MAE
from gigamask.models.sam.sam import Sam
from gigamask.samplers.loss_history import LossHistory
from gigamask.training.config import TrainConfig
from gigamask.types import DataCursor


@dataclass
class TrainState:
    """The moving parts of a training. `step` counts finished updates; `cursor` is of the last batch trained on.

    `scale` is what fp16's losses are multiplied by, None in other precisions. `stopping` says whether it was told to stop; it is not kept.
    """

    model: state_dict.Model
    optimizers: list[torch.optim.Optimizer]
    step: int = 0
    cursor: DataCursor = field(default_factory=DataCursor)
    loss_history: LossHistory | None = None
    scale: LossScaler | None = None
    stopping: bool = False

    @classmethod
    def initialize(
        cls, run: TrainConfig, device: torch.device, init: str | None = None
    ) -> "TrainState":
        """Returns the state before the first step: the weights that lie at `init`, or fresh ones named by the seed."""
        model = run.build()
        if init:
            state_dict.load_init_weights(model, init)
        return cls.from_model(model.to(device), run)

    @classmethod
    def from_model(cls, model: state_dict.Model, run: TrainConfig) -> "TrainState":
        """Returns a state at step 0 for this model, whose gradients exist from the start; those of frozen parts never do.

        A parameter that a step does not touch then has a zero gradient rather than none, on every rank and in every world alike.
        """
        freeze(model, run.freeze)
        keep_gradients(model)
        return cls(
            model,
            run.optimizer.build(model),
            scale=LossScaler() if run.precision == "fp16" else None,
        )

    def shard(self, run: TrainConfig, world: World) -> None:
        """Keeps this process's part of the model and of the optimizer state, as `run.parallel` says; all processes share out together."""
        if world.size == 1 or run.parallel == "ddp":
            return
        encoder = self.model.image_encoder if isinstance(self.model, Sam) else self.model
        precision, tensors = (
            choose_precision(run.precision, next(self.model.parameters()).device),
            self.optimizer_tensors(),
        )
        blocks = self.model.encoder_blocks if isinstance(self.model, Sam) else None
        fsdp.shard(encoder, world, run.parallel, HALVES.get(precision), run.timeout_s, blocks)
        keep_gradients(self.model)
        self.optimizers = run.optimizer.build(self.model)
        if tensors:
            self.load_optimizer(tensors, run.out)

    def advance(self, cursor: DataCursor) -> None:
        """Counts one finished update."""
        self.step += 1
        self.cursor = cursor

    def full_model(self) -> state_dict.Model:
        """Returns the model, put together where processes have parts of it; each must ask."""
        if not fsdp.is_sharded(self.model):
            return self.model
        assert isinstance(self.model, (Sam, MAE))  # other models are not sharded
        model = build_model(self.model.config, seed=0, device="meta")
        whole = {name: fsdp.full_tensor(tensor) for name, tensor in self.model.state_dict().items()}
        model.load_state_dict(whole, assign=True)
        for name, buffer in self.model.named_buffers():
            if name not in whole:  # not persistent, so still on the meta device
                owner, _, leaf = name.rpartition(".")
                setattr(model.get_submodule(owner), leaf, buffer)
        return model

    def optimizer_tensors(self) -> dict[str, Tensor]:
        """Returns the optimizers' state as `{"key/parameter name": tensor}`; a whole number becomes one of int64."""
        names: dict[Tensor, str] = {
            parameter: name for name, parameter in self.model.named_parameters()
        }
        entries = [
            (names[p], entry)
            for optimizer in self.optimizers
            for p, entry in optimizer.state.items()
        ]
        return {
            f"{key}/{name}": torch.tensor(value) if isinstance(value, int) else value
            for name, entry in entries
            for key, value in entry.items()
        }

    def load_optimizer(self, tensors: dict[str, Tensor], source: str) -> None:
        """Puts back what `optimizer_tensors` returned; each optimizer's parameters must be in it with the same keys, and nothing else.

        Small parameters of an 8-bit optimizer have fewer keys than large ones, which have a map from 8 bits.
        """
        names = {parameter: name for name, parameter in self.model.named_parameters()}
        left = dict(tensors)
        missing = []
        for optimizer in self.optimizers:
            held = {names[p]: p for group in optimizer.param_groups for p in group["params"]}
            entries = [
                (key, name)
                for key, _, name in (entry.partition("/") for entry in tensors)
                if name in held
            ]
            mapped = {name for key, name in entries if key == "qmap1"}
            keys = {
                large: sorted({key for key, name in entries if (name in mapped) == large})
                for large in (False, True)
            }
            for name, parameter in held.items():
                wanted = keys[name in mapped]
                missing += [f"{key}/{name}" for key in wanted if f"{key}/{name}" not in left]
                entry = {
                    key: left.pop(f"{key}/{name}") for key in wanted if f"{key}/{name}" in left
                }
                optimizer.state[parameter] = {
                    key: int(value)
                    if value.dtype == torch.int64
                    else fsdp.distribute_like(value, parameter)
                    for key, value in entry.items()
                }
        if odd := [*missing, *left]:
            raise GigamaskError(
                f"{source}: {len(odd)} optimizer entries are missing or unknown, the first is {odd[0]}; "
                f"give --freeze and --optimizer as they were, or start anew from its weights: --init {source} and another --out"
            )


def keep_gradients(model: nn.Module) -> None:
    """Gives every parameter that is trained a gradient of 0."""
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.zeros_like(parameter)


def freeze(model: nn.Module, parts: Sequence[str]) -> None:
    """Keeps the parameters of some parts, or single ones, as they are."""
    named = dict(model.named_parameters())
    for part in parts:
        held = [parameter for name, parameter in named.items() if f"{name}.".startswith(f"{part}.")]
        if not held:
            known = ", ".join(name for name, _ in model.named_children())
            raise GigamaskError(
                f"--freeze names {part!r}, which is no part of the model; name {known}, or what they hold, such as {next(iter(named))}"
            )
        for parameter in held:
            parameter.requires_grad_(False)
    if not any(parameter.requires_grad for parameter in named.values()):
        raise GigamaskError(f"--freeze {' '.join(parts)} leaves nothing to train; leave one out")
