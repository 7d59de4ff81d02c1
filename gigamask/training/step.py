"""One update: the only backward and the only division in the house.

Pieces of the loss arrive one at a time and are sums. Each is back-propagated at once, so its graph is gone before the next is computed;
where pieces share something costly (the image embedding), their gradients meet on a leaf copy of it and go through it once at the end.
The gradient of a sum of sums is divided by the sum of counts: accumulation over micro-batches is exact whatever their sizes, and so are processes,
which add up gradients, sums, counts and each sample's loss in one exchange.

Not here: what a piece is (`train.tasks`).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from jaxtyping import Float, Float64
from torch import Tensor

from gigamask.distributed import fsdp
from gigamask.distributed.profile_ranges import profile_range
from gigamask.distributed.world import World
from gigamask.errors import GigamaskError
from gigamask.interfaces import Task
from gigamask.training.ohem import mine_hard_masks
from gigamask.training.state import TrainState
from gigamask.types import BatchProtocol, LossSums

MOST_PARTS = 16
"""Processes exchange so many sums of the log, since one without a mask does not know how many there are."""


@dataclass
class StepMetrics:
    """Sums and counts of a step so far, on the device; of each sample, by its place in the global batch, the sum and number of its masks' losses in
    all rounds (its own loss where there are no masks), and its weight.
    """

    losses: Float[Tensor, "batch"]
    terms: Float[Tensor, "batch"]
    weights: Float[Tensor, "batch"]
    count: Float[Tensor, ""]
    sums: dict[str, Tensor] = field(default_factory=dict)

    @classmethod
    def zero(cls, batch: int, like: Tensor) -> "StepMetrics":
        """Returns the totals of nothing, for a global batch of so many samples."""
        return cls(
            like.new_zeros(batch), like.new_zeros(batch), like.new_zeros(batch), like.new_zeros(())
        )

    def add(self, terms: LossSums, batch: BatchProtocol) -> None:
        """Counts one piece of a batch's loss."""
        for name, value in {"loss": terms.loss, **terms.parts}.items():
            self.sums[name] = self.sums.get(name, 0.0) + value.detach()
        self.count += terms.count
        assert terms.image is not None, "the task says which image each of its terms is of"
        # Row by row, which a GPU adds up in the same order every time; images are few.
        of_image = (
            terms.image == torch.arange(len(batch.names), device=terms.per_mask.device)[:, None]
        )
        self.losses[batch.batch_index] += torch.where(of_image, terms.per_mask.detach(), 0.0).sum(
            1, dtype=self.losses.dtype
        )
        self.terms[batch.batch_index] += of_image.sum(1, dtype=self.terms.dtype)

    @profile_range("exchange")
    def all_reduce(self, world: World, *others: Tensor) -> None:
        """Adds up what all processes have, `others` as well; the names of the sums are those that this process knows."""
        if len(self.sums) > MOST_PARTS:
            raise GigamaskError(
                f"the loss has {len(self.sums)} parts, at most {MOST_PARTS} can be logged; let the objective name fewer"
            )
        sums, names = self.count.new_zeros(MOST_PARTS), sorted(self.sums)
        for place, name in enumerate(names):
            sums[place] = self.sums[name]
        world.all_reduce([self.count, self.losses, self.terms, self.weights, sums, *others])
        self.sums = {name: sums[place] for place, name in enumerate(names)}

    def divisor(self) -> float:
        """Returns what the gradient of the weighted sum is divided by: the count, or with weights what the count of an ordinary batch would be.

        Samples that are drawn by their loss may have more masks than others. Their weighted mean is that of ordinary samples; it is the count itself
        where all have equally many, whatever the weights, so that the estimate is unbiased then, and consistent else.
        """
        held = (self.terms > 0).to(self.weights.dtype)
        weights = (self.weights * held).sum()
        ordinary = (
            (self.weights * self.terms).sum() * held.sum() / torch.where(weights > 0, weights, 1.0)
        )
        terms = self.terms.sum()
        return max(
            float(
                torch.where(
                    (terms > 0) & (weights > 0), self.count * (ordinary / terms), self.count
                )
            ),
            1.0,
        )

    def means(self) -> dict[str, float]:
        """Returns each sum over the count; empty when nothing was counted."""
        count = float(self.count)
        return {name: float(value) / count for name, value in self.sums.items()} if count else {}


