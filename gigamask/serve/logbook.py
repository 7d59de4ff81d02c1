"""Runs to watch: a folder enters; names of the runs below it leave, and what each one's files tell, short enough to be asked for every other second.

Not here: how a run's files are read (`report.history`).
"""

import threading
import time
from pathlib import Path
from typing import Any

from gigamask.faults import Fault
from gigamask.report import charts, history
from gigamask.report.history import History
from gigamask.serve.studio import Unknown
from gigamask.train import manifest

MOST_EVENTS = 200
LIVE_S = 60.0
"""A run whose record was written within so many seconds is being trained."""
KINDS = {".png": "image/png", ".jpg": "image/jpeg"}


class Logbook:
    """The runs below a folder; those that come later are found, too."""

    def __init__(self, folder: Path) -> None:
        if not folder.is_dir():
            raise Fault(f"--runs {folder}: no such folder; name one that holds runs, or will")
        self.folder, self._lock = folder, threading.Lock()
        self._folders: dict[str, Path] = {}
        self._read: dict[str, tuple[tuple, History]] = {}

    def listed(self) -> list[dict[str, Any]]:
        """Returns the runs, the one begun last first."""
        self._find()
        return [self._short(name) for name in reversed(self._folders)]

    def run(self, name: str) -> dict[str, Any]:
        """Returns what one run's files tell."""
        told = self._history(name)
        return {
            **self._short(name),
            **charts.curves(told),
            "faults": {kind: each[-MOST_EVENTS:] for kind, each in told.faults.items()},
            "fault_counts": {kind: len(each) for kind, each in told.faults.items()},
            "begun": told.begun[-MOST_EVENTS:],
            "checkpoints": [{key: value for key, value in vars(each).items() if key != "scored_by"} for each in told.checkpoints],
            "pictures": [{"name": each.name, "step": each.step} for each in told.pictures],
            "scores": told.scores,
        }

    def differences(self, one: str, other: str) -> list[dict[str, Any]]:
        """Returns the flags in which two runs' configurations differ."""
        first, second = self._history(one).config, self._history(other).config
        return [
            {"flag": flag, "one": first.get(flag), "other": second.get(flag)}
            for flag in {**first, **second}
            if first.get(flag) != second.get(flag) and flag != "out"
        ]

    def picture(self, name: str, file: str) -> tuple[bytes, str]:
        """Returns a picture of a run, by its name there, and its kind."""
        paths = [Path(each.path) for each in self._history(name).pictures if each.name == file]
        if not paths or not paths[0].is_file():
            raise Unknown("this run has no such picture, or no longer")
        return paths[0].read_bytes(), KINDS[paths[0].suffix]

    def verify(self, name: str, step: int) -> dict[str, Any]:
        """Reads a checkpoint and holds it against its checksums; tells what is wrong, None where nothing is."""
        held = [each for each in self._history(name).checkpoints if each.step == step]
        if not held:
            raise Unknown(f"this run has no checkpoint of step {step}, or no longer")
        began_s = time.perf_counter()
        try:
            manifest.verify(self._folders[name] / "checkpoints" / held[0].name)
            fault = None
        except Fault as damaged:
            fault = str(damaged)
        return {"fault": fault, "bytes": held[0].bytes, "seconds": round(time.perf_counter() - began_s, 2)}

    def _find(self) -> None:
        try:
            found = history.find(self.folder)
        except Fault:
            found = []
        self._folders = {str(each.relative_to(self.folder)) if each != self.folder else each.absolute().name: each for each in found}

    def _history(self, name: str) -> History:
        """Returns what a run's files tell, read again once they have changed."""
        with self._lock:
            if name not in self._folders:
                self._find()
            if name not in self._folders:
                raise Unknown("there is no such run, or no longer")
            folder = self._folders[name]
            now = _state(folder)
            if self._read.get(name, ((), None))[0] != now:
                self._read[name] = now, history.read(folder)
            return self._read[name][1]

    def _short(self, name: str) -> dict[str, Any]:
        told = self._history(name)
        metrics = self._folders[name] / history.METRICS
        written_s = metrics.stat().st_mtime if metrics.is_file() else 0.0
        live = told.step < (told.steps or 0) and time.time() - written_s < LIVE_S
        speeds = [each for each in told.records.get("images_per_s", [])[-50:] if each]
        return {
            "name": name,
            "recipe": told.config.get("recipe"),
            "step": told.step,
            "steps": told.steps,
            "live": live,
            "images_per_s": sorted(speeds)[len(speeds) // 2] if speeds else None,
        }


def _state(folder: Path) -> tuple:
    """Returns what changes when a run's files do."""
    told: list[tuple[int, int] | None] = []
    for name in (history.METRICS, history.CONFIG, history.SCORES, "checkpoints", "pictures", "checkpoints/best"):
        try:
            status = (folder / name).lstat()
            told.append((status.st_mtime_ns, status.st_size))
        except OSError:
            told.append(None)
    return tuple(told)
