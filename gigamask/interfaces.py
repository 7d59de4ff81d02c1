"""Interfaces of the components that a user can replace.

A component is a frozen dataclass: its fields are its parameters, and one method is its behavior.
Torch is imported for annotations only, so that recipes, which consist of components, load without
it.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, runtime_checkable

import numpy as np

from gigamask.errors import GigamaskError, check_range

if TYPE_CHECKING:
    import torch
    from jaxtyping import Bool, Float, Float32, Float64, Int, Int32, Int64, UInt8
    from torch import Tensor, nn

    from gigamask.types import LossSums, PromptRound, Prompts, RandomInputs, Targets


GRANULARITIES = ("fine", "medium", "coarse")
"""Meaning of the values 0, 1 and 2 of the column `granularity`."""


@dataclass(frozen=True)
class SampleTable:
    """The items that can be sampled, images or masks, and their attributes.

    Attributes:
        count: Number of items.
        columns: Attributes by name, arrays of length `count`; they may be computed at their first
            use or be memory-mapped.
        seed: Random seed of the training, which orders derive from.
        tars: Number of tars, including those without items.
    """

    count: int
    columns: Mapping[str, np.ndarray]
    seed: int = 0
    tars: int = 0


@dataclass(frozen=True, eq=False)
class LossSnapshot:
    """The losses of the items as they were before the step in which an epoch begins.

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
    """An order with a weight for each position, by which the sample's losses are multiplied."""

    items: Int[np.ndarray, "N"]
    weights: Float32[np.ndarray, "N"]

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, positions: Int64[np.ndarray, "n"]) -> Int[np.ndarray, "n"]:
        return self.items[positions]


@dataclass(frozen=True)
class Sampler(ABC):
    """Order the items of each epoch.

    An order is a pure function of the sampler's fields, the table with its seed, the epoch and the
    loss history. Random numbers come from `make_rng(table.seed, "purpose", epoch)`.
    """

    @property
    def decay(self) -> float | None:
        """Share of an item's average loss that remains when there is a new loss; 0 keeps the last.

        None: orders do not depend on losses.
        """
        return None

    def check(self, batch_size: int, world_size: int, nodes: int) -> None:
        """Check that the sampler works with the size of the job.

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
    """Choose the prompts of each round."""

    @property
    def num_uniforms(self) -> int:
        """Pairs of uniform numbers that each mask needs for its clicks; samples carry that many."""
        return 0

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
            previous: The round before; None before the first.
            targets: Ground-truth masks and boxes of M masks.
            random_inputs: Random numbers of the masks; None where the schedule needs none.
            mask_only_round_u: Uniform number in [0, 1) that picks the round without a new point.

        Returns:
            The prompts of all M masks; None: there is no further round.
        """


@dataclass(frozen=True)
class Loss(ABC):
    """Compute the loss of a round."""

    @property
    def num_uniforms(self) -> int:
        """Pairs of uniform numbers that each mask needs, 0 or 1; they arrive as `Targets.shift`."""
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
    """Choose the masks of a step that are trained on (online hard example mining)."""

    @property
    def by_sampler(self) -> bool:
        """Whether strata are the sampler's instead of the masks' granularities."""
        return False

    @abstractmethod
    def keep(self, losses: Float[Tensor, "M"], strata: Int64[Tensor, "M"]) -> Bool[Tensor, "M"]:
        """Return which masks of the global batch are trained on.

        Args:
            losses: Loss of each mask; NaN: there is no such mask.
            strata: Stratum of each mask.
        """


@dataclass(frozen=True)
class Task(ABC):
    """Compute the losses of a training step: SAM, MAE or grounding."""

    @property
    def mining(self) -> Mining | None:
        """Chooses the masks that are trained on; None: all of them."""
        return None

    @abstractmethod
    def compute_losses(
        self, model: Any, batch: Any, detach: Callable[[Tensor], Tensor]
    ) -> Iterator[LossSums]:
        """Yield the loss of a batch in pieces.

        The graph of a piece is freed before the next one is requested.

        Args:
            model: Model in training mode.
            batch: A `BatchProtocol`, as the configuration's data source yields it.
            detach: Returns a leaf copy of a tensor that several pieces can share. Gradients are
                accumulated on the copy and go through the tensor once, at the end.
        """


