"""Orders and steps as tests look at them."""

from collections.abc import Iterator
from itertools import chain

import numpy as np

from gigamask.interfaces import Order
from gigamask.samplers.batch_sampler import SampleSequence, StepPlan, iter_segments


def listed(order: Order) -> np.ndarray:
    """Returns an order's items from its first position on."""
    return order[np.arange(len(order))]


def iter_steps(
    sequence: SampleSequence,
    consumed: int,
    batch_size: int,
    micro_batch_size: int,
    rank: int = 0,
    world_size: int = 1,
) -> Iterator[StepPlan]:
    """Yields the steps of `iter_segments` one by one, for samplers that learn from no losses."""
    segments = iter_segments(sequence, consumed, batch_size, micro_batch_size, rank, world_size)
    return chain.from_iterable(segments)
