"""A project of the annotation page: three images with an accepted object each, all done."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
from PIL import Image

from gigamask import save_model
from gigamask.masks.rle import RLEMasks
from gigamask.models.init import build_model
from gigamask.plugins.serve.edits import Edit, MaskObject
from gigamask.plugins.serve.project import Project
from gigamask.plugins.serve.prompt_steps import PromptStep
from tests.little import SPEC


def save_untrained(folder: Path, **changes) -> Path:
    """Save a little SAM that is not trained, and return the path."""
    path = folder / "little.safetensors"
    save_model(build_model(replace(SPEC, custom_init=True, **changes), 0), path)
    return path


def picture(height: int = 40, width: int = 60, seed: int = 0) -> np.ndarray:
    """Return random pixels."""
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


def click_at(x: float, y: float, **more) -> PromptStep:
    """Return a prompt of a point."""
    return PromptStep(point=(x, y), **more)


def save_pictures(folder: Path, names: Iterable[str], size: tuple[int, int]) -> None:
    """Save different random pictures of (H, W)."""
    for seed, name in enumerate(names):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(picture(*size, seed)).save(folder / name)


@contextmanager
def annotated(folder: Path, size: tuple[int, int]) -> Iterator[Project]:
    """Yield a project of images of (H, W) in `folder/photos`; the first is held out."""
    save_pictures(folder / "photos", ("0.png", "1.png", "2.png"), size)
    height, width = size
    dense = np.zeros((1, *size), bool)
    dense[0, height // 3 : 2 * height // 3, width // 3 : 2 * width // 3] = True
    mask = RLEMasks.from_dense(dense).to_coco()[0].decode()
    with Project.open(folder / "project", folder / "photos") as project:
        for row in range(3):
            project.edit(row, 0, Edit("stroke", {1: MaskObject(mask, accepted=True)}), size)
            project.mark_done(row, 1, True, size)
        yield project
