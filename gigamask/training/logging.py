"""Training logs: progress bar, metrics.jsonl, pictures of predictions, and trackers.

metrics.jsonl has one JSON object per line, appended and flushed, so that a killed run keeps what it
wrote. `memory_gb` is the peak memory of the GPU or of this process; `loader_mb` is the memory that
the largest loader process has written, including its imports. Each start of training adds a line;
earlier records of later steps are superseded.
"""

import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TextIO, TypeVar, cast

import numpy as np
import psutil
import torch
from jaxtyping import UInt8
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn

from gigamask import files, progress
from gigamask.data import process_memory
from gigamask.data.image import encode_jpeg
from gigamask.distributed.precision import device_name
from gigamask.distributed.profile_ranges import profile_range
from gigamask.errors import first_line, score_text
from gigamask.interfaces import EvaluationResult
from gigamask.serialization import to_json
from gigamask.signals import discard_if_closed
from gigamask.training.config import TrainConfig
from gigamask.training.trackers import Tracker, make_trackers

MAX_PENDING_BYTES = 2**24
"""Size of the lines kept while the disk is full; beyond it, the oldest are dropped."""


class JsonlWriter:
    """Appends JSON lines to a file; lines that cannot be written are kept and written later.

    Args:
        path: The file.
        warn: Called with a message when writing starts to fail.
    """

    def __init__(self, path: Path, warn: Callable[[str], None]) -> None:
        self._path, self._warn = path, warn
        self._file = open(path, "a+b", buffering=0)  # noqa: SIM115 (closed by close)
        self._pending = b""
        self._failing = False

    def end_line(self) -> None:
        """End the last line if a killed process left it incomplete."""
        if self._file.tell():
            self._file.seek(-1, os.SEEK_END)
            if self._file.read(1) != b"\n":
                self._pending = b"\n"

    def write(self, event: dict[str, Any]) -> None:
        """Append one line."""
        self._pending += f"{to_json(event)}\n".encode()
        try:
            while self._pending:
                self._pending = self._pending[self._file.write(self._pending) :]
            self._failing = False
        except OSError as error:
            if not self._failing:
                self._warn(
                    f"{self._path}: cannot be written ({error.strerror}); its lines are kept and "
                    "written later; free some disk space"
                )
            self._failing = True
            if len(self._pending) > MAX_PENDING_BYTES:
                # The file may end within the first line, so its rest is kept.
                first, _, others = self._pending.partition(b"\n")
                kept = others[-MAX_PENDING_BYTES:].partition(b"\n")[2]
                self._pending = first + b"\n" + kept

    def close(self) -> None:
        """Close the file."""
        self._file.close()


Batches = TypeVar("Batches")
Observer = Callable[[int, bool], Iterable[tuple[str, dict[str, Any]]]]
"""Observes the training loop, such as a profiler. It is called with the number of finished steps
before each step, and with True at the end, however training ends. It returns lines to print, each
with an event to add to metrics.jsonl (none if empty)."""
SHOWN_WAIT = 0.1
"""Fraction of the time from which waiting for data is shown; an average over some ten steps."""
PICTURES = "pictures"
"""Subfolder of the run with pictures of predictions by step."""
MAX_PICTURE_BYTES = 150_000
"""Size above which a picture is compressed further."""


class LastingStream:
    """Standard error; a training goes on if it closes, as with a terminal, or cannot be written."""

    def write(self, text: str) -> int:
        """Write text, or discard it.

        Args:
            text: The text.
        """
        try:
            return self._stream.write(text)
        except OSError:
            discard_if_closed(self._stream)
            return len(text)

    def flush(self) -> None:
        """Write what is buffered."""
        try:
            self._stream.flush()
        except OSError:
            discard_if_closed(self._stream)

    @property
    def _stream(self) -> Any:
        """Standard error, also while rich replaces it to show a progress bar."""
        return getattr(sys.stderr, "rich_proxied_file", sys.stderr)

    def __getattr__(self, name: str) -> Any:
        """Return another attribute of standard error, such as `isatty`."""
        return getattr(self._stream, name)


