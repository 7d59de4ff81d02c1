"""`gigamask memory`: bytes of a sample, of loader processes, and of a grounding training."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

from tyro.conf import OmitArgPrefixes, OmitSubcommandPrefixes, Positional, arg, subcommand

from gigamask import parser
from gigamask.errors import GigamaskError

PARTS = ("sample", "loader", "grounding")


@dataclass(frozen=True)
class SampleVerb:
    """bytes of one sample, decoded and in gigamask's form"""

    sample: Positional[Annotated[str | None, arg(metavar="[SAMPLE]")]] = None
    """TAR:IMAGE, by image name (sa_1) or image_id (1); default: a synthetic sample"""
    height: int = 1500
    """rows of the synthetic sample"""
    width: int = 2250
    """columns of the synthetic sample"""
    masks: int = 100
    """masks of the synthetic sample"""
    json: str | None = None
    """file for what was printed, as data"""

    def run(self) -> dict[str, Any]:
        from gigamask.profiling import sample_memory
        from gigamask.synthetic import large_sample

        if self.sample is None:
            name, (jpg, json) = (
                "synthetic sample",
                large_sample.make((self.height, self.width), self.masks),
            )
        else:
            name, jpg, json = self._read(self.sample)
        found = sample_memory.measure(jpg, json, name)
        print(sample_memory.table(found))
        return found

    @staticmethod
    def _read(words: str) -> tuple[str, bytes, bytes]:
        """Return name, jpg and json of the sample TAR:IMAGE."""
        from gigamask.workflows.opening import opened_sample
        from gigamask.data.dataset import Sa1bDataset

        with opened_sample(words) as (index, row):
            name, jpg, json = Sa1bDataset(index).read(row)
        if json is None:
            raise GigamaskError(
                f"{name} has no json and so no masks to measure; name another image"
            )
        return name, jpg, json


@dataclass(frozen=True)
class LoaderVerb:
    """memory of each loader process while it makes batches, and whether it grows"""

    data: tuple[str, ...]
    """tars, folders of tars, globs, or an index"""
    recipe: str = "tiny"
    """recipe whose loader settings are used"""
    workers: int = 2
    """loader processes"""
    batches: int = 50
    """batches to take"""
    json: str | None = None
    """file for what was printed, as data"""

    def run(self) -> dict[str, Any]:
        from gigamask import recipes
        from gigamask.cli.commands.progress import bar
        from gigamask.data import loader
        from gigamask.profiling import loader_memory
        from gigamask.training import train_data

        if self.workers < 1:
            raise GigamaskError(
                f"--workers must be at least 1, got {self.workers}: loader processes are measured"
            )
        recipe = recipes.imaged(recipes.make(self.recipe))
        with tempfile.TemporaryDirectory() as folder, bar("load") as progress:
            wanted = replace(recipe.loader, workers=self.workers)
            run = replace(recipe, data=self.data, out=folder, loader=wanted).check()
            steps = train_data.TrainData(run, train_data.open_index(run)).batches()
            found = loader_memory.measure(steps, self.batches, loader.PREFETCH, progress)
        found = {
            "recipe": self.recipe,
            "side": run.sample_config.image_size,
            "grid": run.sample_config.mask_size,
        } | found
        print(f"recipe {self.recipe}: input {found['side']}, masks on a grid of {found['grid']}")
        print(loader_memory.table(found))
        return found


@dataclass(frozen=True)
class GroundingVerb:
    """memory of a grounding training with a language model, part by part"""

    vision: Literal["vit_b", "vit_l", "vit_h", "none"] = "vit_h"
    """frozen image encoder; none: embeddings are read from disk"""
    language: str = "7b"
    """language model: 7b for Llama 2's shapes, or a folder or cached name of Hugging Face's (only config.json is read)"""
    rank: int = 16
    """rank of the language model's adapters; 0: the language model is not trained"""
    four_bit: bool = True
    """store the language model's linear layers in 4 bits"""
    precision: Literal["bf16", "fp16", "fp32"] = "bf16"
    """of the encoders; the head and the adapters are float32"""
    recompute: bool = True
    """recompute the language model's blocks in the backward pass"""
    optimizer: Literal["adamw", "adamw8bit"] = "adamw"
    """8 or 2 bytes for each trained parameter"""
    images: int = 1
    """images in the batch"""
    queries: int = 1
    """texts of each image"""
    tokens: int = 64
    """tokens of a text"""
    masks: int = 16
    """masks of an image, in float16 at the encoder's image side"""
    head_dim: int = 256
    """width of the cross-modal head"""
    head_layers: int = 2
    """blocks of the cross-modal head"""
    spare_gib: float = 1.5
    """GiB of a GPU to keep free, as in 'gigamask plan'"""
    json: str | None = None
    """file for what was printed, as data"""

    def run(self) -> dict[str, Any]:
        from gigamask.grounding import memory
        from gigamask.grounding.text_encoders import HuggingFace
        from gigamask.models import configs
        from gigamask.training.optim import AdamW, AdamW8bit

        text = HuggingFace(
            self.language,
            self.precision,
            self.four_bit,
            max_tokens=self.tokens,
            lora_rank=self.rank,
            recompute=self.recompute and self.rank > 0,
        )
        setup = memory.GroundingSetup(
            text,
            None if self.vision == "none" else getattr(configs, self.vision)(),
            self.images,
            self.queries,
            self.masks,
            memory.HeadShape(self.head_dim, self.head_layers),
            AdamW() if self.optimizer == "adamw" else AdamW8bit(),
        )
        found = memory.plan(setup, self.spare_gib)
        print(memory.table(found))
        return {"vision": self.vision, "language": self.language} | found


@dataclass(frozen=True)
class MemoryCommand:
    """measure a sample (memory sample) or loader processes (memory loader), or plan a grounding training (memory grounding)"""

    part: OmitArgPrefixes[
        OmitSubcommandPrefixes[
            Annotated[SampleVerb, subcommand(PARTS[0])]
            | Annotated[LoaderVerb, subcommand(PARTS[1])]
            | Annotated[GroundingVerb, subcommand(PARTS[2])]
        ]
    ]

    @property
    def json(self) -> str | None:
        return self.part.json

    def run(self) -> dict[str, Any]:
        """Run the subcommand."""
        return self.part.run()


def parse(words: Sequence[str]) -> MemoryCommand:
    """Parse the command line."""
    if words and not words[0].startswith("-") and words[0] not in PARTS:
        raise GigamaskError(
            f"memory {words[0]!r} is not known, it is {', '.join(PARTS[:-1])} or {PARTS[-1]}; see 'gigamask memory --help'"
        )
    return parser.parse(MemoryCommand, words, "gigamask memory")
