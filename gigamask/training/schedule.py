"""Learning-rate schedules: pure functions of the step, so checkpoints need not store them."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from gigamask.errors import GigamaskError, check_range
from gigamask.interfaces import LRSchedule


@dataclass(frozen=True)
class WarmupMultiStep(LRSchedule):
    """Linear warm-up, then a constant rate with drops.

    The defaults are those of SAM's run of 90,000 steps: warm-up of 250 steps, rate divided by 10 at
    steps 60,000 and 86,666 (paper, appendix A).
    """

    warmup_steps: int = 250
    """steps of linear warm-up; if not set, at most a quarter of --steps below the recipe's"""
    milestones: tuple[float, ...] = (2 / 3, 26 / 27)
    """fractions of --steps at which the learning rate drops"""
    gamma: float = 0.1
    """multiplier of the learning rate at each milestone"""

    def __post_init__(self) -> None:
        _check_warmup(self.warmup_steps)
        check_range("gamma", self.gamma, 0, 1)
        for milestone in self.milestones:
            check_range("milestones", milestone, 0, 1)

    def factor(self, step: int, steps: int) -> float:
        """Return the multiplier of the peak learning rate.

        Args:
            step: Number of the step, from 0.
            steps: Number of steps of the whole run.
        """
        drops = sum(step >= int(milestone * steps) for milestone in self.milestones)
        return _warmup_factor(step, self.warmup_steps) * self.gamma**drops

    def shortened(self, warmup: int) -> WarmupMultiStep:
        return replace(self, warmup_steps=min(self.warmup_steps, max(0, warmup)))


@dataclass(frozen=True)
class WarmupCosine(LRSchedule):
    """Linear warm-up, then half a cosine down to `min_lr_ratio` at the last step."""

    warmup_steps: int = 250
    """steps of linear warm-up; if not set, at most a quarter of --steps below the recipe's"""
    min_lr_ratio: float = 0.0
    """learning rate at the last step relative to the peak"""

    def __post_init__(self) -> None:
        _check_warmup(self.warmup_steps)
        check_range("min_lr_ratio", self.min_lr_ratio, 0, 1)

    def factor(self, step: int, steps: int) -> float:
        """Return the multiplier of the peak learning rate.

        Args:
            step: Number of the step, from 0.
            steps: Number of steps of the whole run.
        """
        progress = min(
            1.0, max(0.0, (step - self.warmup_steps) / max(1, steps - self.warmup_steps))
        )
        return _warmup_factor(step, self.warmup_steps) * (
            self.min_lr_ratio + (1 - self.min_lr_ratio) * (1 + math.cos(math.pi * progress)) / 2
        )

    def shortened(self, warmup: int) -> WarmupCosine:
        return replace(self, warmup_steps=min(self.warmup_steps, max(0, warmup)))


def _check_warmup(warmup_steps: int) -> None:
    if warmup_steps < 0:
        raise GigamaskError(f"warmup_steps must be at least 0 (got {warmup_steps})")


def _warmup_factor(step: int, warmup_steps: int) -> float:
    return min(1.0, (step + 1) / warmup_steps) if warmup_steps else 1.0
