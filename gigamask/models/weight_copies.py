"""Copies of weights in half precision, made once for all rounds of prompts.

Autocast casts every weight anew in every round, and casts and adds each gradient by itself, which
is hundreds of small kernels. Copies are cast, and their gradients added, in a few kernels.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from gigamask.models.shared_tensors import SharedTensors, cast_together, sharing


@dataclass(frozen=True)
class WeightCopies:
    """Weights, and the leaf tensors that replace them in their modules.

    Attributes:
        weights: Weights of the model.
        copies: A tensor for each weight, in half precision or the same memory.
        shared: Tensors computed from the copies, once for all rounds.
    """

    weights: Sequence[nn.Parameter]
    copies: Sequence[nn.Parameter]
    shared: SharedTensors

    def finish(self) -> None:
        """Add the gradients of shared tensors to those of the weights, after the last round."""
        self.shared.backward()
        self.add_gradients()

    @torch.no_grad()
    def add_gradients(self) -> None:
        """Add the gradients of a round to those of the weights, and clear them on the copies."""
        self.shared.add_gradients()
        pairs = [
            (weight, copy.grad)
            for weight, copy in zip(self.weights, self.copies, strict=True)
            if copy.grad is not None
        ]
        for copy in self.copies:
            copy.grad = None
        gradients = cast_together([g for _, g in pairs], [weight.dtype for weight, _ in pairs])
        later = []
        for (weight, _), gradient in zip(pairs, gradients, strict=True):
            if weight.grad is None:
                weight.grad = gradient
            else:
                later.append((weight.grad, gradient))
        if later:
            sums, gradients = zip(*later, strict=True)
            torch._foreach_add_(sums, gradients)


@contextmanager
def weight_copies(
    modules: Sequence[nn.Module],
    cast: tuple[type[nn.Module], ...],
    dtype: torch.dtype | None,
    share: bool = True,
) -> Iterator[WeightCopies]:
    """Replace the weights of modules by leaf copies within the context.

    Args:
        modules: The modules; none of their weights is sharded.
        cast: Modules within them whose weights are used in half precision; the others compute with
            their weights as they are.
        dtype: Dtype of the copies of weights in `cast`; None replaces nothing.
        share: Whether the modules also share tensors, unless `dtype` is None.

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
        with sharing(modules, share and dtype is not None) as shared:
            yield WeightCopies(weights, copies, shared)
    finally:
        for own, name, weight, _ in owners:
            own[name] = weight


@contextmanager
def casting_blocks(
    blocks: Iterable[nn.Module], cast: tuple[type[nn.Module], ...], dtype: torch.dtype | None
) -> Iterator[None]:
    """Cast the weights of each block together when it runs, and their gradients likewise.

    Args:
        blocks: The blocks; none of their weights is sharded.
        cast: Modules within them whose weights are used in half precision.
        dtype: The half precision; None casts nothing.
    """
    hooks = []
    for block in blocks:
        if dtype is None:
            break
        owners = [
            (module._parameters, name, weight)
            for module in block.modules()
            if isinstance(module, cast)
            for name, weight in module._parameters.items()
            if weight is not None and weight.dtype != dtype
        ]
        hooks += [
            block.register_forward_pre_hook(partial(_replace, owners, dtype)),
            block.register_forward_hook(partial(_restore, owners), always_call=True),
        ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


Owners = list[tuple[dict[str, Any], str, nn.Parameter]]
"""The dictionary of a module's parameters, the name in it, and the parameter."""


def _replace(owners: Owners, dtype: torch.dtype, *_hook: Any) -> None:
    copies = _Cast.apply(dtype, *(weight for _, _, weight in owners))
    for (own, name, _), copy in zip(owners, copies, strict=True):
        own[name] = copy


def _restore(owners: Owners, *_hook: Any) -> None:
    for own, name, weight in owners:
        own[name] = weight


class _Cast(torch.autograd.Function):
    """Cast tensors in one operation, and their gradients in another."""

    @staticmethod
    def forward(ctx, dtype: torch.dtype, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.dtypes = [tensor.dtype for tensor in tensors]
        ctx.set_materialize_grads(False)
        return tuple(cast_together(tensors, [dtype] * len(tensors)))

    @staticmethod
    @once_differentiable
    def backward(ctx, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:  # pyrefly: ignore[bad-override]
        given = [
            (x, dtype) for x, dtype in zip(gradients, ctx.dtypes, strict=True) if x is not None
        ]
        found = iter(cast_together([x for x, _ in given], [dtype for _, dtype in given]))
        return None, *(None if gradient is None else next(found) for gradient in gradients)
