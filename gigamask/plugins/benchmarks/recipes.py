"""Recipes that reproduce published experiments at the size of one GPU.

`reproductions` has what their papers published.
"""

from dataclasses import replace

from gigamask.data.augment import ColorJitter, LargeScaleJitter
from gigamask.models.configs import SamConfig, ViTSmall, vit_b
from gigamask.prompts.schedule import InteractiveSchedule
from gigamask.recipes.sam import sam_vit_b
from gigamask.training.optim import AdamW, WarmupMultiStep
from gigamask.training.sam_config import SamLoaderConfig, SamTrainConfig


def sbd_vit_b() -> SamTrainConfig:
    """SAM ViT-B on SBD alone from MAE's weights, in SimpleClick's setting; one GPU.

    `gigamask train sbd_vit_b --data sbd_train --init mae:mae_pretrain_vit_base.pth --out runs/sbd`

    8,498 images of 448 pixels, 55 epochs of batches of 32, which is SimpleClick's length; its
    clicks come before the encoder, SAM's after it. docs/plugins/benchmarks says how to get and
    convert SBD, what SimpleClick reached, and the planned hours.
    """
    base = sam_vit_b()
    return replace(
        base,
        recipe="sbd_vit_b",
        model=replace(vit_b(), image_size=448, drop_path_rate=0.1),
        steps=14_600,
        batch_size=32,
        loader=SamLoaderConfig(
            max_masks=8,
            augment=LargeScaleJitter(low=0.75, high=1.25),
            color_jitter=ColorJitter(0.25, 0.25, 0.1),
        ),
        prompts=InteractiveSchedule(box_prob=0.0, center_click_prob=0.5),
        optimizer=AdamW(lr=2e-4, layer_decay=0.7),
        schedule=WarmupMultiStep(warmup_steps=250, milestones=(50 / 55,)),
    )


def data_curve() -> SamTrainConfig:
    """SAM ViT-S at 512 pixels for one length on any number of SA-1B's tars; one GPU.

    `gigamask train data_curve --data sa_000000.tar --out runs/curve_10k`

    Half a million images are visited whatever the data: one tar (0.01 million images), nine (0.1
    million) or ninety (1 million) compare at equal updates, as in section 7.6 of SAM's paper.
    docs/plugins/benchmarks has the planned hours; training time has not been measured.
    """
    base = sam_vit_b()
    return replace(
        base,
        recipe="data_curve",
        model=SamConfig(image_size=512, drop_path_rate=0.1, encoder=ViTSmall()),
        steps=16_000,
        batch_size=32,
        loader=SamLoaderConfig(max_masks=32),
    )
