"""Named randomness: every random number is a function of a seed, a purpose and the numbers that say where it is spent.

There is no random state anywhere, so nothing about chance is saved, and resuming, resharding or recomputing cannot change it.
Seeds are never added or multiplied: (seed 0, epoch 1) and (seed 1, epoch 0) are unrelated.

Not here: which numbers a sample needs (`contracts.Draws`), or what they decide (`prompts`, `data.choose`).
"""

import hashlib

import numpy as np


def make_rng(seed: int, purpose: str, *ids: int) -> np.random.Generator:
    """Returns the generator that belongs to `(seed, purpose, *ids)`, always at its beginning.

    `purpose` names what the numbers are for ("order", "clicks"); `ids` say where (epoch, position, image...).
    Philox (Salmon et al. 2011) keyed by a 128-bit hash of the whole name.
    """
    name = "\0".join([str(int(seed)), purpose, *(str(int(i)) for i in ids)])
    digest = hashlib.blake2b(name.encode(), digest_size=16).digest()
    return np.random.Generator(np.random.Philox(key=int.from_bytes(digest, "little")))
