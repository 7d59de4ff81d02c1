"""Recipes that distill a large SAM into a small one.

docs/recipes.md lists the source of each hyperparameter, and what the papers do not state.
"""

from dataclasses import replace
from typing import cast

from gigamask.evaluation.click_evaluation import ClickEvaluation
from gigamask.losses.sam_loss import SamLoss
from gigamask.losses.window_loss import WindowLoss
from gigamask.models.configs import ConvPyramid, SamConfig
from gigamask.plugins.distill.config import DistillTrainConfig, FeaturesStage
from gigamask.prompts.schedule import InteractiveSchedule
from gigamask.recipes.photographs import compact, photos
from gigamask.registry import make_component
from gigamask.training.optim import AdamW, MuonAdamW, WarmupCosine
from gigamask.training.sam_config import SamLoaderConfig


def edge_sam() -> DistillTrainConfig:
    """Distill SAM ViT-H into a RepViT by embeddings, then by prompts, like EdgeSAM; 8 GPUs.

    `gigamask distill edge_sam --teacher sam_vit_h_4b8939.pth --data SA1B_TARS --out runs/edge`

    1 % of SA-1B: embeddings for 10 epochs of 112k images, then prompts for 5, with at most 16
    masks an image. Layer norms take the place of RepViT's batch norms, so that its published
    weights, from which EdgeSAM starts, cannot be loaded. Training time has not been measured.
    """
    return DistillTrainConfig(
        evaluation=ClickEvaluation(),
        recipe="edge_sam",
        model=SamConfig(encoder=make_component("model.encoder", "repvit")),
        steps=35_000,
        batch_size=16,
        features=FeaturesStage(
            steps=17_500,
            batch_size=64,
            lr=1.25e-2,
            min_lr_ratio=5e-5,
            warmup_steps=8_750,
            weight_decay=0.01,
        ),
        loader=SamLoaderConfig(max_masks=16),
        prompts=InteractiveSchedule(clicks=1, mask_only_rounds=False, box_noise=0.0),
        loss=SamLoss(focal_weight=10.0, alpha=0.5, gamma=0.0, dice_weight=5.0, iou_weight=0.0),
        optimizer=AdamW(lr=1e-4, weight_decay=0.05, grad_clip=0.01),
        schedule=WarmupCosine(warmup_steps=0, min_lr_ratio=0.1),
        save_every=1000,
    )


def mobile_sam() -> DistillTrainConfig:
    """Distill the embeddings of SAM ViT-H alone, like MobileSAM; one GPU.

    `gigamask distill mobile_sam --teacher sam_vit_h_4b8939.pth --data SA1B_TARS --out runs/mobile`

    The decoder is the teacher's. Paper: 1 % of SA-1B, less than a day on a single GPU; its encoder
    is a TinyViT of 5 million parameters, in whose place is a RepViT of 5.4. Masks are not needed.
    Training time has not been measured.
    """
    edge = edge_sam()
    return replace(
        edge,
        recipe="mobile_sam",
        phase="features",
        steps=edge.features.steps,
        batch_size=edge.features.batch_size,
        features=replace(edge.features, steps=0),
        optimizer=AdamW(lr=1e-3, weight_decay=edge.features.weight_decay),
        schedule=WarmupCosine(warmup_steps=250, min_lr_ratio=0.01),
    )


def compact_student() -> DistillTrainConfig:
    """Distill a model of `photos` into one of a third of its FLOPs; two CPU cores, minutes.

    `gigamask distill compact_student --teacher runs/photos --data PHOTOS/*.tar --out runs/student`

    The student has the teacher's decoder and an encoder of a quarter of its FLOPs.
    docs/plugins/distill lists scores.
    """
    base = photos()
    return DistillTrainConfig(
        evaluation=base.evaluation,
        recipe="compact_student",
        model=replace(
            base.model, encoder=ConvPyramid(widths=(16, 24, 40, 64), depths=(0, 1, 1, 1))
        ),
        steps=150,
        batch_size=base.batch_size,
        micro_batch_size=base.micro_batch_size,
        ema=base.ema,
        features=FeaturesStage(steps=700, batch_size=6, lr=2e-3, min_lr_ratio=0.1, warmup_steps=5),
        loader=base.loader,
        prompts=compact().prompts,
        loss=WindowLoss(iou_weight=0.0, choice_weight=0.0),
        teacher_iou_weight=4.0,
        optimizer=replace(cast(MuonAdamW, base.optimizer), lr=2e-4, muon_lr=2e-3),
        schedule=WarmupCosine(warmup_steps=5, min_lr_ratio=0.01),
        save_every=200,
    )
