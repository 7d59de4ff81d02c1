"""Recipes that train SAM: its three published models, fine-tuning, one GPU, and a laptop.

The hyperparameters of the published models are from Segment Anything (arXiv 2304.02643), appendix
A; docs/recipes.md lists the source of each hyperparameter, and what the paper does not state.
"""

from dataclasses import replace

from gigamask.data.augment import ColorJitter, HorizontalFlip, LargeScaleJitter
from gigamask.data.mask_sampling import MaskFilters
from gigamask.evaluation.click_evaluation import ClickEvaluation
from gigamask.losses.sam_loss import SamLoss
from gigamask.models import configs
from gigamask.models.configs import SamConfig, vit_b, vit_h, vit_l
from gigamask.prompts.schedule import InteractiveSchedule
from gigamask.training.optim import AdamW, AdamW8bit, MuonAdamW, WarmupCosine
from gigamask.training.sam_config import SamLoaderConfig, SamTrainConfig


def sam_vit_b() -> SamTrainConfig:
    """SAM ViT-B on SA-1B; 128 GPUs.

    `gigamask train sam_vit_b --data /sa1b --init mae:MAE_WEIGHTS --out runs/vit_b`

    Paper: 128 GPUs with one image each, training time not stated;
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

    Paper: 128 GPUs with one image each, training time not stated;
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
    """Return a configuration with the hyperparameters that the three models share.

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
        optimizer=optimizer,
        save_every=1000,
    )


def one_gpu() -> SamTrainConfig:
    """SAM ViT-B on one GPU, even a small one.

    `gigamask train one_gpu --data /sa1b/sa_0000*.tar --init mae:MAE_WEIGHTS --out runs/one`

    Batches of 16 in as few micro-batches as fit, at most 32 masks per image, activation
    checkpointing in every encoder block, 8-bit AdamW (`pip install 'gigamask[quant]'`), focal loss
    with alpha .8.
    The length is our choice: 1.44 million images, since in the paper a million images are nearly as
    good as all (section 7.6). Memory is estimated and training time not measured; see
    docs/recipes.md.
    """
    return SamTrainConfig(
        evaluation=ClickEvaluation(),
        recipe="one_gpu",
        model=replace(configs.vit_b(), drop_path_rate=0.1),
        steps=90_000,
        batch_size=16,
        masks_per_chunk=32,
        activation_checkpointing=1,
        loader=SamLoaderConfig(max_masks=32),
        loss=SamLoss(alpha=0.8),
        optimizer=AdamW8bit(lr=1e-4, layer_decay=0.8),
        save_every=1000,
    )


def finetune() -> SamTrainConfig:
    """Fine-tune the official ViT-B on your own masks; one GPU.

    `gigamask train finetune --data TARS --init sam_vit_b_01ec64.pth --out runs/mine`

    The encoder is frozen; change `--freeze` to train it. `--model.image-size 512` interpolates its
    position embeddings. Training time has not been measured.
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


def finetune_laptop() -> SamTrainConfig:
    """Fine-tune the decoder of the official ViT-B; a laptop's CPU.

    `gigamask train finetune_laptop --data TARS --init sam_vit_b_01ec64.pth --out runs/mine`

    The frozen encoder runs once for an image and once for its mirror image; `--embedding-cache`
    names the folder that keeps the embeddings for this run and later ones. docs/finetune.md has
    measured times.
    """
    base = finetune()
    return replace(
        base,
        recipe="finetune_laptop",
        steps=500,
        batch_size=4,
        masks_per_chunk=8,
        embedding_cache="runs/embeddings",
        loader=replace(base.loader, max_masks=8, workers=0),
        prompts=InteractiveSchedule(clicks=2, mask_only_rounds=False),
        schedule=WarmupCosine(warmup_steps=25, min_lr_ratio=0.01),
        save_every=100,
    )


def _finetune(name: str, model: configs.SamConfig) -> SamTrainConfig:
    """Return a configuration with the hyperparameters that the three sizes share, which are ours.

    A tenth of SAM's learning rate for B and H, a frozen encoder, and flips.
    """
    return SamTrainConfig(
        evaluation=ClickEvaluation(),
        recipe=name,
        freeze=("image_encoder",),
        model=model,
        steps=5000,
        batch_size=8,
        loader=SamLoaderConfig(max_masks=32, augment=HorizontalFlip()),
        optimizer=AdamW(lr=8e-5),
        schedule=WarmupCosine(warmup_steps=250, min_lr_ratio=0.01),
    )


def sam_vit_s() -> SamTrainConfig:
    """SAM with ViT-S for 320 px, from scratch on photographs and synthetic scenes; one H100.

    `gigamask train sam_vit_s --data PHOTOS SCENES --data-weights 1 3 --out runs/vit_s`

    Not run to its end yet (docs/learning.md says what is expected). Optimizer, loss and
    initialization are those of `tiny`, which learn without a pre-trained encoder.
    """
    base = tiny()
    return replace(
        base,
        recipe="sam_vit_s",
        model=configs.vit_s(),
        steps=2650,
        batch_size=64,
        micro_batch_size=None,
        loader=SamLoaderConfig(
            filters=MaskFilters(min_predicted_iou=0.7),
            max_masks=16,
            augment=LargeScaleJitter(low=1.0, high=1.4),
            color_jitter=ColorJitter(0.2, 0.2, 0.2),
        ),
        prompts=InteractiveSchedule(clicks=3, box_noise=0.15, box_noise_varies=True),
        schedule=WarmupCosine(warmup_steps=100, min_lr_ratio=0.01),
        ema=0.998,
        save_every=500,
    )


def tiny() -> SamTrainConfig:
    """A SAM for 128-pixel images, on synthetic scenes; two CPU cores, about four minutes.

    `gigamask train tiny --data runs/demo/train --out runs/tiny`

    The hyperparameters are from our own measurements (docs/log.md). Two prompt rounds
    replace SAM's eleven, because early in training the first rounds teach the most for their cost.
    Balanced cross entropy (focal loss with gamma 0) replaces focal loss, which starts more slowly.
    The optimizer is Muon. Without the custom initialization and half the learning rate for the
    encoder, its embedding would collapse before the decoder could use it.
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
