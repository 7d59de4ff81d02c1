"""`gigamask report`: one HTML file about one or several runs."""

from __future__ import annotations

import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from gigamask.errors import GigamaskError
from gigamask.parser import Positional


@dataclass(frozen=True)
class ReportCommand:
    """write one HTML file about runs: curves, evaluations, pictures, configuration, checkpoints"""

    runs: Annotated[tuple[str, ...], Positional("RUN...")]
    """run folders, or folders that contain run folders, such as those of stages"""
    out: str | None = None
    """HTML file; default: report.html in the run folder, or in the current folder for several
    runs"""
    verify: bool = False
    """verify the checksums (crc32) of all checkpoints, not only their manifests and sizes"""
    trust: bool = False
    """run a recipe that is not built in, such as file.py:function, to list what differs from it"""
    json: str | None = None
    """write the contents of the page to this JSON file"""

    def run(self) -> dict[str, Any]:
        """Write the page, and return its contents."""
        from gigamask import config_files
        from gigamask.report import history, page

        if not self.runs:
            raise GigamaskError("RUN is required: one or several run folders, such as runs/demo")
        folders = [folder for path in self.runs for folder in history.find(Path(path))]
        names = history.labels(folders)
        default = folders[0] / page.REPORT if len(folders) == 1 else Path(page.REPORT)
        out = Path(self.out) if self.out else default
        if out.is_dir() or not out.parent.is_dir():
            raise GigamaskError(
                f"--out {out}: cannot be written; pass a file in an existing folder"
            )
        runs = {
            name: history.read(folder, self.verify)
            for name, folder in zip(names, folders, strict=True)
        }
        with suppress(FileNotFoundError), out.open("rb") as old:
            is_page = old.read(15).lower() == b"<!doctype html>"
            if not is_page or b"Made by gigamask" not in old.read():
                raise GigamaskError(f"--out {out}: is not a report; give the page another file")
        empty = {name: run for name, run in runs.items() if run.empty}
        for run in empty.values():
            why = run.damaged[0] if run.damaged else "train the run first"
            if len(empty) == len(runs):
                raise GigamaskError(f"{run.folder}: has no records yet ({why})")
            print(f"gigamask: left out {run.folder}: no records yet ({why})", file=sys.stderr)
        runs = {name: run for name, run in runs.items() if name not in empty}
        for line in [line for run in runs.values() for line in run.damaged]:
            print(f"gigamask: left out {line}", file=sys.stderr)
        recipes = {
            name: config_files.recipe_config(run.config.get("recipe"), self.trust)
            for name, run in runs.items()
        }
        contents = page.write(runs, recipes, out)
        print(out)
        return contents
