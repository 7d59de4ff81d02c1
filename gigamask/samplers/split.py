"""The endless sequence of samples, cut into steps, ranks and micro-batches.

In: an order for each epoch, and how many samples were consumed. Out: what one rank visits in each step from there on.
The sequence is the epochs' orders, one after the other; a global batch is the next `batch` of it, also across the end of an epoch.
Neither the number of ranks nor the micro-batch changes which samples a step holds.

Not here: what an order is (`samplers.uniform`), loading (`data.loader`).
"""

from collections.abc import Callable, Iterator

import numpy as np
from jaxtyping import Int64

from gigamask.contracts import Group, Visit
from gigamask.faults import Fault


def groups(
    order_of_epoch: Callable[[int], Int64[np.ndarray, "N"]],
    per_epoch: int,
    samples: int,
    batch: int,
    micro: int,
    rank: int = 0,
    world: int = 1,
) -> Iterator[Group]:
    """Yields the steps of one rank without end, beginning behind the first `samples` samples of the sequence.

    Rank r takes every `world`-th sample of each global batch of `batch`, from the r-th on, in micro-batches of `micro` images. All ranks get
    the same number of micro-batches; where `batch` is not a multiple of `world`, the last one of some ranks is smaller, or empty.
    """
    if per_epoch < 1:
        raise Fault("the sampler's order has no positions, training needs at least one; loosen the sampler or the filters")
    rounds = -(-batch // (world * micro))
    epoch, order = -1, None
    while True:
        visits = []
        for number in range(samples + rank, samples + batch, world):
            wanted, position = divmod(number, per_epoch)
            if order is None or wanted != epoch:
                epoch, order = wanted, _order(order_of_epoch, wanted, per_epoch)
            visits.append(Visit(epoch, position, int(order[position])))
        yield Group(tuple(tuple(visits[i * micro : (i + 1) * micro]) for i in range(rounds)), samples, samples + batch)
        samples += batch


def _order(order_of_epoch: Callable[[int], Int64[np.ndarray, "N"]], epoch: int, per_epoch: int) -> Int64[np.ndarray, "N"]:
    order = order_of_epoch(epoch)
    if len(order) != per_epoch:
        raise Fault(
            f"epoch {epoch}: the sampler's order has {len(order)} positions, {per_epoch} were expected; "
            "make their number depend on the items only, not on the epoch"
        )
    return order
