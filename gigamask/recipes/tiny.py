"""Recipes of models that learn on a laptop: from scenes in minutes, from photographs in an hour."""

from dataclasses import replace

from gigamask.data.augment import ColorJitter, HorizontalFlip, LargeScaleJitter
from gigamask.data.mask_sampling import MaskFilters
from gigamask.evaluation.click_evaluation import ClickEvaluation
from gigamask.losses.sam_loss import SamLoss
from gigamask.models import configs
from gigamask.prompts.schedule import InteractiveSchedule
from gigamask.samplers.shards import TarSubset
from gigamask.training.optim import MuonAdamW
from gigamask.training.sam_config import SamLoaderConfig, SamTrainConfig
from gigamask.training.schedule import WarmupCosine


def tiny() -> SamTrainConfig:
    """A SAM for 128-pixel images, on synthetic scenes; two CPU cores, about four minutes.

    `gigamask train tiny --data runs/demo/train --out runs/tiny`

    The numbers are from our own measurements (docs/measurements.md). Two rounds of prompts instead
    of SAM's eleven: early in training the first ones teach the most for their cost. Balanced cross
    entropy (focal loss with gamma 0) instead of focal loss, which starts more slowly. Muon. An
    initialization by hand, and half the learning rate for the encoder, without which its embedding
    collapses before the decoder can use it.
    """
    return SamTrainConfig(
        evaluation=ClickEvaluation(),
        recipe="tiny",
        model=configs.tiny(),
        steps=1000,
        batch_size=4,
        micro_batch_size=4,
        loader=SamLoaderConfig(max_masks=8, augment=HorizontalFlip(), workers=1),
        prompts=InteractiveSchedule(clicks=1, mask_only_rounds=False, box_noise_limit_px=2.5),
        loss=SamLoss(focal_weight=2.0, alpha=0.5, gamma=0.0, iou_weight=2.0, iou_supervision="all"),
        optimizer=MuonAdamW(
            lr=2e-3, betas=(0.9, 0.98), weight_decay=0.01, encoder_lr_scale=0.5, muon_lr=0.03
        ),
        schedule=WarmupCosine(warmup_steps=50, min_lr_ratio=0.01),
        save_every=300,
    )


def photos() -> SamTrainConfig:
    """`tiny` with patches of four pixels, for photographs; two CPU cores, about an hour.

    `gigamask train photos --data PHOTOS/*.tar SCENES/*.tar --out runs/photos`

    Run one process per core: `torchrun --nproc-per-node 2 --no-python gigamask train photos ...`.
    Every tar is sampled equally often, so four tars of photographs and one of synthetic scenes make
    a mixture of four to one. The numbers are from our own measurements (docs/measurements.md, also
    for the scores).
    """
    base = tiny()
    return replace(
        base,
        recipe="photos",
        model=replace(base.model, patch_size=4),
        steps=3000,
        micro_batch_size=2,
        sampler=TarSubset(per_tar=50, mixed=True),
        loader=SamLoaderConfig(
            filters=MaskFilters(min_predicted_iou=0.7),
            max_masks=8,
            augment=LargeScaleJitter(low=0.8, high=1.6),
            color_jitter=ColorJitter(0.2, 0.2, 0.2),
            workers=0,
        ),
        prompts=InteractiveSchedule(
            clicks=1, mask_only_rounds=False, box_noise_limit_px=1.5, center_click_prob=0.8
        ),
        schedule=WarmupCosine(warmup_steps=100, min_lr_ratio=0.01),
        save_every=500,
    )