@dataclass(frozen=True, eq=False)
class StepResult:
    """What an update did: its record for the log, whether it was skipped, whether that was for fp16's scale alone, the mean loss of each sample of
    the global batch over its masks and rounds (NaN where it has none), and of each thing that processes may ask for, whether one did.
    """

    record: dict[str, float]
    skipped: bool
    overflow: bool
    losses: Float64[np.ndarray, "batch"]
    asked: tuple[bool, ...]


def accumulate(
    task: Task,
    model: torch.nn.Module,
    batch: BatchProtocol,
    totals: StepMetrics,
    scale: float = 1.0,
) -> None:
    """Adds the gradient of `scale` times a batch's loss sum to every parameter's, and its sums and counts to `totals`."""
    totals.weights[batch.batch_index] = batch.weights.to(totals.weights.dtype)
    cuts: list[tuple[Tensor, Tensor]] = []

    def detach(whole: Tensor) -> Tensor:
        leaf = whole.detach().requires_grad_(whole.requires_grad)
        cuts.append((whole, leaf))
        return leaf

    for terms in task.compute_losses(model, batch, detach):
        if terms.loss.requires_grad:  # all that a piece depends on may be frozen
            with profile_range("backward"):
                (terms.loss if scale == 1 else terms.loss * scale).backward()
        totals.add(terms, batch)
        del terms
    for whole, leaf in cuts:
        if leaf.grad is not None:
            with profile_range("encoder backward"):
                whole.backward(leaf.grad)


def step(
    task: Task,
    state: TrainState,
    batches: Sequence[BatchProtocol],
    batch: int,
    rate: float,
    grad_clip: float | None,
    world: World | None = None,
    asked: tuple[bool, ...] = (),
) -> StepResult:
    """Makes one update from this process's micro-batches of a global batch of `batch` samples, together with those of the others.

    `rate` is the learning rate before each layer's own factor; `asked` is what this process asks all others for. A step whose gradient is not finite
    changes nothing and says that it was skipped; so does one without a mask. A task that mines is asked twice, and its update is made of the masks
    that are kept.
    """
    world, mined = world or World(), None
    if task.mining:
        batches, mined = mine_hard_masks(task, task.mining, state.model, batches, batch, world)
    parameters = [
        p
        for optimizer in state.optimizers
        for group in optimizer.param_groups
        for p in group["params"]
    ]
    torch._foreach_zero_([fsdp.to_local(p.grad) for p in parameters])
    totals = StepMetrics.zero(batch, fsdp.to_local(parameters[0].grad))
    for micro in batches:
        accumulate(task, state.model, micro, totals, state.scale.value if state.scale else 1.0)
    gradients = [fsdp.to_local(p.grad) for p in parameters]
    # Gradients of what is shared out are sums over all processes already.
    whole = [
        gradient
        for gradient, p in zip(gradients, parameters, strict=True)
        if not fsdp.is_sharded_tensor(p)
    ]
    squares = fsdp.squared_norm((p.grad for p in parameters), totals.count)
    wishes = torch.tensor(asked, dtype=totals.count.dtype, device=totals.count.device)
    totals.all_reduce(world, *whole, squares, wishes)
    divisor = totals.divisor() * (state.scale.value if state.scale else 1.0)
    torch._foreach_div_(gradients, divisor)
    norm = math.hypot(
        float(torch.nn.utils.get_total_norm(whole)), math.sqrt(float(squares)) / divisor
    )
    if grad_clip is not None and norm > grad_clip:
        torch._foreach_mul_(gradients, grad_clip / norm)
    skipped = not math.isfinite(norm) or not float(totals.count)
    record = {**totals.means(), "lr": rate, "grad_norm": norm, "skipped": float(skipped)}
    overflow = (
        state.scale is not None
        and state.scale.value > 1
        and not math.isfinite(norm)
        and math.isfinite(record.get("loss", math.nan))
    )
    if state.scale:
        record["loss_scale"] = state.scale.value
        state.scale.note(math.isfinite(norm))
    if not skipped:
        for optimizer in state.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate * group.get("lr_scale", 1.0)
            optimizer.step()
    losses = (totals.losses / totals.terms if mined is None else mined).double().cpu().numpy()
    return StepResult(record, skipped, overflow, losses, tuple(map(bool, wishes)))
