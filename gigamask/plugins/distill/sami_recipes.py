"""Recipes of EfficientSAM: SAMI, then training on SA-1B.

The hyperparameters are from EfficientSAM (Xiong et al. 2023, arXiv 2312.00863), as far as
docs/recipes.md names it; the others are MAE's and SAM's.
"""

from gigamask.evaluation.click_evaluation import ClickEvaluation
from gigamask.models.configs import MAEConfig, SamConfig, ViTSmall
from gigamask.plugins.distill.sami_config import SAMITrainConfig
from gigamask.recipes.mae import BATCH, IMAGES, mae_vit_b
from gigamask.training.optim import AdamW
from gigamask.training.sam_config import SamTrainConfig

EPOCHS, IMAGES_SA1B = 400, 11_185_362
"""Epochs of ImageNet-1k, and number of images of SA-1B."""


def sami_vit_t() -> SAMITrainConfig:
    """Pre-train ViT-T to predict SAM's embedding from visible patches, like EfficientSAM.

    `gigamask pretrain sami_vit_t --teacher sam_vit_h_4b8939.pth --data /imagenet --out runs/sami_t`

    Images without masks will do. Paper: 400 epochs of ImageNet-1k. Training time has not been
    measured.
    """
    return _sami("sami_vit_t", MAEConfig(embed_dim=192, num_heads=3, feature_channels=256))


def sami_vit_s() -> SAMITrainConfig:
    """Pre-train ViT-S to predict SAM's embedding from visible patches, like EfficientSAM.

    `gigamask pretrain sami_vit_s --teacher sam_vit_h_4b8939.pth --data /imagenet --out runs/sami_s`
    """
    return _sami("sami_vit_s", MAEConfig(embed_dim=384, num_heads=6, feature_channels=256))


def _sami(name: str, model: MAEConfig) -> SAMITrainConfig:
    """Return a configuration with the hyperparameters that the two sizes share."""
    mae = mae_vit_b()
    return SAMITrainConfig(
        recipe=name,
        model=model,
        steps=EPOCHS * (IMAGES // BATCH),
        batch_size=mae.batch_size,
        micro_batch_size=mae.micro_batch_size,
        loader=mae.loader,
        optimizer=mae.optimizer,
        schedule=mae.schedule,
        save_every=mae.save_every,
    )


def efficient_sam() -> SamTrainConfig:
    """Train EfficientSAM-S on SA-1B from a ViT-S that SAMI has pre-trained; 64 GPUs.

    `gigamask train efficient_sam --init mae:runs/sami_s --data /sa1b --out runs/efficient`

    Paper: 5 epochs of SA-1B on 64 A100. `--model.encoder vit_t` is EfficientSAM-Ti. Training time
    has not been measured.
    """
    return SamTrainConfig(
        evaluation=ClickEvaluation(),
        recipe="efficient_sam",
        model=SamConfig(encoder=ViTSmall()),
        steps=5 * IMAGES_SA1B // 128,
        batch_size=128,
        optimizer=AdamW(lr=8e-4),
        save_every=1000,
    )
