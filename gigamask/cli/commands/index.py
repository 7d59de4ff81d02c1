"""`gigamask index`: index the images and masks of tars."""

from __future__ import annotations

from dataclasses import dataclass
from glob import escape, glob
from shlex import quote
from typing import Annotated, Any

from gigamask.launch import PartOptions
from gigamask.parser import Positional


@dataclass(frozen=True)
class IndexCommand(PartOptions):
    """index every image and mask of tars; run again with more tars to scan only the new ones"""

    paths: Annotated[tuple[str, ...], Positional("PATH ...")]
    """tars, folders of tars, globs, or indexes to include; local or s3://, gs://, http(s)://,
    hf://ORG/NAME"""
    out: str
    """output folder for the index"""
    workers: int = 1
    """number of processes; each works on one tar at a time; for remote tars, use more than there
    are cores"""
    salvage: bool = False
    """index the readable beginning of a truncated tar instead of skipping the tar"""
    checksums: bool = False
    """read every jpg too, and record its crc32: 'gigamask verify INDEX' then finds every flipped
    bit; tars written by gigamask state them, so their jpgs are not read"""
    json: str | None = None
    """write the results to this JSON file"""

    def run(self) -> dict[str, Any]:
        """Build or extend the index, and return its report."""
        from gigamask.data import image_folder, worker_pool
        from gigamask.data import index as indexes
        from gigamask.errors import counted
        from gigamask.progress import progress_bar

        workers = worker_pool.workers_of(self.part, self.workers)
        with progress_bar("index") as progress:
            index, scanned, reused = indexes.extend(
                self.paths, self.out, workers, progress, self.salvage, self.checksums
            )
        report = index.report() | {"scanned": scanned, "reused": reused}
        images, masks = counted(report["images"], "image"), counted(report["masks"], "mask")
        tars = f"{counted(report['shards'], 'tar')} ({scanned} scanned, {reused} reused)"
        print(f"{self.out}: {images} with {masks} in {tars}")
        for name in ("without_json", "without_jpg", "other_members"):
            if report[name]:
                print(f"  {name.replace('_', ' ')}: {report[name]}")
        unpacked = next(
            (path for path in index.shard_paths if glob(f"{escape(path)}/*.json")), None
        )
        if unpacked is not None:
            command = image_folder.pack_command(unpacked)
            print(f"  JSONs of a folder are not read; to read those of SA-1B, pack it: {command}")
        for broken in report["broken_tars"]:
            print(f"  broken {broken}")
        for sample in report["skipped"]:
            print(f"  skipped {sample['reason']}")
        print(f"next: gigamask stats {quote(self.out)}")
        return report
