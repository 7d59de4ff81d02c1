"""The seams: where a user puts a part of their own. Each has one method; a part is a frozen dataclass whose fields are its parameters.

Torch is imported for annotations only, so that a recipe, which is made of such parts, can be read without it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

if TYPE_CHECKING:
    from jaxtyping import Float, Int64
    from torch import Tensor

    from gigamask.contracts import Batch, Draws, Prompts, Round, Terms, Truth


@dataclass(frozen=True)
class Items:
    """What can be sampled: how many items there are, and their attributes by name, each an array of that length (memory-mapped is fine)."""

    count: int
    columns: Mapping[str, np.ndarray]


@dataclass(frozen=True)
class Sampler(ABC):
    """Says in which order the items are visited."""

    @abstractmethod
    def order(self, items: Items, epoch: int, ledger: Float[np.ndarray, "count"] | None) -> Int64[np.ndarray, "N"]:
        """Returns the item of each position of `epoch`; N depends on `items` only. `ledger` holds each item's last loss, NaN where unseen."""


@dataclass(frozen=True)
class Policy(ABC):
    """Says what the next round is asked."""

    @property
    def draws(self) -> int:
        """How many click draws of a mask the policy spends; samples carry that many."""
        return 0

    @abstractmethod
    def next(self, previous: Round | None, truth: Truth, draws: Draws | None, pause: float) -> Prompts | None:
        """Returns the prompts of the round after `previous` (None before the first), or None when there is no further round."""


@dataclass(frozen=True)
class Objective(ABC):
    """Says how wrong a round is."""

    @abstractmethod
    def __call__(self, round: Round, truth: Truth) -> Terms:
        """Returns the loss of one round as sums over its masks and their count."""


@dataclass(frozen=True)
class Task(ABC):
    """Says what a training step computes: SAM, MAE, grounding."""

    @abstractmethod
    def terms(self, model: Any, batch: Batch, cut: Callable[[Tensor], Tensor]) -> Iterator[Terms]:
        """Yields the batch's loss piece by piece; each piece's graph is freed before the next is asked for.

        `cut(tensor)` returns a leaf copy that the pieces may share: their gradients meet on it and go through `tensor` once, at the end.
        """


class Encoder(Protocol):
    """Turns pixels into an embedding; an `nn.Module` of the user's own takes this shape."""

    def forward(self, pixels: Float[Tensor, "B 3 S S"], drop_path: Float[Tensor, "B L 2"] | None) -> Float[Tensor, "B C E E"]:
        """Returns the embedding of normalised pixels; `drop_path` holds the uniforms that decide which branches are skipped, None in evaluation."""
        ...
