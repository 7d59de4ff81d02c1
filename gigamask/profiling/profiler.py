"""Profile of a few training steps.

- `trace.json.gz`: operators and kernels over time within the parts of a step
- `profile.md`: parts of a step, the costliest operators, memory after each step, remaining tensors
- on a GPU `memory.pickle`, the allocator's history, and `allocator.txt`, its statistics

Each process writes its own files. Profiling does not change the results of the training.
"""

import gc
import gzip
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, record_function, supported_activities

from gigamask.data import process_memory
from gigamask.data.process_memory import in_bytes
from gigamask.files import write_bytes, write_text
from gigamask.profiling import timeline
from gigamask.profiling.timeline import TimeSpent

WARM_UP = 3
"""Steps before profiling, in which libraries are loaded, memory is allocated, and caches fill."""
MAX_OPERATORS, MAX_TENSORS = 20, 10
MAX_ALLOCATIONS = 100_000
"""Number of last entries of the GPU's history to keep; several KB each according to torch."""
GZIP_LEVEL = 3
"""Files are 30 % larger than with the highest level, and written in an eighth of the time."""


@dataclass(frozen=True)
class StepRecord:
    """Duration of one step, and the bytes in use after it, as `bytes_in_use` returns them."""

    step: int
    ms: float
    held: dict[str, int]


class Profile:
    """Profiles some steps of a training after its first few, and writes the files to a folder."""

    def __init__(
        self,
        folder: Path,
        asked: int,
        done: int,
        last: int,
        device: torch.device,
        rank: int | None = None,
    ) -> None:
        """Select the steps to profile.

        Args:
            folder: The folder for the files.
            asked: Number of steps to profile.
            done: Number of finished steps.
            last: The last step of the training.
            device: The device of the training.
            rank: The process's rank, None if there is only one.
        """
        self._folder, self._asked, self._device, self._rank = folder, asked, device, rank
        steps = min(asked, max(1, last - done - WARM_UP))
        self._first = last + 1 - steps if last - done < WARM_UP + steps else done + 1 + WARM_UP
        self._last = self._first + steps - 1
        self._done, self._over = done, False
        self._start_s = time.perf_counter()
        self._records: list[StepRecord] = []
        self._recorder: torch.profiler.profile | None = None
        self._range: record_function | None = None
        self._tensors: Counter[str] = Counter()

    def observe(self, done: int, over: bool) -> Iterator[tuple[str, dict[str, Any]]]:
        """Start or stop the profiler between two steps.

        Args:
            done: Number of finished steps.
            over: Whether the training has ended.

        Yields:
            A line to print and its metrics, once the files are written.
        """
        if self._over:
            return
        if self._range:
            self._range.__exit__(None, None, None)
            self._range = None
        if done > self._done:
            elapsed_ms = 1e3 * (time.perf_counter() - self._start_s)
            self._records.append(StepRecord(done, elapsed_ms, bytes_in_use(self._device)))
            self._done = done
        try:
            if over or done == self._last:
                self._over = True
                line = self._finish()
            else:
                line = None
                if done == self._first - 1:
                    self._start()
        # Errors of the disk or of torch's profiler do not stop training.
        except (OSError, RuntimeError, msgspec.DecodeError) as error:
            self._over = True
            line = f"{self._folder}: no profile can be written ({error}); training continues"
            if self._recorder:
                self._recorder.stop()
                self._recorder = None
        if line and not self._rank:
            yield line, {}
        if self._recorder:
            self._range = record_function(f"{timeline.STEP}{done + 1}")
            self._range.__enter__()
        self._start_s = time.perf_counter()

    def _start(self) -> None:
        self._tensors = tensors()
        on_gpu = self._device.type == "cuda"
        if on_gpu:
            torch.cuda.synchronize(self._device)
        recorder = torch.profiler.profile(
            activities=supported_activities() if on_gpu else [ProfilerActivity.CPU]
        )
        recorder.start()
        self._recorder = recorder
        if on_gpu:
            torch.cuda.memory._record_memory_history(max_entries=MAX_ALLOCATIONS, stacks="python")

    def _finish(self) -> str:
        """Write the files and return a line that lists them."""
        recorder, self._recorder = self._recorder, None
        records = [record for record in self._records if record.step >= self._first]
        if recorder:
            recorder.stop()
        try:
            if not recorder or not records:
                return (
                    f"--profile {self._asked}: nothing is written, training ended after step"
                    f" {self._done}, before the first step to profile, {self._first}"
                )
            files = self._write(recorder, records)
        finally:
            if self._device.type == "cuda":
                torch.cuda.memory._record_memory_history(enabled=None)
        fewer = "" if len(records) == self._asked else f", not {self._asked}: training had no more"
        return f"profiled {step_range(records)}{fewer}; in {self._folder}: {', '.join(files)}"

    def _write(self, recorder: torch.profiler.profile, records: Sequence[StepRecord]) -> list[str]:
        """Write the files and return their names, each with a program that opens it."""
        mark = "" if self._rank is None else f"_rank{self._rank}"
        self._folder.mkdir(parents=True, exist_ok=True)
        plain, trace, report = (
            self._folder / name
            for name in (f"trace{mark}.json", f"trace{mark}.json.gz", f"profile{mark}.md")
        )
        files = [report.name, f"{trace.name} (for https://ui.perfetto.dev or chrome://tracing)"]
        if self._device.type == "cuda":
            history, statistics = (
                self._folder / f"memory{mark}.pickle",
                self._folder / f"allocator{mark}.txt",
            )
            torch.cuda.memory._dump_snapshot(str(history))
            write_text(statistics, torch.cuda.memory_summary(self._device))
            files += [f"{history.name} (for https://pytorch.org/memory_viz)", statistics.name]
        recorder.export_chrome_trace(str(plain))
        lines = plain.read_bytes()
        write_bytes(trace, gzip.compress(lines, GZIP_LEVEL))
        plain.unlink()
        parts, operators = timeline.read(lines, len(records))
        write_text(report, "\n".join(self._report(parts, operators, records)) + "\n")
        return files if self._rank is None else [*files, "and those of the other processes"]

    def _report(
        self, parts: list[TimeSpent], operators: list[TimeSpent], records: Sequence[StepRecord]
    ) -> Iterator[str]:
        """Yield the lines of the report."""
        on_gpu, steps = self._device.type == "cuda", len(records)
        process = "" if self._rank is None else f", process {self._rank}"
        yield f"# {self._folder.parent}: {step_range(records)}\n"
        step_ms = sum(record.ms for record in records) / steps
        previous = [
            f"; the step before them, not profiled, took {record.ms:.1f} ms"
            for record in self._records
            if record.step == self._first - 1
        ]
        yield (
            f"{self._device}{process}, torch {torch.__version__}. A profiled step took"
            f" {step_ms:.1f} ms{''.join(previous)}.\n"
        )
        yield "Rows exclude nested rows; `a / b` is b within a.\n"
        yield from table("part of a step", parts, on_gpu)
        yield f"\nThe costliest {MAX_OPERATORS} of {len(operators)} operators:\n"
        yield from table("operator", operators, on_gpu, MAX_OPERATORS)
        holders = list(records[0].held)
        yield "\nMemory after each step, including the recorded trace:\n"
        head = ["step", "ms", *holders]
        yield from (f"| {' | '.join(head)} |", "|---" * len(head) + "|")
        for record in records:
            sizes = " | ".join(in_bytes(record.held[holder]) for holder in holders)
            yield f"| {record.step} | {record.ms:.1f} | {sizes} |"
        now = tensors()
        more = [
            (count, kind)
            for kind, count in (now - self._tensors).most_common(MAX_TENSORS)
            if count >= steps
        ]
        remaining = (
            ". At least one of these remained per step:\n\n| more | kind |\n|---|---|"
            if more
            else ""
        )
        yield (
            f"\nTensors in Python: {self._tensors.total()} before the first of these steps,"
            f" {now.total()} after the last{remaining}"
        )
        yield from (f"| {count} | {kind} |" for count, kind in more)