class MetricsLogger:
    """Training logger, a context manager.

    Args:
        config: The configuration.
        first_step: Number of steps finished before this start.
        device: Device to train on.
        enabled: Whether this process logs; other processes only run their observers.
        observers: Called before each step and at the end.
    """

    def __init__(
        self,
        config: TrainConfig,
        first_step: int,
        device: torch.device,
        enabled: bool = True,
        observers: Sequence[Observer] = (),
    ) -> None:
        self._config = config
        self._enabled = enabled
        self._device = device
        self._first_step = self._step = self._begun = first_step  # `_step` is the last one logged
        self._observers = observers
        is_bar = enabled and progress.mode() == "bar"
        self._console = Console(file=cast(TextIO, LastingStream()), force_terminal=is_bar or None)
        self._progress = progress.make_bars(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[figures]}"),
            TimeRemainingColumn(),
            console=self._console,
            transient=False,
            disable=not is_bar,
        )
        self._bar = self._progress.add_task(
            "train", total=config.steps, completed=first_step, figures=""
        )
        self._trackers: list[Tracker] = make_trackers(config, first_step) if enabled else []
        self._writer = JsonlWriter(Path(config.out) / "metrics.jsonl", self.print)
        if enabled:
            self._writer.end_line()
        self._start_s = self._last_s = self._printed_s = time.perf_counter()
        self._data_time_s = self._waiting = 0.0

    def log_start(self, processes: int = 1, damaged: Sequence[str] = ()) -> None:
        """Log the start of training.

        Args:
            processes: Number of processes that train together.
            damaged: Names of the damaged checkpoints that were skipped.
        """
        if not self._enabled:
            return
        event = {
            "step": self._first_step,
            "started": datetime.now(UTC).isoformat(timespec="seconds"),
            "device": device_name(self._device),
            "processes": processes,
            "threads": torch.get_num_threads(),
        }
        self.write(event | ({"corrupt_checkpoints": list(damaged)} if damaged else {}))

    def time_data(self, batches: Iterable[Batches]) -> Iterator[Batches]:
        """Yield the batches, and measure the wait for each."""
        iterator = iter(batches)
        while True:
            self._observe(self._begun)
            start_s = time.perf_counter()
            with profile_range("load wait"):
                batch = next(iterator)
            self._data_time_s = time.perf_counter() - start_s
            self._begun += 1
            yield batch

    def log_step(self, step: int, images: int, record: dict[str, float]) -> None:
        """Show a finished step, and log it every `log_every` steps.

        Args:
            step: Number of the step, from 1.
            images: Number of images in the step.
            record: Metrics of the step.
        """
        self._step = step
        if not self._enabled:
            return
        now_s = time.perf_counter()
        record = record | {
            "images_per_s": images / (now_s - self._last_s),
            "data_time_s": self._data_time_s,
            "memory_gb": memory_gb(self._device),
        }
        waiting = self._data_time_s / max(now_s - self._last_s, 1e-9)
        self._waiting = 0.9 * self._waiting + 0.1 * min(waiting, 1.0)
        self._last_s = now_s
        waits = f"  waits for data {self._waiting:.0%}" if self._waiting > SHOWN_WAIT else ""
        iou = f"IoU {record['iou']:.3f}  " if "iou" in record else ""
        figures = (
            f"loss {record.get('loss', float('nan')):.3f}  {iou}"
            f"{record['images_per_s']:.1f} images/s  {record['memory_gb']:.1f} GB{waits}"
        )
        self._progress.update(self._bar, completed=step, figures=figures)
        is_logged = step % self._config.log_every == 0 or step == self._config.steps
        is_due = is_logged or now_s - self._printed_s > progress.INTERVAL_S
        if is_due and progress.mode() == "lines":
            self._printed_s = now_s
            elapsed_s = now_s - self._start_s
            left_s = elapsed_s / max(1, step - self._first_step) * (self._config.steps - step)
            self.print(f"step {step}/{self._config.steps}  {figures}  {left_s:.0f} s left")
        if not is_logged:
            return
        if loaders := process_memory.workers_allocated_bytes():
            record["loader_mb"] = max(loaders.values()) / 1e6
        self.write({"step": step, **_rounded(record)})
        self._track(lambda tracker: tracker.scalars(record, step))

    def log_evaluation(self, step: int, evaluation: EvaluationResult) -> float:
        """Log an evaluation.

        Args:
            step: Number of the step that it followed.
            evaluation: Result of the evaluation.

        Returns:
            The score that selects the best checkpoint.
        """
        seconds = time.perf_counter() - self._last_s  # since the record of the same step
        scores, errors = evaluation.scores, evaluation.errors
        known = {
            "of": evaluation.of,
            "subject": evaluation.subject,
            "standard_error": _rounded(errors),
        }
        self.write(
            {
                "step": step,
                "evaluation": _rounded(scores),
                **{name: value for name, value in known.items() if value},
                "warnings": evaluation.warnings,
                "seconds": round(seconds, 3),
            }
        )
        tracked = {f"evaluation/{name}": value for name, value in scores.items()}
        self._track(lambda tracker: tracker.scalars(tracked, step))
        of = f", {evaluation.of}" if evaluation.of else ""
        texts = (f"{name} {score_text(scores[name], errors.get(name))}" for name in scores)
        self.print(f"evaluated at step {step}{of}: {'  '.join(texts)}")
        for warning in evaluation.warnings:
            self.print(f"  {warning}")
        if evaluation.picture is not None:
            self._save_picture(step, evaluation.picture)
        self._last_s = time.perf_counter()
        return float(scores[evaluation.best_by])

    def write(self, event: dict[str, Any]) -> None:
        """Append a line to metrics.jsonl."""
        self._writer.write(event)

    def print(self, message: str) -> None:
        """Print a line above the progress bar."""
        self._progress.console.print(message, highlight=False, soft_wrap=True, markup=False)

    def log(self, message: str, event: dict[str, Any]) -> None:
        """Print a line, and append its event to metrics.jsonl.

        Args:
            message: Line to print.
            event: Event without the step; nothing is appended if it is empty.
        """
        if event:
            self.write({"step": self._step, **event})
        self.print(message)

    def _track(self, send: Callable[[Tracker], None]) -> None:
        """Send to every tracker; one that fails, as on a full disk, is dropped."""
        for tracker in tuple(self._trackers):
            try:
                send(tracker)
            except Exception as error:  # also where TensorBoard or W&B is installed but broken
                self._trackers.remove(tracker)
                reason = getattr(error, "strerror", None) or first_line(error)
                self.print(
                    f"{type(tracker).__name__} stopped: {reason}; "
                    "training and metrics.jsonl continue"
                )

    def _save_picture(self, step: int, picture: UInt8[np.ndarray, "H W 3"]) -> None:
        """Save and track the picture of an evaluation; training continues if that fails."""
        self._track(lambda tracker: tracker.picture("predictions", picture, step))
        try:
            path = Path(self._config.out) / PICTURES / f"step_{step:08d}.jpg"
            path.parent.mkdir(exist_ok=True)
            files.write_bytes(path, jpeg(picture))
        except OSError as error:
            self.print(f"the picture of step {step} was not saved: {error}")

    def _observe(self, step: int, is_end: bool = False) -> None:
        """Run the observers and log what they return; their time does not count as a step's."""
        start_s = time.perf_counter()
        for observer in self._observers:
            for line, event in observer(step, is_end):
                self.log(line, event)
        self._last_s += time.perf_counter() - start_s

    def __enter__(self) -> "MetricsLogger":
        self._progress.start()
        self._bars_before = progress.BARS.set(self._progress)
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self._observe(self._step, is_end=True)
        finally:
            progress.BARS.reset(self._bars_before)
            self._progress.stop()
            self._writer.close()
            self._track(lambda tracker: tracker.close())


def jpeg(picture: UInt8[np.ndarray, "H W 3"]) -> bytes:
    """Encode a picture as JPEG of at most `MAX_PICTURE_BYTES`, if quality 30 or above suffices."""
    encoded = b""
    for quality in (85, 70, 50, 30):
        encoded = encode_jpeg(picture, quality)
        if len(encoded) <= MAX_PICTURE_BYTES:
            break
    return encoded


def memory_gb(device: torch.device) -> float:
    """Return the peak memory so far in 1e9 bytes: of a GPU, or of this process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 1e9
    try:
        import resource
    except ImportError:  # Windows
        memory = psutil.Process().memory_info()
        return getattr(memory, "peak_wset", memory.rss) / 1e9
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / 1e9 if sys.platform == "darwin" else peak * 1024 / 1e9


def _rounded(values: Mapping[str, float]) -> dict[str, float]:
    # Six digits of what is below 1, such as the learning rates of a fine-tuning. Scores may be
    # numbers of NumPy or torch.
    return {
        name: round(float(value), 6) if abs(value) >= 1 else float(f"{value:.6g}")
        for name, value in values.items()
    }
