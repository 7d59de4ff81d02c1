"""`gigamask report`: one HTML file about a run, or about several side by side."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from tyro.conf import Positional, arg

from gigamask.faults import Fault

if TYPE_CHECKING:
    from gigamask.report.history import History

REPORT = "report.html"


@dataclass(frozen=True)
class Verb:
    """writes one HTML file about a run, or several side by side: curves, evaluations, pictures, configuration, faults, checkpoints"""

    runs: Positional[Annotated[tuple[str, ...], arg(metavar="RUN...")]]
    """run folders, or folders that hold some, such as stages"""
    out: str | None = None
    """file to write; by default report.html in the run's folder, or here where there are several runs"""
    verify: bool = False
    """read all checkpoints and hold them against their crc32; else their manifests and sizes alone"""
    json: str | None = None
    """file for what the page shows, as data"""

    def run(self) -> dict[str, Any]:
        from gigamask.report import history

        if not self.runs:
            raise Fault("report wants a run folder; name one or several, such as runs/demo")
        folders = [each for path in self.runs for each in history.find(Path(path))]
        names = history.labels(folders)
        out = Path(self.out) if self.out else (folders[0] / REPORT if len(folders) == 1 else Path(REPORT))
        if out.is_dir() or not out.parent.is_dir():
            raise Fault(f"--out {out}: cannot be written; name a file in a folder that exists")
        runs = {name: history.read(folder, self.verify) for name, folder in zip(names, folders, strict=True)}
        if empty := [run.folder for run in runs.values() if run.empty]:
            raise Fault(f"{empty[0]}: has recorded nothing yet, there is nothing to report; train it first, or leave it out")
        told = write(runs, out)
        print(out)
        return told


def write(runs: dict[str, History], out: Path) -> dict[str, Any]:
    """Writes the page of some runs and returns what it shows, as data."""
    from gigamask.report import page, summary

    told = summary.tell(runs, {name: recipe_of(run.config.get("recipe", "")) for name, run in runs.items()})
    out.write_text(page.page(runs, told))
    return told


def recipe_of(name: str) -> dict[str, Any] | None:
    """Returns the configuration that a recipe has by itself, as text; None where it is not here any more."""
    from gigamask import arguments, recipes

    try:
        return arguments.told_of(recipes.make(name))
    except Fault:
        return None
