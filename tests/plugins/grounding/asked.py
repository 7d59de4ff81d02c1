"""A grounding run small enough for tests, over half a dozen describable scenes."""

from collections.abc import Collection
from dataclasses import replace
from pathlib import Path

from gigamask import config_files
from gigamask.data import index as indexes
from gigamask.data import tar
from gigamask.data.index import Index
from gigamask.data.shards import ShardReader
from gigamask.plugins.grounding.config import GroundingTrainConfig
from gigamask.plugins.grounding.model_config import GroundingModelConfig
from gigamask.plugins.grounding.text_encoders import HuggingFace
from gigamask.training.optim import AdamW, WarmupCosine

SPEC = GroundingModelConfig(embedding_dim=16, text_dim=16, dim=16, layers=2, heads=2, crop_side=4)
RECIPE = f"{Path(__file__).resolve()}:asking"
DAMAGES = [lambda raw: raw[:-1], lambda raw: raw[:-1] + bytes([raw[-1] ^ 1]), lambda raw: b""]
"""What may be left of a file."""


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
    places = {
        "data": (str(described / "scenes"),),
        "queries": (str(described / "scenes" / "queries.jsonl"),),
        "text": HuggingFace(str(described / "text"), max_tokens=24, lora_rank=lora_rank),
        "segmenter": str(described / "segmenter.safetensors"),
        "cache": str(described / "kept"),
    }
    run = replace(asking(), out=str(folder), **(places | changes))
    config_files.save_config(run)
    return run


def write_spoilt(index: Index, folder: Path, cut: Collection[int], without: Collection[int] = ()):
    """Write a tar of the images of an index, with some JPEGs cut short and some JSONs left out, and
    return its index.
    """
    shards, members = ShardReader(index.shard_paths), []
    for row in range(len(index)):
        jpg, json_bytes = shards.read_entry(index, row)
        members.append((f"sa_{row}.jpg", jpg[:200] if row in cut else jpg))
        members += [] if row in without else [(f"sa_{row}.json", json_bytes)]
    shards.close()
    tar.write(folder / "sa_000000.tar", members)
    return indexes.open_or_build([str(folder)], str(folder / "index"))


def flags(described: Path, out: Path) -> list[str]:
    """The same run as words on the command line, behind the recipe."""
    return (
        f"--data {described}/scenes --queries {described}/scenes/queries.jsonl "
        f"--segmenter {described}/segmenter.safetensors --text.name {described}/text "
        f"--cache {described}/kept --out {out}"
    ).split()


def untrained(spec: GroundingModelConfig = SPEC, seed: int = 0, device: str = "cpu"):
    """Return a grounding model without a text model."""
    from gigamask.models.init import materialize
    from gigamask.plugins.grounding.model import GroundingModel

    return materialize(lambda: GroundingModel(spec), seed, device)
