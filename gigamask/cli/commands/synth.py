"""`gigamask synth`: write synthetic scenes."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from functools import partial
from shlex import join
from typing import TYPE_CHECKING, Annotated, Any, Literal

from gigamask import plugin
from gigamask.parser import Positional

CORE = {
    "objects": "gigamask.synthetic.scenes:compose_scene",
    "cells": "gigamask.synthetic.cells:compose_cells",
}
KINDS = CORE | plugin.merged("scenes", CORE)
"""What draws the scenes of each kind, those of plugins last."""

if TYPE_CHECKING:
    Kind = str
else:
    Kind = Literal[tuple(KINDS)]


@dataclass(frozen=True)
class SynthCommand:
    """write tars of synthetic scenes in SA-1B's format"""

    folder: Annotated[str, Positional("FOLDER")]
    """output folder for the tars"""
    images: int = 256
    """number of scenes"""
    kind: Kind = "objects"
    """objects with parts; or micrographs of cells that touch; or scenes of a plugin"""
    bits: Literal[8, 16] = 8
    """bits of a pixel: 8 in JPEGs, or 16 in gray PNGs of --kind cells"""
    seed: int = 0
    """random seed; the seed and a scene's number determine the scene, byte for byte"""
    first: int = 0
    """number of the first scene"""
    data: tuple[str, ...] = ()
    """tars of photographs with masks, or an index of them, for kinds that are made of them"""
    crowded: float = 0.0
    """fraction of scenes with many small objects, whose masks mostly cover less than 1 % of the
    image"""
    long_side: tuple[int, int] = (256, 320)
    """range of the longer side of the images, 32 to 8192 px; the shorter is 0.75 to 1 of it"""
    workers: int = 1
    """number of processes; the tars do not depend on it"""
    json: str | None = None
    """write the results to this JSON file"""

    def run(self) -> dict[str, Any]:
        """Write the scenes, and return their number and tars."""
        from gigamask.errors import GigamaskError, check_range, counted
        from gigamask.files import find_tars
        from gigamask.progress import progress_bar
        from gigamask.synthetic import scenes
        from gigamask.workflows.open_data import open_index

        check_range("--crowded", self.crowded, 0, 1)
        options = {}
        for name in ("crowded", "bits", "data"):
            if takes(self.kind, name):
                options[name] = getattr(self, name)
            elif getattr(self, name) != getattr(SynthCommand, name):
                kinds = ", ".join(kind for kind in KINDS if takes(kind, name))
                raise GigamaskError(f"--{name} is for --kind {kinds} (got {self.kind})")
        if "data" in options:
            if not self.data:
                raise GigamaskError(
                    f"--kind {self.kind} needs photographs; give their tars to --data"
                )
            options["data"] = str(open_index(self.data).folder)
        compose = scenes.seeded(
            partial(plugin.load(KINDS[self.kind]), **options), self.seed, self.long_side
        )
        with progress_bar("synth") as progress:
            paths = scenes.write_scenes(
                self.folder,
                self.images,
                compose,
                first=self.first,
                progress=progress,
                workers=self.workers,
            )
        print(f"{counted(self.images, 'scene')} in {counted(len(paths), 'tar')} in {self.folder}")
        if others := len(find_tars(paths[0].parent)) - len(paths):
            print(f"  it also holds {counted(others, 'other tar')}, of other runs")
        window = " --percentiles 0.5 99.5" if self.bits == 16 else ""
        data, recipe = join([*self.data, self.folder]), "compact" if self.data else "tiny"
        print(f"next: gigamask train {recipe} --data {data}{window} --out runs/{recipe}")
        return {"images": self.images, "tars": [str(path) for path in paths]}


def takes(kind: str, name: str) -> bool:
    """Return whether scenes of a kind depend on a flag.

    Args:
        kind: The kind.
        name: The flag, without dashes.
    """
    return name in inspect.signature(plugin.load(KINDS[kind])).parameters
