"""Orders, and the steps cut from them, as tests and benchmarks look at them."""

from collections.abc import Iterator
from itertools import chain

import numpy as np

from gigamask.interfaces import Order
from gigamask.records import StepPlan
from gigamask.samplers.batch_sampler import SampleSequence, iter_segments


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
    """Returns the steps of `iter_segments`, for samplers that do not learn from losses."""
    return chain.from_iterable(
        iter_segments(sequence, consumed, batch_size, micro_batch_size, rank, world_size)
    )
