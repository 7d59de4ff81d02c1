"""The runs in a folder, as responses small enough to be requested every two seconds."""

import threading
import time
from pathlib import Path

from gigamask.errors import GigamaskError
from gigamask.models import manifest
from gigamask.plugins.serve.open_images import Json, NotFoundError
from gigamask.plugins.serve.photographs import stamp_of
from gigamask.plugins.serve.pictures import file_version
from gigamask.report import charts, history
from gigamask.report.history import History
from gigamask.report.html import MAX_PICTURE_BYTES
from gigamask.serialization import read_limited
from gigamask.training.config import differences

MAX_EVENTS = 200
LIVE_S = 60.0
"""A run counts as training for this many seconds after its last record."""
MEDIA_TYPES = {".png": "image/png", ".jpg": "image/jpeg"}
WATCHED = (history.METRICS, history.CONFIG, history.SCORES, "checkpoints", "pictures")
"""A run is read again when one of these has changed."""


class RunsView:
    """The runs in a folder; new ones are found while the page is open."""

    def __init__(self, folder: Path) -> None:
        if not folder.is_dir():
            raise GigamaskError(
                f"--runs {folder}: is not a folder; pass one for runs, which may still be empty"
            )
        self.folder, self._lock = folder, threading.Lock()
        self._folders: dict[str, Path] = {}
        self._histories: dict[str, tuple[list, History]] = {}

    def runs(self) -> list[Json]:
        """Return a summary of each run, or why it cannot be read, newest first."""
        self._find()
        found = []
        for name in reversed(self._folders):
            try:
                found.append(self._summary(name))
            except (GigamaskError, OSError) as error:
                fault = {"name": name, "step": 0, "steps": None, "live": False, "fault": str(error)}
                found.append(fault)
        return found

    def run(self, name: str) -> Json:
        """Return the records, evaluations, events, checkpoints and pictures of a run."""
        read = self._history(name)
        return {
            **self._summary(name),
            **charts.curves(read),
            "faults": {kind: events[-MAX_EVENTS:] for kind, events in read.faults.items()},
            "event_counts": {kind: len(events) for kind, events in read.faults.items()},
            "starts": read.starts[-MAX_EVENTS:],
            "checkpoints": read.to_dict()["checkpoints"],
            "pictures": [
                {"name": image.name, "step": image.step, "shows": file_version(image.path)}
                for image in read.pictures
            ],
            "scores": read.scores,
        }

    def differences(self, one: str, other: str) -> list[Json]:
        """Return the flags that differ between two runs.

        Args:
            one: Name of the first run.
            other: Name of the second run.
        """
        differing = differences(self._history(one).config, self._history(other).config)
        return [
            {"flag": flag, "one": first, "other": second}
            for flag, (first, second) in differing.items()
            if flag != "out"
        ]

    def picture(self, name: str, file: str) -> tuple[bytes, str, str]:
        """Return a picture of a run, its media type and its version.

        Args:
            name: Name of the run.
            file: Name of the picture, as in `run`.
        """
        paths = [Path(each.path) for each in self._history(name).pictures if each.name == file]
        if not paths or not paths[0].is_file():
            raise NotFoundError("this run has no such picture, or it was removed")
        version = file_version(paths[0])
        return read_limited(paths[0], MAX_PICTURE_BYTES), MEDIA_TYPES[paths[0].suffix], version

    def verify(self, name: str, step: int) -> Json:
        """Read a whole checkpoint and check it against its checksums.

        Args:
            name: Name of the run.
            step: Step of the checkpoint.

        Returns:
            "fault", what is wrong or None; "bytes", the bytes read; "seconds", the time it took.
        """
        found = [each for each in self._history(name).checkpoints if each.step == step]
        if not found:
            raise NotFoundError(f"this run has no checkpoint of step {step}, or it was removed")
        start_s, fault = time.perf_counter(), None
        try:
            manifest.verify(self._folders[name] / "checkpoints" / found[0].name)
        except GigamaskError as error:
            fault = str(error)
        seconds = round(time.perf_counter() - start_s, 2)
        return {"fault": fault, "bytes": found[0].bytes, "seconds": seconds}

    def _find(self) -> None:
        try:
            folders = history.find(self.folder)
        except GigamaskError:
            folders = []
        self._folders = {self._name(folder): folder for folder in folders}

    def _name(self, folder: Path) -> str:
        own = folder == self.folder
        name = folder.absolute().name if own else str(folder.relative_to(self.folder))
        return name.encode(errors="backslashreplace").decode()

    def _history(self, name: str) -> History:
        """Return a run's history, read again if its files have changed."""
        with self._lock:
            if name not in self._folders:
                self._find()
            if name not in self._folders:
                raise NotFoundError("there is no such run, or it was removed")
            folder = self._folders[name]
            state = [stamp_of(folder / file) for file in (*WATCHED, "checkpoints/best")]
            if name not in self._histories or self._histories[name][0] != state:
                self._histories[name] = state, history.read(folder)
            return self._histories[name][1]

    def _summary(self, name: str) -> Json:
        read = self._history(name)
        written = stamp_of(self._folders[name] / history.METRICS)
        age_s = time.time() - written[1] / 1e9 if written else LIVE_S
        speeds = sorted(filter(None, read.records.get("images_per_s", [])[-50:]))
        return {
            "name": name,
            "recipe": read.config.get("recipe"),
            "batch_size": read.config.get("batch-size"),
            "step": read.step,
            "steps": read.steps,
            "live": read.step < (read.steps or 0) and age_s < LIVE_S,
            "images_per_s": speeds[len(speeds) // 2] if speeds else None,
            "fault": "; ".join(read.damaged) or None,
        }
