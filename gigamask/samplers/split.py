"""The sequence of samples, cut into steps, ranks and micro-batches.

In: a sequence, and how many samples were consumed. Out: what one rank visits in each step from there on.
A global batch is the next `batch` samples of the sequence, also across the end of an epoch. Neither the number of ranks nor the micro-batch changes
which samples a step holds.

Not here: what the sequence is (`samplers.sequence`), loading (`data.loader`).
"""

from collections.abc import Iterator
from itertools import chain

import numpy as np

from gigamask.contracts import Group
from gigamask.samplers.sequence import Sequence


def legs(sequence: Sequence, samples: int, batch: int, micro: int, rank: int, world: int) -> Iterator[Iterator[Group]]:
    """Yields the steps of one rank without end, beginning behind the first `samples` samples, in legs.

    All steps of a leg are known when it begins, so they may be loaded ahead; the next leg may be asked for once the losses of this one are noted.
    Rank r takes every `world`-th sample of each global batch of `batch`, from the r-th on, in micro-batches of `micro` images. All ranks get
    the same number of micro-batches; where `batch` is not a multiple of `world`, the last one of some ranks is smaller, or empty.
    """
    rounds = -(-batch // (world * micro))
    while True:
        known = sequence.open(samples, batch)
        yield _steps(sequence, samples, known, batch, micro, rank, world, rounds)
        samples = int(known)


def _steps(sequence: Sequence, samples: int, known: float, batch: int, micro: int, rank: int, world: int, rounds: int) -> Iterator[Group]:
    while samples < known:
        visits = sequence.visits(np.arange(samples + rank, samples + batch, world), samples)
        yield Group(tuple(visits[i * micro : (i + 1) * micro] for i in range(rounds)), samples, samples + batch)
        samples += batch


def groups(sequence: Sequence, samples: int, batch: int, micro: int, rank: int = 0, world: int = 1) -> Iterator[Group]:
    """Yields the same steps in one go, for who loads them without training."""
    return chain.from_iterable(legs(sequence, samples, batch, micro, rank, world))
