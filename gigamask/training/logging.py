"""What a training shows: a progress bar, lines in metrics.jsonl, pictures of predictions, and curves on boards.

metrics.jsonl is the record: one JSON object a line, appended and flushed, so that a killed run keeps what it wrote. `memory_gb` in it is the peak of
the GPU or of this process, `loader_mb` what the largest loader process has written, its imports with it. Each time training begins it says so there:
what stands before that of later steps is trained again.

Not here: which numbers (`train.step`), the record's lines (`train.journal`), the boards (`train.boards`).
"""

import resource
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import numpy as np
import torch
from jaxtyping import UInt8
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from gigamask.data import process_memory
from gigamask.data.image import encode_jpeg
from gigamask.distributed.profile_ranges import profile_range
from gigamask.interfaces import EvaluationResult
from gigamask.training import manifest
from gigamask.training.config import TrainConfig
from gigamask.training.jsonl_writer import JsonlWriter
from gigamask.training.trackers import Tracker, make_trackers

Batches = TypeVar("Batches")
Observer = Callable[[int, bool], Iterable[tuple[str, dict[str, Any]]]]
"""Looks on from outside. Called with the number of updates done before each next one, and with True behind the last, however a training ends; returns
lines to say, and what metrics.jsonl is told of each, nothing where that is empty."""
PICTURES = "pictures"
"""In the run folder: what the model answered, by step."""
PICTURE_BYTES = 150_000
"""Of a picture at most; it is compressed as much as that takes."""


