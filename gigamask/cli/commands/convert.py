"""`gigamask convert`: turn other annotations into SA-1B's format."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from shlex import quote
from typing import Annotated, Any

from gigamask.datatools import formats
from gigamask.launch import PartOptions
from gigamask.parser import FLAT, Positional


@dataclass(frozen=True)
class ConvertCommand(PartOptions):
    """convert annotations in other formats to tars in SA-1B's format"""

    source: Annotated[str, Positional("SOURCE")]
    """COCO's instances JSON; or a folder of SBD's .mat files, or of PNGs or TIFFs whose pixel
    values are instance ids (0 is background); or a file or folder in another of these formats (a
    table also as a quoted glob or a URL)"""
    out: str
    """output folder for the tars"""
    images: str | None = None
    """folder of the images: those that the JSON names, or those named like the files in SOURCE; or
    the column of images of a table, if its name does not say so"""
    masks: str | None = None
    """the column of masks of a table, if its name does not say so"""
    list: str | None = None
    """text file with the names of the images to convert, without suffixes, such as SBD's train.txt;
    default: all"""
    shard_images: int = 500
    """images per tar"""
    options: Annotated[formats.ConvertOptions, FLAT] = field(default_factory=formats.ConvertOptions)
    strict: bool = False
    """end with exit code 2 if an image or a mask was left out; the tars are written all the same"""
    workers: int = 1
    """number of processes; each works on one tar at a time"""
    json: str | None = None
    """write the results to this JSON file, with everything that was skipped"""

    def run(self) -> dict[str, Any]:
        """Convert, and return the counts."""
        from gigamask.data import worker_pool
        from gigamask.datatools.convert import convert, lines, listed
        from gigamask.datatools.find_source import of_annotations
        from gigamask.datatools.left_out import LeftOutRecord
        from gigamask.errors import counted
        from gigamask.progress import progress_bar

        folder = None if self.images is None else Path(self.images)
        source, out = of_annotations(self.source, folder, self.masks), Path(self.out)
        workers = worker_pool.workers_of(self.part, self.workers)
        select = listed(None if self.list is None else Path(self.list))
        with progress_bar("convert") as progress:
            result = convert(
                source, None, out, self.options, self.shard_images, workers, progress, select
            )
        images, masks = counted(result["images"], "image"), counted(result["masks"], "mask")
        print(f"{self.out}: {images} with {masks} in {counted(len(result['tars']), 'tar')}")
        if result["renumbered"]:
            print(
                "  the image names are not distinct integers of at most 14 digits: images are "
                "numbered from 0, and each JSON records its 'source'"
            )
        for line in lines(result, self.json or ""):
            print(line)
        print(f"next: gigamask stats {quote(self.out)}")
        if self.strict and (left_out := len(LeftOutRecord.from_counts(result))):
            result["fault"] = (
                f"--strict: {left_out} of the images or masks were left out, see above"
            )
        return result


ConvertCommand.__doc__ = f"convert {', '.join(formats.readers())} to tars in SA-1B's format"
