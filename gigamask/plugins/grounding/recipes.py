"""Recipes that train a grounding model on top of a trained segmenter."""

from dataclasses import replace

from gigamask.plugins.grounding.config import GroundingTrainConfig
from gigamask.plugins.grounding.model_config import GroundingModelConfig
from gigamask.plugins.grounding.text_encoders import WordTransformer
from gigamask.training.optim import AdamW, WarmupCosine


def ground() -> GroundingTrainConfig:
    """Find masks by text with a SAM of any size; one GPU, or a CPU.

    `gigamask ground train ground --segmenter WEIGHTS --data TARS --queries QUERIES --out runs/text`

    The segmenter encodes each image once, and its features are stored and reused. The text encoder
    is all-MiniLM-L6-v2, downloaded once from the Hugging Face Hub; `--text huggingface --text.name
    NAME` uses another one, and `--text words --model.text-dim 128` one that needs no download. The
    hyperparameters are our own, from synthetic scenes, except 16 masks per query, which published
    accounts use. Training time has not been measured, and the recipe has not been run with SAM's
    own weights yet.
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
    """Find masks by text with the SAM of `tiny`; one CPU core, about twenty minutes.

    `gigamask ground train ground_tiny --segmenter runs/tiny --data SCENES
    --queries SCENES/queries.jsonl --out runs/text`

    The hyperparameters are those of `ground`, for image embeddings of 64 channels. The text encoder
    is trained with the model, so nothing is downloaded.
    """
    text = WordTransformer()
    model = GroundingModelConfig(embedding_dim=64, text_dim=text.dim)
    return replace(ground(), recipe="ground_tiny", text=text, model=model)
