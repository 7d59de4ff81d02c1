"""A step as it is rehearsed: what its phases hold at most, a batch without contents, and the rounds that hold most.

Enters: the trainer's own step, whatever its tensors are. Leaves: bytes in each phase.

Not here: tensors that take no memory (`memory.pretence`), counting bytes (`memory.allocations`), what stands and how all adds up
(`memory.planner`), the step (`train.step`).
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from gigamask.contracts import Batch, Chance, Cursor, Draws, Prompts, Round, Terms, Truth
from gigamask.data.settings import Assembly
from gigamask.seams import Policy, Task


@runtime_checkable
class Book(Protocol):
    """Says how many bytes are held now, and the most since it was last asked."""

    now: int

    def since(self) -> int: ...


class Rehearsal:
    """What a step has been seen to hold: the most in each phase, in bytes above what stood when it began, and what its first round found.

    `forward` encodes the images and is all of a pre-training's forward pass; `rounds` decodes and back-propagates masks; `backward` goes through the
    encoder; `update` is the rest.
    """

    def __init__(self, book: Book) -> None:
        self.peaks = dict.fromkeys(("forward", "rounds", "backward", "update"), 0)
        self.kept = 0
        self._book, self._phase, self._stood = book, "", 0

    def begin(self) -> None:
        """Begins the step."""
        self._stood, self._phase = self._book.now, "forward"
        self._book.since()

    def mark(self, phase: str) -> None:
        """Notes that a phase begins, or goes on."""
        self.peaks[self._phase] = max(self.peaks[self._phase], self._book.since() - self._stood)
        if self._phase == "forward":
            self.kept = self._book.now - self._stood
        self._phase = phase


def blank_batch(assembly: Assembly, chance: Chance, images: int, masks: int) -> Batch:
    """Returns a batch of black images with as many empty masks, of the sizes that the loader's have; a mask has a bound for four cells of a side
    (docs/measurements.md, Memory)."""
    zeros = torch.zeros
    owner = torch.arange(masks) // max(1, -(-masks // max(1, images)))
    return Batch(
        names=tuple(str(number) for number in range(images)),
        images=zeros(images, 3, assembly.side, assembly.side, dtype=torch.uint8),
        input_sizes=torch.full((images, 2), assembly.side),
        places=torch.arange(images),
        weights=torch.ones(images),
        mask_image=owner,
        strata=zeros(masks, dtype=torch.int64),
        boxes_input=zeros(masks, 4),
        mask_bounds=zeros(masks * assembly.grid // 4, dtype=torch.int32),
        mask_starts=zeros(masks + 1, dtype=torch.int64),
        grid=assembly.grid,
        draws=Draws(
            first=zeros(masks),
            clicks=zeros(masks, chance.clicks + chance.points, 2),
            box_noise=zeros(masks, 4),
            drop_path=zeros(images, chance.blocks, 2),
            patches=zeros(images, chance.patches),
        ),
        pause=0.5,
        cursor=Cursor(images),
    )


@dataclass(frozen=True)
class Watched(Task):
    """A task that says when which phase of the step begins. With `crowded` there were masks before these, whose gradient the embedding has."""

    task: Task
    mark: Callable[[str], None]
    crowded: bool = False

    def terms(self, model: Any, batch: Batch, cut: Callable[[Tensor], Tensor]) -> Iterator[Terms]:
        phase = "backward"

        def marked(whole: Tensor) -> Tensor:
            nonlocal phase
            leaf = cut(whole)
            if self.crowded and leaf.requires_grad:
                leaf.grad = torch.zeros_like(leaf)
            phase = "rounds"
            self.mark(phase)
            return leaf

        for terms in self.task.terms(model, batch, marked):
            self.mark(phase)
            yield terms
            self.mark(phase)
        self.mark("backward")


class WatchedBatches(tuple[Batch, ...]):
    """Batches of a step; when the last one is done, the update begins."""

    mark: Callable[[str], None]

    def __iter__(self) -> Iterator[Batch]:
        yield from super().__iter__()
        self.mark("update")


@dataclass(frozen=True)
class Abridged(Policy):
    """A policy's first two rounds and its last: rounds in between differ by a token or two. `played` is given the number of all of them."""

    policy: Policy
    played: list[int] = field(default_factory=list)

    @property
    def draws(self) -> int:
        """As many as the policy spends."""
        return self.policy.draws

    def next(self, previous: Round | None, truth: Truth, draws: Draws | None, pause: float) -> Prompts | None:
        """Returns what the policy asks first, second and last."""
        if previous is not None and previous.index > 1:
            return None
        prompts, index = self.policy.next(previous, truth, draws, pause), 0 if previous is None else previous.index + 1
        while previous is not None and prompts is not None and index > 1:
            later = self.policy.next(Round(index, prompts, previous.prediction), truth, draws, pause)
            if later is None:
                break
            prompts, index = later, index + 1
        if prompts is not None:
            self.played.append(index + 1)
        return prompts
