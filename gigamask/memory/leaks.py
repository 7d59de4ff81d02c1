"""Memory that grows for as long as a training runs: what this process, the GPU and the loader's processes hold enters, a warning leaves.

Of this process counts what is in use, not what its allocator keeps: a heap grows and shrinks by 100 MB of which nothing is held, and hides a leak of
that size (docs/measurements.md). What grows without bound is told by its shape from what fills up. Looks are taken every so many updates. The first
`DROPPED` of them are left out, when caches fill: a share, so that a slow start is outgrown. The others are cut into `BLOCKS` of one length, and of
each its median counts, which no single look moves. Memory is suspected when, over `LEAST_STEPS` updates and `LEAST_LOOKS` looks or more,

- the last block lies above the first by `LEAST_BYTES` and `LEAST_SHARE`: less has done no harm yet, and a leak gets there. Quiet trainings
  moved by 15 MB at most, single looks at a loader's process by 20 (`memory.loading`);
- that is `LEAST_BYTES_A_STEP` or more: a page with every update is 0.7 GB in SAM's 180,000;
- each block lies above the one before it: behind a jump, however large, they are level;
- the later half grew at least `STEADY` times as much as the earlier: of a leak that is 1, the more exactly the longer it goes on, of a square root of
  time 0.65, of a logarithm, as which a heap fragments, 0.4, of what levels off ever less.

It is a leak when all that holds again once the training has gone on for as long once more; before, nothing is said. A false alarm is worse than a
late one. What fills steadily through hundreds of updates, by a tenth of all memory, and only then stops would be called a leak too early.

Not here: the loader's processes on their own (`memory.loading`), what it is that grows (`memory.profiler`).
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from gigamask.data import process_memory
from gigamask.memory.sample import in_bytes

BLOCKS = 8
DROPPED = 1 / 8
LEAST_STEPS, LEAST_LOOKS = 100, 3 * BLOCKS
LEAST_BYTES, LEAST_SHARE = 32e6, 0.1
LEAST_BYTES_A_STEP = 4096
STEADY = 0.8
MOST_LOOKS = 1024
"""When so many are kept, every second one goes, and from there on of the looks to come."""


@dataclass(frozen=True)
class Growth:
    """A leak: the update that it is seen from, the bytes held now, the bytes that each update adds."""

    since: int
    held: int
    a_step: float


def growth(steps: np.ndarray, sizes: np.ndarray) -> Growth | None:
    """Returns how memory grows that was `sizes` bytes behind the updates `steps`, if it does for good."""
    kept = slice(int(len(steps) * DROPPED), None)
    steps, sizes = steps[kept], sizes[kept]
    if len(steps) < LEAST_LOOKS or steps[-1] - steps[0] < LEAST_STEPS:
        return None
    at, held = (np.array([np.median(block) for block in np.array_split(each, BLOCKS)]) for each in (steps, sizes))
    grown, half = held[-1] - held[0], BLOCKS // 2
    a_step = grown / (at[-1] - at[0])
    if grown < max(LEAST_BYTES, LEAST_SHARE * held[0]) or a_step < LEAST_BYTES_A_STEP or (np.diff(held) <= 0).any():
        return None
    if held[-1] - held[half] < STEADY * (held[half - 1] - held[0]):
        return None
    return Growth(int(steps[0]), int(sizes[-1]), float(a_step))


@dataclass
class Series:
    """The looks at one thing, at most `MOST_LOOKS` of them however long it is looked at."""

    steps: list[int] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    stride: int = 1
    seen: int = 0
    due: float = 0.0
    suspected: bool = False

    def add(self, step: int, size: int) -> Growth | None:
        """Takes a look; returns how memory grows when it is time to ask and it has grown for good before."""
        self.seen += 1
        if self.seen % self.stride:
            return None
        self.steps.append(step)
        self.sizes.append(size)
        if len(self.steps) == MOST_LOOKS:
            self.steps, self.sizes, self.stride = self.steps[1::2], self.sizes[1::2], 2 * self.stride
        if step < self.due:
            return None
        found, suspected = growth(np.array(self.steps), np.array(self.sizes)), self.suspected
        self.suspected = found is not None
        self.due = step + (step - self.steps[0]) * (1 if self.suspected else 1 / 8)
        return found if suspected else None


class Leaks:
    """Looks at a training's memory every so many updates, and warns once of each kind that grows for good."""

    def __init__(self, every: int, last: int, device: torch.device) -> None:
        """`last` is the training's last update."""
        self._every, self._last, self._device = every, last, device
        self._series: dict[tuple[str, int], Series] = {}
        self._told: set[str] = set()

    def look(self, done: int, over: bool) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yields a line, and what is to be noted with it, for each leak that shows behind update `done`."""
        if over or not done or done % self._every:
            return
        for (what, number), held in self._held().items():
            if what in self._told or (found := self._series.setdefault((what, number), Series()).add(done, held)) is None:
                continue
            self._told.add(what)
            noted = {"leak": what, "bytes": found.held, "bytes_a_step": round(found.a_step), "since": found.since}
            yield self._line(what, found, self._last - done), noted

    def _held(self) -> dict[tuple[str, int], int]:
        """Returns the bytes that are held now, by what holds them."""
        held = {("this process", 0): process_memory.in_use_bytes(), ("the GPU", 0): None}
        if self._device.type == "cuda":
            held["the GPU", 0] = torch.cuda.memory_allocated(self._device)
        held |= {("a loader process", pid): size for pid, size in process_memory.workers_allocated_bytes().items()}
        return {what: size for what, size in held.items() if size is not None}

    @staticmethod
    def _line(what: str, found: Growth, left: int) -> str:
        more = f", {in_bytes(round(found.a_step * left))} more in the {left} steps that are left" if left > 0 else ""
        return (
            f"memory leak: {what} holds {in_bytes(found.held)}, {in_bytes(round(found.a_step))} more with every step since step {found.since}{more}; "
            "--profile 5 tells which tensors stay (docs/profile.md)"
        )
