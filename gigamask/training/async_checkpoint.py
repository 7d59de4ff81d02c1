"""Checkpoints behind the training's back: the state is copied at once and written by a thread, one at a time.

A save that fails, of a full disk or a network folder that is away, costs the training nothing but that checkpoint: it is told, the old ones stay, and
it is tried again. Whoever leaves the context waits for what is being written.

Not here: what is written (`train.checkpoint`), when (`train.loop`).
"""

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

from gigamask.distributed.fsdp import is_sharded
from gigamask.distributed.profile_ranges import profile_range
from gigamask.distributed.world import World
from gigamask.training import checkpoint
from gigamask.training.config import TrainConfig
from gigamask.training.state import TrainState

Done = TypeVar("Done")

RETRY_S = 60.0
"""A save that failed is tried again with the state that there is so many seconds later."""


class AsyncCheckpointer:
    """Saves a run's state; a context manager."""

    def __init__(
        self,
        run: TrainConfig,
        tell: Callable[[str, dict[str, Any]], object],
        world: World | None = None,
    ) -> None:
        """`tell` is told what fails, as a line and as data. All processes ask for the same, the first one writes."""
        self._run, self._tell, self._world = run, tell, world or World()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="save")
        self._writing: Future[Path] | None = None
        self._step = 0
        self._saved: Path | None = None
        self._failed_s: float | None = None

    @property
    def overdue(self) -> bool:
        """Whether the last save failed long enough ago to try again."""
        if self._writing and self._writing.done():
            self.wait()
        return self._failed_s is not None and time.monotonic() - self._failed_s >= RETRY_S

    @profile_range("save")
    def save(self, state: TrainState) -> None:
        """Copies the state and begins to write it, when what was being written is done."""
        self.wait()
        self._step, self._saved, snapshot = state.step, None, self._snapshot(state)
        if snapshot:
            self._writing = self._thread.submit(checkpoint.write, snapshot, self._run)

    def record_score(self, score: float, scored_by: str) -> None:
        """Notes the score of the state that was saved last; see `checkpoint.rate`."""
        self.wait()
        if saved := self._saved:
            self._attempt(
                lambda: checkpoint.record_score(saved, score, scored_by, self._run.keep),
                "is not rated",
            )

    def finish(self, state: TrainState) -> None:
        """Leaves when this state, the last there will be, is saved; raises the `OSError` that hinders it the second time."""
        self.wait()
        missing = self._world.is_main and not (self._saved and self._step == state.step)
        if any(self._world.gather(missing)) and (snapshot := self._snapshot(state)):
            checkpoint.write(snapshot, self._run)

    def wait(self) -> None:
        """Waits until nothing is being written."""
        writing, self._writing = self._writing, None
        if writing:
            self._saved = self._attempt(
                writing.result, f"is not saved, training goes on and tries again in {RETRY_S:.0f} s"
            )
            self._failed_s = None if self._saved else time.monotonic()

    def _snapshot(self, state: TrainState) -> checkpoint.Snapshot | None:
        """Returns a copy of the state where it is written; the others may have parts of it to give."""
        copy = (
            checkpoint.Snapshot.of(state)
            if self._world.is_main or is_sharded(state.model)
            else None
        )
        return copy if self._world.is_main else None

    def _attempt(self, act: Callable[[], Done], otherwise: str) -> Done | None:
        try:
            return act()
        except OSError as error:
            self._tell(
                f"step {self._step} {otherwise}: {error}",
                {"step": self._step, "unsaved": str(error)},
            )
            return None

    def __enter__(self) -> "AsyncCheckpointer":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.wait()
        self._thread.shutdown()
