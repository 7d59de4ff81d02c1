"""Copies of weights in half precision, made once for all rounds of prompts.

Autocast casts every weight anew in every round, and casts and adds each gradient by itself, which
is hundreds of small kernels. Copies are cast, and their gradients added, in a few kernels.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class WeightCopies:
    """Weights, and the leaf tensors that replace them in their modules.

    Attributes:
        weights: Weights of the model.
        copies: A tensor for each weight, in half precision or the same memory.
    """

    weights: Sequence[nn.Parameter]
    copies: Sequence[nn.Parameter]

    @torch.no_grad()
    def add_gradients(self) -> None:
        """Add the gradients of the copies to those of the weights, and clear the copies'."""
        pairs = [
            (weight, copy.grad)
            for weight, copy in zip(self.weights, self.copies, strict=True)
            if copy.grad is not None
        ]
        for copy in self.copies:
            copy.grad = None
        if pairs:
            weights, gradients = map(list, zip(*pairs, strict=True))
            sums = [_gradient(weight) for weight in weights]
            torch._foreach_add_(sums, _cast_like(gradients, sums))


@contextmanager
def weight_copies(
    modules: Sequence[nn.Module], cast: tuple[type[nn.Module], ...], dtype: torch.dtype | None
) -> Iterator[WeightCopies]:
    """Replace the weights of modules by leaf copies within the context.

    Args:
        modules: The modules; none of their weights is sharded.
        cast: Modules within them whose weights are used in half precision; the others compute with
            their weights as they are.
        dtype: Dtype of the copies of weights in `cast`; None replaces nothing.

    Returns:
        The copies, whose gradients the caller adds to those of the weights.
    """
    owners = [
        (module._parameters, name, weight, isinstance(module, cast))
        for parent in modules
        for module in parent.modules()
        for name, weight in module._parameters.items()
        if weight is not None and dtype is not None
    ]
    weights = [weight for _, _, weight, _ in owners]
    copies = [
        nn.Parameter(
            torch.empty_like(weight, dtype=dtype) if is_cast else weight.detach(),
            weight.requires_grad,
        )
        for _, _, weight, is_cast in owners
    ]
    half = [index for index, owner in enumerate(owners) if owner[-1]]
    if half:
        with torch.no_grad():
            torch._foreach_copy_([copies[index] for index in half], [weights[i] for i in half])
    for (own, name, _, _), copy in zip(owners, copies, strict=True):
        own[name] = copy
    try:
        yield WeightCopies(weights, copies)
    finally:
        for own, name, weight, _ in owners:
            own[name] = weight


def _gradient(weight: nn.Parameter) -> Tensor:
    """Return the gradient of a weight, zeros if it has none."""
    if weight.grad is None:
        weight.grad = torch.zeros_like(weight)
    return weight.grad


def _cast_like(gradients: list[Tensor], sums: list[Tensor]) -> list[Tensor]:
    """Return gradients in the dtypes of `sums`, cast in one operation."""
    cast = list(gradients)
    other = [index for index, total in enumerate(sums) if gradients[index].dtype != total.dtype]
    for index in other:
        cast[index] = torch.empty_like(gradients[index], dtype=sums[index].dtype)
    if other:
        torch._foreach_copy_([cast[index] for index in other], [gradients[i] for i in other])
    return cast
