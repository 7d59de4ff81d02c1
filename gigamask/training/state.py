"""Training state, which is exactly what a checkpoint stores.

It is complete because random numbers are keyed by seed and sample, schedules are functions of the
step, and the state of the loader is the cursor.
"""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor, nn

from gigamask.distributed import fsdp
from gigamask.distributed.gradient_exchange import GradientExchange
from gigamask.distributed.precision import HALF_DTYPES, LossScaler, choose_precision
from gigamask.distributed.world import World
from gigamask.errors import GigamaskError
from gigamask.models.model import Model
from gigamask.records import DataCursor
from gigamask.training.config import TrainConfig
from gigamask.training.optim import check_frozen, select_trained
from gigamask.training.unreached import Unreached

if TYPE_CHECKING:
    from gigamask.samplers.loss_history import LossHistory
    from gigamask.training.ema import Average


@dataclass(frozen=True)
class Resumed:
    """The checkpoint that a run was resumed from.

    Attributes:
        folder: Its folder.
        is_scored: Whether the result of its evaluation is recorded in it.
        damaged: Names of the newer checkpoints, which are damaged.
    """

    folder: Path
    is_scored: bool
    damaged: tuple[str, ...] = ()


def build_to_load(config: TrainConfig, device: torch.device) -> Model:
    """Build a model on a device, without initial values that loaded ones replace.

    Models that a user's code builds have initial values.

    Args:
        config: The configuration.
        device: Device to train on.
    """
    from gigamask.models.init import allocate
    from gigamask.training.sam_config import SamTrainConfig

    is_ours = type(config).build is SamTrainConfig.build
    if is_ours and not cast(SamTrainConfig, config).model.encoder.initializes_itself:
        return allocate(config.build("meta"), device)
    return config.build().to(device)


