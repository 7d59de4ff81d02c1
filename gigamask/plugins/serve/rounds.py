"""Rounds of a project: train on what is accepted, and use the better model.

A training is a folder of its own, `rounds/0001`, with its data, its run and its result, and runs in
a process of its own (`training_round`), which goes on if the page is closed.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

from gigamask import files
from gigamask.data import image
from gigamask.datatools.image_files import read_file
from gigamask.errors import GigamaskError, counted
from gigamask.files import exclusive_lock
from gigamask.plugins.serve.annotator import Annotator
from gigamask.plugins.serve.lost_images import unused
from gigamask.plugins.serve.open_images import Json
from gigamask.plugins.serve.project import TrainingRound, judged, progress
from gigamask.plugins.serve.project_export import export
from gigamask.plugins.serve.runs_view import RunsView
from gigamask.plugins.serve.session import shown_pixels
from gigamask.report import history
from gigamask.serialization import read_json
from gigamask.training.checkpoint import load_model

ROUNDS = "rounds"
SETTINGS, RESULT, LOG = "round.json", "result.json", "log.txt"
LOCK, PID, RUN = ".lock", "pid", "run"
COMMAND = ("-m", "gigamask.plugins.serve.training_round")
"""Arguments of Python that train a round, before its folder."""
KILLED = -9
"""Exit code of a training that was killed, as for want of memory; it goes on from what it saved."""
STOP_S = 40.0
"""Seconds that a training has to save its state when the server stops."""


class Rounds:
    """Trains and switches the models of a project."""

    def __init__(
        self,
        annotator: Annotator,
        weights: str,
        device: str = "auto",
    ) -> None:
        """Continue where the project was left, with the model that it uses.

        Args:
            annotator: The project and the session, whose model is replaced.
            weights: The model that the project began with.
            device: Device of the model.
        """
        self.annotator, self.project = annotator, annotator.project
        self.weights, self.device = weights, device
        self._first = annotator.session.model
        self.folder = self.project.folder / ROUNDS
        try:
            self.folder.mkdir(exist_ok=True)
        except OSError as error:
            raise GigamaskError(
                f"{self.folder}: is no folder, and none can be made ({error.strerror}); move it "
                "away, or correct the permissions"
            ) from None
        self.runs = RunsView(self.folder)
        self._process: subprocess.Popen | None = None
        self._lock = threading.Lock()
        self.notice: str | None = None
        self._skipped: list[str] = []
        number = self.project.content.model
        try:
            self.use(number)
        except GigamaskError as error:
            self.use(-1)
            self.notice = (
                f"the model of round {number + 1} cannot be used, so the first one is: {error}"
            )

    def status(self) -> Json:
        """Return the state of the training, the models, and what masks cost in each round."""
        with self._lock:
            training = self._training()
        content = self.project.content
        return {
            "training": training,
            "rounds": [vars(each) | {"verdict": each.verdict} for each in content.rounds],
            "model": content.model,
            "weights": self.weights,
            "progress": progress(self.project),
            "judged": judged(self.project),
            "unused": [*filter(None, [self.notice]), *unused(self.project), *self._skipped],
        }

    def train(self, minutes: float) -> None:
        """Start a training on what is accepted, or continue one that was stopped.

        Args:
            minutes: How long it should take on a CPU.

        Raises:
            GigamaskError: One is running, or too little is accepted.
        """
        with self._lock:
            state = self._training()["state"]
            if state == "running":
                raise GigamaskError("a training is running already; wait for it, or stop it")
            folder = self._newest()
            if state != "stopped" or folder is None:
                folder = self._prepare(minutes)
            with open(folder / LOG, "wb") as log:
                self._process = subprocess.Popen(
                    [sys.executable, *COMMAND, str(folder)],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            files.write_text(folder / PID, str(self._process.pid))

    def stop(self, wait: bool = False) -> None:
        """Ask the training to stop; it continues later where it was.

        Args:
            wait: Whether to wait until it has.
        """
        process, folder = self._process, self._newest()
        if process is None and folder is not None and _is_locked(folder / LOCK):
            with suppress(OSError):  # of a server that has ended
                os.kill(int((folder / PID).read_text()), signal.SIGTERM)
        if process is None or process.poll() is not None:
            return
        process.terminate()
        if wait:
            with suppress(subprocess.TimeoutExpired):
                process.wait(STOP_S)

    def use(self, number: int) -> None:
        """Use the model of a round from now on.

        Args:
            number: Index of the round; -1 is the model that the project began with.

        Raises:
            GigamaskError: There is no such round, or its weights cannot be read.
        """
        rounds = self.project.content.rounds
        if not -1 <= number < len(rounds):
            raise GigamaskError(f"there is no round {number + 1}; there are {len(rounds)}")
        model = self._first
        if number >= 0:
            model = load_model(self.weights_of(number), self.device)
        if not model.config.pixels.has_window:
            model.set_window(**vars(self.project.content.pixels))
        self.annotator.session.use_model(model)
        self.notice = None
        if number != self.project.content.model:
            self.project.update(model=number)

    def weights_of(self, number: int) -> str:
        """Return the weights of a round's model; -1 is the model that the project began with."""
        if number < 0:
            return self.weights
        return str(self.project.folder / self.project.content.rounds[number].weights)

    def _newest(self) -> Path | None:
        """Return the folder of the newest training; others, such as copies, are left alone."""
        found = (path.parent for path in self.folder.glob(f"*/{SETTINGS}"))
        return max((path for path in found if re.fullmatch(r"\d{4}", path.name)), default=None)

    def _training(self) -> Json:
        """Return the state of the newest training, and record its result in the project."""
        folder = self._newest()
        if folder is None:
            return {"state": "none"}
        number = int(folder.name)
        begun = history.is_run(folder / RUN)
        found: Json = {"number": number, "run": f"{folder.name}/{RUN}" if begun else None}
        if (folder / RESULT).exists():
            result, known = read_json(folder / RESULT, TrainingRound), self.project.content.rounds
            if result.weights not in {each.weights for each in known}:
                self.project.update(rounds=(*known, result))
            return found | {"state": "finished"}
        if _is_locked(folder / LOCK) or (self._process and self._process.poll() is None):
            return found | {"state": "running"}
        code = self._process.returncode if self._process else 75
        if code in (0, 75, -signal.SIGTERM, KILLED):
            return found | {"state": "stopped"}
        lines = (folder / LOG).read_text(errors="replace").strip().splitlines()
        return found | {"state": "failed", "fault": lines[-1] if lines else f"exit code {code}"}

    def _prepare(self, minutes: float) -> Path:
        """Write the data and the settings of a new training; return its folder."""
        rows = self.project.summary()
        usable = [row for row, each in enumerate(rows) if each["accepted"]]
        held_out = [row for row in usable if rows[row]["held_out"] and rows[row]["truth"]]
        rest = [row for row in usable if not rows[row]["held_out"]]
        if not rest or not held_out:
            raise GigamaskError(
                "training needs two images or more with accepted objects, of which one is held out "
                "to compare models; mark images as done that have masks which you drew, clicked or "
                f"corrected ({counted(len(rest), 'image')} to train on, {len(held_out)} held out)"
            )
        newest, number = self._newest(), len(self.project.content.rounds) + 1
        if newest is not None:  # project.json may be older than the rounds
            number = max(number, int(newest.name) + (newest / RESULT).exists())
        folder = self.folder / f"{number:04d}"
        shutil.rmtree(folder, ignore_errors=True)  # of a training that failed
        # What a model answered and nobody changed, is no truth to compare it with.
        self._skipped = [
            f"training: {line}"
            for name, part, truth in (("train", rest, False), ("held_out", held_out, True))
            for line in export(self.project, folder / name, part, only_truth=truth)["skipped"]
        ]
        settings: Json = {
            "init": os.path.abspath(self.current) if os.path.exists(self.current) else self.current,
            "minutes": minutes,
            "device": self.device,
            "weights": f"{ROUNDS}/{folder.name}/{RUN}",
            "pixels": None,
        }
        if any(_is_deep(Path(self.project.content.images), self.project.names[i]) for i in usable):
            settings["pixels"] = asdict(shown_pixels(self.annotator.session.model))
        files.write_text(folder / SETTINGS, json.dumps(settings))
        return folder

    @property
    def current(self) -> str:
        """The weights in use."""
        return self.weights_of(self.project.content.model)


def _is_deep(folder: Path, name: str) -> bool:
    """Return whether an image has more than 8 bits per channel."""
    with suppress(GigamaskError):  # as the export says
        raw = read_file(folder / name, name)
        return image.keeps_its_bytes(raw) and image.read_stored(raw, name).dtype != "uint8"
    return False


def _is_locked(path: Path) -> bool:
    """Return whether another process holds a lock."""
    if not path.exists():
        return False
    try:
        with exclusive_lock(path, "locked"):
            return False
    except GigamaskError:
        return True
