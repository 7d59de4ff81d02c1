"""Keyed random numbers: a pure function of seed, purpose and ids, without generator state.

There is no state to save, so resuming, resharding or recomputing cannot change the numbers. Seeds
are never added or multiplied: (seed 0, epoch 1) and (seed 1, epoch 0) are unrelated.
"""

import hashlib

import numpy as np


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
