"""Asynchronous checkpoints: the state is copied, then written by a thread, one at a time.

A failed save, as on a full disk or to a run folder that was moved, loses only that checkpoint: the
failure is logged, older checkpoints are kept, and the save is retried. While the main process waits
for an earlier write, the other processes wait for it without a timeout, however slow the disk is.
"""

import errno
import os
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from gigamask.distributed.fsdp import is_sharded
from gigamask.distributed.profile_ranges import profile_range
from gigamask.distributed.world import World
from gigamask.errors import GigamaskError
from gigamask.training import checkpoint
from gigamask.training.config import TrainConfig
from gigamask.training.retention import Retention
from gigamask.training.state import Resumed, TrainState

Result = TypeVar("Result")

RETRY_S = 60.0
"""Seconds after which a failed save is retried, with the state at that time."""


class AsyncCheckpointer:
    """Saves the training state; a context manager that waits for the last save on exit.

    All processes call the same methods; only the main process writes.

    Args:
        config: The configuration.
        log: Logs a failure, as a line and as an event.
        world: The processes of the run; None means only this one.
        resumed: The checkpoint that the run was resumed from.
    """

    def __init__(
        self,
        config: TrainConfig,
        log: Callable[[str, dict[str, Any]], object],
        world: World | None = None,
        resumed: Resumed | None = None,
    ) -> None:
        self._config, self._log, self._world = config, log, world or World()
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="save")
        self._writing: Future[Path] | None = None
        self._step = 0
        self._saved = resumed.folder if resumed else None
        self._retention = Retention(config.keep, self._saved)
        self._unrecorded: list[tuple[Path, float, str]] = []
        self._failed_s: float | None = None
        path = config.out if self._world.is_main else os.curdir
        self._in_folder = partial(_in_folder, os.stat(path), path)

    @property
    def overdue(self) -> bool:
        """Whether the last save failed at least `RETRY_S` seconds ago."""
        if self._writing and self._writing.done():
            self.wait()
        return self._failed_s is not None and time.monotonic() - self._failed_s >= RETRY_S

    @profile_range("save")
    def save(self, state: TrainState) -> None:
        """Wait for the previous save, copy the state and start writing it; a collective operation.

        Args:
            state: The state.
        """
        self.wait()
        self._record_scores()
        self._world.barrier()
        self._step, self._saved, snapshot = state.step, None, self._snapshot(state)
        if snapshot:
            self._writing = self._executor.submit(
                self._in_folder, checkpoint.write, snapshot, self._config, self._retention
            )
        self._world.barrier()

    def record_score(self, score: float, scored_by: str) -> None:
        """Record the score of the state saved last, once it is written.

        If that fails, as on a full disk, it is tried again before the next save.

        Args:
            score: Higher is better.
            scored_by: What was evaluated; only scores of the same are compared.
        """
        self.wait()
        if self._saved:
            self._unrecorded.append((self._saved, score, scored_by))
            self._record_scores()

    def _record_scores(self) -> None:
        """Record the scores that are not recorded yet, of checkpoints that are still there."""
        for score in tuple(self._unrecorded):
            recorded = self._try(partial(self._record, score), "score not recorded")
            if recorded or not score[0].exists():
                self._unrecorded.remove(score)

    def _record(self, score: tuple[Path, float, str]) -> bool:
        self._in_folder(checkpoint.record_score, *score, self._config.keep, self._retention)
        return True

    def finish(self, state: TrainState) -> None:
        """Make sure that the final state is saved; a collective operation.

        Args:
            state: The state.

        Raises:
            OSError: Writing it failed twice.
        """
        self.wait()
        self._record_scores()
        missing = self._world.is_main and not (self._saved and self._step == state.step)
        if any(self._world.gather(missing)) and (snapshot := self._snapshot(state)):
            self._in_folder(checkpoint.write, snapshot, self._config, self._retention)

    def wait(self) -> None:
        """Wait until nothing is being written."""
        writing, self._writing = self._writing, None
        if writing:
            self._saved = self._try(
                writing.result, f"not saved, training continues and retries in {RETRY_S:.0f} s"
            )
            self._failed_s = None if self._saved else time.monotonic()

    def _snapshot(self, state: TrainState) -> checkpoint.Snapshot | None:
        """Return a copy of the state in the main process; others only contribute their shards."""
        if self._world.is_main:
            return checkpoint.Snapshot.from_state(state)
        if is_sharded(state.model):
            checkpoint.contribute_shards(state)
        return None

    def _try(self, function: Callable[[], Result], failure: str) -> Result | None:
        """Call a function; log why it failed, and return None."""
        try:
            return function()
        except (OSError, GigamaskError) as error:
            self._log(
                f"step {self._step} {failure}: {error}",
                {"step": self._step, "save_failed": str(error)},
            )
            return None

    def __enter__(self) -> "AsyncCheckpointer":
        return self

    def __exit__(self, *_: object) -> None:
        self.wait()
        self._executor.shutdown()


def _in_folder(
    found: os.stat_result, out: str, function: Callable[..., Result], *given: Any
) -> Result:
    """Call a function, unless the run folder is not the one found at the start.

    Args:
        found: The run folder at the start.
        out: Its path.
        function: Writes to it.
        *given: Its arguments.

    Raises:
        OSError: Another folder, such as that of another run, or none is there.
    """
    if not os.path.samestat(found, os.stat(out)):
        raise OSError(errno.ENOENT, "was replaced while it was trained", out)
    return function(*given)
