"""`gigamask index`: an index of every image and mask of some tars."""

from __future__ import annotations

from dataclasses import dataclass
from shlex import quote
from typing import Annotated, Any

from tyro.conf import Positional, arg


@dataclass(frozen=True)
class IndexCommand:
    """scans tars once and writes an index of every image and mask; run again with more tars, it scans only those"""

    paths: Positional[Annotated[tuple[str, ...], arg(metavar="PATH ...")]]
    """tars, folders of tars, globs, or indexes whose rows are taken over; local or at s3://, gs://, http(s)://"""
    out: str
    """the index folder to write"""
    workers: int = 1
    """processes, each on one tar at a time; more than there are cores where tars are remote"""
    salvage: bool = False
    """of a tar that breaks off, take what lies before the break, rather than refuse it"""
    json: str | None = None
    """file for what was printed, as data"""

    def run(self) -> dict[str, Any]:
        from gigamask.cli.commands.progress import bar
        from gigamask.data import index as indexes

        with bar("index") as progress:
            index, scanned, reused = indexes.extend(
                self.paths, self.out, self.workers, progress, self.salvage
            )
        report = index.report() | {"scanned": scanned, "reused": reused}
        print(
            f"{self.out}: {report['images']} images with {report['masks']} masks in {report['shards']} tars ({scanned} scanned, {reused} reused)"
        )
        for what in ("without_json", "without_jpg", "other_members"):
            if report[what]:
                print(f"  {what.replace('_', ' ')}: {report[what]}")
        for each in report["broken_tars"]:
            print(f"  broken {each}")
        for each in report["rejected"]:
            print(f"  left out {each['reason']}")
        print(f"next: gigamask stats {quote(self.out)}")
        return report
