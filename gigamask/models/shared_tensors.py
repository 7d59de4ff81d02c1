"""What all rounds of a micro-batch share: joined weights, and the gradients of linear layers.

A training step decodes the same masks in many rounds, each with a backward pass of its own. What
depends on weights alone is computed in the first round and becomes a leaf; the gradients of all
rounds are summed in it, and pass through the computation once, at the end. A linear layer of few
tokens keeps inputs and gradients of outputs, and multiplies those of all rounds at once.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import cast

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from gigamask.errors import GigamaskError

ATTRIBUTE = "shared_tensors"
"""Name of the attribute of modules within `sharing`."""
MAX_KEPT_ROWS = 8192
"""Rows that a linear layer keeps; eleven rounds of 64 masks with 11 tokens each have 7,744."""


@dataclass
class KeptProducts:
    """Inputs of a linear layer and gradients of its outputs, not multiplied yet.

    Attributes:
        weight: Weight of the layer, a leaf.
        bias: Its bias, a leaf.
        inputs: Inputs of each round.
        gradients: Gradients of the outputs.
        rows: Rows of all inputs.
    """

    weight: Float[Tensor, "D C"]
    bias: Float[Tensor, "D"]
    inputs: list[Float[Tensor, "R C"]] = field(default_factory=list)
    gradients: list[Float[Tensor, "R D"]] = field(default_factory=list)
    rows: int = 0

    @torch.no_grad()
    def multiply(self) -> None:
        """Add what is kept to the gradients of the weight and the bias."""
        if not self.inputs:
            return
        gradient = torch.cat(self.gradients)
        found = gradient.T @ torch.cat(self.inputs), gradient.sum(0)
        for leaf, more in zip((self.weight, self.bias), found, strict=True):
            leaf.grad = more if leaf.grad is None else leaf.grad + more
        self.inputs, self.gradients, self.rows = [], [], 0


class SharedTensors:
    """Leaf tensors by name, the sums of their gradients, and products not computed yet."""

    def __init__(self) -> None:
        self._products: dict[int, KeptProducts] = {}
        self._sources: dict[tuple[int, str], tuple[Tensor, ...]] = {}
        self._leaves: dict[tuple[int, str], tuple[Tensor, ...]] = {}
        self._sums: dict[Tensor, Tensor] = {}

    def get(
        self, key: tuple[int, str], compute: Callable[[], tuple[Tensor, ...]]
    ) -> tuple[Tensor, ...]:
        """Return the leaves of a key, computed when it is first asked for.

        Args:
            key: A module and a name.
            compute: Computes the tensors.
        """
        if key not in self._leaves:
            sources = self._sources[key] = compute()
            self._leaves[key] = tuple(
                tensor.detach().requires_grad_(tensor.requires_grad) for tensor in sources
            )
        return self._leaves[key]

    def keep(
        self,
        weight: Float[Tensor, "D C"],
        bias: Float[Tensor, "D"],
        inputs: Float[Tensor, "R C"],
        gradient: Float[Tensor, "R D"],
    ) -> None:
        """Keep what the gradients of a linear layer's weight and bias are computed from.

        Args:
            weight: The weight, a leaf.
            bias: The bias, a leaf.
            inputs: The layer's inputs.
            gradient: Gradient of its outputs.
        """
        kept = self._products.get(id(weight))
        if kept is None:
            kept = self._products[id(weight)] = KeptProducts(weight, bias)
        kept.inputs.append(inputs)
        kept.gradients.append(gradient)
        kept.rows += len(inputs)
        if kept.rows > MAX_KEPT_ROWS:
            kept.multiply()

    @torch.no_grad()
    def add_gradients(self) -> None:
        """Add the gradients of a round to the sums, in at least float32, and clear them."""
        leaves = [leaf for each in self._leaves.values() for leaf in each if leaf.grad is not None]
        kinds = [torch.promote_types(leaf.dtype, torch.float32) for leaf in leaves]
        later = []
        for leaf, gradient in zip(
            leaves,
            cast_together(cast(list[Tensor], [leaf.grad for leaf in leaves]), kinds),
            strict=True,
        ):
            leaf.grad = None
            if leaf in self._sums:
                later.append((self._sums[leaf], gradient))
            else:
                self._sums[leaf] = gradient
        if later:
            torch._foreach_add_(*zip(*later, strict=True))

    def backward(self) -> None:
        """Multiply what is kept, and pass gradients on to what the tensors were computed from."""
        for kept in self._products.values():
            kept.multiply()
        for key, sources in reversed(self._sources.items()):
            self.add_gradients()  # of tensors computed later, from these
            leaves = zip(sources, self._leaves[key], strict=True)
            found = [(source, self._sums[leaf]) for source, leaf in leaves if leaf in self._sums]
            if found:
                given, totals = zip(*found, strict=True)
                torch.autograd.backward(given, cast_together(totals, [x.dtype for x in given]))


def shared(
    module: nn.Module, name: str, compute: Callable[[], tuple[Tensor, ...]]
) -> tuple[Tensor, ...]:
    """Return tensors that depend on weights alone; within `sharing`, as leaves computed once.

    Args:
        module: The module that they belong to.
        name: Their name in the module.
        compute: Computes them.
    """
    tensors = getattr(module, ATTRIBUTE, None)
    return compute() if tensors is None else tensors.get((id(module), name), compute)


def is_plain(module: nn.Module) -> bool:
    """Return whether a module is a linear layer, and no hook of a program's waits for a call."""
    return is_own(module, nn.Linear)


