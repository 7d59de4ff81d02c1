"""Learning-rate schedules: pure functions of the step, so that there is nothing to save.

Not here: the learning rates themselves (`train.optim`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from gigamask.errors import GigamaskError, check_range
from gigamask.interfaces import LRSchedule


@dataclass(frozen=True)
class WarmupMultiStep(LRSchedule):
    """Linear warm-up, then constant with drops; the defaults are SAM's 90k-step run (warm-up 250, /10 at 60,000 and 86,666; paper, appendix A)."""

    warmup_steps: int = 250
    """updates of linear warm-up"""
    milestones: tuple[float, ...] = (2 / 3, 26 / 27)
    """shares of the run after which the rate drops"""
    gamma: float = 0.1
    """factor of each drop"""

    def __post_init__(self) -> None:
        _check_warmup(self.warmup_steps)
        check_range("drop_factor", self.gamma, 0, 1)
        for share in self.milestones:
            check_range("drops", share, 0, 1)

    def factor(self, step: int, steps: int) -> float:
        drops_taken = sum(step >= int(share * steps) for share in self.milestones)
        return _warm(step, self.warmup_steps) * self.gamma**drops_taken

    def shortened(self, warmup: int) -> WarmupMultiStep:
        return replace(self, warmup_steps=min(self.warmup_steps, warmup))


@dataclass(frozen=True)
class WarmupCosine(LRSchedule):
    """Linear warm-up, then half a cosine from 1 down to `final` at the last update."""

    warmup_steps: int = 250
    """updates of linear warm-up"""
    min_lr_ratio: float = 0.0
    """factor at the end of the run"""

    def __post_init__(self) -> None:
        _check_warmup(self.warmup_steps)
        check_range("final", self.min_lr_ratio, 0, 1)

    def factor(self, step: int, steps: int) -> float:
        progress = min(
            1.0, max(0.0, (step - self.warmup_steps) / max(1, steps - self.warmup_steps))
        )
        return _warm(step, self.warmup_steps) * (
            self.min_lr_ratio + (1 - self.min_lr_ratio) * (1 + math.cos(math.pi * progress)) / 2
        )

    def shortened(self, warmup: int) -> WarmupCosine:
        return replace(self, warmup_steps=min(self.warmup_steps, warmup))


def _check_warmup(warmup: int) -> None:
    if warmup < 0:
        raise GigamaskError(
            f"warmup is {warmup}, it counts updates and must be at least 0; give another value"
        )


def _warm(step: int, warmup: int) -> float:
    return min(1.0, (step + 1) / warmup) if warmup else 1.0
