"""`gigamask repack`: downscale tars."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from shlex import quote
from typing import Annotated, Any

from gigamask.launch import PartOptions
from gigamask.parser import Positional


@dataclass(frozen=True)
class RepackCommand(PartOptions):
    """downscale the images and masks of tars, so that they load several times faster; resumable"""

    paths: Annotated[tuple[str, ...], Positional("PATH ...")]
    """tars, folders of tars, globs, or an index; an index made with --salvage includes the readable
    beginnings of truncated tars"""
    out: str
    """output folder for the tars, which keep their names"""
    size: int = 1024
    """length of an image's long side (pixels); smaller images are copied unchanged"""
    quality: int = 90
    """JPEG quality, 1 to 100"""
    workers: int = 1
    """number of processes; each works on one tar at a time"""
    json: str | None = None
    """write the results to this JSON file, with everything that was skipped"""

    def run(self) -> dict[str, Any]:
        """Repack, and return the counts."""
        from gigamask.cli.commands.output import print_skipped
        from gigamask.data import worker_pool
        from gigamask.data.process_memory import in_bytes
        from gigamask.errors import counted
        from gigamask.plugins.repack.repack import RepackConfig, repack
        from gigamask.progress import progress_bar

        config = RepackConfig(self.size, self.quality)
        workers = worker_pool.workers_of(self.part, self.workers)
        with progress_bar("repack") as progress:
            result = repack(self.paths, Path(self.out), config, workers, progress)
        images, masks, tars = (
            counted(result[f"{noun}s"], noun) for noun in ("image", "mask", "tar")
        )
        print(f"{self.out}: {images} with {masks} in {tars} ({result['existing']} done before)")
        if result["bytes"]:
            before, after = result["source_bytes"], result["bytes"]
            sizes = f"{in_bytes(before)} to {in_bytes(after)}"
            print(f"  from {sizes}, {before / after:.2g} times smaller")
        for name, meaning in (
            ("copied", "images copied: small already, or TIFFs, arrays or of 16 bits"),
            ("dropped_masks", "masks have no pixel left"),
            ("other_files", "other members skipped"),
        ):
            if result[name]:
                print(f"  {result[name]} {meaning}")
        for broken in result["broken_tars"]:
            print(f"  truncated, its readable beginning was repacked: {broken}")
        print_skipped("images", [sample["reason"] for sample in result["skipped"]])
        failed = result["failed"]
        print_skipped("tars", failed)
        if failed:
            result["fault"] = (
                f"{counted(len(failed), 'tar')} could not be repacked; repair what is damaged and "
                f"run the same command again (the first: {failed[0]})"
            )
        else:
            index = quote(str(Path(self.out) / "index"))
            print(f"next: gigamask index {quote(self.out)} --out {index}")
        return result
