"""What a few steps of a training spend, and on what: steps go by, files about them leave.

- `trace.json.gz`: every operator and kernel on a time line, and the parts of a step (`parallel.ranges`) around them
- `profile.md`: the parts of a step, the costliest operators, memory behind each step, the tensors that stay
- on a GPU `memory.pickle`, the allocator's history, and `allocator.txt`, its statistics

Of several processes each writes its own. No number of a training depends on being looked at.

Not here: how a trace becomes tables (`memory.timeline`), memory that grows in the long run (`memory.leaks`).
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
from gigamask.profiling import timeline
from gigamask.profiling.sample_memory import in_bytes
from gigamask.profiling.timeline import Spent

WARM_UP = 3
"""Steps that go by first: in them libraries are loaded, memory is claimed, and caches fill."""
MOST_OPERATORS, MOST_TENSORS = 20, 10
MOST_ALLOCATIONS = 100_000
"""Of the GPU's history, the last ones; several KB each, says torch."""
LEVEL = 3
"""Of gzip: 30 % larger than by the highest, in an eighth of the time."""


@dataclass(frozen=True)
class Look:
    """What was seen behind one step: how long it took, and the bytes that are held."""

    step: int
    ms: float
    held: dict[str, int]


class Profile:
    """Looks at some steps of a training behind its first few, or at those there are, and writes what it saw into a folder."""

    def __init__(
        self,
        folder: Path,
        asked: int,
        done: int,
        last: int,
        device: torch.device,
        rank: int | None = None,
    ) -> None:
        """`asked` steps are looked at of those that are left from `done` to `last`; where there are several processes, this is number `rank`."""
        self._folder, self._asked, self._device, self._rank = folder, asked, device, rank
        steps = min(asked, max(1, last - done - WARM_UP))
        self._first = last + 1 - steps if last - done < WARM_UP + steps else done + 1 + WARM_UP
        self._last = self._first + steps - 1
        self._done, self._over = done, False
        self._began_s = time.perf_counter()
        self._looks: list[Look] = []
        self._recorder: torch.profiler.profile | None = None
        self._range: record_function | None = None
        self._tensors: Counter[str] = Counter()

    def look(self, done: int, over: bool) -> Iterator[tuple[str, dict[str, Any]]]:
        """Begins and ends what there is to begin and to end behind update `done`, and yields a line once all is written."""
        if self._over:
            return
        if self._range:
            self._range.__exit__(None, None, None)
            self._range = None
        if done > self._done:
            self._looks.append(
                Look(done, 1e3 * (time.perf_counter() - self._began_s), held(self._device))
            )
            self._done = done
        try:
            if over or done == self._last:
                self._over = True
                told = self._finish()
            else:
                told = None
                if done == self._first - 1:
                    self._start()
        except (
            OSError,
            RuntimeError,
            msgspec.DecodeError,
        ) as error:  # of the disk, of torch's profiler: no reason to end a training
            self._over = True
            told = f"{self._folder}: no profile can be written ({error}); training goes on"
            if self._recorder:
                self._recorder.stop()
                self._recorder = None
        if told and not self._rank:
            yield told, {}
        if self._recorder:
            self._range = record_function(f"{timeline.STEP}{done + 1}")
            self._range.__enter__()
        self._began_s = time.perf_counter()

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
            torch.cuda.memory._record_memory_history(max_entries=MOST_ALLOCATIONS, stacks="python")

    def _finish(self) -> str:
        """Writes what there is to write, and returns what to say of it."""
        recorder, self._recorder = self._recorder, None
        seen = [look for look in self._looks if look.step >= self._first]
        if recorder:
            recorder.stop()
        try:
            if not recorder or not seen:
                return f"--profile {self._asked}: training ended behind step {self._done}, step {self._first} was to be the first; nothing is written"
            files = self._write(recorder, seen)
        finally:
            if self._device.type == "cuda":
                torch.cuda.memory._record_memory_history(enabled=None)
        fewer = "" if len(seen) == self._asked else f", not {self._asked}: training had no more"
        return f"profiled {named(seen)}{fewer}; in {self._folder}: {', '.join(files)}"

    def _write(self, recorder: torch.profiler.profile, seen: Sequence[Look]) -> list[str]:
        """Writes the files, and returns each with what opens it."""
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
            statistics.write_text(torch.cuda.memory_summary(self._device))
            files += [f"{history.name} (for https://pytorch.org/memory_viz)", statistics.name]
        recorder.export_chrome_trace(str(plain))
        lines = plain.read_bytes()
        trace.write_bytes(gzip.compress(lines, LEVEL))
        plain.unlink()
        report.write_text("\n".join(self._told(*timeline.read(lines, len(seen)), seen)) + "\n")
        return (
            files
            if self._rank is None
            else [*files, "and those of the other processes beside them"]
        )

    def _told(
        self, parts: list[Spent], operators: list[Spent], seen: Sequence[Look]
    ) -> Iterator[str]:
        """Yields the lines of the report."""
        on_gpu, steps = self._device.type == "cuda", len(seen)
        process = "" if self._rank is None else f", process {self._rank}"
        yield f"# {self._folder.parent}: {named(seen)}\n"
        whole = sum(look.ms for look in seen) / steps
        before = [
            f"; the step before them, not profiled, took {look.ms:.1f} ms"
            for look in self._looks
            if look.step == self._first - 1
        ]
        yield f"{self._device}{process}, torch {torch.__version__}. A step took {whole:.1f} ms while it was profiled{''.join(before)}.\n"
        yield "No row counts what lies in it and has a row of its own; `a / b` is b in a.\n"
        yield from table("part of a step", parts, on_gpu)
        yield f"\nThe costliest {MOST_OPERATORS} of {len(operators)} operators:\n"
        yield from table("operator", operators, on_gpu, MOST_OPERATORS)
        kinds = list(seen[0].held)
        yield "\nMemory behind each step; what is recorded takes some of it:\n"
        yield from (f"| {' | '.join(['step', 'ms', *kinds])} |", "|---" * (2 + len(kinds)) + "|")
        for look in seen:
            yield f"| {look.step} | {look.ms:.1f} | {' | '.join(in_bytes(look.held[kind]) for kind in kinds)} |"
        now = tensors()
        more = [
            (count, kind)
            for kind, count in (now - self._tensors).most_common(MOST_TENSORS)
            if count >= steps
        ]
        stayed = (
            ". Of each step one or more of these stayed:\n\n| more | kind |\n|---|---|"
            if more
            else ""
        )
        yield f"\nTensors that Python holds: {self._tensors.total()} before the first of these steps, {now.total()} behind the last{stayed}"
        yield from (f"| {count} | {kind} |" for count, kind in more)


