"""The endless sequence of samples, cut into steps, ranks and micro-batches.

The order of an epoch is computed at the start of the step that holds the epoch's first sample, from
the losses of all steps before it. So reading ahead does not change any order, and with a sampler
that learns from losses, the sequence is known only up to the end of an epoch.
"""

import math
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import numpy as np
from jaxtyping import Float32, Int64

from gigamask.errors import GigamaskError
from gigamask.interfaces import LossSnapshot, Order, Sampler, SampleTable, WeightedOrder
from gigamask.records import SampleRef, StepPlan

if TYPE_CHECKING:
    from gigamask.samplers.loss_history import LossHistory

Integers = Int64[np.ndarray, "n"]
Locate = Callable[[Integers], tuple[Integers, Integers]]
"""Maps items to the rows of their images, and to masks of these images (-1: the whole image)."""


def whole_images(items: Integers) -> tuple[Integers, Integers]:
    """Locate items that are the rows of an index."""
    return items, np.full(len(items), -1)


def order_of(
    sampler: Sampler,
    table: SampleTable,
    epoch: int,
    history: LossSnapshot | None,
    length: int | None = None,
) -> Order:
    """Return the order of an epoch, which may be of a sampler of the user's own.

    Args:
        sampler: The sampler.
        table: Items to sample.
        epoch: Number of the epoch.
        history: Losses so far, for samplers that learn from them.
        length: Number of positions of epoch 0; None: this is the first order.

    Raises:
        GigamaskError: It cannot be indexed by positions, or has another length.
    """
    order, name = sampler.order(table, epoch, history), type(sampler).__name__
    is_lazy = all(hasattr(order, method) for method in ("__len__", "__getitem__"))
    if isinstance(order, list) or getattr(order, "ndim", 1) != 1 or not is_lazy:
        shape = getattr(order, "shape", type(order).__name__)
        raise GigamaskError(
            f"{name}.order must return an array of integers of one dimension, or an object that "
            f"computes them (got {shape})"
        )
    if length is not None and len(order) != length:
        raise GigamaskError(
            f"{name}: the order of epoch {epoch} must have {length} positions like epoch 0 (got "
            f"{len(order)}); make the length independent of the epoch"
        )
    return order


def items_at(order: Order, positions: Integers, sampler: Sampler, table: SampleTable) -> Integers:
    """Return the items at positions of an order.

    Args:
        order: The order, of `order_of`.
        positions: The positions.
        sampler: The sampler, for the error.
        table: Items to sample.

    Raises:
        GigamaskError: They are not items of the table.
    """
    items = order[positions]
    outside = items[(items < 0) | (items >= table.count)]
    if not np.issubdtype(items.dtype, np.integer) or len(outside):
        got = outside[0] if len(outside) else items.dtype
        raise GigamaskError(
            f"{type(sampler).__name__}: an order must hold integers from 0 to {table.count - 1}, "
            f"numbers of items of the table (got {got})"
        )
    return np.asarray(items, np.int64)


