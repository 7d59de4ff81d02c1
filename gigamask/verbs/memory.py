"""`gigamask memory`: what a sample costs, what loader processes hold, and what is often written of a batch and of grounding."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

from tyro.conf import OmitArgPrefixes, OmitSubcommandPrefixes, Positional, arg, subcommand

from gigamask import parser
from gigamask.faults import Fault, check_range

PARTS = ("sample", "loader", "plan", "grounding")


@dataclass(frozen=True)
class SampleVerb:
    """what one sample costs decoded, and what it costs here"""

    sample: Positional[Annotated[str | None, arg(metavar="[SAMPLE]")]] = None
    """TAR:IMAGE, the image by name (sa_1) or by its image_id (1); a synthetic one by default"""
    height: int = 1500
    """rows of the synthetic sample"""
    width: int = 2250
    """columns of the synthetic sample"""
    masks: int = 100
    """masks of the synthetic sample"""
    json: str | None = None
    """file for what was printed, as data"""

    def run(self) -> dict[str, Any]:
        from gigamask.memory import sample
        from gigamask.prepare import specimen

        if self.sample is None:
            name, (jpg, json) = "synthetic sample", specimen.make((self.height, self.width), self.masks)
        else:
            name, jpg, json = self._read(self.sample)
        found = sample.measure(jpg, json, name)
        print(sample.table(found))
        return found

    @staticmethod
    def _read(words: str) -> tuple[str, bytes, bytes]:
        """Returns the name and the bytes of the sample that TAR:IMAGE means."""
        from gigamask.data.dataset import Sa1bDataset
        from gigamask.verbs.opening import opened_sample

        with opened_sample(words) as (index, row):
            name, jpg, json = Sa1bDataset(index).read(row)
        if json is None:
            raise Fault(f"{name}: has no json, so there are no masks to measure; name another image")
        return name, jpg, json


@dataclass(frozen=True)
class LoaderVerb:
    """what each loader process holds while it makes batches, and whether that grows"""

    data: tuple[str, ...]
    """tars, folders of tars, globs, or an index"""
    recipe: str = "tiny"
    """the recipe whose loading is run"""
    workers: int = 2
    """loader processes"""
    batches: int = 50
    """batches to take"""
    json: str | None = None
    """file for what was printed, as data"""

    def run(self) -> dict[str, Any]:
        from gigamask import recipes
        from gigamask.data import loader
        from gigamask.memory import loading
        from gigamask.train import feed
        from gigamask.verbs.progress import bar

        if self.workers < 1:
            raise Fault(f"--workers is {self.workers}, memory is measured of loader processes; give at least 1")
        recipe = recipes.imaged(recipes.make(self.recipe))
        with tempfile.TemporaryDirectory() as folder, bar("load") as progress:
            wanted = replace(recipe.loading, workers=self.workers)
            run = replace(recipe, data=self.data, out=folder, loading=wanted).check()
            steps = feed.Feed(run, feed.open_index(run)).batches()
            found = loading.measure(steps, self.batches, loader.PREFETCH, progress)
        found = {"recipe": self.recipe, "side": run.assembly.side, "grid": run.assembly.grid} | found
        print(f"recipe {self.recipe}: input {found['side']}, masks on a grid of {found['grid']}")
        print(loading.table(found))
        return found


@dataclass(frozen=True)
class PlanVerb:
    """the estimate of a batch that is often written, by the write-ups' own formula, beside what 'gigamask plan' says of a step"""

    recipe: str = "sam_vit_h"
    """the recipe that is planned beside, with these images in a micro-batch and so many masks of each"""
    images: int = 2
    """images in the batch"""
    height: int = 1500
    """rows of an image"""
    width: int = 2250
    """columns of an image"""
    masks: int = 100
    """masks of an image"""
    weights_gb: float = 2.5
    """GB of the weights in the formula; written are 2.5 for ViT-H, which has 2.56"""
    json: str | None = None
    """file for what was printed, as data"""

    def run(self) -> dict[str, Any]:
        from gigamask import planning, recipes
        from gigamask.memory import estimate, planner
        from gigamask.train.run import at_least
        from gigamask.train.segmentation import Segmentation

        at_least(1, images=self.images, height=self.height, width=self.width, masks=self.masks)
        check_range("--weights-gb", self.weights_gb, 0, None)
        recipe = recipes.make(self.recipe)
        if not isinstance(recipe, Segmentation):
            raise Fault(f"--recipe {self.recipe} trains without masks, of which the estimate mostly is; name one of 'gigamask train'")
        loading = replace(recipe.loading, max_masks=self.masks)
        run = planning.settled(replace(recipe, batch=self.images, micro=self.images, loading=loading), planning.Ask())
        phases = planning.planned(run, planning.Ask(), planning.rehearse(run, planning.device_of(run), self.images))
        written = estimate.written(self.images, (self.height, self.width), self.masks, self.weights_gb)
        found = {"recipe": self.recipe, "precision": run.precision} | estimate.beside(written, phases, planner.peak_of(phases)[0])
        print(f"{self.images} images of {self.height} x {self.width} with {self.masks} masks each")
        print("as written: masks in float32 at full size, activations of twice the weights an image, Adam; the write-ups' own formula")
        print(f"planned here: {self.recipe}, {run.precision} on a GPU, {min(recipe.masks_at_once, self.images * self.masks)} masks at once\n")
        print(estimate.table(found))
        return found


