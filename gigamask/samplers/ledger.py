"""The book that training keeps of its losses, for samplers that learn from them.

In: the losses of each step's samples. Out: the `Ledger` as it stood when an epoch began, which is all that an order may depend on.

Not here: what the losses change (`samplers.curriculum`, `samplers.loss_weighted`, `samplers.replay`), how ranks share theirs (`train.step`).
"""

from dataclasses import dataclass, fields

import numpy as np
from jaxtyping import Float32, Float64, Int32, Int64, Shaped

from gigamask.faults import Fault
from gigamask.seams import Ledger


@dataclass
class Book:
    """The losses so far, and as they were at the last freeze; `decay` is the share of an item's earlier loss that stays when there is a new one.

    `subject` names what the losses are of: a sampler's kind, its epochs' length and its items. Of another subject they would say something else.
    """

    subject: str
    decay: float
    losses: Float32[np.ndarray, "count"]
    seen: Int32[np.ndarray, "count"]
    sums: Float64[np.ndarray, "epochs"]
    counts: Int64[np.ndarray, "epochs"]
    frozen: Ledger

    @classmethod
    def empty(cls, subject: str, count: int, decay: float) -> "Book":
        """Returns a book of so many items, none of them trained on."""
        nothing = Ledger.empty(count)
        return cls(subject, decay, nothing.losses, nothing.seen, np.zeros(0), np.zeros(0, np.int64), Ledger.empty(count))

    def note(self, items: Int64[np.ndarray, "n"], epochs: Int64[np.ndarray, "n"], losses: Float64[np.ndarray, "n"]) -> None:
        """Takes the losses of one step's samples; NaN where a sample has none. An item that the step holds twice counts with its mean."""
        told = np.isfinite(losses)
        items, epochs, losses = items[told], epochs[told], losses[told]
        length = max(len(self.sums), int(epochs.max(initial=-1)) + 1)
        self.sums = np.bincount(epochs, losses, length) + np.pad(self.sums, (0, length - len(self.sums)))
        self.counts = np.bincount(epochs, minlength=length) + np.pad(self.counts, (0, length - len(self.counts)))
        distinct, places = np.unique(items, return_inverse=True)
        now = np.bincount(places, losses) / np.bincount(places)
        before = self.losses[distinct].astype(np.float64)
        self.losses[distinct] = np.where(np.isnan(before), now, self.decay * before + (1 - self.decay) * now)
        self.seen[items] = epochs  # which ascend; of an item that comes twice, the last stays

    def freeze(self, finished: int) -> None:
        """Makes `frozen` what the book says now, of epochs the first `finished`: the mean of one that goes on would be another one later."""
        means = np.full(finished, np.nan)
        sums, counts = self.sums[:finished], self.counts[:finished]
        np.divide(sums, counts, out=means[: len(sums)], where=counts > 0)
        self.frozen = Ledger(self.losses.copy(), self.seen.copy(), means)

    def arrays(self) -> dict[str, Shaped[np.ndarray, "..."]]:
        """Returns everything that a book holds, by name."""
        now = {each: getattr(self, each) for each in ("losses", "seen", "sums", "counts")}
        return now | {f"frozen.{each.name}": getattr(self.frozen, each.name) for each in fields(Ledger)}

    @classmethod
    def of(cls, arrays: dict[str, Shaped[np.ndarray, "..."]], subject: str, decay: float, source: str) -> "Book":
        """Returns the book that `arrays` described; raises Fault where it holds something else."""
        wanted = set(cls.empty("", 0, 0.0).arrays())
        if odd := sorted(wanted ^ set(arrays)):
            raise Fault(f"{source}: {odd[0]} is missing or unknown in the ledger; give another --out to start anew")
        frozen = Ledger(*(arrays[f"frozen.{each.name}"] for each in fields(Ledger)))
        losses, seen, sums, counts = (arrays[each] for each in ("losses", "seen", "sums", "counts"))
        return cls(subject, decay, losses, seen, sums, counts, frozen)
