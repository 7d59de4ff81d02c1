"""Leak detection: warn when the memory of this process, of the GPU or of loader processes keeps growing.

For this process the bytes in use count, without what malloc keeps: a heap grows and shrinks by
100 MB that nothing holds, which would hide a leak of that size (docs/measurements.md). Memory is
sampled at a fixed interval of updates. The first `DROPPED` share of samples, when caches fill, is
ignored. The rest is cut into `BLOCKS` of equal length, and the median of each is used. A leak is
suspected when, over at least `LEAST_STEPS` updates and `LEAST_LOOKS` samples,

- the last block exceeds the first by `LEAST_BYTES` and `LEAST_SHARE`. Quiet trainings moved by at
  most 15 MB, single samples of a loader's process by 20 (`memory.loading`);
- the growth is at least `LEAST_BYTES_A_STEP`: a page with every update is 0.7 GB in SAM's 180,000;
- every block exceeds the one before it, which a single jump does not;
- the later half grew at least `STEADY` times as much as the earlier half. A leak has a ratio of 1,
  a square root of time 0.65, a logarithm (a fragmenting heap) 0.4, a filling cache less and less.

The warning comes when all of this holds again after the training has run for as long once more. A
false alarm is worse than a late one. Memory that grows steadily for hundreds of updates, by a tenth
of the total, and then stops, would be reported wrongly.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from gigamask.data import process_memory
from gigamask.profiling.sample_memory import in_bytes

BLOCKS = 8
DROPPED = 1 / 8
LEAST_STEPS, LEAST_LOOKS = 100, 3 * BLOCKS
LEAST_BYTES, LEAST_SHARE = 32e6, 0.1
LEAST_BYTES_A_STEP = 4096
STEADY = 0.8
MOST_LOOKS = 1024
"""When this many samples are kept, every second one is dropped, then and from there on."""


@dataclass(frozen=True)
class Growth:
    """A leak: the first update it is visible in, the current bytes, and the bytes added per update."""

    since: int
    held: int
    a_step: float


def growth(steps: np.ndarray, sizes: np.ndarray) -> Growth | None:
    """Return the growth of `sizes` bytes sampled after the updates `steps`, or None if it is no leak."""
    kept = slice(int(len(steps) * DROPPED), None)
    steps, sizes = steps[kept], sizes[kept]
    if len(steps) < LEAST_LOOKS or steps[-1] - steps[0] < LEAST_STEPS:
        return None
    at, held = (
        np.array([np.median(block) for block in np.array_split(each, BLOCKS)])
        for each in (steps, sizes)
    )
    grown, half = held[-1] - held[0], BLOCKS // 2
    a_step = grown / (at[-1] - at[0])
    if (
        grown < max(LEAST_BYTES, LEAST_SHARE * held[0])
        or a_step < LEAST_BYTES_A_STEP
        or (np.diff(held) <= 0).any()
    ):
        return None
    if held[-1] - held[half] < STEADY * (held[half - 1] - held[0]):
        return None
    return Growth(int(steps[0]), int(sizes[-1]), float(a_step))


@dataclass
class Series:
    """Samples of one thing's memory, at most `MOST_LOOKS` however long the training is."""

    steps: list[int] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    stride: int = 1
    seen: int = 0
    due: float = 0.0
    suspected: bool = False

    def add(self, step: int, size: int) -> Growth | None:
        """Add a sample; return the growth when it has been found twice."""
        self.seen += 1
        if self.seen % self.stride:
            return None
        self.steps.append(step)
        self.sizes.append(size)
        if len(self.steps) == MOST_LOOKS:
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
    """Sample a training's memory every `every` updates, and warn once of each kind of leak."""

    def __init__(self, every: int, last: int, device: torch.device) -> None:
        """Set the interval, the training's last update and its device."""
        self._every, self._last, self._device = every, last, device
        self._series: dict[tuple[str, int], Series] = {}
        self._told: set[str] = set()

    def look(self, done: int, over: bool) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield a line and its metrics for each leak found after update `done`."""
        if over or not done or done % self._every:
            return
        for (what, number), held in self._held().items():
            if (
                what in self._told
                or (found := self._series.setdefault((what, number), Series()).add(done, held))
                is None
            ):
                continue
            self._told.add(what)
            noted = {
                "leak": what,
                "bytes": found.held,
                "bytes_a_step": round(found.a_step),
                "since": found.since,
            }
            yield self._line(what, found, self._last - done), noted

    def _held(self) -> dict[tuple[str, int], int]:
        """Return the current bytes by holder."""
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
            f", {in_bytes(round(found.a_step * left))} more in the {left} steps that are left"
            if left > 0
            else ""
        )
        return (
            f"memory leak: {what} holds {in_bytes(found.held)}, {in_bytes(round(found.a_step))} more with every step since step {found.since}{more}; "
            "--profile 5 tells which tensors stay (docs/profile.md)"
        )
