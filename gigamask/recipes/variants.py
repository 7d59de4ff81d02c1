"""Recipes beside SAM's own: another mix of prompts, one GPU, and weights that are there already. docs/recipes.md tells the source of each number."""

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
    """SAM ViT-H by one round of mixed prompts: `gigamask train mixed_prompts --stages mae,decoder,joint --data /sa1b --out runs/mixed`.

    256 GPUs with one image each, as `sam_vit_h`, whose optimizer and length it shares; a cosine instead of drops, light augmentation. Some
    write-ups tell it as SAM's. They train the decoder alone for 5 of 95 "epochs", which the stages do. Hours: not measured.
    """
    loading = SamLoaderConfig(augment=ScaleJitter(), color_jitter=ColorJitter(0.2, 0.2, 0.2))
    return replace(
        sam_vit_h(),
        recipe="mixed_prompts",
        prompts=MixedPrompts(),
        schedule=WarmupCosine(warmup_steps=250),
        loader=loading,
    )


def one_gpu() -> SamTrainConfig:
    """SAM ViT-B on one GPU, even a small one: `gigamask train one_gpu --data /sa1b/sa_0000*.tar --init mae:MAE_WEIGHTS --out runs/one`.

    Batches of 16 in eight parts, at most 32 masks an image, every encoder block recomputed, 8-bit AdamW (`pip install 'gigamask[quant]'`), focal loss
    with alpha .8. Its length is our choice: 1.44 million images, since the paper finds a million nearly as good as all (section 7.6). Memory is
    planned, hours are not measured: docs/recipes.md.
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
    """Official ViT-B weights on one's own masks: `gigamask train finetune --data TARS --init sam_vit_b_01ec64.pth --out runs/mine`.

    One GPU, hours not measured; the encoder stays as it is unless `--freeze` says otherwise. `--model.image-size 512` interpolates its positions.
    """
    return _finetune("finetune", configs.vit_b())


def finetune_vit_l() -> SamTrainConfig:
    """Official ViT-L weights on one's own masks: `gigamask train finetune_vit_l --data TARS --init sam_vit_l_0b3195.pth --out runs/mine`."""
    return _finetune("finetune_vit_l", configs.vit_l())


def finetune_vit_h() -> SamTrainConfig:
    """Official ViT-H weights on one's own masks: `gigamask train finetune_vit_h --data TARS --init sam_vit_h_4b8939.pth --out runs/mine`."""
    return _finetune("finetune_vit_h", configs.vit_h())


def _finetune(name: str, model: configs.SamConfig) -> SamTrainConfig:
    """The numbers the three share are ours: a tenth of SAM's learning rate for B and H, the encoder frozen, flips."""
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
