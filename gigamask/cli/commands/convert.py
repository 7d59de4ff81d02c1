"""`gigamask convert`: data of one's own, made into shards."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from shlex import quote
from typing import Annotated, Any

from tyro.conf import Positional, arg


@dataclass(frozen=True)
class ConvertCommand:
    """makes SA-1B's tars from COCO's instances json, or from a folder of label images (PNG), and the pictures they belong to"""

    source: Positional[Annotated[str, arg(metavar="SOURCE")]]
    """COCO's instances json, or a folder of PNGs whose pixels name their instance (0 is background)"""
    images: str
    """the folder of pictures: what the json's file names start from, or where each label image's namesake lies"""
    out: str
    """folder for the tars"""
    shard_images: int = 500
    """images a tar"""
    keep_crowds: bool = False
    """COCO: keep what is marked iscrowd"""
    split_components: bool = False
    """label images: make each connected piece a mask of its own"""
    ignore: tuple[int, ...] = ()
    """label images: values that are no object, such as 255 around VOC's"""
    workers: int = 1
    """processes, each on one tar at a time"""
    json: str | None = None
    """file for what was printed, as data, with all that was left out"""

    def run(self) -> dict[str, Any]:
        from gigamask.cli.commands import omissions
        from gigamask.cli.commands.progress import bar
        from gigamask.datatools.convert import ConvertOptions, convert

        options = ConvertOptions(self.keep_crowds, self.split_components, self.ignore)
        with bar("convert") as progress:
            done = convert(
                Path(self.source),
                Path(self.images),
                Path(self.out),
                options,
                self.shard_images,
                self.workers,
                progress,
            )
        print(
            f"{self.out}: {done['images']} images with {done['masks']} masks in {len(done['tars'])} tars"
        )
        if done["renumbered"]:
            print(
                "  the images' names are no distinct whole numbers: they are numbered from 0 on, and each json says its 'source'"
            )
        for what in ("images_without_masks", "crowds_left_out", "pictures_without_label"):
            if done[what]:
                print(f"  {what.replace('_', ' ')}: {done[what]}")
        for what in ("images", "masks"):
            omissions.tell(what, [each["reason"] for each in done[f"{what}_left_out"]])
        print(f"next: gigamask stats {quote(self.out)}")
        return done
