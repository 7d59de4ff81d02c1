"""Interfaces of the components that a user can replace.

A component is a frozen dataclass: its fields are its parameters, and one method does its work.
Torch is imported for type annotations only, so that recipes, which consist of components, load
without it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, runtime_checkable

from gigamask.errors import check_positive, check_range
from gigamask.lazy_numpy import np

if TYPE_CHECKING:
    import torch
    from jaxtyping import Bool, Float, Float32, Float64, Int, Int32, Int64, UInt8
    from torch import Tensor, nn

    from gigamask.types import LossSums, PromptRound, Prompts, RandomInputs, Targets


GRANULARITIES = ("fine", "medium", "coarse")
"""Names of the values 0, 1 and 2 of the column `granularity`."""


@dataclass(frozen=True)
class SampleTable:
    """The items that can be sampled, images or masks, and their attributes.

    Attributes:
        count: Number of items.
        columns: Attributes by name, arrays of length `count`; they may be memory-mapped, or
            computed on first use.
        seed: Random seed of the run, from which orders derive.
        tars: Number of tars, including those without items.
        derived: What samplers computed from the columns, kept for all epochs.
    """

    count: int
    columns: Mapping[str, np.ndarray]
    seed: int = 0
    tars: int = 0
    derived: dict[tuple[str, ...], Any] = field(default_factory=dict, repr=False, compare=False)

    def __len__(self) -> int:
        return self.count


@dataclass(frozen=True, eq=False)
class LossSnapshot:
    """The losses of all items before the step in which an epoch begins.

    Attributes:
        losses: Loss of each item, a moving average if the sampler has a `decay` above 0; NaN for
            items that were never trained on.
        seen: Epoch in which each item was last trained on; -1: never.
        epoch_losses: Mean loss of each finished epoch; NaN: no loss was recorded.
    """

    losses: Float32[np.ndarray, "count"]
    seen: Int32[np.ndarray, "count"]
    epoch_losses: Float64[np.ndarray, "epochs"]

    @classmethod
    def empty(cls, count: int) -> LossSnapshot:
        """Return the snapshot of `count` items that were never trained on."""
        return cls(np.full(count, np.nan, np.float32), np.full(count, -1, np.int32), np.zeros(0))


@runtime_checkable
class Order(Protocol):
    """The items of an epoch by position: an array of integers, or an object that computes them."""

    def __len__(self) -> int:
        """Return the number of positions."""
        ...

    def __getitem__(self, positions: Int64[np.ndarray, "n"], /) -> Int[np.ndarray, "n"]:
        """Return the items at these positions."""
        ...


@dataclass(frozen=True, eq=False)
class WeightedOrder:
    """An order with a loss weight for each position."""

    items: Int[np.ndarray, "N"]
    weights: Float32[np.ndarray, "N"]

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, positions: Int64[np.ndarray, "n"]) -> Int[np.ndarray, "n"]:
        return self.items[positions]


@dataclass(frozen=True)
class Sampler(ABC):
    """Base class of samplers, which order the items of each epoch.

    An order is a pure function of the sampler's fields, the table with its seed, the epoch and the
    loss history. Random numbers come from `make_rng(table.seed, "purpose", epoch)`.
    """

    @property
    def decay(self) -> float | None:
        """Decay of the moving average of an item's losses; 0 keeps only the last loss.

        None: orders do not depend on losses.
        """
        return None

    def check(self, batch_size: int, world_size: int, nodes: int) -> None:
        """Check that the sampler supports the batch size and the number of processes.

        Args:
            batch_size: Samples of a step, over all processes.
            world_size: Number of processes.
            nodes: Number of machines.

        Raises:
            GigamaskError: It does not.
        """
        return

    def strata(self, table: SampleTable) -> Int[np.ndarray, "count"] | None:
        """Return the stratum of each item, counted from 0; None: the sampler has no strata.

        Hard example mining can compare losses within strata.
        """
        return None

    @abstractmethod
    def order(self, table: SampleTable, epoch: int, history: LossSnapshot | None) -> Order:
        """Return the items of an epoch by position.

        Args:
            table: Items to sample.
            epoch: Number of the epoch, from 0.
            history: Losses before the epoch; None where `decay` is None.

        Returns:
            The item at each position. The number of positions depends on `table` only.
        """


@dataclass(frozen=True)
class PromptSchedule(ABC):
    """Base class of prompt schedules, which choose the prompts of each round."""

    compiled_methods: ClassVar[tuple[str, ...]] = ()
    """methods of tensors and constants that --compile compiles"""

    @property
    def num_uniforms(self) -> int:
        """Number of uniform pairs that each mask needs for its clicks, drawn with the sample."""
        return 0

    @property
    def has_groups(self) -> bool:
        """Whether `groups` returns several groups, which have different rounds."""
        return False

    def groups(
        self, random_inputs: RandomInputs
    ) -> list[tuple[Bool[Tensor, "M"] | None, PromptSchedule]]:
        """Return groups of masks with a schedule for each; None stands for all masks.

        Args:
            random_inputs: Random numbers of the masks.
        """
        return [(None, self)]

    @abstractmethod
    def next(
        self,
        previous: PromptRound | None,
        targets: Targets,
        random_inputs: RandomInputs | None,
        mask_only_round_u: float,
    ) -> Prompts | None:
        """Return the prompts of the next round.

        Args:
            previous: The previous round; None for the first.
            targets: Ground-truth masks and boxes of M masks.
            random_inputs: Random numbers of the masks; None where the schedule needs none.
            mask_only_round_u: Uniform number in [0, 1) that selects the mask-only round.

        Returns:
            The prompts of all M masks; None after the last round.
        """


@dataclass(frozen=True)
class Loss(ABC):
    """Base class of losses, which compute the loss of a round."""

    @property
    def supports_filling(self) -> bool:
        """Whether loss, parts and count leave out masks with a False `Targets.counted`, which
        --compile adds so that each step has as many masks."""
        return False

    @property
    def num_uniforms(self) -> int:
        """Number of uniform pairs that each mask needs, 0 or 1; passed as `Targets.shift`."""
        return 0

    @abstractmethod
    def __call__(self, round: PromptRound, targets: Targets) -> LossSums:
        """Return the loss of one round as sums over its masks and their count.

        Args:
            round: Prompts and predictions of M masks.
            targets: Ground truth of the same masks.
        """


@dataclass(frozen=True)
class Mining(ABC):
    """Base class of online hard example mining, which chooses the masks of a step to train on."""

    keeps_all: ClassVar[bool] = False
    """whether every mask is trained on, so that no losses are compared"""

    @property
    def use_sampler_strata(self) -> bool:
        """Whether strata come from the sampler instead of the masks' granularities."""
        return False

    @abstractmethod
    def keep(self, losses: Float[Tensor, "M"], strata: Int64[Tensor, "M"]) -> Bool[Tensor, "M"]:
        """Return which masks of the global batch are trained on.

        Args:
            losses: Loss of each mask; NaN: no mask.
            strata: Stratum of each mask.
        """


