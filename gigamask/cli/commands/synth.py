"""`gigamask synth`: shards of synthetic scenes."""

from __future__ import annotations

from dataclasses import dataclass
from shlex import quote
from typing import Annotated, Any

from tyro.conf import Positional, arg


@dataclass(frozen=True)
class SynthCommand:
    """makes shards of synthetic scenes in SA-1B's format"""

    folder: Positional[Annotated[str, arg(metavar="FOLDER")]]
    """where the tars go"""
    images: int = 256
    """how many scenes"""
    seed: int = 0
    """names the scenes: the same seed and number give the same bytes"""
    first: int = 0
    """number of the first scene; scenes with other numbers are other scenes"""
    crowded: float = 0.0
    """share of the scenes that hold many small objects, whose masks are mostly fine (< 1 % of the image)"""
    queries: bool = False
    """scenes of things that words can tell apart, and FOLDER/queries.jsonl, which asks for them: some twelve queries a scene"""
    json: str | None = None
    """file for what was printed, as data"""

    def run(self) -> dict[str, Any]:
        from gigamask.cli.commands.progress import bar
        from gigamask.errors import GigamaskError
        from gigamask.synthetic import described_scenes, scenes

        if self.queries and self.crowded:
            raise GigamaskError(
                f"--crowded is {self.crowded}, scenes with queries hold no crowds; leave out --crowded or --queries"
            )
        asked = []
        with bar("synth") as progress:
            if self.queries:
                paths, asked = described_scenes.write(
                    self.folder, self.images, seed=self.seed, first=self.first, progress=progress
                )
            else:
                paths = scenes.write(
                    self.folder,
                    self.images,
                    seed=self.seed,
                    first=self.first,
                    progress=progress,
                    crowded=self.crowded,
                )
        print(f"{self.images} scenes in {len(paths)} tars under {self.folder}")
        if asked:
            print(f"{len(asked)} queries of them in {self.folder}/{described_scenes.QUERIES}")
        print(f"next: gigamask train tiny --data {quote(self.folder)} --out runs/tiny")
        return {"images": self.images, "tars": [str(path) for path in paths], "queries": len(asked)}
