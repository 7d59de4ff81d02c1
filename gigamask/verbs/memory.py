"""`gigamask memory`: what a sample costs, what loader processes hold, and what is often written of a batch."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass, replace
from typing import Annotated, Any

from tyro.conf import OmitArgPrefixes, OmitSubcommandPrefixes, Positional, arg, subcommand

from gigamask.faults import Fault


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
        from gigamask.data.shards import Shards
        from gigamask.verbs.opening import opened_sample

        with opened_sample(words) as (index, row):
            name = index.entry_name(row)
            jpg, json = Shards(index.shard_paths).read_entry(index, row)
        if json is None:
            raise Fault(f"{name}: it has no json, so there are no masks to measure; name another image")
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
        recipe = recipes.make(self.recipe)
        with tempfile.TemporaryDirectory() as folder, bar("load") as progress:
            run = replace(recipe, data=self.data, out=folder, loading=replace(recipe.loading, workers=self.workers)).check()
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
class Verb:
    """measures what a sample (memory sample) or the loader's processes (memory loader) take, or estimates a batch as is often done (memory plan)"""

    part: OmitArgPrefixes[
        OmitSubcommandPrefixes[
            Annotated[SampleVerb, subcommand("sample")] | Annotated[LoaderVerb, subcommand("loader")] | Annotated[PlanVerb, subcommand("plan")]
        ]
    ]

    @property
    def json(self) -> str | None:
        return self.part.json

    def run(self) -> dict[str, Any]:
        """Measures what was named."""
        return self.part.run()
