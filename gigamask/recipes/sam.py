"""Recipes of SAM's three published models.

The numbers are from Segment Anything (arXiv 2304.02643), appendix A; docs/recipes.md names the
source of each, and what the paper does not say.
"""

from dataclasses import replace

from gigamask.evaluation.click_evaluation import ClickEvaluation
from gigamask.models.configs import SamConfig, vit_b, vit_h, vit_l
from gigamask.training.optim import AdamW
from gigamask.training.sam_config import SamTrainConfig


def sam_vit_b() -> SamTrainConfig:
    """SAM ViT-B on SA-1B; 128 GPUs.

    `gigamask train sam_vit_b --data /sa1b --init mae:MAE_WEIGHTS --out runs/vit_b`

    Paper: 128 GPUs with one image each, hours not stated;
    180k updates of 128 images, lr 8e-4, layer decay .6, drop path .6.
    """
    return _sam(
        "sam_vit_b",
        replace(vit_b(), drop_path_rate=0.6),
        steps=180_000,
        batch_size=128,
        optimizer=AdamW(lr=8e-4, layer_decay=0.6),
    )


def sam_vit_l() -> SamTrainConfig:
    """SAM ViT-L on SA-1B; 128 GPUs.

    `gigamask train sam_vit_l --data /sa1b --init mae:MAE_WEIGHTS --out runs/vit_l`

    Paper: 128 GPUs with one image each, hours not stated;
    180k updates of 128 images, lr 4e-4, layer decay .8, drop path .4.
    """
    return _sam(
        "sam_vit_l",
        replace(vit_l(), drop_path_rate=0.4),
        steps=180_000,
        batch_size=128,
        optimizer=AdamW(lr=4e-4, layer_decay=0.8),
    )


def sam_vit_h() -> SamTrainConfig:
    """SAM ViT-H on SA-1B; 256 A100 GPUs, 68 hours.

    `gigamask train sam_vit_h --data /sa1b --init mae:MAE_WEIGHTS --out runs/vit_h`

    Paper: 256 A100 GPUs with one image each, 68 hours (model card);
    90k updates of 256 images, lr 8e-4, layer decay .8, drop path .4.
    """
    return _sam(
        "sam_vit_h",
        replace(vit_h(), drop_path_rate=0.4),
        steps=90_000,
        batch_size=256,
        optimizer=AdamW(lr=8e-4, layer_decay=0.8),
    )


def _sam(
    name: str, model: SamConfig, steps: int, batch_size: int, optimizer: AdamW
) -> SamTrainConfig:
    """Return a configuration with the numbers that the three models share.

    Most are the components' defaults: AdamW (.9, .999), weight decay .1, warm-up 250, drops at 2/3
    and 26/27, 64 masks per image, 11 rounds, 20 focal : 1 dice : 1 IoU. One image per GPU is the
    paper's choice; clipping at 1 is ours, the paper states none. The paper's dropout in the decoder
    is left out (docs/recipes.md).
    """
    return SamTrainConfig(
        recipe=name,
        evaluation=ClickEvaluation(),
        model=model,
        steps=steps,
        batch_size=batch_size,
        micro_batch_size=1,
        optimizer=optimizer,
        save_every=1000,
    )
