"""A run small enough for tests, over a dozen synthetic scenes."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from gigamask.data.augment import HorizontalFlip
from gigamask.evaluation.click_evaluation import ClickEvaluation
from gigamask.losses.window_loss import WindowLoss
from gigamask.models.configs import ConvPyramid, SamConfig, WindowDecoder
from gigamask.prompts.schedule import InteractiveSchedule
from gigamask.training.optim import AdamW, WarmupCosine
from gigamask.training.sam_config import SamLoaderConfig, SamTrainConfig

SPEC = SamConfig(
    image_size=64,
    patch_size=8,
    embed_dim=16,
    depth=2,
    num_heads=2,
    window_size=4,
    global_attn_indexes=(1,),
    drop_path_rate=0.1,
    embedding_dim=16,
    decoder_num_heads=2,
    decoder_mlp=32,
    iou_hidden=16,
)

COMPACT = SamConfig(
    image_size=64,
    patch_size=4,
    embedding_dim=32,
    decoder_num_heads=2,
    decoder_mlp=32,
    iou_hidden=16,
    encoder=ConvPyramid(widths=(8, 16, 16, 24), depths=(1, 0, 1, 0), width=8, fine_width=4),
    decoder=WindowDecoder(widths=(8, 16)),
)


def save_little(folder: Path, spec: SamConfig = SPEC, seed: int = 0) -> str:
    """Save a little SAM that is not trained, and return the path."""
    from gigamask.models.init import build_model
    from gigamask.models.weight_files import save_weights

    path = folder / "model.safetensors"
    save_weights(build_model(spec, seed).state_dict(), spec, path)
    return str(path)


def noise(count: int, side: int) -> Any:
    """Square images of random pixels, the same ones in every call."""
    import torch

    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, 256, (count, 3, side, side), generator=generator, dtype=torch.uint8)


def little() -> SamTrainConfig:
    """A model of a few thousand parameters, two rounds, one process."""
    return SamTrainConfig(
        evaluation=ClickEvaluation(),
        recipe=f"{Path(__file__).resolve()}:little",
        model=SPEC,
        steps=4,
        batch_size=3,
        micro_batch_size=2,
        masks_per_chunk=5,
        loader=SamLoaderConfig(max_masks=4, augment=HorizontalFlip(), workers=0),
        prompts=InteractiveSchedule(clicks=1, mask_only_rounds=False),
        optimizer=AdamW(lr=1e-3, layer_decay=0.9),
        schedule=WarmupCosine(warmup_steps=2),
        save_every=2,
        log_every=1,
        device="cpu",
    )


def little_compact() -> SamTrainConfig:
    """A model that answers in windows, three rounds, some boxes, and the optimizer without decay by
    layer."""
    return replace(
        little(),
        recipe=f"{Path(__file__).resolve()}:little_compact",
        model=COMPACT,
        prompts=InteractiveSchedule(clicks=2, mask_only_rounds=False, box_prob=0.4),
        loss=WindowLoss(),
        optimizer=AdamW(lr=1e-3),
    )


def little_classes() -> SamTrainConfig:
    """The same with classes, which not all masks have."""
    return replace(
        little_compact(),
        recipe=f"{Path(__file__).resolve()}:little_classes",
        model=replace(COMPACT, class_names=("ellipse", "star", "rectangle")),
        class_weight=0.5,
        ignore_other_classes=True,
    )