@dataclass(frozen=True)
class EvaluationResult:
    """Result of an evaluation during training.

    Attributes:
        scores: Scores by name.
        best_by: Name of the score that chooses the best checkpoint.
        warnings: Warnings, one line each.
        subject: What was evaluated; only scores of the same subject are compared.
        picture: Image of some results, if there is one.
    """

    scores: Mapping[str, float]
    best_by: str
    warnings: tuple[str, ...] = ()
    subject: str = ""
    picture: UInt8[np.ndarray, "H W 3"] | None = field(default=None, compare=False)


@dataclass(frozen=True)
class Evaluator(ABC):
    """Evaluate the model during training, every `interval` updates and after the last one."""

    interval: int = 1000
    """updates between evaluations"""

    def check(self) -> None:
        """Raise `GigamaskError` if the settings are not valid."""
        if self.interval < 1:
            raise GigamaskError(f"--evaluation.interval must be at least 1 (got {self.interval})")

    def check_inputs(self) -> None:
        """Raise `GigamaskError` if data that `open` needs are missing; called before training."""
        return

    @abstractmethod
    def open(self, run: Any, world: Any) -> Callable[[Any], EvaluationResult] | None:
        """Return the function that evaluates a model; None: there is nothing to evaluate.

        Args:
            run: The whole configuration of the training.
            world: The training processes, `distributed.world.World`; each of them evaluates.

        Returns:
            A function from the model to an `EvaluationResult`. It must not change the model.
        """


@dataclass(frozen=True)
class NoEvaluation(Evaluator):
    """Evaluate nothing during training."""

    def open(self, run: Any, world: Any) -> None:
        """Return None.

        Args:
            run: Unused.
            world: Unused.
        """
        return None


@dataclass(frozen=True)
class Optimizer(ABC):
    """Build the torch optimizers of a model; the training step schedules, clips and updates."""

    lr: float = 1e-3
    """peak learning rate"""
    grad_clip: float | None = 1.0
    """largest global gradient norm; None is off"""
    supports_sharding: ClassVar[bool] = False
    """whether it works on shards of parameters (DTensor), as --parallel fsdp and hsdp need"""

    def __post_init__(self) -> None:
        check_range("lr", self.lr, 0, None)
        if self.grad_clip is not None and not 0 < self.grad_clip < math.inf:
            raise GigamaskError(
                f"grad_clip is {self.grad_clip}, it must be above 0; give another value"
            )

    @abstractmethod
    def build(self, model: nn.Module) -> list[torch.optim.Optimizer]:
        """Return torch optimizers over the parameters of `model` that require a gradient.

        Before each update the `lr` of each parameter group is set to the scheduled learning rate,
        times the group's `lr_scale` if it has one.
        """

    def state_bytes(self, numel: int) -> int | None:
        """Return the bytes of state per parameter of `numel` elements; None: `plan` measures."""
        return None


@dataclass(frozen=True)
class LRSchedule(ABC):
    """Scale the learning rate by a pure function of the step, so there is no state to save."""

    @abstractmethod
    def factor(self, step: int, steps: int) -> float:
        """Return what the learning rate is multiplied by.

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
        self, pixels: Float[Tensor, "B 3 S S"], drop_path: Float[Tensor, "B L 2"] | None
    ) -> Float[Tensor, "B C E E"]:
        """Return the image embedding.

        Args:
            pixels: Normalized pixels, zero in the padding.
            drop_path: Uniform numbers that decide which residual branches are skipped, for the
                attention and the MLP of L blocks; None in evaluation.

        Returns:
            C channels on a grid of E x E tokens.
        """
        ...


@dataclass(frozen=True)
class ImageEncoder(ABC):
    """Build an image encoder; its fields are its parameters."""

    @abstractmethod
    def build(self, model: Any) -> nn.Module:
        """Return a new encoder with its initial weights.

        Torch's global generator is seeded before the call and may be used. The encoder may also be
        built on the meta device, in a context of `torch.device("meta")`.

        Args:
            model: Configuration of the whole SAM, `models.configs.SamConfig`.

        Returns:
            An `ImageEncoderModule` whose embedding has `embedding_dim` channels and is
            `embedding_size` tokens high and wide.
        """

    def blocks(self, encoder: nn.Module) -> Sequence[nn.Module]:
        """Return the blocks of an encoder, from input to output; by default its `blocks`.

        They are used by --activation-checkpointing, --parallel fsdp, layer-wise learning-rate decay
        and `plan`.
        """
        return list(getattr(encoder, "blocks", ()))

    def drop_path_blocks(self, model: Any) -> int:
        """Return the number L of blocks that `forward` needs `drop_path` numbers for."""
        return 0

    @property
    def pretrained(self) -> bool:
        """Whether `build` returns trained weights, so that --freeze does not require --init."""
        return False
