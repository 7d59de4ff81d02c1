"""Models small enough to learn on a laptop's CPU: from scenes in minutes, from photographs in an hour."""

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
    """A 128-pixel SAM on synthetic scenes: `gigamask train tiny --data runs/demo/train --out runs/tiny`.

    Two CPU cores, about four minutes. Numbers: our own measurements (docs/measurements.md): two rounds where SAM plays eleven, because early
    in training the first ones teach the most for their cost; plain cross entropy (focal with gamma 0, balanced) where SAM has focal, which
    begins more slowly; Muon; an informed start with an encoder at half the rate, without which its embedding collapses before the decoder can use it.
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
    """`tiny` with tokens of four pixels, for photographs: `gigamask train photos --data PHOTOS/*.tar SCENES/*.tar --out runs/photos`.

    Two CPU cores, one process on each (`torchrun --nproc-per-node 2 --no-python gigamask train photos ...`), about an hour. Every tar is visited
    equally often, which makes the mixture: four tars of photographs and one of synthetic scenes are four to one. Numbers: our own measurements
    (docs/measurements.md), which also say how far it gets.
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
