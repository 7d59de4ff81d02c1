"""The endless sequence of items: the orders of the epochs, one after the other.

In: a sampler, its items, the book of losses if it learns. Out: what stands at any place of the sequence.
The order of an epoch is asked for when the step begins that holds the epoch's first sample; it sees the losses of all steps before that one.
So how far ahead samples are loaded changes nothing, and a learning sampler's sequence is known no further than to the end of an epoch.

Not here: steps, ranks and micro-batches (`samplers.split`), the orders themselves.
"""

import math
from collections.abc import Callable

import numpy as np
from jaxtyping import Float32, Int64

from gigamask.contracts import Visit
from gigamask.faults import Fault
from gigamask.samplers.ledger import Book
from gigamask.seams import Items, Ledger, Order, Sampler, Weighted

Locate = Callable[[Int64[np.ndarray, "n"]], tuple[Int64[np.ndarray, "n"], Int64[np.ndarray, "n"]]]
"""From items to the rows of their images, and which of the image's masks an item is, -1 where it is the whole image."""


def whole_images(items: Int64[np.ndarray, "n"]) -> tuple[Int64[np.ndarray, "n"], Int64[np.ndarray, "n"]]:
    """Locates items that are the rows of an index."""
    return items, np.full(len(items), -1)


class Sequence:
    """What is visited, from sample 0 of training on."""

    def __init__(self, sampler: Sampler, items: Items, book: Book | None = None, locate: Locate = whole_images, strata: bool = False) -> None:
        """`book` is needed where the sampler's `decay` is not None; `strata` says whether visits tell which of the sampler's strata they are of."""
        self._sampler, self._items, self._book, self._locate = sampler, items, book, locate
        self._orders: dict[int, Order] = {}
        self._strata = sampler.strata(items) if strata else None
        if strata and self._strata is None:
            raise Fault(f"mining within the sampler's strata, but {type(sampler).__name__} has none; choose another sampler, or mine within another")
        # Where a training goes on, the book already knows later epochs; the number of positions does not depend on it.
        new = book is None or (book.seen < 0).all()
        first = sampler.order(items, 0, Ledger.empty(items.count) if book else None)
        self.per_epoch = len(first)
        if not self.per_epoch:
            raise Fault("the sampler's order has no positions, training needs at least one; loosen the sampler or the filters")
        if new:
            self._orders[0] = first

    def open(self, samples: int, batch: int) -> float:
        """Asks for the orders of the epochs that the step of `batch` behind `samples` begins, and returns up to which sample steps are known then."""
        if self._book is None:
            return math.inf
        newest = (samples + batch - 1) // self.per_epoch
        self._orders = {epoch: order for epoch, order in self._orders.items() if epoch >= samples // self.per_epoch}
        if samples % self.per_epoch:
            self._order(samples // self.per_epoch)
        if newest * self.per_epoch >= samples:
            self._book.freeze(samples // self.per_epoch)
        for epoch in range(-(-samples // self.per_epoch), newest + 1):
            self._order(epoch)
        return float(samples + ((newest + 1) * self.per_epoch - samples) // batch * batch)

    def visits(self, numbers: Int64[np.ndarray, "n"], start: int) -> tuple[Visit, ...]:
        """Returns the visits of these samples, in ascending order, of the step that begins with sample `start`."""
        if self._book is None:
            self._orders = {epoch: order for epoch, order in self._orders.items() if epoch >= start // self.per_epoch}
        items, weights = self._at(numbers)
        rows, masks = self._locate(items)
        epochs, positions = np.divmod(numbers, self.per_epoch)
        strata = np.full(len(items), -1) if self._strata is None else self._strata[items]
        columns = (epochs, positions, rows, masks, numbers - start, weights, strata)
        return tuple(map(Visit, *(column.tolist() for column in columns)))

    def note(self, start: int, losses: np.ndarray) -> None:
        """Enters the losses of the step that begins with sample `start`, one for each of its samples, NaN where there is none."""
        if self._book is not None:
            numbers = np.arange(start, start + len(losses))
            self._book.note(self._at(numbers)[0], numbers // self.per_epoch, losses)

    def _at(self, numbers: Int64[np.ndarray, "n"]) -> tuple[Int64[np.ndarray, "n"], Float32[np.ndarray, "n"]]:
        """Returns the items at these places of the sequence, and the weights of their losses."""
        epochs, positions = np.divmod(numbers, self.per_epoch)
        items, weights = np.empty(len(numbers), np.int64), np.ones(len(numbers), np.float32)
        for epoch in np.unique(epochs).tolist():
            there, order = epochs == epoch, self._order(epoch)
            items[there] = order[positions[there]]
            if isinstance(order, Weighted):
                weights[there] = order.weights[positions[there]]
        return items, weights

    def _order(self, epoch: int) -> Order:
        if epoch not in self._orders:
            order = self._sampler.order(self._items, epoch, self._book.frozen if self._book else None)
            if len(order) != self.per_epoch:
                raise Fault(
                    f"epoch {epoch}: the sampler's order has {len(order)} positions, {self.per_epoch} were expected; "
                    "make their number depend on the items only, not on the epoch"
                )
            self._orders[epoch] = order
        return self._orders[epoch]
