"""`gigamask stats`: what some tars or an index hold."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tyro.conf import Positional

from gigamask.verbs.opening import opened


@dataclass(frozen=True)
class Verb:
    """describes tars or an index: masks per image, areas, scores, sizes"""

    paths: Positional[tuple[str, ...]]
    """an index, or tars to index in passing"""
    picture: str | None = None
    """file for a picture of the distributions, such as stats.png"""
    json: str | None = None
    """file for what was printed, as data"""

    def run(self) -> dict[str, Any]:
        from gigamask.prepare import histograms, statistics

        with opened(self.paths) as index:
            stats = statistics.describe(index)
        print(statistics.table(stats))
        if self.picture:
            histograms.write_picture(stats, self.picture, " ".join(self.paths))
            print(self.picture)
        return stats