@dataclass(frozen=True)
class NoMining(Mining):
    """Train on every mask."""

    keeps_all: ClassVar[bool] = True

    def keep(self, losses: Float[Tensor, "M"], strata: Int64[Tensor, "M"]) -> Bool[Tensor, "M"]:
        """Return which masks exist.

        Args:
            losses: Loss of each mask; NaN if there is no mask.
            strata: Not used.
        """
        return ~losses.isnan()


@dataclass(frozen=True)
class Task(ABC):
    """Base class of tasks (SAM, MAE, grounding), which compute the losses of a training step."""

    @property
    def mining(self) -> Mining | None:
        """How to choose the masks to train on; None: all masks."""
        return None

    @property
    def frozen_models(self) -> tuple[nn.Module, ...]:
        """Models that the task runs besides the trained one, such as a teacher."""
        return ()

    def compiled(self, model: Any) -> AbstractContextManager[Task]:
        """Return a context that yields the task to train with, compiled if it is configured so.

        Args:
            model: Model to train, whose methods are compiled within the context.
        """
        return nullcontext(self)

    @abstractmethod
    def compute_losses(
        self, model: Any, batch: Any, detach: Callable[[Tensor], Tensor]
    ) -> Iterator[LossSums]:
        """Yield the loss of a batch in chunks.

        The graph of a chunk is freed before the next one is requested.

        Args:
            model: Model in training mode.
            batch: A `BatchProtocol`, as the configuration's data source yields it.
            detach: Returns a leaf copy of a tensor that several chunks can share. Gradients
                accumulate on the copy and are propagated through the tensor once, at the end.
        """