@dataclass(frozen=True)
class GroundingVerb:
    """what it takes to train grounding with a language model, part by part, beside the 13.3 GB that is often written"""

    vision: Literal["vit_b", "vit_l", "vit_h", "none"] = "vit_h"
    """the frozen image encoder; none where embeddings are kept on disk"""
    language: str = "7b"
    """the language model: 7b for Llama 2's shapes, or a folder or cached name of Hugging Face's, of which only config.json is read"""
    train: Literal["adapters", "all", "none"] = "adapters"
    """what of the language model is trained"""
    rank: int = 16
    """rank of the adapters"""
    four_bit: bool = True
    """linear layers in 4 bits"""
    precision: Literal["bf16", "fp16", "fp32"] = "bf16"
    """of images and texts; the head and what is trained are float32"""
    recompute: bool = True
    """blocks of the language model are computed again in the backward pass"""
    optimizer: Literal["adamw", "adamw8bit"] = "adamw"
    """8 or 2 bytes a trained parameter"""
    images: int = 1
    """images in the batch"""
    queries: int = 1
    """texts of each image"""
    tokens: int = 64
    """tokens of a text"""
    masks: int = 16
    """masks of an image, in float16 at the encoder's side"""
    head_dim: int = 256
    """width of the cross-modal head"""
    head_layers: int = 2
    """blocks of the cross-modal head"""
    spare_gib: float = 1.5
    """GiB of a GPU to keep free, as in 'gigamask plan'"""
    json: str | None = None
    """file for what was printed, as data"""

    def run(self) -> dict[str, Any]:
        from gigamask.grounding import budget
        from gigamask.grounding.parts import Head
        from gigamask.grounding.text_encoders import HuggingFace
        from gigamask.model import sizes
        from gigamask.train.optim import AdamW, AdamW8bit

        rank = self.rank if self.train == "adapters" else 0
        text = HuggingFace(
            self.language, self.precision, self.four_bit, max_tokens=self.tokens, lora_rank=rank, recompute=self.recompute and self.train != "none"
        )
        found = budget.plan(
            budget.Ask(
                text,
                self.train == "all",
                None if self.vision == "none" else getattr(sizes, self.vision)(),
                self.images,
                self.queries,
                self.masks,
                Head(self.head_dim, self.head_layers),
                AdamW() if self.optimizer == "adamw" else AdamW8bit(),
            ),
            self.spare_gib,
        )
        print(budget.table(found))
        return {"vision": self.vision, "language": self.language} | found


@dataclass(frozen=True)
class Verb:
    """measures a sample (memory sample) or loaders (memory loader), estimates a batch (memory plan) or a language model's part (memory grounding)"""

    part: OmitArgPrefixes[
        OmitSubcommandPrefixes[
            Annotated[SampleVerb, subcommand(PARTS[0])]
            | Annotated[LoaderVerb, subcommand(PARTS[1])]
            | Annotated[PlanVerb, subcommand(PARTS[2])]
            | Annotated[GroundingVerb, subcommand(PARTS[3])]
        ]
    ]

    @property
    def json(self) -> str | None:
        return self.part.json

    def run(self) -> dict[str, Any]:
        """Measures what was named."""
        return self.part.run()


def parse(words: Sequence[str]) -> Verb:
    """Returns the verb that the words describe."""
    if words and not words[0].startswith("-") and words[0] not in PARTS:
        raise Fault(f"memory {words[0]!r} is not known, it is {', '.join(PARTS[:-1])} or {PARTS[-1]}; see 'gigamask memory --help'")
    return parser.parse(Verb, words, "gigamask memory")
