"""`gigamask memory`: memory of a sample, and of loader processes."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any

from gigamask import parser
from gigamask.errors import GigamaskError, check_range
from gigamask.parser import Positional


@dataclass(frozen=True)
class SampleMemory:
    """memory of one sample: with dense masks, and as gigamask stores it"""

    sample: Annotated[str | None, Positional("[SAMPLE]")] = None
    """TAR:IMAGE, with the image's name (sa_1) or image_id (1); default: a synthetic sample"""
    height: int = 1500
    """height of the synthetic sample (pixels)"""
    width: int = 2250
    """width of the synthetic sample (pixels)"""
    masks: int = 100
    """number of masks of the synthetic sample"""
    json: str | None = None
    """write the results to this JSON file"""

    def run(self) -> dict[str, Any]:
        """Measure, print and return the bytes."""
        from gigamask.plugins.memory import large_sample

        if self.sample is None:
            name = "synthetic sample"
            jpg, json = large_sample.make((self.height, self.width), self.masks)
        else:
            name, jpg, json = self._read(self.sample)
        from gigamask.plugins.memory import sample_memory

        result = sample_memory.measure(jpg, json, name)
        print(sample_memory.table(result))
        return result

    @staticmethod
    def _read(name: str) -> tuple[str, bytes, bytes]:
        """Return name, JPEG and JSON of the sample TAR:IMAGE."""
        from gigamask.workflows.open_data import open_sample

        with open_sample(name) as (index, row):
            from gigamask.data.dataset import Sa1bDataset

            name, jpg, json = Sa1bDataset(index).read(row)
        if json is None:
            raise GigamaskError(f"{name} has no JSON and so no masks; choose another image")
        return name, jpg, json


@dataclass(frozen=True)
class LoaderMemory:
    """memory of each loader process while it makes batches, and whether it grows"""

    data: tuple[str, ...]
    """tars, folders of tars, globs, or an index"""
    recipe: str = "tiny"
    """recipe whose loader settings are used"""
    workers: int = 2
    """number of loader processes"""
    batches: int = 50
    """number of batches to load"""
    json: str | None = None
    """write the results to this JSON file"""

    def run(self) -> dict[str, Any]:
        """Load batches, print the memory of each process, and return it."""
        from gigamask import recipes
        from gigamask.data import loader
        from gigamask.plugins.memory import loader_memory
        from gigamask.progress import progress_bar
        from gigamask.training import train_data

        check_range("--workers", self.workers, 1)
        recipe = recipes.require_images(recipes.make(self.recipe))
        with tempfile.TemporaryDirectory() as folder, progress_bar("load") as progress:
            settings = replace(recipe.loader, workers=self.workers)
            config = replace(recipe, data=self.data, out=folder, loader=settings).check()
            steps = train_data.TrainData(config, train_data.open_index(config)).batches()
            result = loader_memory.measure(steps, self.batches, loader.PREFETCH, progress)
        image_size, mask_size = config.sample_config.image_size, config.sample_config.mask_size
        print(f"recipe {self.recipe}: input {image_size}, masks on a grid of {mask_size}")
        print(loader_memory.table(result))
        return {"recipe": self.recipe, "image_size": image_size, "mask_size": mask_size} | result


class MemoryCommand:
    """measure the memory of a sample, or of the processes that load batches"""


KINDS = {"sample": SampleMemory, "loader": LoaderMemory}


def parse(arguments: Sequence[str]) -> SampleMemory | LoaderMemory:
    """Parse the subcommand and its flags."""
    name, *rest = arguments or [""]
    if name in ("-h", "--help"):
        print(
            f"usage: gigamask memory {{{','.join(KINDS)}}} [OPTIONS]\n\n{MemoryCommand.__doc__}\n\n"
            "Each has its own --help."
        )
        raise SystemExit(0)
    if name not in KINDS:
        raise GigamaskError(
            f"memory needs {' or '.join(KINDS)} (got {name!r}); see 'gigamask memory --help'"
        )
    return parser.parse(KINDS[name], rest, f"gigamask memory {name}")
