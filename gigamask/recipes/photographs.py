"""Recipes that train `compact` on photographs: small models that learn in minutes."""

from dataclasses import replace
from typing import cast

from gigamask.data.augment import ColorJitter, LargeScaleJitter
from gigamask.data.mask_sampling import MaskFilters
from gigamask.evaluation.click_evaluation import ClickEvaluation
from gigamask.losses.window_loss import WindowLoss
from gigamask.models import configs
from gigamask.prompts.schedule import InteractiveSchedule
from gigamask.training.optim import MuonAdamW, WarmupCosine
from gigamask.training.sam_config import SamLoaderConfig, SamTrainConfig


def compact() -> SamTrainConfig:
    """A small model that answers in windows around the prompts; two CPU cores, minutes.

    `gigamask train compact --data PHOTOS/*.tar --out runs/compact`

    It learns much faster than a plain SAM of its size (docs/learning.md), and cannot be exported to
    Meta's or Hugging Face's format. The hyperparameters are from our own measurements
    (docs/measurements/small_models.md, which also lists scores).
    """
    return SamTrainConfig(
        evaluation=ClickEvaluation(),
        recipe="compact",
        model=configs.compact(),
        steps=300,
        batch_size=6,
        micro_batch_size=6,
        precision="fastest",
        loader=SamLoaderConfig(
            filters=MaskFilters(min_predicted_iou=0.7),
            max_masks=6,
            augment=LargeScaleJitter(low=1.0, high=1.4, multiple=32),
            color_jitter=ColorJitter(0.2, 0.2, 0.2),
            workers=1,
        ),
        prompts=InteractiveSchedule(
            clicks=3,
            mask_only_rounds=False,
            box_prob=0.4,
            box_noise=0.04,
            center_click_prob=0.75,
        ),
        loss=WindowLoss(),
        optimizer=MuonAdamW(
            lr=2e-3, betas=(0.9, 0.98), weight_decay=0.01, muon_lr=0.02, muon_kernels=True
        ),
        schedule=WarmupCosine(warmup_steps=5, min_lr_ratio=1.0),
        ema=0.99,
        save_every=100,
    )


def photos() -> SamTrainConfig:
    """`compact` from scratch on photographs; two CPU cores, about an hour.

    `gigamask train photos --data PHOTOS/*.tar --out runs/photos`

    docs/measurements/small_models.md lists scores, and how they grow with time and with
    photographs. `--init starter` starts from weights that have learned from synthetic scenes.
    """
    base = compact()
    return replace(
        base,
        recipe="photos",
        steps=2800,
        micro_batch_size=3,
        loader=replace(base.loader, workers=0),
        prompts=replace(
            cast(InteractiveSchedule, base.prompts),
            mask_only_rounds=True,
            box_noise=0.1,
            box_noise_varies=True,
        ),
        schedule=WarmupCosine(warmup_steps=30, min_lr_ratio=0.01),
        save_every=500,
    )
