"""`gigamask index`: an index of every image and mask of some tars."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tyro.conf import Positional


@dataclass(frozen=True)
class Verb:
    """scans tars once and writes an index of every image and mask"""

    paths: Positional[tuple[str, ...]]
    """tars, folders of tars, or globs"""
    out: str
    """the index folder to write"""
    json: str | None = None
    """file for what was printed, as data"""

    def run(self) -> dict[str, Any]:
        from gigamask.data import index as indexes
        from gigamask.verbs.progress import bar

        with bar("index") as progress:
            built = indexes.build(self.paths, self.out, progress)
        report = built.report()
        print(f"{self.out}: {report['images']} images with {report['masks']} masks in {report['shards']} tars")
        for what in ("without_json", "without_jpg", "other_members"):
            if report[what]:
                print(f"  {what.replace('_', ' ')}: {report[what]}")
        for each in report["rejected"]:
            print(f"  left out {each['reason']}")
        print(f"next: gigamask stats {self.out}")
        return report
