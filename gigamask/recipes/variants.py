"""Recipes beside SAM's own: mixed prompts, one GPU, and fine-tuning of the official weights.

docs/recipes.md names the source of each number.
"""

from dataclasses import replace

from gigamask.data.augment import ColorJitter, HorizontalFlip, ScaleJitter
from gigamask.evaluation.click_evaluation import ClickEvaluation
from gigamask.losses.sam_loss import SamLoss
from gigamask.models import configs
from gigamask.prompts.mixed import MixedPrompts
from gigamask.recipes.sam import sam_vit_h
from gigamask.training.optim import AdamW, AdamW8bit
from gigamask.training.sam_config import SamLoaderConfig, SamTrainConfig
from gigamask.training.schedule import WarmupCosine


def mixed_prompts() -> SamTrainConfig:
    """SAM ViT-H with one round of mixed prompts instead of clicks in rounds; 256 GPUs.

    `gigamask train mixed_prompts --stages mae,decoder,joint --data /sa1b --out runs/mixed`

    256 GPUs with one image each, and the optimizer and length of `sam_vit_h`; a cosine schedule
    instead of drops, and light augmentation. Some published accounts describe this as SAM's
    training. They train the decoder alone for 5 of 95 "epochs", as the stages do. Hours are not
    measured.
    """
    loader = SamLoaderConfig(augment=ScaleJitter(), color_jitter=ColorJitter(0.2, 0.2, 0.2))
    return replace(
        sam_vit_h(),
        recipe="mixed_prompts",
        prompts=MixedPrompts(),
        schedule=WarmupCosine(warmup_steps=250),
        loader=loader,
    )


def one_gpu() -> SamTrainConfig:
    """SAM ViT-B on one GPU, even a small one.

    `gigamask train one_gpu --data /sa1b/sa_0000*.tar --init mae:MAE_WEIGHTS --out runs/one`

    Batches of 16 in eight micro-batches, at most 32 masks per image, activation checkpointing in
    every encoder block, 8-bit AdamW (`pip install 'gigamask[quant]'`), focal loss with alpha .8.
    The length is our choice: 1.44 million images, since the paper finds a million nearly as good as
    all (section 7.6). Memory is planned and hours are not measured: docs/recipes.md.
    """
    return SamTrainConfig(
        evaluation=ClickEvaluation(),
        recipe="one_gpu",
        model=replace(configs.vit_b(), drop_path_rate=0.1),
        steps=90_000,
        batch_size=16,
        micro_batch_size=2,
        masks_per_chunk=32,
        activation_checkpointing=1,
        loader=SamLoaderConfig(max_masks=32, workers=4),
        loss=SamLoss(alpha=0.8),
        optimizer=AdamW8bit(lr=1e-4, layer_decay=0.8),
        save_every=1000,
    )


def finetune() -> SamTrainConfig:
    """Fine-tune the official ViT-B on your own masks; one GPU.

    `gigamask train finetune --data TARS --init sam_vit_b_01ec64.pth --out runs/mine`

    The encoder is frozen; change `--freeze` to train it. `--model.image-size 512` interpolates its
    position embeddings. Hours are not measured.
    """
    return _finetune("finetune", configs.vit_b())


def finetune_vit_l() -> SamTrainConfig:
    """Fine-tune the official ViT-L on your own masks; one GPU.

    `gigamask train finetune_vit_l --data TARS --init sam_vit_l_0b3195.pth --out runs/mine`
    """
    return _finetune("finetune_vit_l", configs.vit_l())


def finetune_vit_h() -> SamTrainConfig:
    """Fine-tune the official ViT-H on your own masks; one GPU.

    `gigamask train finetune_vit_h --data TARS --init sam_vit_h_4b8939.pth --out runs/mine`
    """
    return _finetune("finetune_vit_h", configs.vit_h())


def _finetune(name: str, model: configs.SamConfig) -> SamTrainConfig:
    """Return a configuration with the numbers that the three sizes share, which are ours.

    A tenth of SAM's learning rate for B and H, a frozen encoder, and flips.
    """
    return SamTrainConfig(
        evaluation=ClickEvaluation(),
        recipe=name,
        freeze=("image_encoder",),
        model=model,
        steps=5000,
        batch_size=8,
        micro_batch_size=1,
        loader=SamLoaderConfig(max_masks=32, augment=HorizontalFlip()),
        optimizer=AdamW(lr=8e-5),
        schedule=WarmupCosine(warmup_steps=250, min_lr_ratio=0.01),
    )