@dataclass(frozen=True)
class Kernels:
    """The kernels that a SAM is trained with: those of torch, or a subclass's."""

    def check(self, config: Any) -> None:
        """Check, before anything is loaded, that a training can use them.

        Args:
            config: The `SamTrainConfig`.

        Raises:
            GigamaskError: It cannot.
        """

    def check_device(self, device: str) -> None:
        """Check, before a training starts, that its device runs them.

        Args:
            device: Value of --device.

        Raises:
            GigamaskError: It does not.
        """

    def used(self, task: Task, model: Any) -> AbstractContextManager[Task]:
        """Return a context that yields the task to train with, in which the model uses them.

        Args:
            task: The `SamTask`.
            model: Model to train, of which methods may be replaced within the context.
        """
        return nullcontext(task)


@dataclass(frozen=True)
class EvaluationResult:
    """Result of an evaluation during training.

    Attributes:
        scores: Scores by name.
        best_by: Name of the score that selects the best checkpoint.
        warnings: Warnings, one line each.
        subject: What was evaluated; only scores of the same subject are compared.
        picture: Image of some results, if any.
        of: What the scores are means of, as "366 masks on 50 images".
        errors: Standard errors of scores by name, if they are means of few.
    """

    scores: Mapping[str, float]
    best_by: str
    warnings: tuple[str, ...] = ()
    subject: str = ""
    picture: UInt8[np.ndarray, "H W 3"] | None = field(default=None, compare=False)
    of: str = ""
    errors: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Evaluator(ABC):
    """Base class of evaluation in training, every `interval` updates and after the last one."""

    interval: int = 1000
    """steps between evaluations"""

    def check(self) -> None:
        """Raise `GigamaskError` if the settings are not valid."""
        check_range("--evaluation.interval", self.interval, 1)

    def check_inputs(self) -> None:
        """Raise `GigamaskError` if data that `open` needs is missing; called before training."""
        return

    @abstractmethod
    def open(self, config: Any, world: Any) -> Callable[[Any], EvaluationResult] | None:
        """Return the function that evaluates a model; None: there is nothing to evaluate.

        Args:
            config: The whole configuration of the training.
            world: The training processes, `distributed.world.World`; each of them evaluates.

        Returns:
            A function from the model, in evaluation mode, to an `EvaluationResult`. It must not
            change the model's weights.
        """


@dataclass(frozen=True)
class NoEvaluation(Evaluator):
    """No evaluation during training."""

    def open(self, config: Any, world: Any) -> None:
        """Return None.

        Args:
            config: Unused.
            world: Unused.
        """
        return None


@dataclass(frozen=True)
class Optimizer(ABC):
    """Base class of optimizer builders; the training step schedules, clips and updates."""

    lr: float = 1e-3
    """peak learning rate"""
    grad_clip: float | None = 1.0
    """maximum global gradient norm; None disables clipping"""
    supports_sharding: ClassVar[bool] = False
    """whether it works on shards of parameters (DTensor), as --parallel fsdp and hsdp need"""

    def __post_init__(self) -> None:
        check_range("lr", self.lr, 0)
        check_positive("grad_clip", self.grad_clip)

    @abstractmethod
    def build(self, model: nn.Module) -> list[torch.optim.Optimizer]:
        """Return torch optimizers over the parameters of `model` that require a gradient.

        Before each update the `lr` of each parameter group is set to the scheduled learning rate,
        times the group's `lr_scale` if it has one.
        """

    def state_bytes(self, numel: int) -> int | None:
        """Return the state bytes of a parameter of `numel` elements; None: `plan` measures them."""
        return None


@dataclass(frozen=True)
class LRSchedule(ABC):
    """Base class of learning-rate schedules: pure functions of the step, without state to save."""

    @abstractmethod
    def factor(self, step: int, steps: int) -> float:
        """Return the factor by which the learning rate is multiplied.

        Args:
            step: Number of the update, from 0.
            steps: Updates of the whole training.
        """

    def shortened(self, warmup: int) -> LRSchedule:
        """Return the schedule with a warm-up of at most `warmup` updates."""
        return self


