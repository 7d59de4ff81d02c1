"""Settings of the evaluation during training; importable without torch, as recipes need them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, cast

from gigamask.errors import check_range
from gigamask.interfaces import Evaluator

if TYPE_CHECKING:
    from gigamask.distributed.world import World
    from gigamask.interfaces import EvaluationResult
    from gigamask.training.config import TrainConfig


@dataclass(frozen=True)
class ClickEvaluation(Evaluator):
    """Score clicks and boxes on a fixed subset of held-out images."""

    data: tuple[str, ...] = ()
    """held-out tars, folders of tars, globs, or an index; without data, nothing is evaluated"""
    images: int = 50
    """number of images, the same in every evaluation"""
    min_predicted_iou: float | None = None
    """evaluate only masks with at least this predicted_iou in their annotation"""
    best_by: Literal["1 click", "3 clicks", "5 clicks", "oracle", "box"] = "1 click"
    """score that selects the best checkpoint"""

    precision: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    """number format of the model; auto: bf16 on a GPU, fp32 on a CPU"""

    def check(self) -> None:
        super().check()
        check_range("--evaluation.images", self.images, 1)
        check_range("--evaluation.min-predicted-iou", self.min_predicted_iou, 0, 1)

    def check_inputs(self) -> None:
        """Raise `GigamaskError` if the data are not tars."""
        from gigamask.data.index import find_tars

        if self.data:
            find_tars(self.data)

    def open(self, config: TrainConfig, world: World) -> Callable[[Any], EvaluationResult] | None:
        """Return the function that evaluates a model; None if there is no data.

        Args:
            config: Configuration of the training.
            world: Processes that evaluate together.
        """
        if not self.data:
            return None
        from gigamask.evaluation.in_training import ClickScorer
        from gigamask.evaluation.seen_images import say_seen

        scorer = ClickScorer.open(
            self.data,
            f"{config.out}/evaluation",
            self.images,
            self.min_predicted_iou,
            self.best_by,
            world,
            self.precision,
            cast(Any, config).model.pixels,
        )
        say_seen(scorer.index, scorer.rows, config.out, config.data)
        return scorer.run
