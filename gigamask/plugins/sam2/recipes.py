"""Recipes that fine-tune the image models of SAM 2.1.

The hyperparameters are those of SAM 2.1's own fine-tuning of base plus, as far as images have them;
docs/recipes.md lists the source of each.
"""

from dataclasses import replace

from gigamask.data.augment import HorizontalFlip
from gigamask.evaluation.click_evaluation import ClickEvaluation
from gigamask.losses.sam_loss import SamLoss
from gigamask.models.configs import SamConfig
from gigamask.plugins.sam2 import configs
from gigamask.prompts.schedule import InteractiveSchedule
from gigamask.training.optim import AdamW, WarmupCosine
from gigamask.training.sam_config import SamLoaderConfig, SamTrainConfig


def sam2_tiny() -> SamTrainConfig:
    """Fine-tune SAM 2.1 tiny on images; one GPU.

    `gigamask train sam2_tiny --data TARS --init sam2.1_hiera_tiny.pt --out runs/mine`

    Everything is trained but the object score. docs/plugins/sam2 lists the memory it takes.
    Training time has not been measured.
    """
    return _sam2("sam2_tiny", configs.sam2_tiny())


def sam2_small() -> SamTrainConfig:
    """Fine-tune SAM 2.1 small on images; one GPU.

    `gigamask train sam2_small --data TARS --init sam2.1_hiera_small.pt --out runs/mine`
    """
    return _sam2("sam2_small", configs.sam2_small())


def sam2_base_plus() -> SamTrainConfig:
    """Fine-tune SAM 2.1 base plus on images; one GPU.

    `gigamask train sam2_base_plus --data TARS --init sam2.1_hiera_base_plus.pt --out runs/mine`
    """
    return _sam2("sam2_base_plus", configs.sam2_base_plus())


def sam2_large() -> SamTrainConfig:
    """Fine-tune SAM 2.1 large on images; one GPU.

    `gigamask train sam2_large --data TARS --init sam2.1_hiera_large.pt --out runs/mine`
    """
    return _sam2("sam2_large", configs.sam2_large())


def _sam2(name: str, model: SamConfig) -> SamTrainConfig:
    """Return a configuration with the hyperparameters that the four sizes share."""
    return SamTrainConfig(
        evaluation=ClickEvaluation(),
        recipe=name,
        freeze=("mask_decoder.pred_obj_score_head",),
        model=replace(model, drop_path_rate=0.1),
        steps=5000,
        batch_size=8,
        loader=SamLoaderConfig(max_masks=32, augment=HorizontalFlip()),
        prompts=InteractiveSchedule(clicks=7, mask_only_rounds=False),
        loss=SamLoss(iou_supervision="all", iou_loss="l1"),
        optimizer=AdamW(lr=5e-6, encoder_lr_scale=0.6, layer_decay=0.9, grad_clip=0.1),
        schedule=WarmupCosine(warmup_steps=0, min_lr_ratio=0.1),
    )
