"""When a training must not go on as if nothing were wrong: samples that cannot be read, steps that change nothing.

Not here: what makes a step be skipped (`train.step`), a sample be left out (`data.loader`).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from gigamask.errors import GigamaskError
from gigamask.training.config import TrainConfig
from gigamask.training.logging import MetricsLogger
from gigamask.types import BatchProtocol

MAX_SKIPPED_IN_A_ROW = 10
# Of fewer samples than this, a share says little: one bad sample is always allowed.
LEAST_SAMPLES = 100


@dataclass
class HealthChecks:
    """Says each bad sample and skipped step once, and raises `GigamaskError` when they are too many."""

    run: TrainConfig
    watch: MetricsLogger
    seen: int = 0
    rejected: set[str] = field(default_factory=set)
    skipped_in_a_row: int = 0

    def check(self, step: int, batches: Sequence[BatchProtocol], skipped: bool) -> None:
        """Takes what one step was made of and whether it was skipped."""
        for batch in batches:
            self.seen += len(batch.names) + len(batch.rejected)
            for each in batch.rejected:
                if each.name not in self.rejected:
                    self.rejected.add(each.name)
                    self.watch.note({"step": step, "rejected": each.name, "reason": each.reason})
                    self.watch.print(f"left out {each.reason}")
        if len(self.rejected) > max(1, self.run.max_bad_share * max(self.seen, LEAST_SAMPLES)):
            raise GigamaskError(
                f"{len(self.rejected)} of {self.seen} samples could not be read, more than {self.run.max_bad_share:.1%}; "
                "mend the data, or raise --max-bad-share"
            )
        self.skipped_in_a_row = self.skipped_in_a_row + 1 if skipped else 0
        if skipped:
            names = (
                ", ".join(name for batch in batches for name in batch.names) or "no readable sample"
            )
            self.watch.note({"step": step, "skipped": names})
            self.watch.print(
                f"step {step} skipped, its gradient is not finite or it has no mask: {names}"
            )
            if self.skipped_in_a_row == MAX_SKIPPED_IN_A_ROW:
                raise GigamaskError(
                    f"{self.run.out}: {MAX_SKIPPED_IN_A_ROW} steps in a row were skipped, the last with {names}; "
                    "lower --optimizer.lr, or look at the data"
                )
