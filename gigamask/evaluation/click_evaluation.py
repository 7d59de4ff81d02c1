"""The settings of SAM's evaluation during training; importable without torch, as recipes hold them.

Not here: the evaluation itself (`evaluate.progress`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from gigamask.interfaces import Evaluator
from gigamask.training.config import check_at_least

if TYPE_CHECKING:
    from gigamask.distributed.world import World
    from gigamask.interfaces import EvaluationResult
    from gigamask.training.config import TrainConfig


@dataclass(frozen=True)
class ClickEvaluation(Evaluator):
    """Score clicks and boxes on a fixed subset of held-out images."""

    data: tuple[str, ...] = ()
    """tars, folders of tars, globs, or an index; none: no evaluation"""
    images: int = 50
    """images that are looked at, always the same"""
    min_predicted_iou: float | None = None
    """only masks whose annotation has at least this predicted_iou"""
    best_by: Literal["1 click", "3 clicks", "5 clicks", "oracle", "box"] = "1 click"
    """the score of which the best checkpoint is kept, too"""

    def check(self) -> None:
        super().check()
        check_at_least(1, **{"evaluation.images": self.images})

    def look_ahead(self) -> None:
        """Raise `GigamaskError` where the data are not tars."""
        from gigamask.data.index import find_tars

        if self.data:
            find_tars(self.data)

    def open(self, run: TrainConfig, world: World) -> Callable[[Any], EvaluationResult] | None:
        """Return the evaluation of a run, None where it has no data to evaluate on."""
        from gigamask.evaluation.in_training import ClickScorer

        progress = ClickScorer.of(self, run.out, world)
        return None if progress is None else progress.run
