"""The recipe that trains SAM with one round of mixed prompts."""

from dataclasses import replace

from gigamask.data.augment import ColorJitter, ScaleJitter
from gigamask.prompts.mixed import MixedPrompts
from gigamask.recipes.sam import sam_vit_h
from gigamask.training.optim import WarmupCosine
from gigamask.training.sam_config import SamLoaderConfig, SamTrainConfig


def mixed_prompts() -> SamTrainConfig:
    """SAM ViT-H with one round of mixed prompts instead of clicks in rounds; 256 GPUs.

    `gigamask train mixed_prompts --stages mae,decoder,joint --data /sa1b --out runs/mixed`

    256 GPUs with one image each, with the optimizer and length of `sam_vit_h`, a cosine schedule
    instead of drops, and light augmentation. Some published accounts describe SAM's training this
    way, with the decoder trained alone for 5 of 95 "epochs", as in the stages. Training time has
    not been measured.
    """
    loader = SamLoaderConfig(augment=ScaleJitter(), color_jitter=ColorJitter(0.2, 0.2, 0.2))
    return replace(
        sam_vit_h(),
        recipe="mixed_prompts",
        prompts=MixedPrompts(),
        schedule=WarmupCosine(warmup_steps=250),
        loader=loader,
    )
