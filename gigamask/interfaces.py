"""The seams: where a user puts a part of their own. Each has one method; a part is a frozen dataclass whose fields are its parameters.

Torch is imported for annotations only, so that a recipe, which is made of such parts, can be read without it.
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
"""What the numbers 0, 1 and 2 of the column `granularity` mean."""


@dataclass(frozen=True)
class SampleTable:
    """What can be sampled: how many images or masks there are, and their attributes by name, each an array of that length.

    An attribute may be worked out when it is first asked for, or be memory-mapped. `seed` names their orders: it is that of the training.
    `tars` says how many there are, with or without items.
    """

    count: int
    columns: Mapping[str, np.ndarray]
    seed: int = 0
    tars: int = 0


@dataclass(frozen=True, eq=False)
class LossSnapshot:
    """What the losses of training have said about the items before the step in which an epoch begins.

    `losses` holds each item's loss, a moving average if the sampler wants one, NaN where it was never trained on; `seen` the epoch in which it last
    was, -1 where never; `epoch_losses` the mean loss of each epoch that was over by then, NaN where none was noted.
    """

    losses: Float32[np.ndarray, "count"]
    seen: Int32[np.ndarray, "count"]
    epoch_losses: Float64[np.ndarray, "epochs"]

    @classmethod
    def empty(cls, count: int) -> LossSnapshot:
        """Returns the ledger of items of which none was trained on."""
        return cls(np.full(count, np.nan, np.float32), np.full(count, -1, np.int32), np.zeros(0))


@runtime_checkable
class Order(Protocol):
    """The items of an epoch by position: an array of whole numbers, or whatever works them out when it is asked for some."""

    def __len__(self) -> int:
        """Returns the number of positions."""
        ...

    def __getitem__(self, positions: Int64[np.ndarray, "n"], /) -> Int[np.ndarray, "n"]:
        """Returns the items at these positions."""
        ...


@dataclass(frozen=True, eq=False)
class WeightedOrder:
    """An order whose samples' losses count more or less: each is multiplied by the weight at its position."""

    items: Int[np.ndarray, "N"]
    weights: Float32[np.ndarray, "N"]

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, positions: Int64[np.ndarray, "n"]) -> Int[np.ndarray, "n"]:
        return self.items[positions]


@dataclass(frozen=True)
class Sampler(ABC):
    """Says in which order the items are visited.

    An order depends on the sampler's fields, the items with their seed, the epoch and the ledger alone. What is random in it is drawn from
    `make_rng(table.seed, "what it is for", epoch)`.
    """

    @property
    def decay(self) -> float | None:
        """None when orders do not depend on losses; else how much of an item's earlier loss the ledger keeps when it is trained on again."""
        return None

    def check(self, batch: int, processes: int, nodes: int) -> None:
        """Raises `GigamaskError` where an order cannot keep its promise with this global batch, so many processes, and so many machines."""
        return

    def strata(self, table: SampleTable) -> Int[np.ndarray, "count"] | None:
        """Returns which kind of its own each item is of, from 0 on, or None where the sampler knows none; mining looks within them."""
        return None

    @abstractmethod
    def order(self, table: SampleTable, epoch: int, history: LossSnapshot | None) -> Order:
        """Returns the item of each position of `epoch`; their number depends on `table` only. `history` is None where `decay` is."""


@dataclass(frozen=True)
class PromptSchedule(ABC):
    """Says what the next round is asked."""

    @property
    def num_uniforms(self) -> int:
        """How many click draws of a mask the policy spends; samples carry that many."""
        return 0

    @abstractmethod
    def next(
        self,
        previous: PromptRound | None,
        targets: Targets,
        random_inputs: RandomInputs | None,
        mask_only_round_u: float,
    ) -> Prompts | None:
        """Returns the prompts of the round after `previous` (None before the first), or None when there is no further round."""


@dataclass(frozen=True)
class Loss(ABC):
    """Says how wrong a round is."""

    @property
    def num_uniforms(self) -> int:
        """How many pairs of uniform numbers of a mask the objective spends, 0 or 1: it finds them in `Targets.shift`."""
        return 0

    @abstractmethod
    def __call__(self, round: PromptRound, targets: Targets) -> LossSums:
        """Returns the loss of one round as sums over its masks and their count."""


@dataclass(frozen=True)
class Mining(ABC):
    """Says which masks of a step are trained on."""

    @property
    def by_sampler(self) -> bool:
        """Whether the strata it looks within are the sampler's, else they are the masks' granularities."""
        return False

    @abstractmethod
    def keep(self, losses: Float[Tensor, "M"], strata: Int64[Tensor, "M"]) -> Bool[Tensor, "M"]:
        """Tells of all masks of the global batch which are kept; a loss of NaN is of a mask that is not there."""


