"""One update: the only backward and the only division in the house.

Pieces of the loss arrive one at a time and are sums. Each is back-propagated at once, so its graph is gone before the next is computed;
where pieces share something costly (the image embedding), their gradients meet on a leaf copy of it and go through it once at the end.
The gradient of a sum of sums is divided by the sum of counts: accumulation over micro-batches is exact whatever their sizes.

Not here: what a piece is (`train.tasks`).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from gigamask.contracts import Batch, Terms
from gigamask.seams import Task
from gigamask.train.state import TrainState


@dataclass
class Totals:
    """Sums and counts of a step so far, on the device."""

    sums: dict[str, Tensor] = field(default_factory=dict)
    count: Tensor | float = 0.0

    def add(self, terms: Terms) -> None:
        for name, value in {"loss": terms.loss, **terms.parts}.items():
            self.sums[name] = self.sums.get(name, 0.0) + value.detach()
        self.count = self.count + terms.count

    def means(self) -> dict[str, float]:
        """Returns each sum over the count; empty when nothing was counted."""
        count = float(self.count)
        return {name: float(value) / count for name, value in self.sums.items()} if count else {}


def accumulate(task: Task, model: torch.nn.Module, batch: Batch, totals: Totals) -> None:
    """Adds the gradient of a batch's loss sum to every parameter's, and its sums and counts to `totals`."""
    cuts: list[tuple[Tensor, Tensor]] = []

    def cut(whole: Tensor) -> Tensor:
        leaf = whole.detach().requires_grad_(whole.requires_grad)
        cuts.append((whole, leaf))
        return leaf

    for terms in task.terms(model, batch, cut):
        terms.loss.backward()
        totals.add(terms)
        del terms
    for whole, leaf in cuts:
        if leaf.grad is not None:
            whole.backward(leaf.grad)


def step(task: Task, state: TrainState, batches: Sequence[Batch], rate: float, clip_norm: float | None) -> dict[str, float]:
    """Makes one update from all micro-batches of a global batch and returns its record.

    `rate` is the learning rate before each layer's own factor. A step whose gradient is not finite changes nothing and says `skipped: 1`;
    so does one without a mask.
    """
    for optimizer in state.optimizers:
        optimizer.zero_grad(set_to_none=False)
    totals = Totals()
    for batch in batches:
        accumulate(task, state.model, batch, totals)
    means = totals.means()
    parameters = [p for optimizer in state.optimizers for group in optimizer.param_groups for p in group["params"]]
    gradients = [p.grad for p in parameters]
    torch._foreach_div_(gradients, max(float(totals.count), 1.0))
    norm = float(torch.nn.utils.clip_grad_norm_(parameters, clip_norm if clip_norm is not None else math.inf))
    skipped = not math.isfinite(norm) or not means
    if not skipped:
        for optimizer in state.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate * group["lr_scale"]
            optimizer.step()
    return {**means, "rate": rate, "gradient_norm": norm, "skipped": float(skipped)}
