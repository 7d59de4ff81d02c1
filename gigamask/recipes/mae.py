"""Recipes that pre-train SAM's image encoders as masked autoencoders (MAE).

The hyperparameters are from Masked Autoencoders (arXiv 2111.06377), appendix A.1, and
facebookresearch/mae (PRETRAIN.md, `main_pretrain.py`), unless stated otherwise.
"""

from dataclasses import replace

from gigamask.data.augment import RandomResizedCrop
from gigamask.errors import GigamaskError
from gigamask.models import configs
from gigamask.models.configs import MAEConfig
from gigamask.samplers.shards import Streamed
from gigamask.training.config import LoaderConfig
from gigamask.training.mae_config import MAETrainConfig
from gigamask.training.optim import AdamW, WarmupCosine
from gigamask.training.sam_config import SMALL_WIDTH, SamTrainConfig

IMAGES, EPOCHS, WARMUP_EPOCHS, BATCH = 1_281_167, 1600, 40, 4096
"""Number of images of ImageNet-1k, and the paper's epochs, warm-up epochs and batch size."""


def mae_tiny() -> MAETrainConfig:
    """Pre-train the encoder of `tiny`; two CPU cores, about 15 CPU minutes.

    `gigamask pretrain mae_tiny --data runs/demo/train --out runs/mae`

    Any images will do, with or without masks. The hyperparameters are our own choice
    (docs/recipes.md).
    """
    return MAETrainConfig(
        recipe="mae_tiny",
        model=configs.mae_tiny(),
        steps=1500,
        batch_size=32,
        micro_batch_size=32,
        loader=LoaderConfig(augment=RandomResizedCrop(), workers=1),
        optimizer=AdamW(lr=1.5e-3, betas=(0.9, 0.95), weight_decay=0.05, grad_clip=None),
        schedule=WarmupCosine(warmup_steps=100),
    )


def mae_vit_b() -> MAETrainConfig:
    """Pre-train ViT-B; 64 GPUs with 64 images each.

    `gigamask pretrain mae_vit_b --data /sa1b --out runs/mae_b`
    """
    return _mae("mae_vit_b", configs.mae_vit_b())


def mae_vit_l() -> MAETrainConfig:
    """Pre-train ViT-L; 64 V100 GPUs, about 42 hours for 800 epochs (PRETRAIN.md).

    `gigamask pretrain mae_vit_l --data /sa1b --out runs/mae_l`
    """
    return _mae("mae_vit_l", configs.mae_vit_l())


def mae_vit_h() -> MAETrainConfig:
    """Pre-train ViT-H, with patch size 16 as in SAM; the published MAE has 14.

    `gigamask pretrain mae_vit_h --data /sa1b --out runs/mae_h`
    """
    return _mae("mae_vit_h", configs.mae_vit_h())


def pretraining_for(config: SamTrainConfig, steps: int | None = None) -> MAETrainConfig:
    """Return the pre-training configuration for a SAM's image encoder, on the same data.

    Args:
        config: Configuration of SAM training.
        steps: Number of steps; None means the recipe's.

    Returns:
        A configuration with the hyperparameters of `mae_tiny` for a narrow encoder, else of
        `mae_vit_b`.

    Raises:
        GigamaskError: The encoder is not SAM's ViT.
    """
    if type(config.model.encoder) is not configs.ViT:
        raise GigamaskError(
            f"recipe {config.recipe}: only SAM's ViT can be pre-trained as a masked autoencoder "
            f"(got {type(config.model.encoder).__name__}); leave out the stage mae"
        )
    recipe, encoder = (
        mae_tiny() if config.model.embed_dim < SMALL_WIDTH else mae_vit_b(),
        config.model,
    )
    side = (
        min(recipe.model.image_size // recipe.model.patch_size, encoder.embedding_size)
        * encoder.patch_size
    )
    model = replace(
        recipe.model,
        image_size=side,
        patch_size=encoder.patch_size,
        embed_dim=encoder.embed_dim,
        depth=encoder.depth,
        num_heads=encoder.num_heads,
    )
    names = (
        "data",
        "data_weights",
        "precision",
        "device",
        "seed",
        "keep",
        "log_every",
        "max_bad_fraction",
        "wandb",
        "tf32",
        "reduce_precision",
        "parallel",
        "timeout_s",
    )
    common = {name: getattr(config, name) for name in names}
    # Reading ahead pays off for tars read sequentially; in random order, each image fetches a
    # block.
    is_streamed = isinstance(config.sampler, Streamed)
    loader = replace(
        recipe.loader,
        workers=config.loader.workers,
        read_ahead_mb=config.loader.read_ahead_mb if is_streamed else 0,
    )
    sampler = config.sampler if is_streamed else recipe.sampler
    return replace(
        recipe, model=model, steps=steps or recipe.steps, loader=loader, sampler=sampler, **common
    )


def _mae(name: str, model: MAEConfig) -> MAETrainConfig:
    """Return a configuration with the hyperparameters that the three sizes share.

    AdamW (.9, .95), weight decay .05, base learning rate 1.5e-4 for 256 images, batch size 4096,
    warm-up for 40 of 1600 epochs of ImageNet-1k, cosine schedule, crops of .2 to 1 of the image,
    flips, no clipping.
    """
    per_epoch = IMAGES // BATCH  # drops the incomplete batch
    return MAETrainConfig(
        recipe=name,
        model=model,
        steps=EPOCHS * per_epoch,
        batch_size=BATCH,
        micro_batch_size=64,
        loader=LoaderConfig(augment=RandomResizedCrop()),
        optimizer=AdamW(
            lr=1.5e-4 * BATCH / 256, betas=(0.9, 0.95), weight_decay=0.05, grad_clip=None
        ),
        schedule=WarmupCosine(warmup_steps=WARMUP_EPOCHS * per_epoch),
        save_every=1000,
    )
