"""Tensors that all rounds of a micro-batch share, such as joined weights: computed once.

A training step decodes the same masks in many rounds, each with a backward pass of its own. What
depends on weights alone is computed in the first round and becomes a leaf; the gradients of all
rounds are summed in it, and pass through the computation once, at the end.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

ATTRIBUTE = "shared_tensors"
"""Name of the attribute of modules within `sharing`."""


class SharedTensors:
    """Leaf tensors by name, and the sums of their gradients."""

    def __init__(self) -> None:
        self._sources: dict[tuple[int, str], tuple[Tensor, ...]] = {}
        self._leaves: dict[tuple[int, str], tuple[Tensor, ...]] = {}
        self._sums: dict[tuple[int, str], list[Tensor | None]] = {}

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
            self._sums[key] = [None] * len(sources)
        return self._leaves[key]

    @torch.no_grad()
    def add_gradients(self) -> None:
        """Add the gradients of a round to the sums, in at least float32, and clear them."""
        sums, gradients = [], []
        for key, leaves in self._leaves.items():
            for index, leaf in enumerate(leaves):
                if leaf.grad is None:
                    continue
                gradient, leaf.grad, total = leaf.grad, None, self._sums[key][index]
                if total is None:
                    wide = torch.promote_types(leaf.dtype, torch.float32)
                    self._sums[key][index] = gradient.to(wide)
                else:
                    sums.append(total)
                    gradients.append(gradient)
        if sums:
            torch._foreach_add_(sums, cast_together(gradients, [total.dtype for total in sums]))

    def backward(self) -> None:
        """Pass the summed gradients on to what the tensors were computed from."""
        for key, sources in reversed(self._sources.items()):
            self.add_gradients()  # of tensors computed later, from these
            pairs = [
                (source, total.to(source.dtype))
                for source, total in zip(sources, self._sums[key], strict=True)
                if total is not None
            ]
            if pairs:
                given, totals = zip(*pairs, strict=True)
                torch.autograd.backward(given, totals)


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
    cast = list(tensors)
    other = [index for index, dtype in enumerate(dtypes) if tensors[index].dtype != dtype]
    for index in other:
        cast[index] = torch.empty_like(tensors[index], dtype=dtypes[index])
    if other:
        torch._foreach_copy_([cast[index] for index in other], [tensors[i] for i in other])
    return cast