class ImageEncoderModule(Protocol):
    """The interface of an image encoder's `nn.Module`."""

    def forward(
        self, pixels: Float[Tensor, "B N S S"], drop_path: Float[Tensor, "B L 2"] | None
    ) -> Float[Tensor, "B C E E"]:
        """Return the image embedding.

        Args:
            pixels: Normalized pixels, zero in the padding.
            drop_path: Uniform numbers, on the CPU, that decide which residual branches (attention
                and MLP of L blocks) are skipped; None in evaluation.

        Returns:
            C channels on a grid of E x E tokens.
        """
        ...


PIXEL_MEAN, PIXEL_STD = (123.675, 116.28, 103.53), (58.395, 57.12, 57.375)
"""ImageNet's mean and standard deviation, RGB in 0..255 (Segment Anything, `modeling/sam.py`)."""


@dataclass(frozen=True)
class ImageEncoder(ABC):
    """Base class of image encoders; the fields are the encoder's parameters."""

    takes_input_sizes: ClassVar[bool] = False
    """whether `forward` also takes the height and width of each image without padding"""
    pretrained_part: ClassVar[str] = ""
    """what the names of the parameters begin with that have trained weights, if `pretrained`"""
    initializes_itself: ClassVar[bool] = True
    """whether `build` gives the weights their initial values; otherwise `models.init` does"""
    is_available: ClassVar[bool] = True
    """whether the encoder can be built, unlike one of which a file states only the name"""
    encodes_rectangles: ClassVar[bool] = False
    """whether it can encode only the tokens that an image covers, for --model.rectangular"""
    shards: ClassVar[bool] = True
    """whether its blocks have linear layers, which --parallel fsdp shards"""
    decoder: ClassVar[str] = ""
    """the only mask decoder that reads its embedding; "": any"""
    argument: ClassVar[str] = ""
    """the field that `--model.encoder NAME:VALUE` sets"""
    stated: ClassVar[tuple[str, ...]] = ()
    """fields that weights must state, since their defaults are looked up elsewhere"""

    @abstractmethod
    def build(self, model: Any) -> nn.Module:
        """Return a new encoder with its initial weights.

        Torch's global generator is seeded before the call and may be used. The encoder may also be
        built on the meta device, in a context of `torch.device("meta")`.

        Args:
            model: Configuration of the whole SAM, `models.configs.SamConfig`; `in_channels` is the
                number of channels N of the input.

        Returns:
            An `ImageEncoderModule` whose embedding has `embedding_dim` channels and is
            `embedding_size` tokens high and wide.
        """

    def plain_vit(self, model: Any) -> tuple[Any, str] | None:
        """Return the sizes of a plain vision transformer, which can start from an MAE.

        Args:
            model: Configuration of the whole SAM.

        Returns:
            An object with `embed_dim`, `depth` and `num_heads`, and the flag before their names;
            None if the encoder is another.
        """
        return None

    def custom_init(self, encoder: nn.Module) -> None:  # noqa: B027
        """Change the initial weights of an encoder for a small model, with --model.custom-init.

        Args:
            encoder: What `build` has returned, with initial weights.
        """

    def blocks(self, encoder: nn.Module) -> Sequence[nn.Module]:
        """Return the blocks of an encoder, from input to output; by default `encoder.blocks`.

        They are used by --activation-checkpointing, --parallel fsdp, layer-wise learning-rate decay
        and `plan`.
        """
        return list(getattr(encoder, "blocks", ()))

    def channels(self, model: Any) -> int:
        """Return the number C of channels of the embedding."""
        return model.embedding_dim

    def max_width(self, model: Any) -> int:
        """Return the channels of the widest block, by which commands tell small models."""
        return model.embed_dim

    def drop_path_blocks(self, model: Any) -> int:
        """Return the number L of blocks that `forward` needs `drop_path` numbers for."""
        return 0

    @property
    def pixel_scale(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Mean and standard deviation of red, green and blue in 0..255, by which pixels are
        normalized; or of each channel, if the encoder knows other channels."""
        return PIXEL_MEAN, PIXEL_STD

    @property
    def pretrained(self) -> bool:
        """Whether `build` or `load_pretrained` gives trained weights, so that --freeze does not
        require --init."""
        return False

    def load_pretrained(self, encoder: nn.Module) -> None:  # noqa: B027
        """Load trained weights into a new encoder, unless training starts from --init.

        Args:
            encoder: What `build` has returned.
        """