@dataclass(frozen=True)
class Task(ABC):
    """Says what a training step computes: SAM, MAE, grounding."""

    @property
    def mining(self) -> Mining | None:
        """Which masks are trained on; None: all of them."""
        return None

    @abstractmethod
    def compute_losses(
        self, model: Any, batch: Any, detach: Callable[[Tensor], Tensor]
    ) -> Iterator[LossSums]:
        """Yields the loss of a batch, a `BatchProtocol` as the run supplies them, piece by piece; each one's graph is freed before the next is asked for.

        `detach(tensor)` returns a leaf copy that the pieces may share: their gradients meet on it and go through `tensor` once, at the end.
        """


@dataclass(frozen=True)
class EvaluationResult:
    """What an evaluation during training found: scores by name, the one that the best checkpoint is kept by, what should worry, a line each, and
    what was looked at: only scores of the same are compared. `picture` shows some of what was found, if it can be shown."""

    scores: Mapping[str, float]
    best_by: str
    warnings: tuple[str, ...] = ()
    subject: str = ""
    picture: UInt8[np.ndarray, "H W 3"] | None = field(default=None, compare=False)


@dataclass(frozen=True)
class Evaluator(ABC):
    """Evaluate the model during training, every `every` updates and after the last one."""

    interval: int = 1000
    """updates between evaluations"""

    def check(self) -> None:
        """Raise `GigamaskError` where the settings cannot be evaluated with."""
        if self.interval < 1:
            raise GigamaskError(f"--evaluation.interval is {self.interval}, it must be at least 1")

    def look_ahead(self) -> None:
        """Raise `GigamaskError` where data that `open` needs are missing; called before a training begins."""
        return

    @abstractmethod
    def open(self, run: Any, world: Any) -> Callable[[Any], EvaluationResult] | None:
        """Return the function that evaluates a model, or None where there is nothing to evaluate.

        Args:
            run: the run's whole configuration.
            world: the processes that train; each of them evaluates (`parallel.world.World`).

        Returns:
            A function from the model to a `EvaluationResult`. It must leave the model as it was.
        """


@dataclass(frozen=True)
class NoEvaluation(Evaluator):
    """Evaluate nothing during training."""

    def open(self, run: Any, world: Any) -> None:
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
                f"clip_norm is {self.grad_clip}, it must be above 0; give another value"
            )

    @abstractmethod
    def build(self, model: nn.Module) -> list[torch.optim.Optimizer]:
        """Return torch optimizers over the parameters of `model` that require a gradient.

        Before each update a group's `lr` is set to the scheduled learning rate, times the
        group's `lr_scale` where it has one.
        """

    def state_bytes(self, numel: int) -> int | None:
        """Return the bytes kept of a parameter of `numel` elements; None: `plan` measures them."""
        return None


@dataclass(frozen=True)
class LRSchedule(ABC):
    """Scale the learning rate; a pure function of the step, so that there is nothing to save."""

    @abstractmethod
    def factor(self, step: int, steps: int) -> float:
        """Return what the learning rate is multiplied by.

        Args:
            step: the number of the update, from 0.
            steps: updates of the whole run.
        """

    def shortened(self, warmup: int) -> LRSchedule:
        """Return the schedule with a warm-up of at most `warmup` updates."""
        return self


class ImageEncoderModule(Protocol):
    """Turns pixels into an embedding; an `nn.Module` of the user's own takes this shape."""

    def forward(
        self, pixels: Float[Tensor, "B 3 S S"], drop_path: Float[Tensor, "B L 2"] | None
    ) -> Float[Tensor, "B C E E"]:
        """Returns the embedding of normalised pixels; `drop_path` holds the uniforms that decide which branches are skipped, None in evaluation."""
        ...


@dataclass(frozen=True)
class ImageEncoder(ABC):
    """Build an image encoder; its fields are its parameters."""

    @abstractmethod
    def build(self, model: Any) -> nn.Module:
        """Return the encoder, an `ImageEncoderModule`, as training starts from it.

        Its random numbers may come from torch's global generator, which is seeded for it. The
        encoder may be asked for on the meta device, too, in a context of `torch.device("meta")`.

        Args:
            model: the numbers of the whole SAM (`model.sizes.SamConfig`). The embedding must have
                `embedding_dim` channels and be `embedding_side` tokens high and wide.
        """

    def blocks(self, encoder: nn.Module) -> Sequence[nn.Module]:
        """Return the blocks of a built encoder, from input to output.

        --activation-checkpointing, --parallel fsdp, layer-wise learning-rate decay and `plan` go by them; by
        default they are the children of `encoder.blocks`.
        """
        return list(getattr(encoder, "blocks", ()))

    def drop_path_blocks(self, model: Any) -> int:
        """Return how many pairs of uniform numbers per image `forward` needs as `drop_path`."""
        return 0

    @property
    def pretrained(self) -> bool:
        """Whether `build` returns trained weights, so that --freeze needs no --init."""
        return False
