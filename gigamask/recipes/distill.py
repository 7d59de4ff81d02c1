"""Recipes that distill a large SAM into a small one.

docs/recipes.md lists the source of each hyperparameter, and what the papers do not state.
"""

from dataclasses import replace

from gigamask.losses.window_loss import WindowLoss
from gigamask.models.configs import ConvPyramid
from gigamask.recipes.sam import photos
from gigamask.training.distill_config import DistillTrainConfig, FeaturesStage
from gigamask.training.schedule import WarmupCosine


def compact_student() -> DistillTrainConfig:
    """Distill a model of `photos` into one of a third of its FLOPs; two CPU cores, minutes.

    `gigamask distill compact_student --teacher runs/photos --data PHOTOS/*.tar --out runs/student`

    The student has the teacher's decoder and an encoder of a quarter of its FLOPs. docs/distill.md
    lists scores.
    """
    base = photos()
    return DistillTrainConfig(
        evaluation=base.evaluation,
        recipe="compact_student",
        model=replace(
            base.model, encoder=ConvPyramid(widths=(16, 24, 40, 64), depths=(0, 1, 1, 1))
        ),
        steps=150,
        batch_size=base.batch_size,
        micro_batch_size=base.micro_batch_size,
        ema=base.ema,
        features=FeaturesStage(steps=700, batch_size=6, lr=2e-3, min_lr_ratio=0.1),
        loader=base.loader,
        prompts=base.prompts,
        loss=WindowLoss(iou_weight=0.0, choice_weight=0.0),
        teacher_iou_weight=4.0,
        optimizer=base.optimizer,
        schedule=WarmupCosine(warmup_steps=5, min_lr_ratio=0.01),
        save_every=200,
    )
