"""Little models that learn from others of their kind."""

from dataclasses import fields, replace
from pathlib import Path

from gigamask.data.augment import RandomResizedCrop
from gigamask.losses.window_loss import WindowLoss
from gigamask.models.configs import MAEConfig
from gigamask.plugins.distill.config import DistillTrainConfig, FeaturesStage
from gigamask.plugins.distill.sami_config import SAMITrainConfig
from gigamask.training.config import LoaderConfig
from gigamask.training.optim import AdamW, WarmupCosine
from tests.little import little, little_compact

HERE = Path(__file__).resolve()


def little_student() -> DistillTrainConfig:
    """The little model as the student of another of its kind, in two phases."""
    base = little()
    return DistillTrainConfig(
        **{item.name: getattr(base, item.name) for item in fields(base) if item.name != "recipe"},
        recipe=f"{HERE}:little_student",
        features=FeaturesStage(steps=4, batch_size=3, lr=1e-3),
    )


def little_compact_student() -> DistillTrainConfig:
    """The same for models that answer in windows."""
    base = little_compact()
    return replace(
        little_student(),
        recipe=f"{HERE}:little_compact_student",
        model=base.model,
        prompts=base.prompts,
        loss=WindowLoss(iou_weight=0.0, choice_weight=0.0),
        optimizer=base.optimizer,
        teacher_iou_weight=2.0,
    )


def little_sami() -> SAMITrainConfig:
    """A masked autoencoder that predicts the embedding of the little model."""
    return SAMITrainConfig(
        recipe=f"{HERE}:little_sami",
        model=MAEConfig(
            image_size=32,
            patch_size=8,
            embed_dim=16,
            depth=2,
            num_heads=2,
            decoder_dim=8,
            decoder_depth=2,
            decoder_num_heads=2,
            feature_channels=16,
        ),
        steps=4,
        batch_size=3,
        micro_batch_size=2,
        loader=LoaderConfig(augment=RandomResizedCrop(), workers=0),
        optimizer=AdamW(lr=1e-3),
        schedule=WarmupCosine(warmup_steps=0, min_lr_ratio=1.0),
        device="cpu",
        log_every=1,
        save_every=2,
    )
