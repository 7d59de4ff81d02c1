"""Keyed random numbers: a pure function of seed, purpose and ids, without generator state.

There is no state to save, so resuming, resharding or recomputing cannot change the numbers. Seeds
are never added or multiplied: (seed 0, epoch 1) and (seed 1, epoch 0) are unrelated.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

from gigamask.lazy_numpy import np

if TYPE_CHECKING:
    import torch


def make_rng(seed: int, purpose: str, *ids: int) -> np.random.Generator:
    """Return a new generator for `(seed, purpose, *ids)`; equal keys give equal numbers.

    The generator is Philox (Salmon et al. 2011), keyed by a 128-bit hash of the arguments.

    Args:
        seed: Random seed of the run.
        purpose: What the numbers are for, for example "order" or "clicks".
        *ids: Where they are used: epoch, position, image and so on.

    Returns:
        A fresh generator.
    """
    name = "\0".join([str(int(seed)), purpose, *(str(int(i)) for i in ids)])
    digest = hashlib.blake2b(name.encode(), digest_size=16).digest()
    return np.random.Generator(np.random.Philox(key=int.from_bytes(digest, "little")))


def make_torch_generator(seed: int, purpose: str) -> torch.Generator:
    """Return a new generator of torch on the CPU for `(seed, purpose)`.

    Args:
        seed: Random seed of the run.
        purpose: What the numbers are for, for example "weights neck.0.weight".
    """
    import torch  # which recipes and command-line help do without

    return torch.Generator().manual_seed(int(make_rng(seed, purpose).integers(2**63)))
