"""A grounding run small enough for tests, over half a dozen describable scenes."""

from dataclasses import replace
from pathlib import Path

from gigamask import config_files
from gigamask.plugins.grounding.config import GroundingTrainConfig
from gigamask.plugins.grounding.model_config import GroundingModelConfig
from gigamask.plugins.grounding.text_encoders import HuggingFace
from gigamask.training.optim import AdamW, WarmupCosine

SPEC = GroundingModelConfig(embedding_dim=16, text_dim=16, dim=16, layers=2, heads=2, crop_side=4)
RECIPE = f"{Path(__file__).resolve()}:asking"


def asking() -> GroundingTrainConfig:
    """A network of a few thousand parameters, and a text model that has yet to be named."""
    return GroundingTrainConfig(
        recipe=RECIPE,
        model=SPEC,
        steps=4,
        batch_size=8,
        micro_batch_size=3,
        max_masks=6,
        text=HuggingFace(max_tokens=24),
        optimizer=AdamW(lr=1e-3),
        schedule=WarmupCosine(warmup_steps=2),
        save_every=3,
        log_every=1,
        device="cpu",
    )


def run_in(folder: Path, described: Path, lora_rank: int = 0, **changes) -> GroundingTrainConfig:
    """The run over what the fixture `described` holds, its configuration written down."""
    text = HuggingFace(str(described / "text"), max_tokens=24, lora_rank=lora_rank)
    places = {
        "data": (str(described / "scenes"),),
        "queries": (str(described / "scenes" / "queries.jsonl"),),
        "text": text,
    }
    run = replace(
        asking(),
        out=str(folder),
        segmenter=str(described / "segmenter.safetensors"),
        cache=str(described / "kept"),
        **places,
    )
    run = replace(run, **changes)
    config_files.save_config(run)
    return run


def flags(described: Path, out: Path) -> list[str]:
    """The same run as words on the command line, behind the recipe."""
    words = [
        "--data",
        described / "scenes",
        "--queries",
        described / "scenes" / "queries.jsonl",
        "--segmenter",
        described / "segmenter.safetensors",
    ]
    words += ["--text.name", described / "text", "--cache", described / "kept", "--out", out]
    return [str(word) for word in words]


def untrained(spec: GroundingModelConfig = SPEC, seed: int = 0, device: str = "cpu"):
    """Return a grounding model without a text model."""
    from gigamask.models.init import materialize
    from gigamask.plugins.grounding.model import GroundingModel

    return materialize(lambda: GroundingModel(spec), seed, device)