def is_own(module: nn.Module, kind: type[nn.Module]) -> bool:
    """Return whether a program has neither replaced what a module computes nor hooked into it.

    Args:
        module: The module.
        kind: The class that computes it otherwise.
    """
    after = module._forward_hooks, module._backward_hooks, module._backward_pre_hooks
    return _has_forward_of(module, kind) and not any((module._forward_pre_hooks, *after))


def _has_forward_of(module: nn.Module, kind: type[nn.Module]) -> bool:
    is_replaced = "forward" in vars(module)
    return getattr(type(module), "forward", None) is kind.forward and not is_replaced


def affine(module: nn.Module) -> tuple[Float[Tensor, "D C"], Float[Tensor, "D"]]:
    """Return weight and bias of a layer, or of what a program has put in its place.

    Args:
        module: A linear layer, or an affine module that has one, such as a LoRA's.

    Raises:
        GigamaskError: It is not affine.
    """
    # A hook before the call may set the weight.
    if _has_forward_of(module, nn.Linear) and not module._forward_pre_hooks:
        return cast(tuple[Tensor, Tensor], (module.weight, module.bias))
    inner = [each.weight for each in module.modules() if isinstance(each, nn.Linear)]
    if not inner:
        raise GigamaskError(f"{type(module).__name__} in the mask decoder has no linear layer")
    zero = torch.zeros_like(inner[0][:1])
    unit = torch.eye(zero.shape[1], dtype=zero.dtype, device=zero.device)
    probe = torch.linspace(-1, 1, zero.shape[1], dtype=zero.dtype, device=zero.device)
    found = module(torch.cat([zero, unit, probe[None]])[None])[0]
    bias, weight = found[0], (found[1:-1] - found[0]).T
    if not torch.allclose(found[-1], F.linear(probe, weight, bias), rtol=1e-2, atol=1e-2):
        raise GigamaskError(
            f"{type(module).__name__} in the mask decoder is not affine: projections of its "
            "attention may only be replaced by modules that are (without dropout in training)"
        )
    return weight, bias


def linear(
    module: nn.Module,
    x: Float[Tensor, "... C"],
    joined: tuple[Float[Tensor, "D C"], Float[Tensor, "D"]] | None = None,
) -> Float[Tensor, "... D"]:
    """Apply a linear layer to few tokens; within `sharing`, its gradients are computed at the end.

    Args:
        module: The layer, or the owner of `joined`.
        x: The tokens.
        joined: Weight and bias; None: those of the layer.
    """
    if joined is None and not is_plain(module):
        return module(x)
    weight, bias = joined or cast(tuple[Tensor, Tensor], (module.weight, module.bias))
    tensors = getattr(module, ATTRIBUTE, None)
    trained = all(each.is_leaf and each.requires_grad for each in (weight, bias))
    if tensors is None or not trained or x.dtype != weight.dtype:
        return F.linear(x, weight, bias)
    return _Linear.apply(x, weight, bias, tensors)


class _Linear(torch.autograd.Function):
    """A linear layer that leaves the gradients of weight and bias to `SharedTensors`."""

    @staticmethod
    def forward(
        ctx, x: Tensor, weight: Tensor, bias: Tensor, tensors: SharedTensors
    ) -> Float[Tensor, "... D"]:
        ctx.save_for_backward(x, weight, bias)
        ctx.tensors = tensors
        return F.linear(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx, *gradients: Tensor) -> tuple[Tensor | None, ...]:  # pyrefly: ignore[bad-override]
        (x, weight, bias), gradient = ctx.saved_tensors, gradients[0].flatten(0, -2)
        ctx.tensors.keep(weight, bias, x.flatten(0, -2), gradient)
        more = (gradient @ weight).view(x.shape) if ctx.needs_input_grad[0] else None
        return more, None, None, None


@contextmanager
def sharing(modules: Iterable[nn.Module], enabled: bool) -> Iterator[SharedTensors]:
    """Let modules share tensors within the context.

    Args:
        modules: The modules, with all their children.
        enabled: Whether they do.

    Returns:
        The tensors; the caller adds the gradients of each round and passes them on at the end.
    """
    tensors = SharedTensors()
    owners = [module for parent in modules for module in parent.modules()] if enabled else []
    for module in owners:
        module.__dict__[ATTRIBUTE] = tensors
    try:
        yield tensors
    finally:
        for module in owners:
            del module.__dict__[ATTRIBUTE]


def cast_together(tensors: Sequence[Tensor], dtypes: Sequence[torch.dtype]) -> list[Tensor]:
    """Return tensors in the given dtypes, cast in one operation; those that have it as they are.

    Args:
        tensors: The tensors.
        dtypes: The dtype of each.
    """
    cast = [
        x if x.dtype == dtype else torch.empty_like(x, dtype=dtype)
        for x, dtype in zip(tensors, dtypes, strict=True)
    ]
    made = [pair for pair in zip(cast, tensors, strict=True) if pair[0] is not pair[1]]
    if made:
        copies, found = zip(*made, strict=True)
        torch._foreach_copy_(copies, found)
    return cast
