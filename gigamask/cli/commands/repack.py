"""`gigamask repack`: the same shards at a smaller size."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from shlex import quote
from typing import Annotated, Any

from tyro.conf import Positional, arg


@dataclass(frozen=True)
class RepackCommand:
    """writes tars anew at a smaller size, images and masks, which load several times as fast; run again, it goes on where it stopped"""

    paths: Positional[Annotated[tuple[str, ...], arg(metavar="PATH ...")]]
    """tars, folders of tars, globs, or an index; of one made with --salvage, broken tars as far as they go"""
    out: str
    """folder for the tars, which keep their names"""
    size: int = 1024
    """pixels on the long side; images that have no more are copied as they are"""
    quality: int = 90
    """JPEG quality, 1 to 100"""
    workers: int = 1
    """processes, each on one tar at a time"""
    json: str | None = None
    """file for what was printed, as data, with all that was left out"""

    def run(self) -> dict[str, Any]:
        from gigamask.cli.commands import omissions
        from gigamask.cli.commands.progress import bar
        from gigamask.datatools.repack import RepackConfig, repack

        with bar("repack") as progress:
            done = repack(
                self.paths,
                Path(self.out),
                RepackConfig(self.size, self.quality),
                self.workers,
                progress,
            )
        print(
            f"{self.out}: {done['images']} images with {done['masks']} masks in {done['tars']} tars ({done['kept']} were done before)"
        )
        if done["bytes"]:
            ratio = done["source_bytes"] / done["bytes"]
            print(
                f"  {done['source_bytes'] / 1e9:.3g} GB became {done['bytes'] / 1e9:.3g} GB, {ratio:.2g} times less"
            )
        for what, means in (
            ("copied", "images were small already"),
            ("vanished", "masks have no pixel left"),
            ("others", "other members left out"),
        ):
            if done[what]:
                print(f"  {done[what]} {means}")
        for each in done["broken_tars"]:
            print(f"  broken, repacked as far as it goes: {each}")
        omissions.tell("images", [each["reason"] for each in done["left_out"]])
        omissions.tell("tars", done["failed"])
        if done["failed"]:
            done["fault"] = (
                f"{len(done['failed'])} tars could not be repacked; mend them and run the same command again (the first: {done['failed'][0]})"
            )
        else:
            print(f"next: gigamask index {quote(self.out)} --out {quote(self.out + '/index')}")
        return done