class SampleSequence:
    """The orders of all epochs, one after the other, starting at sample 0 of the run.

    Args:
        sampler: Computes the order of each epoch.
        table: Items to sample.
        history: Losses so far; required if `sampler.decay` is not None.
        locate: Maps items to images and masks.
        strata: Whether samples carry the stratum that the sampler assigns to them.

    Raises:
        GigamaskError: Orders are empty, or strata are requested but the sampler has none.
    """

    def __init__(
        self,
        sampler: Sampler,
        table: SampleTable,
        history: "LossHistory | None" = None,
        locate: Locate = whole_images,
        strata: bool = False,
    ) -> None:
        self._sampler, self._items, self._history = sampler, table, history
        self._locate = locate
        self._orders: dict[int, Order] = {}
        self._strata = sampler.strata(table) if strata else None
        if strata and self._strata is None:
            raise GigamaskError(
                f"{type(sampler).__name__} has no strata; choose another sampler or "
                "--mining.group-by"
            )
        # A resumed history already holds later epochs, so this order may not be that of epoch 0;
        # but its length does not depend on losses.
        is_new = history is None or (history.seen < 0).all()
        first = order_of(sampler, table, 0, LossSnapshot.empty(table.count) if history else None)
        self.epoch_length = len(first)
        if not self.epoch_length:
            raise GigamaskError("the sampler's order is empty; loosen the sampler or the filters")
        if is_new:
            self._orders[0] = first

    def check_lengths(self, samples: int) -> None:
        """Check, before an epoch is trained, the order of a later one, if the sampler is not ours.

        It is the last that a loader may ask for ahead of time, the second at least.

        Args:
            samples: Number of samples of the training.

        Raises:
            GigamaskError: It has another length than the first.
        """
        last = max(1, samples // self.epoch_length)
        if self._history is None and not type(self._sampler).__module__.startswith("gigamask."):
            order_of(self._sampler, self._items, last, None, self.epoch_length)

    def prepare(self, consumed: int, batch_size: int) -> float:
        """Compute the orders of the epochs that start in the next step.

        Args:
            consumed: Number of samples before the step.
            batch_size: Number of samples of the step.

        Returns:
            The number of samples up to which whole steps are known; infinity if losses are not
            used.
        """
        if self._history is None:
            return math.inf
        length = self.epoch_length
        newest = (consumed + batch_size - 1) // length
        self._drop_orders_before(consumed)
        if consumed % length:
            self._order(consumed // length)
        if newest * length >= consumed:
            self._history.take_snapshot(consumed // length)
        for epoch in range(-(-consumed // length), newest + 1):
            self._order(epoch)
        steps = ((newest + 1) * length - consumed) // batch_size
        return float(consumed + steps * batch_size)

    def sample_refs(self, samples: Integers, start: int) -> tuple[SampleRef, ...]:
        """Return the references of some samples of a step.

        Args:
            samples: Numbers of the samples, ascending.
            start: Number of the step's first sample.
        """
        if self._history is None:
            self._drop_orders_before(start)
        items, weights = self._at(samples)
        rows, masks = self._locate(items)
        epochs, positions = np.divmod(samples, self.epoch_length)
        strata = np.full(len(items), -1) if self._strata is None else self._strata[items]
        columns = (epochs, positions, rows, masks, samples - start, weights, strata)
        return tuple(map(SampleRef, *(column.tolist() for column in columns)))

    def record_losses(self, start: int, losses: np.ndarray) -> None:
        """Add the losses of a step to the history, if there is one.

        Args:
            start: Number of the step's first sample.
            losses: Loss of each sample of the step, NaN where there is none.
        """
        if self._history is not None:
            samples = np.arange(start, start + len(losses))
            self._history.update(self._at(samples)[0], samples // self.epoch_length, losses)

    def _at(self, samples: Integers) -> tuple[Integers, Float32[np.ndarray, "n"]]:
        """Return the items at these samples, and the weights of their losses."""
        epochs, positions = np.divmod(samples, self.epoch_length)
        items, weights = np.empty(len(samples), np.int64), np.ones(len(samples), np.float32)
        for epoch in np.unique(epochs).tolist():
            where, order = epochs == epoch, self._order(epoch)
            items[where] = items_at(order, positions[where], self._sampler, self._items)
            if isinstance(order, WeightedOrder):
                weights[where] = order.weights[positions[where]]
        return items, weights

    def _order(self, epoch: int) -> Order:
        if epoch not in self._orders:
            snapshot = self._history.snapshot if self._history else None
            order = order_of(self._sampler, self._items, epoch, snapshot, self.epoch_length)
            self._orders[epoch] = order
        return self._orders[epoch]

    def _drop_orders_before(self, sample: int) -> None:
        epoch = sample // self.epoch_length
        self._orders = {other: order for other, order in self._orders.items() if other >= epoch}


def iter_segments(
    sequence: SampleSequence,
    consumed: int,
    batch_size: int,
    micro_batch_size: int,
    rank: int,
    world_size: int,
) -> Iterator[Iterator[StepPlan]]:
    """Yield the endless sequence of one rank's steps, in segments.

    A global batch is the next `batch_size` samples of the sequence, even across the end of an
    epoch. Rank r takes its samples r, r + world_size, and so on. All ranks get the same number of
    micro-batches; if the batch is not a multiple of the world size, the last one of some ranks is
    smaller or empty.

    Args:
        sequence: Sequence of samples.
        consumed: Number of samples before the first step.
        batch_size: Global batch size.
        micro_batch_size: Samples per rank that are processed together.
        rank: Rank of this process.
        world_size: Number of processes.

    Yields:
        The steps known so far, which may be loaded ahead. Request the next segment after the losses
        of this one are recorded.
    """
    rounds = -(-batch_size // (world_size * micro_batch_size))

    def steps(start: int, known: float) -> Iterator[StepPlan]:
        while start < known:
            end = start + batch_size
            sample_refs = sequence.sample_refs(np.arange(start + rank, end, world_size), start)
            micro_batches = tuple(
                sample_refs[i * micro_batch_size : (i + 1) * micro_batch_size]
                for i in range(rounds)
            )
            yield StepPlan(micro_batches, start, end)
            start = end

    while True:
        known = sequence.prepare(consumed, batch_size)
        yield steps(consumed, known)
        consumed = int(known)
