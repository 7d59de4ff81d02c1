"""Activation checkpointing: recompute blocks in the backward pass (Chen et al. 2016).

A recomputed block repeats its first pass exactly, since drop path is drawn beforehand and the
encoder has no other randomness.
"""

from collections.abc import Iterable
from functools import partial

from torch import nn
from torch.utils.checkpoint import checkpoint


def checkpoint_blocks(blocks: Iterable[nn.Module], every: int) -> None:
    """Make every n-th block keep only its input and recompute the rest in the backward pass.

    Args:
        blocks: The blocks, from input to output.
        every: Interval n, counted from the first block; 0 disables.
    """
    for index, block in enumerate(blocks):
        if every and index % every == 0:
            block.forward = partial(
                checkpoint, block.forward, use_reentrant=False, preserve_rng_state=False
            )


def is_checkpointed(model: nn.Module) -> bool:
    """Return whether a module of the model keeps only its input."""
    forwards = (module.__dict__.get("forward") for module in model.modules())
    return any(isinstance(forward, partial) and forward.func is checkpoint for forward in forwards)