def held(device: torch.device) -> dict[str, int]:
    """Returns the bytes that are held now, by what holds them."""
    written = process_memory.allocated_bytes()
    found = {} if written is None else {"this process": written}
    if device.type == "cuda":
        found |= {
            "GPU, allocated": torch.cuda.memory_allocated(device),
            "GPU, the most so far": torch.cuda.max_memory_allocated(device),
        }
    return found


def tensors() -> Counter[str]:
    """Counts the tensors that Python holds, by what they are like."""
    found = (each for each in gc.get_objects() if issubclass(type(each), Tensor))
    return Counter(
        f"{tuple(each.shape)} {str(each.dtype).removeprefix('torch.')} {each.device.type}"
        for each in found
    )


def named(seen: Sequence[Look]) -> str:
    """Returns the steps in words."""
    return f"step {seen[0].step}" if len(seen) == 1 else f"steps {seen[0].step} to {seen[-1].step}"


def table(head: str, rows: Sequence[Spent], on_gpu: bool, most: int | None = None) -> Iterator[str]:
    """Yields rows and their shares of all of these, the GPU's where there is one; with `most` the costliest so many."""
    cost = {each.name: each.gpu_ms if on_gpu else each.ms for each in rows}
    whole = sum(cost.values()) or 1.0
    heads = [head, "ms a step", *(["GPU ms a step"] if on_gpu else []), "share", "times a step"]
    yield from (f"| {' | '.join(heads)} |", "|---" * len(heads) + "|")
    for each in (
        rows
        if most is None
        else sorted(rows, key=lambda each: cost[each.name], reverse=True)[:most]
    ):
        took = [f"{each.ms:.2f}", *([f"{each.gpu_ms:.2f}"] if on_gpu else [])]
        yield f"| {' | '.join([each.name, *took, f'{100 * cost[each.name] / whole:.1f} %', f'{each.times:.4g}'])} |"
