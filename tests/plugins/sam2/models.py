"""A SAM 2.1 image model and a run small enough for tests."""

from dataclasses import replace
from pathlib import Path

from gigamask.losses.sam_loss import SamLoss
from gigamask.plugins.sam2.configs import Hiera, Sam2Decoder
from gigamask.training.optim import AdamW
from gigamask.training.sam_config import SamTrainConfig
from tests.little import SPEC, little_compact

SAM2 = replace(
    SPEC,
    patch_size=16,
    stretch=True,
    embedding_dim=32,
    encoder=Hiera(
        embed_dim=16, depths=(1, 1, 2, 1), global_attn_indexes=(3,), window_sizes=(8, 4, 6, 3)
    ),
    decoder=Sam2Decoder(),
)


def little_sam2() -> SamTrainConfig:
    """SAM 2.1's image model, three rounds and some boxes."""
    return replace(
        little_compact(),
        recipe=f"{Path(__file__).resolve()}:little_sam2",
        model=SAM2,
        loss=SamLoss(iou_supervision="all", iou_loss="l1"),
        freeze=("mask_decoder.pred_obj_score_head",),
        optimizer=AdamW(lr=1e-3, layer_decay=0.9),
    )
