"""`gigamask report`: one HTML file about a run, or about several side by side."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from tyro.conf import Positional, arg

from gigamask.errors import GigamaskError


@dataclass(frozen=True)
class ReportCommand:
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
        from gigamask import config_files
        from gigamask.report import history, page

        if not self.runs:
            raise GigamaskError("report wants a run folder; name one or several, such as runs/demo")
        folders = [each for path in self.runs for each in history.find(Path(path))]
        names = history.labels(folders)
        out = (
            Path(self.out)
            if self.out
            else (folders[0] / page.REPORT if len(folders) == 1 else Path(page.REPORT))
        )
        if out.is_dir() or not out.parent.is_dir():
            raise GigamaskError(
                f"--out {out}: cannot be written; name a file in a folder that exists"
            )
        runs = {
            name: history.read(folder, self.verify)
            for name, folder in zip(names, folders, strict=True)
        }
        if empty := [run.folder for run in runs.values() if run.empty]:
            raise GigamaskError(
                f"{empty[0]}: has recorded nothing yet, there is nothing to report; train it first, or leave it out"
            )
        known = {
            name: config_files.recipe_config(run.config.get("recipe", ""))
            for name, run in runs.items()
        }
        told = page.write(runs, known, out)
        print(out)
        return told
