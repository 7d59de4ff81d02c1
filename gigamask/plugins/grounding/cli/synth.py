"""`gigamask ground synth`: write synthetic scenes with text queries."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

from gigamask.parser import Positional


@dataclass(frozen=True)
class GroundSynthCommand:
    """write synthetic scenes of objects that text can tell apart, and about twelve queries each"""

    folder: Annotated[str, Positional("FOLDER")]
    """output folder for the tars and queries.jsonl"""
    images: int = 256
    """number of scenes"""
    seed: int = 0
    """random seed; the seed and a scene's number determine the scene, byte for byte"""
    first: int = 0
    """number of the first scene"""
    long_side: tuple[int, int] = (256, 320)
    """range of the longer side of the images, 32 to 8192 px; the shorter is 0.75 to 1 of it"""
    json: str | None = None
    """write the results to this JSON file"""

    def run(self) -> dict[str, Any]:
        """Write the scenes and queries, and return their numbers and the tars."""
        from gigamask.errors import counted
        from gigamask.plugins.grounding import described_scenes
        from gigamask.progress import progress_bar

        with progress_bar("synth") as progress:
            paths, queries = described_scenes.write(
                self.folder,
                self.images,
                seed=self.seed,
                first=self.first,
                long_side=self.long_side,
                progress=progress,
            )
        print(f"{counted(self.images, 'scene')} in {counted(len(paths), 'tar')} in {self.folder}")
        print(
            f"{counted(len(queries), 'query', 'queries')} in "
            f"{self.folder}/{described_scenes.QUERIES}"
        )
        tars = [str(path) for path in paths]
        return {"images": self.images, "tars": tars, "queries": len(queries)}
