"""Recipes that train a grounding model on top of a trained segmenter."""

from dataclasses import replace

from gigamask.grounding.config import GroundingTrainConfig
from gigamask.models.configs import GroundingModelConfig
from gigamask.training.optim import AdamW
from gigamask.training.schedule import WarmupCosine


def ground() -> GroundingTrainConfig:
    """Texts over a SAM of any size: `gigamask ground train ground --segmenter sam_vit_b_01ec64.pth --data TARS --queries QUERIES --out runs/words`.

    One GPU or a CPU: images pass through the segmenter once, afterwards it sees none. The text encoder needs no download;
    `--text huggingface --text.name NAME` takes any other. Numbers: our own, on synthetic scenes (docs/measurements.md); 16 masks a query are the
    write-ups'. Hours: not measured; nobody has trained it over SAM's own weights yet.
    """
    return GroundingTrainConfig(
        recipe="ground",
        steps=5000,
        batch_size=32,
        micro_batch_size=32,
        optimizer=AdamW(lr=1e-3, betas=(0.9, 0.98), weight_decay=0.05),
        schedule=WarmupCosine(warmup_steps=100, min_lr_ratio=0.01),
        save_every=1000,
        log_every=50,
    )


def ground_tiny() -> GroundingTrainConfig:
    """Texts over `tiny`: `gigamask ground train ground_tiny --segmenter runs/tiny --data SCENES --queries SCENES/queries.jsonl --out runs/words`.

    One CPU core, some twenty minutes. Numbers as `ground`, for the 64 channels that `tiny` embeds images in.
    """
    return replace(ground(), recipe="ground_tiny", model=GroundingModelConfig(embedding_dim=64))
