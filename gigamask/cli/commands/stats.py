"""`gigamask stats`: statistics of tars, an index, or a sampler."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from gigamask.errors import GigamaskError, abridged
from gigamask.parser import Positional
from gigamask.workflows.open_data import AnnotationOptions, open_or_build_temporary


@dataclass(frozen=True)
class StatsCommand(AnnotationOptions):
    """describe tars or an index (masks per image, areas, scores, sizes), or what a sampler draws"""

    needs_flags: ClassVar = dict.fromkeys(("epochs", "seed", "items", "attributes"), "sampler")

    paths: Annotated[tuple[str, ...], Positional("PATH ...")]
    """an index, or tars, which are indexed temporarily; or one path with --images or --masks"""
    sampler: str | Any = None
    """describe what this sampler draws instead: granularity, difficulty and tars over its epochs;
    its fields are flags, such as --sampler.per-tar 10"""
    epochs: int = 1
    """number of epochs of the sampler"""
    seed: int = 0
    """random seed of the sampler, as in training"""
    items: Literal["image", "mask"] = "image"
    """what the sampler draws: images, or single masks"""
    attributes: str | None = None
    """CSV file with attributes of images or tars, for the sampler (docs/samplers.md)"""
    picture: str | None = None
    """image file for a plot, such as stats.png; needs matplotlib (pip install 'gigamask[plots]')"""
    json: str | None = None
    """write the results to this JSON file"""

    def run(self) -> dict[str, Any]:
        """Print and return the statistics."""
        from gigamask.datatools import plots, stats
        from gigamask.workflows import own_data

        if self.picture:
            plots.check_picture(self.picture)
        tars = own_data.own_tars(self.paths, self)
        with open_or_build_temporary(tars) as index:
            if self.sampler is not None:
                return self._describe_sampler(index)
            result = stats.describe(index)
        print(stats.table(result))
        if self.picture:
            plots.plot_stats(result, self.picture, abridged(self.paths))
            print(self.picture)
        return result

    def _describe_sampler(self, index: Any) -> dict[str, Any]:
        """Print and return what the sampler draws."""
        from gigamask.data import attributes
        from gigamask.data.mask_sampling import MaskFilters
        from gigamask.data.sample_table import open_sample_table
        from gigamask.datatools import plots, sampler_stats
        from gigamask.registry import name_of_component
        from gigamask.samplers.validation import UNREAD, reads_attributes

        sampler: Any = self.sampler  # `parse` has replaced the name with the sampler
        if self.attributes and not reads_attributes(sampler):
            raise GigamaskError(f"--attributes {self.attributes}: has no effect, since {UNREAD}")
        table = attributes.read(self.attributes, index) if self.attributes else None
        items = open_sample_table(index, MaskFilters(), self.items, table, self.seed).items
        result = sampler_stats.describe(items, sampler, self.epochs)
        print(sampler_stats.table(result))
        if self.picture:
            title = f"{name_of_component('sampler', sampler)} over {abridged(self.paths)}"
            plots.plot_sampler_stats(result, self.picture, title)
            print(self.picture)
        return result


def parse(arguments: Sequence[str]) -> StatsCommand:
    """Parse the flags, including those of the sampler."""
    from gigamask import config_files

    return config_files.parse_command(StatsCommand, arguments, "gigamask stats")
