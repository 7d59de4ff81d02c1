"""Masked pre-training of SAM's image encoders. Numbers: Masked Autoencoders (arXiv 2111.06377), appendix A.1, and facebookresearch/mae (PRETRAIN.md,
`main_pretrain.py`), unless a line says otherwise."""

from dataclasses import replace

from gigamask.data.augment import RandomResizedCrop
from gigamask.errors import GigamaskError
from gigamask.models import configs
from gigamask.models.configs import MAEConfig
from gigamask.samplers.shards import Streamed
from gigamask.training.config import LoaderConfig
from gigamask.training.mae_config import MAETrainConfig
from gigamask.training.optim import AdamW
from gigamask.training.sam_config import SamTrainConfig
from gigamask.training.schedule import WarmupCosine

IMAGES, EPOCHS, WARMUP_EPOCHS, BATCH = 1_281_167, 1600, 40, 4096
"""Of ImageNet-1k, in whose epochs the paper counts."""
SMALL = 256
"""Encoders narrower than this are pre-trained as `tiny` is."""


def mae_tiny() -> MAETrainConfig:
    """Pre-trains the encoder of `tiny`: `gigamask pretrain mae_tiny --data runs/demo/train --out runs/mae`.

    Two CPU cores, about 15 CPU minutes. Numbers: our own choice (docs/recipes.md); the images may be any, with or without masks.
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
    """MAE ViT-B: `gigamask pretrain mae_vit_b --data /sa1b --out runs/mae_b`; 64 GPUs with 64 images each."""
    return _mae("mae_vit_b", configs.mae_vit_b())


def mae_vit_l() -> MAETrainConfig:
    """MAE ViT-L: `gigamask pretrain mae_vit_l --data /sa1b --out runs/mae_l`; 800 epochs took about 42 hours on 64 V100 (PRETRAIN.md)."""
    return _mae("mae_vit_l", configs.mae_vit_l())


def mae_vit_h() -> MAETrainConfig:
    """MAE ViT-H: `gigamask pretrain mae_vit_h --data /sa1b --out runs/mae_h`; patch 16 as SAM's, where the published one has 14."""
    return _mae("mae_vit_h", configs.mae_vit_h())


def pretraining_for(run: SamTrainConfig, steps: int | None = None) -> MAETrainConfig:
    """Returns the pre-training of a run's encoder, on its data: by the numbers of `mae_tiny` where it is narrow, else of `mae_vit_b`."""
    if type(run.model.encoder) is not configs.ViT:
        raise GigamaskError(
            f"recipe {run.recipe}: masked pre-training is for SAM's ViT, not for {type(run.model.encoder).__name__}; leave out the stage mae"
        )
    recipe, encoder = mae_tiny() if run.model.embed_dim < SMALL else mae_vit_b(), run.model
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
        "precision",
        "device",
        "seed",
        "keep",
        "log_every",
        "max_bad_share",
        "parallel",
        "timeout_s",
    )
    common = {name: getattr(run, name) for name in names}
    # Reading ahead pays where tars are read from end to end; images of a random order would each fetch a block.
    streamed = isinstance(run.sampler, Streamed)
    loading = replace(
        recipe.loader,
        workers=run.loader.workers,
        read_ahead_mb=run.loader.read_ahead_mb if streamed else 0,
    )
    sampler = run.sampler if streamed else recipe.sampler
    return replace(
        recipe, model=model, steps=steps or recipe.steps, loader=loading, sampler=sampler, **common
    )


def _mae(name: str, model: MAEConfig) -> MAETrainConfig:
    """The numbers the three share: AdamW (.9, .95), weight decay .05, base rate 1.5e-4 for 256 images, batch 4096, 40 of 1600 epochs of ImageNet-1k
    warm-up, cosine, crops of .2 to 1 of the image, flips, no clipping."""
    per_epoch = IMAGES // BATCH  # an incomplete batch is left out
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
