"""`gigamask stats`: what some tars or an index hold, and what a sampler makes of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from tyro.conf import Positional, arg

from gigamask.workflows.opening import opened
from gigamask.errors import GigamaskError


@dataclass(frozen=True)
class StatsCommand:
    """describes tars or an index: masks per image, areas, scores, sizes; or what a sampler does to it"""

    paths: Positional[Annotated[tuple[str, ...], arg(metavar="PATH ...")]]
    """an index, or tars to index in passing"""
    sampler: Annotated[str | None, arg(metavar="NAME|file.py:Class")] = None
    """describe what this sampler visits instead: granularity, difficulty and tars over its epochs; its fields are flags, as --sampler.per-tar 10"""
    epochs: int = 1
    """how many epochs of the sampler"""
    seed: int = 0
    """names the orders, as the seed of a training does"""
    items: Literal["image", "mask"] = "image"
    """what the sampler chooses from"""
    attributes: str | None = None
    """CSV file of what else is known of images or tars, for the sampler"""
    picture: str | None = None
    """file for a picture of the same, such as stats.png; needs matplotlib (extra plots)"""
    json: str | None = None
    """file for what was printed, as data"""

    def run(self) -> dict[str, Any]:
        if self.sampler is None and (self.attributes or self.items != "image" or self.epochs != 1):
            raise GigamaskError(
                "--epochs, --items and --attributes tell what a sampler visits, but none is named; give --sampler NAME, or leave them out"
            )
        from gigamask.datatools import plots, stats

        if self.picture:
            plots.require_matplotlib()
        with opened(self.paths) as index:
            if self.sampler is not None:
                return self._describe_sampler(index)
            found = stats.describe(index)
        print(stats.table(found))
        if self.picture:
            plots.plot_stats(found, self.picture, " ".join(self.paths))
            print(self.picture)
        return found

    def _describe_sampler(self, index: Any) -> dict[str, Any]:
        """Prints and returns what the sampler visits."""
        from gigamask.data import attributes
        from gigamask.data.mask_sampling import MaskFilters
        from gigamask.data.sample_table import open_sample_table
        from gigamask.datatools import plots, sampler_stats

        sampler: Any = self.sampler  # the command line has put the part in the place of its name
        known = attributes.read(self.attributes, index) if self.attributes else None
        items = open_sample_table(index, MaskFilters(), self.items, known, self.seed).items
        found = sampler_stats.describe(items, sampler, self.epochs)
        print(sampler_stats.table(found))
        if self.picture:
            title = f"{type(sampler).__name__} over {' '.join(self.paths)}"
            plots.plot_sampler_stats(found, self.picture, title)
            print(self.picture)
        return found


def parse(words: Sequence[str]) -> StatsCommand:
    """Returns the verb that the words describe; its sampler is a part, whose fields are flags, too."""
    from gigamask import config_files

    return config_files.parse_verb(StatsCommand, words, "gigamask stats")