def bytes_in_use(device: torch.device) -> dict[str, int]:
    """Return the bytes in use by the process and on the GPU."""
    process_bytes = process_memory.allocated_bytes()
    sizes = {} if process_bytes is None else {"this process": process_bytes}
    if device.type == "cuda":
        sizes |= {
            "GPU, allocated": torch.cuda.memory_allocated(device),
            "GPU, peak": torch.cuda.max_memory_allocated(device),
        }
    return sizes


def tensors() -> Counter[str]:
    """Count the tensors in Python by shape, dtype and device."""
    found = (value for value in gc.get_objects() if issubclass(type(value), Tensor))
    return Counter(
        f"{tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')} {tensor.device.type}"
        for tensor in found
    )


def step_range(records: Sequence[StepRecord]) -> str:
    """Return the steps in words."""
    first, last = records[0].step, records[-1].step
    return f"step {first}" if len(records) == 1 else f"steps {first} to {last}"


def table(
    head: str, rows: Sequence[TimeSpent], on_gpu: bool, most: int | None = None
) -> Iterator[str]:
    """Yield the lines of a Markdown table of times.

    Args:
        head: Title of the first column.
        rows: Times per step.
        on_gpu: Whether to add GPU times, and use them for the shares.
        most: Number of rows to show, the costliest first; None shows all rows in order.
    """
    cost = {row.name: row.gpu_ms if on_gpu else row.ms for row in rows}
    total = sum(cost.values()) or 1.0
    heads = [head, "ms/step", *(["GPU ms/step"] if on_gpu else []), "share", "calls/step"]
    yield from (f"| {' | '.join(heads)} |", "|---" * len(heads) + "|")
    if most is not None:
        rows = sorted(rows, key=lambda row: cost[row.name], reverse=True)[:most]
    for row in rows:
        times = [f"{row.ms:.2f}", *([f"{row.gpu_ms:.2f}"] if on_gpu else [])]
        share = f"{100 * cost[row.name] / total:.1f} %"
        yield f"| {' | '.join([row.name, *times, share, f'{row.times:.4g}'])} |"
