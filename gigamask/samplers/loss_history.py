"""Losses of the samples trained on so far, for samplers that learn from them."""

from dataclasses import dataclass, fields

import numpy as np
from jaxtyping import Float32, Float64, Int32, Int64, Shaped

from gigamask.errors import GigamaskError
from gigamask.interfaces import LossSnapshot


@dataclass
class LossHistory:
    """Losses so far, and a snapshot of them; orders use only the snapshot.

    Attributes:
        subject: Digest of the sampler and the data that the losses belong to.
        decay: Decay of the moving average of an item's losses.
        losses: Average loss of each item; NaN if there is none.
        seen: Epoch in which each item was last trained on; -1: never.
        sums: Sum of the losses of each epoch.
        counts: Number of losses of each epoch.
        snapshot: The history as it was when `take_snapshot` was last called.
    """

    subject: str
    decay: float
    losses: Float32[np.ndarray, "count"]
    seen: Int32[np.ndarray, "count"]
    sums: Float64[np.ndarray, "epochs"]
    counts: Int64[np.ndarray, "epochs"]
    snapshot: LossSnapshot

    @classmethod
    def empty(cls, subject: str, count: int, decay: float) -> "LossHistory":
        """Return a history of items that were never trained on.

        Args:
            subject: Digest of the sampler and the data.
            count: Number of items.
            decay: Decay of the moving average of an item's losses.
        """
        start = LossSnapshot.empty(count)
        sums, counts = np.zeros(0), np.zeros(0, np.int64)
        return cls(
            subject, decay, start.losses, start.seen, sums, counts, LossSnapshot.empty(count)
        )

    def update(
        self,
        items: Int64[np.ndarray, "n"],
        epochs: Int64[np.ndarray, "n"],
        losses: Float64[np.ndarray, "n"],
    ) -> None:
        """Add the losses of one step's samples.

        Args:
            items: Item of each sample; losses of an item that occurs twice are averaged.
            epochs: Epoch of each sample, ascending.
            losses: Loss of each sample; those that are not finite are ignored.
        """
        valid = np.isfinite(losses)
        items, epochs, losses = items[valid], epochs[valid], losses[valid]
        length = max(len(self.sums), int(epochs.max(initial=-1)) + 1)
        padding = (0, length - len(self.sums))
        self.sums = np.bincount(epochs, losses, length) + np.pad(self.sums, padding)
        self.counts = np.bincount(epochs, minlength=length) + np.pad(self.counts, padding)
        distinct, places = np.unique(items, return_inverse=True)
        new = np.bincount(places, losses) / np.bincount(places)
        old = self.losses[distinct].astype(np.float64)
        average = self.decay * old + (1 - self.decay) * new
        self.losses[distinct] = np.where(np.isnan(old), new, average)
        self.seen[items] = epochs  # ascending, so the last epoch of a repeated item stays

    def take_snapshot(self, finished: int) -> None:
        """Copy the current losses to `snapshot`.

        Args:
            finished: Number of finished epochs; only these get a mean, because the mean of an
                unfinished epoch would change later.
        """
        means = np.full(finished, np.nan)
        sums, counts = self.sums[:finished], self.counts[:finished]
        np.divide(sums, counts, out=means[: len(sums)], where=counts > 0)
        self.snapshot = LossSnapshot(self.losses.copy(), self.seen.copy(), means)

    def arrays(self) -> dict[str, Shaped[np.ndarray, "..."]]:
        """Return the whole history as arrays by name, as stored in checkpoints."""
        current = {name: getattr(self, name) for name in ("losses", "seen", "sums", "counts")}
        names = [field.name for field in fields(LossSnapshot)]
        return current | {f"frozen.{name}": getattr(self.snapshot, name) for name in names}

    @classmethod
    def from_arrays(
        cls, arrays: dict[str, Shaped[np.ndarray, "..."]], subject: str, decay: float, source: str
    ) -> "LossHistory":
        """Restore a history from its `arrays()`.

        Args:
            arrays: Arrays by name.
            subject: Digest of the sampler and the data.
            decay: Decay of the moving average of an item's losses.
            source: Source of the arrays, for error messages.

        Raises:
            GigamaskError: An array is missing or unknown.
        """
        expected = set(cls.empty("", 0, 0.0).arrays())
        if mismatch := sorted(expected ^ set(arrays)):
            raise GigamaskError(
                f"{source}: array '{mismatch[0]}' is missing or unknown; use another --out"
            )
        snapshot = LossSnapshot(*(arrays[f"frozen.{field.name}"] for field in fields(LossSnapshot)))
        losses, seen, sums, counts = (arrays[name] for name in ("losses", "seen", "sums", "counts"))
        return cls(subject, decay, losses, seen, sums, counts, snapshot)