@dataclass
class TrainState:
    """Weights, optimizer state and progress of a run.

    Attributes:
        model: The model, with gradients.
        optimizers: Torch optimizers of its trainable parameters.
        step: Number of finished steps.
        cursor: Position in the data after the last step.
        loss_history: Losses of the samples, if the sampler learns from them.
        scale: Loss scale of fp16; None in other precisions.
        average: Running average of the trainable weights, by name; None without --ema.
        base: Size and crc32 of the file of frozen weights that adapters belong to; None without
            adapters.
        stopping: Whether the training was asked to stop; not saved.
        unscored: Whether that has ended its evaluation, which the next start does; not saved.
        exchange: Sums the encoder's gradients over all processes; not saved.
        resumed: The checkpoint that it was loaded from; not saved.
        unreached: The trained parameters that have had no gradient yet.
        loaded: Number of tensors that the initial weights set; not saved.
    """

    model: Model
    optimizers: list[torch.optim.Optimizer]
    step: int = 0
    cursor: DataCursor = field(default_factory=DataCursor)
    loss_history: "LossHistory | None" = None
    scale: LossScaler | None = None
    average: "Average | None" = None
    base: dict[str, int] | None = None
    stopping: bool = False
    unscored: bool = False
    exchange: GradientExchange | None = None
    resumed: Resumed | None = None
    unreached: Unreached = field(default_factory=Unreached)
    loaded: int = 0

    @classmethod
    def initialize(
        cls, config: TrainConfig, device: torch.device, init: str | None = None
    ) -> "TrainState":
        """Return the state before the first step.

        Args:
            config: The configuration.
            device: Device to train on.
            init: Path of initial weights; None initializes them from the seed.

        Raises:
            GigamaskError: The weights do not fit, or a frozen parameter has no trained value.
        """
        if not init:
            model = config.build()
            model.load_pretrained()
            return cls.from_model(model.to(device), config)
        model = build_to_load(config, torch.device("cpu"))
        loaded = model.load_init(init)
        if not model.state_dict().keys() <= loaded:  # the others need initial values
            model = config.build()
            loaded = model.load_init(init)
        state = cls.from_model(model.to(device), config)
        check_frozen(model, loaded, init)
        state.loaded = len(loaded)
        return state

    @classmethod
    def from_model(cls, model: Model, config: TrainConfig) -> "TrainState":
        """Return the state at step 0 of a given model.

        Every trainable parameter has a gradient, of which several processes make their buckets.

        Args:
            model: The model, of which `select_trained` freezes parts.
            config: The configuration.
        """
        select_trained(model, config.freeze, config.unfreeze, config.lora, config.seed)
        allocate_gradients(model)
        average = None
        if config.ema:
            from gigamask.training.ema import Average

            average = Average.of(model)
        unreached = {p for p in model.parameters() if p.requires_grad}
        if getattr(config, "drop_path_mode", None) == "batch":
            # All processes skip these together, unless they are sharded.
            unreached -= {p for block in model.encoder_blocks for p in block.parameters()}
        return cls(
            model,
            config.optimizer.build(model),
            scale=LossScaler() if config.precision == "fp16" else None,
            average=average,
            unreached=Unreached(unreached),
        )

    def shard(self, config: TrainConfig, world: World) -> None:
        """Prepare the state for several processes; a collective operation.

        With `parallel` "ddp", the encoder's gradients are to be exchanged while they arrive;
        otherwise the model, its average and the optimizer state are sharded.

        Args:
            config: The configuration.
            world: The processes of the run.
        """
        if world.size == 1:
            return
        encoder, blocks = self.model.encoder, self.model.encoder_blocks
        reduce_dtype = HALF_DTYPES.get(config.reduce_precision)
        if config.parallel == "ddp":
            trained = [p for p in encoder.parameters() if p.requires_grad]
            self.exchange = GradientExchange(trained, world, reduce_dtype)
            return
        device = next(self.model.parameters()).device
        param_dtype = HALF_DTYPES.get(choose_precision(config.precision, device))
        tensors = self.optimizer_tensors()
        dtypes = param_dtype, reduce_dtype
        fsdp.shard(encoder, world, config.parallel, dtypes, config.timeout_s, blocks)
        allocate_gradients(self.model)
        self.unreached.note(set(self.model.parameters()))  # all processes run every sharded block
        self.optimizers = config.optimizer.build(self.model)
        if tensors:
            self.load_optimizer(tensors, config.out)
        if self.average is not None:
            parameters = dict(self.model.named_parameters())
            for name, tensor in self.average.items():
                self.average[name] = fsdp.distribute_like(tensor, parameters[name])

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The trained parameters, in the order of the optimizers."""
        groups = [group for optimizer in self.optimizers for group in optimizer.param_groups]
        return [parameter for group in groups for parameter in group["params"]]

    def update_average(self, decay: float) -> None:
        """Update the average, if there is one, after a step, even one without an update.

        Args:
            decay: Decay of the average after its warm-up.
        """
        if self.average is not None:
            self.average.follow(self.model, decay, self.step)

    def advance(self, cursor: DataCursor) -> None:
        """Count a finished step that ended at `cursor`."""
        self.step += 1
        self.cursor = cursor

    @contextmanager
    def averaged_model(self) -> Iterator[Model]:
        """Yield the model with full weights, averaged ones if they are averaged.

        A collective operation. Within the context, no step may run.
        """
        if fsdp.is_sharded(self.model):
            yield self._full_model()
            return
        with self.average.applied(self.model) if self.average else nullcontext():
            yield self.model

    def _full_model(self) -> Model:
        """Return a copy of the sharded model with full weights, averaged if there is an average."""
        with torch.device("meta"):
            model = self.model.config.build()
        averaged = self.average.by_state_name(self.model) if self.average else {}
        weights = self.model.state_dict() | averaged
        full = {name: fsdp.full_tensor(tensor) for name, tensor in weights.items()}
        model.load_state_dict(full, assign=True)
        for name, buffer in self.model.named_buffers():
            if name not in full:  # not persistent, so still on the meta device
                owner, _, leaf = name.rpartition(".")
                setattr(model.get_submodule(owner), leaf, buffer)
        return model

    def optimizer_tensors(self) -> dict[str, Tensor]:
        """Return the optimizer state as `{"key/parameter name": tensor}`, integers as int64."""
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
        """Load the optimizer state.

        Parameters of an optimizer may have different keys, as Adafactor's vectors and matrices, but
        none lacks some of another's, except that small parameters of an 8-bit optimizer, which are
        not quantized, have fewer.

        Args:
            tensors: Result of `optimizer_tensors`.
            source: Where they come from, for errors.

        Raises:
            GigamaskError: Entries are missing or unknown.
        """
        names = {parameter: name for name, parameter in self.model.named_parameters()}
        entries: dict[str, dict[str, Tensor]] = {}
        for entry, value in tensors.items():
            key, _, name = entry.partition("/")
            entries.setdefault(name, {})[key] = value
        mismatches = []
        for optimizer in self.optimizers:
            parameters = [p for group in optimizer.param_groups for p in group["params"]]
            found = {p: entries.pop(names[p], {}) for p in parameters}
            kinds = {frozenset(own) for own in found.values()}
            for parameter, own in found.items():
                alike = [each for each in kinds if ("qmap1" in each) == ("qmap1" in own)]
                absent = {key for each in alike if own.keys() < each for key in each - own.keys()}
                mismatches += [f"{key}/{names[parameter]}" for key in sorted(absent)]
                optimizer.state[parameter] = {
                    key: int(value)
                    if value.dtype == torch.int64
                    else fsdp.distribute_like(value, parameter)
                    for key, value in own.items()
                }
        mismatches += [f"{key}/{name}" for name, own in entries.items() for key in own]
        if mismatches:
            raise GigamaskError(
                f"{source}: {len(mismatches)} optimizer entries are missing or unknown, such as "
                f"{mismatches[0]}; keep --freeze and --optimizer as they were, or start a new run "
                f"from its weights: --init {source} and another --out"
            )


def allocate_gradients(model: nn.Module) -> None:
    """Give every trainable parameter a zero gradient."""
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.zeros_like(parameter)
