"""Checks that stop training after too many unreadable samples or skipped steps."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from gigamask.errors import GigamaskError
from gigamask.training.config import TrainConfig
from gigamask.training.logging import MetricsLogger
from gigamask.types import BatchProtocol

MAX_SKIPPED_IN_A_ROW = 10
MIN_BAD = 10
"""Number of unreadable samples below which training goes on, unless `max_bad_fraction` is 0."""


@dataclass
class HealthChecks:
    """Logs each unreadable sample and skipped step once, and stops training if there are too many.

    Attributes:
        config: The configuration.
        logger: Logs the findings.
        samples_per_epoch: Number of distinct samples of the run.
        seen: Number of samples so far, counted again whenever they recur.
        skipped_samples: Names of the unreadable ones.
        skipped_in_a_row: Number of steps skipped since the last update.
    """

    config: TrainConfig
    logger: MetricsLogger
    samples_per_epoch: int
    seen: int = 0
    skipped_samples: set[str] = field(default_factory=set)
    skipped_in_a_row: int = 0

    def check(self, step: int, batches: Sequence[BatchProtocol], skipped: bool) -> None:
        """Check a finished step.

        Args:
            step: Number of the step.
            batches: Micro-batches of the step.
            skipped: Whether its update was skipped.

        Raises:
            GigamaskError: Too many samples are unreadable, or too many steps in a row are skipped.
        """
        for batch in batches:
            self.seen += len(batch.names) + len(batch.skipped)
            for sample in batch.skipped:
                if sample.name not in self.skipped_samples:
                    self.skipped_samples.add(sample.name)
                    self.logger.write(
                        {"step": step, "skipped_sample": sample.name, "reason": sample.reason}
                    )
                    self.logger.print(f"skipped sample: {sample.reason}")
        limit, bad = self.config.max_bad_fraction, len(self.skipped_samples)
        distinct = min(self.seen, self.samples_per_epoch)
        if bad > limit * distinct and bad >= (MIN_BAD if limit else 1):
            raise GigamaskError(
                f"{self.config.out}: {bad} of {distinct} samples are unreadable, more than "
                f"{limit:.1%}; repair the data, or raise --max-bad-fraction"
            )
        self.skipped_in_a_row = self.skipped_in_a_row + 1 if skipped else 0
        if skipped:
            names = (
                ", ".join(name for batch in batches for name in batch.names) or "no readable sample"
            )
            self.logger.write({"step": step, "skipped_step": names})
            self.logger.print(
                f"step {step} skipped: its gradient is not finite, or it has no mask: {names}"
            )
            if self.skipped_in_a_row == min(MAX_SKIPPED_IN_A_ROW, self.config.steps):
                raise GigamaskError(
                    f"{self.config.out}: {self.skipped_in_a_row} steps in a row were skipped, the "
                    f"last one with {names}; lower --optimizer.lr, or check the data"
                )