class MetricsLogger:
    """Shows and keeps the records of a run; a context manager. Of several processes one does, the others only note what is theirs alone."""

    def __init__(
        self,
        run: TrainConfig,
        first_step: int,
        device: torch.device,
        shown: bool = True,
        meters: Sequence[Observer] = (),
    ) -> None:
        self._run = run
        self._shown = shown
        self._device = device
        self._first = self._done = first_step
        self._meters = meters
        self._console = Console(stderr=True)
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[figures]}"),
            TimeRemainingColumn(),
            console=self._console,
            disable=not (shown and self._console.is_terminal),
        )
        self._bar = self._progress.add_task(
            "train", total=run.steps, completed=first_step, figures=""
        )
        self._boards: list[Tracker] = make_trackers(run) if shown else []
        self._journal = JsonlWriter(Path(run.out) / "metrics.jsonl", self.print)
        if shown:
            self._journal.end_line()
        self._began_s = self._last_s = time.perf_counter()
        self._waited_s = 0.0

    def begin(self, processes: int = 1) -> None:
        """Notes that training begins, or goes on, behind update number `first_step`, and which checkpoints it passed over to do so."""
        if not self._shown:
            return
        on = (
            torch.cuda.get_device_name(self._device)
            if self._device.type == "cuda"
            else self._device.type
        )
        told = {
            "step": self._first,
            "begun": datetime.now(UTC).isoformat(timespec="seconds"),
            "device": on,
            "processes": processes,
        }
        newer = [
            each.name
            for each in manifest.complete(Path(self._run.out) / "checkpoints")
            if each.name > f"step_{self._first:08d}"
        ]
        self.note(told | ({"damaged": newer} if newer else {}))

    def waiting(self, batches: Iterable[Batches]) -> Iterator[Batches]:
        """Yields the batches and notes how long each was waited for."""
        iterator = iter(batches)
        while True:
            self._look()
            asked_s = time.perf_counter()
            with profile_range("load wait"):
                batch = next(iterator)
            self._waited_s = time.perf_counter() - asked_s
            yield batch

    def record(self, step: int, images: int, record: dict[str, float]) -> None:
        """Takes the record of finished update number `step` (from 1), made of so many images."""
        self._done = step
        if not self._shown:
            return
        now_s = time.perf_counter()
        record = record | {
            "images_per_s": images / (now_s - self._last_s),
            "data_time_s": self._waited_s,
            "memory_gb": memory_gb(self._device),
        }
        self._last_s = now_s
        iou = f"IoU {record['iou']:.3f}  " if "iou" in record else ""
        figures = f"loss {record.get('loss', float('nan')):.3f}  {iou}{record['images_per_s']:.1f} images/s  {record['memory_gb']:.1f} GB"
        self._progress.update(self._bar, completed=step, figures=figures)
        if step % self._run.log_every and step != self._run.steps:
            return
        if loaders := process_memory.workers_allocated_bytes():
            record["loader_mb"] = max(loaders.values()) / 1e6
        self.note({"step": step, **{name: round(value, 6) for name, value in record.items()}})
        self._show(lambda board: board.scalars(record, step))
        if self._progress.disable:
            elapsed_s = time.perf_counter() - self._began_s
            left_s = elapsed_s / max(1, step - self._first) * (self._run.steps - step)
            self._console.print(
                f"step {step}/{self._run.steps}  {figures}  {left_s:.0f} s left", highlight=False
            )

    def log_evaluation(self, step: int, verdict: EvaluationResult) -> float:
        """Takes what an evaluation after update number `step` found, and returns the score that the best checkpoint is kept by."""
        seconds = time.perf_counter() - self._last_s  # since the record of the same update
        scores = {name: round(value, 6) for name, value in verdict.scores.items()}
        self.note(
            {
                "step": step,
                "evaluation": scores,
                "worries": verdict.warnings,
                "seconds": round(seconds, 3),
            }
        )
        self._show(
            lambda board: board.scalars(
                {f"evaluation/{name}": value for name, value in verdict.scores.items()}, step
            )
        )
        self.print(
            f"evaluated at step {step}: "
            + "  ".join(f"{name} {100 * value:.1f}" for name, value in verdict.scores.items())
        )
        for worry in verdict.warnings:
            self.print(f"  {worry}")
        if verdict.picture is not None:
            self._keep_picture(step, verdict.picture)
        self._last_s = time.perf_counter()
        return verdict.scores[verdict.best_by]

    def note(self, event: dict) -> None:
        """Appends one line to metrics.jsonl."""
        self._journal.write(event)

    def print(self, message: str) -> None:
        """Prints a line above the progress bar."""
        self._progress.console.print(message, highlight=False, soft_wrap=True, markup=False)

    def log(self, message: str, noted: dict[str, Any]) -> None:
        """Prints a line, and notes what stands for it in metrics.jsonl, if anything."""
        if noted:
            self.note({"step": self._done, **noted})
        self.print(message)

    def _show(self, on: Callable[[Tracker], None]) -> None:
        """Shows something on every board; one that can no longer be written, of a full disk, shows nothing from then on."""
        for board in tuple(self._boards):
            try:
                on(board)
            except OSError as error:
                self._boards.remove(board)
                self.print(
                    f"{type(board).__name__} shows nothing more, {error.strerror or error}; training and metrics.jsonl go on"
                )

    def _keep_picture(self, step: int, picture: UInt8[np.ndarray, "H W 3"]) -> None:
        """Writes the picture that an evaluation made; one that cannot be written costs nothing but itself."""
        self._show(lambda board: board.picture("predictions", picture, step))
        try:
            path = Path(self._run.out) / PICTURES / f"step_{step:08d}.jpg"
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(jpeg(picture))
        except OSError as error:
            self.print(f"the picture of step {step} is not saved: {error}")

    def _look(self, over: bool = False) -> None:
        """Lets the meters look, and tells what they find; the time that takes is not that of a step."""
        began_s = time.perf_counter()
        for meter in self._meters:
            for line, noted in meter(self._done, over):
                self.log(line, noted)
        self._last_s += time.perf_counter() - began_s

    def __enter__(self) -> "MetricsLogger":
        self._progress.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            self._look(over=True)
        finally:
            self._progress.stop()
            self._journal.close()
            self._show(lambda board: board.close())


def jpeg(picture: UInt8[np.ndarray, "H W 3"]) -> bytes:
    """Returns a picture as a JPEG of at most `PICTURE_BYTES`, if that can be."""
    packed = b""
    for quality in (85, 70, 50, 30):
        packed = encode_jpeg(picture, quality)
        if len(packed) <= PICTURE_BYTES:
            break
    return packed


def memory_gb(device: torch.device) -> float:
    """Returns the peak memory of the training so far in 1e9 bytes: the GPU's when training on one, else the process's."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 1e9
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / 1e9 if sys.platform == "darwin" else peak * 1024 / 1e9
