"""Little models that learn from others of their kind."""

from dataclasses import fields, replace
from pathlib import Path

from gigamask.losses.window_loss import WindowLoss
from gigamask.plugins.distill.config import DistillTrainConfig, FeaturesStage
from tests.little import little, little_compact


def little_student() -> DistillTrainConfig:
    """The little model as the student of another of its kind, in two phases."""
    base = little()
    return DistillTrainConfig(
        **{item.name: getattr(base, item.name) for item in fields(base) if item.name != "recipe"},
        recipe=f"{Path(__file__).resolve()}:little_student",
        features=FeaturesStage(steps=4, batch_size=3, lr=1e-3),
    )


def little_compact_student() -> DistillTrainConfig:
    """The same for models that answer in windows."""
    base = little_compact()
    return replace(
        little_student(),
        recipe=f"{Path(__file__).resolve()}:little_compact_student",
        model=base.model,
        prompts=base.prompts,
        loss=WindowLoss(iou_weight=0.0, choice_weight=0.0),
        optimizer=base.optimizer,
        teacher_iou_weight=2.0,
    )
