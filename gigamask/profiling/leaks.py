"""Leak detection: warn when memory of this process, the GPU or loader processes keeps growing.

For this process, only bytes in use are counted, without free memory that malloc keeps: the heap
grows and shrinks by 100 MB of free memory, which would hide a leak of that size.
Memory is sampled at a fixed interval of updates. The first `DROPPED` share
of samples, when caches fill, is ignored. The rest is split into `BLOCKS` blocks of equal length,
each represented by its median. A leak is suspected if, over at least `MIN_STEPS` updates and
`MIN_SAMPLES` samples,

- the last block exceeds the first by `MIN_BYTES` and `MIN_SHARE`. Runs without a leak varied by at
  most 15 MB, single samples of a loader process by 20 MB (the plugin `memory`);
- the growth is at least `MIN_BYTES_PER_STEP`: one page per update is 0.7 GB in SAM's 180,000;
- every block exceeds the one before it, unlike after a single jump;
- the later half grew at least `STEADY` times as much as the earlier half. The ratio is 1 for a
  leak, 0.65 for growth with the square root of time, 0.4 for logarithmic growth (a fragmenting
  heap), and ever smaller for a filling cache.

A warning is issued only if all of this still holds after the run has trained for as long again,
since a false alarm is worse than a late one. Memory that grows steadily for hundreds of updates, by
a tenth of the total, and then stops growing would be reported by mistake.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from gigamask.data import process_memory
from gigamask.data.process_memory import in_bytes

BLOCKS = 8
DROPPED = 1 / 8
MIN_STEPS, MIN_SAMPLES = 100, 3 * BLOCKS
MIN_BYTES, MIN_SHARE = 32e6, 0.1
MIN_BYTES_PER_STEP = 4096
STEADY = 0.8
MAX_SAMPLES = 1024
"""At this number of samples, every second one is dropped, and the interval doubles."""


@dataclass(frozen=True)
class Growth:
    """A leak: the first update that shows it, the current bytes, and the bytes added per update."""

    since: int
    held: int
    bytes_per_step: float


def growth(steps: np.ndarray, sizes: np.ndarray) -> Growth | None:
    """Return the growth of memory, or None if it is not a leak.

    Args:
        steps: Updates after which memory was sampled.
        sizes: Bytes in use after them.
    """
    kept = slice(int(len(steps) * DROPPED), None)
    steps, sizes = steps[kept], sizes[kept]
    if len(steps) < MIN_SAMPLES or steps[-1] - steps[0] < MIN_STEPS:
        return None
    at, held = (
        np.array([np.median(block) for block in np.array_split(series, BLOCKS)])
        for series in (steps, sizes)
    )
    grown, half = held[-1] - held[0], BLOCKS // 2
    bytes_per_step = grown / (at[-1] - at[0])
    if (
        grown < max(MIN_BYTES, MIN_SHARE * held[0])
        or bytes_per_step < MIN_BYTES_PER_STEP
        or (np.diff(held) <= 0).any()
    ):
        return None
    if held[-1] - held[half] < STEADY * (held[half - 1] - held[0]):
        return None
    return Growth(int(steps[0]), int(sizes[-1]), float(bytes_per_step))


@dataclass
class MemorySeries:
    """Samples of one memory size, fewer than `MAX_SAMPLES` however long the run is."""

    steps: list[int] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    stride: int = 1
    seen: int = 0
    due: float = 0.0
    suspected: bool = False

    def add(self, step: int, size: int) -> Growth | None:
        """Add a sample, and return the growth once it has been found twice.

        Args:
            step: Number of finished updates.
            size: Bytes in use.
        """
        self.seen += 1
        if self.seen % self.stride:
            return None
        self.steps.append(step)
        self.sizes.append(size)
        if len(self.steps) == MAX_SAMPLES:
            self.steps, self.sizes, self.stride = (
                self.steps[1::2],
                self.sizes[1::2],
                2 * self.stride,
            )
        if step < self.due:
            return None
        found, suspected = growth(np.array(self.steps), np.array(self.sizes)), self.suspected
        self.suspected = found is not None
        self.due = step + (step - self.steps[0]) * (1 if self.suspected else 1 / 8)
        return found if suspected else None


class Leaks:
    """Sample a run's memory every `every` updates, and warn once about each kind of leak."""

    def __init__(self, every: int, last: int, device: torch.device) -> None:
        """Set the interval.

        Args:
            every: Number of updates between samples.
            last: The last update of the training.
            device: The device of the training.
        """
        self._every, self._last, self._device = every, last, device
        self._series: dict[tuple[str, int], MemorySeries] = {}
        self._reported: set[str] = set()

    def observe(self, done: int, over: bool) -> Iterator[tuple[str, dict[str, Any]]]:
        """Sample the memory if it is time.

        Args:
            done: Number of finished updates.
            over: Whether the training has ended.

        Yields:
            A line to print and its metrics for each leak that is found.
        """
        if over or not done or done % self._every:
            return
        for (what, number), held in self._held().items():
            if what in self._reported:
                continue
            series = self._series.setdefault((what, number), MemorySeries())
            if (found := series.add(done, held)) is None:
                continue
            self._reported.add(what)
            noted = {
                "leak": what,
                "bytes": found.held,
                "bytes_per_step": round(found.bytes_per_step),
                "since": found.since,
            }
            yield self._line(what, found, self._last - done), noted

    def _held(self) -> dict[tuple[str, int], int]:
        """Return the current bytes of the processes and the GPU."""
        held = {("this process", 0): process_memory.in_use_bytes(), ("the GPU", 0): None}
        if self._device.type == "cuda":
            held["the GPU", 0] = torch.cuda.memory_allocated(self._device)
        held |= {
            ("a loader process", pid): size
            for pid, size in process_memory.workers_allocated_bytes().items()
        }
        return {what: size for what, size in held.items() if size is not None}

    @staticmethod
    def _line(what: str, found: Growth, left: int) -> str:
        more = (
            f", {in_bytes(round(found.bytes_per_step * left))} more in the {left} remaining steps"
            if left > 0
            else ""
        )
        return (
            f"memory leak: {what} holds {in_bytes(found.held)},"
            f" {in_bytes(round(found.bytes_per_step))} more with every step since step"
            f" {found.since}{more};"
            " --profile 5 lists the tensors that remain (docs/profile.md)"
        )
