"""Activation checkpointing: blocks that keep only what enters them and compute the rest again in the backward pass (Chen et al. 2016).

Drop path is drawn beforehand and the encoder has no other chance, so a block does the same both times.

Not here: what it saves and costs (`docs/measurements.md`).
"""

from collections.abc import Iterable
from functools import partial

from torch import nn
from torch.utils.checkpoint import checkpoint


def checkpoint_blocks(blocks: Iterable[nn.Module], every: int) -> None:
    """Makes every `every`-th block recompute, beginning with the first; 0 leaves all as they are."""
    for index, block in enumerate(blocks):
        if every and index % every == 0:
            block.forward = partial(
                checkpoint, block.forward, use_reentrant=False, preserve_rng_state=False
            )
