"""Activation checkpointing: recompute blocks in the backward pass (Chen et al. 2016).

A recomputed block of gigamask repeats its first pass exactly, since drop path is drawn beforehand
and it has no other randomness. A block that is not ours may draw from the global generators of
torch, NumPy and Python, and may change its buffers, as batch norm and spectral norm do. Its second
pass therefore starts from the generators and buffers that the first one started from, and leaves
them as they are. If the two passes of the first step still differ, the training is refused.
"""

import random
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import numpy as np
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from gigamask.distributed.foreign_modules import copy_buffers, is_foreign, using_buffers
from gigamask.errors import GigamaskError

TOLERANCE = 0.01
"""Largest difference of two passes, relative to the largest value: GPUs add in any order."""


def checkpoint_blocks(blocks: Iterable[nn.Module], every: int) -> None:
    """Make every n-th block keep only its input and recompute the rest in the backward pass.

    Args:
        blocks: The blocks, from input to output.
        every: Interval n, counted from the first block; 0 disables.
    """
    for index, block in enumerate(blocks):
        if not every or index % every or is_checkpointed(block):  # a block may come twice
            continue
        if not is_foreign(block):
            block.forward = partial(
                checkpoint, block.forward, use_reentrant=False, preserve_rng_state=False
            )
        else:
            repeated = _Repeated(block)
            block.forward = partial(
                checkpoint,
                repeated.forward,
                use_reentrant=False,
                context_fn=repeated.contexts,
                early_stop=False,
            )


def is_checkpointed(model: nn.Module) -> bool:
    """Return whether a module of the model keeps only its input."""
    forwards = (module.__dict__.get("forward") for module in model.modules())
    return any(isinstance(forward, partial) and forward.func is checkpoint for forward in forwards)


class _Repeated:
    """A block whose second pass repeats the first one.

    Args:
        block: The block.
    """

    def __init__(self, block: nn.Module) -> None:
        self._block, self._forward = block, block.forward
        self._pass: tuple[int, bool] | None = None
        self._passes, self._is_checked = 0, False
        self._outputs: dict[int, list[Tensor]] = {}

    def contexts(self) -> tuple[AbstractContextManager, AbstractContextManager]:
        """Return a context for the first pass of the block, and one for the second."""
        self._passes += 1
        start: list[Any] = []
        return self._first(self._passes, start), self._again(self._passes, start)

    def forward(self, *inputs: Any, **options: Any) -> Any:
        """Run the block; the first time that it runs twice, compare the results."""
        output = self._forward(*inputs, **options)
        if self._pass and not self._is_checked:
            number, is_again = self._pass
            tensors = [
                each.detach()
                for each in tree_leaves(output)
                if isinstance(each, Tensor) and each.is_floating_point()
            ]
            first = self._outputs.setdefault(number, tensors)
            if is_again:
                self._check(first, tensors)
        return output

    def _check(self, first: list[Tensor], second: list[Tensor]) -> None:
        self._is_checked, self._outputs = True, {}
        for one, other in zip(first, second, strict=True):
            if type(one) is not Tensor:  # fake, in a memory plan
                continue
            if one.numel() and (one - other).abs().max() > TOLERANCE * one.abs().max():
                kind = type(self._block)
                raise GigamaskError(
                    "--activation-checkpointing computes blocks twice, and "
                    f"{kind.__module__}.{kind.__qualname__} does not give the same both times; "
                    "draw random numbers from torch's global generator, and keep in buffers what "
                    "changes, or leave the flag out"
                )

    @contextmanager
    def _first(self, number: int, start: list[Any]) -> Iterator[None]:
        start += copy_buffers(self._block), random.getstate(), np.random.get_state()
        self._pass = number, False
        try:
            yield
        finally:
            self._pass = None

    @contextmanager
    def _again(self, number: int, start: list[Any]) -> Iterator[None]:
        now = random.getstate(), np.random.get_state()
        with using_buffers(start[0]):
            random.setstate(start[1])
            np.random.set_state(start[2])
            self._pass = number, True
            try:
                yield
            finally:
                self._pass = None
                random.setstate(now[0])
                np.random.set_state(now[1])
