"""Map a function over many items, such as tars, with worker processes or the parts of a command.

The processes that load batches are torch's (`data.loader`).
"""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import signal
import sys
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import msgspec

from gigamask import files
from gigamask.errors import GigamaskError, check_processes, check_range
from gigamask.signals import STOP_SIGNALS

Item = TypeVar("Item")
Result = TypeVar("Result")
STOP_INTERVAL_S = 1.0
"""Seconds between two requests to stop."""
AHEAD = 4
"""Items per worker that are begun before the first is needed."""
Progress = Callable[[float, int], object]
"""Called as `progress(done, total)` after each item, or part of one."""


@dataclass(frozen=True)
class Part:
    """A command's share of the items, or the command that joins the results of all parts.

    Each part writes its results to a file and exits; a file is complete or does not exist, and one
    of an earlier run is removed when its part begins.

    Attributes:
        number: Number of this part; None joins all parts.
        count: Number of parts.
        folder: Folder for the results.
        workers: Number of processes of this part.
    """

    number: int | None
    count: int
    folder: Path
    workers: int = 1

    def share(self, items: Sequence[Item]) -> Sequence[Item]:
        """Return the items of this part, contiguous and in order; all of them to join the parts."""
        if self.number is None:
            return items
        ends = [len(items) * end // self.count for end in (self.number, self.number + 1)]
        return items[ends[0] : ends[1]]

    def results_of(self, number: int | None) -> Path:
        """Return the file of the results of a part."""
        return self.folder / f"part-{number}.json"

    def finish(self, total: int, results: Sequence[object]) -> NoReturn:
        """Write this part's results and exit.

        Args:
            total: Number of items of all parts.
            results: Its results: dataclasses, msgspec structs, or what JSON holds.
        """
        content = {"total": total, "results": msgspec.to_builtins(results, str_keys=True)}
        # Unlike msgspec's, this encoder keeps numbers that are not finite, and names that are not
        # valid text.
        path = self.results_of(self.number)
        files.write_text(path, json.dumps(content))
        join = f"--part join/{self.count}@{self.folder}"
        print(f"part {self.number} of {self.count} is done, in {path}; join all parts with {join}")
        raise SystemExit(0)

    def join(self, total: int, kind: Any) -> list[Any]:
        """Return the results of all parts, in order.

        Args:
            total: Number of items.
            kind: Type of a result.

        Raises:
            GigamaskError: A part has not ended, found another number of items, or has results of
                another command.
        """
        results: list[Any] = []
        for number in range(self.count):
            path = self.results_of(number)
            if not path.exists():
                raise GigamaskError(f"{path}: part {number} has not ended; run it first")
            content = json.loads(path.read_bytes())
            if content["total"] != total:
                raise GigamaskError(
                    f"{path}: part {number} found {content['total']} items, but now there are "
                    f"{total}: the data changed meanwhile; run the same command again"
                )
            try:
                results += msgspec.convert(content["results"], list[kind], str_keys=True)
            except msgspec.ValidationError:
                raise GigamaskError(
                    f"{path}: has results of another command; give --part a folder of its own"
                ) from None
        return results


Workers = int | Part
"""Number of processes, or a part of a command, which has its own number of processes."""


def workers_of(part: str, workers: int) -> Workers:
    """Return what `--part` and `--workers` of a command mean; see `part_of`.

    Args:
        part: The value of `--part`.
        workers: Number of processes.
    """
    return part_of(part, workers) or workers


def part_of(part: str, workers: int = 1) -> Part | None:
    """Return what `--part` of a command means.

    Args:
        part: `NUMBER/COUNT@FOLDER`, `join/COUNT@FOLDER`, or nothing.
        workers: Number of processes.

    Raises:
        GigamaskError: `part` is something else.
    """
    if not part:
        return None
    words = re.fullmatch(r"(\d{1,9}|join)/(\d{1,9})@(.+)", part)
    if not words or (words[1] != "join" and int(words[1]) >= int(words[2])):
        raise GigamaskError(
            f"--part must be NUMBER/COUNT@FOLDER with numbers from 0, or join/COUNT@FOLDER "
            f"(got {part!r})"
        )
    folder = Path(words[3])
    folder.mkdir(parents=True, exist_ok=True)
    found = Part(None if words[1] == "join" else int(words[1]), int(words[2]), folder, workers)
    found.results_of(found.number).unlink(missing_ok=True)
    return found


def part_in(workers: Workers) -> Part | None:
    """Return the part of a command that `workers` is; None for a number of processes."""
    return workers if isinstance(workers, Part) else None


def is_part(workers: Workers) -> bool:
    """Return whether other processes write to the same output, each its share of the items."""
    return isinstance(workers, Part) and workers.number is not None


def parallel_map(
    function: Callable[[Item], Result],
    items: Sequence[Item],
    workers: Workers = 1,
    progress: Progress | None = None,
    kind: Any = None,
) -> list[Result]:
    """Apply a function to every item, in worker processes if there is more than one worker.

    Args:
        function: The function; with more than one worker, it and its results must be picklable.
        items: The function's arguments, one per call; the same in all parts of a command.
        workers: Number of processes; 1 runs everything in this process. A part of a command runs
            its share of the items and exits; the command that joins them reads the results.
        progress: Called as `progress(done, total)` after each item.
        kind: Type of the results, for parts.

    Returns:
        The results in the order of the items.

    Raises:
        GigamaskError: `workers` is less than 1 or too many, or a worker process died.
        Exception: The first exception raised by `function`; no further items are started.
        SystemExit: This was one part of a command, and its results are written.
    """
    if isinstance(workers, Part):
        if workers.number is None:
            return workers.join(len(items), kind)
        share = workers.share(items)
        workers.finish(len(items), parallel_map(function, share, workers.workers, progress))
    check_range("--workers", workers, 1)
    results: dict[int, Result] = {}

    def collect(position: int, result: Result) -> None:
        results[position] = result
        if progress is not None:
            progress(len(results), len(items))

    if min(workers, len(items)) <= 1:
        _keep_freed_memory()
        for position, item in enumerate(items):
            collect(position, function(item))
    else:
        _run_in_processes(function, items, min(workers, len(items)), collect)
    return [results[position] for position in range(len(items))]


def _run_in_processes(
    function: Callable[[Item], Result],
    items: Sequence[Item],
    workers: int,
    collect: Callable[[int, Result], None],
) -> None:
    """Call `collect(position, result)` for every item, in order of completion."""
    with _pool(workers) as pool:
        with stop_signals_blocked():
            futures = {pool.submit(_run_item, function, item): i for i, item in enumerate(items)}
        for future in as_completed(futures):
            collect(futures[future], future.result())


def ordered_map(
    function: Callable[[Item], Result], items: Iterable[Item], workers: int
) -> Generator[Result, None, None]:
    """Yield a function of every item in order, held in memory for few items at a time.

    Args:
        function: The function; with more than one worker, it and its results must be picklable.
        items: The function's arguments, one per call.
        workers: Number of processes; 1 runs everything in this process.

    Raises:
        GigamaskError: There are too many workers, or one died.
    """
    if workers <= 1:
        yield from map(function, items)
        return
    with _pool(workers) as pool:
        futures: deque[Future[Result]] = deque()
        for item in items:
            with stop_signals_blocked():
                futures.append(pool.submit(_run_item, function, item))
            if len(futures) > AHEAD * workers:
                yield futures.popleft().result()
        while futures:
            yield futures.popleft().result()


@contextmanager
def _pool(workers: int) -> Iterator[ProcessPoolExecutor]:
    """Yield worker processes, which end with the context."""
    check_processes("--workers", workers)
    # Forked processes would inherit the locks and threads of torch and of remote file systems.
    context = multiprocessing.get_context("spawn")
    with stop_signals_blocked():  # before the pool starts it, which would die of them
        resource_tracker.ensure_running()  # lets SIGINT and SIGTERM through again
    pool = ProcessPoolExecutor(workers, context, _initialize_worker, ("torch" in sys.modules,))
    other_processes = set(multiprocessing.active_children())
    try:
        yield pool
    except KeyboardInterrupt:  # do not wait for items in progress, which may take long
        while own := set(multiprocessing.active_children()) - other_processes:
            for process in own:
                process.terminate()
            own.pop().join(STOP_INTERVAL_S)  # one that trains saves, and may start another item
        raise
    except BrokenProcessPool as error:
        raise GigamaskError(
            f"one of {workers} worker processes died, often because memory ran out; "
            "run the same command again with fewer --workers"
        ) from error
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


@contextmanager
def stop_signals_blocked() -> Iterator[None]:
    """Block the stop signals in this process and in workers that it starts meanwhile.

    Terminals and batch systems signal all processes. Workers that are still starting must not die
    of it: this process stops them.
    """
    if not hasattr(signal, "pthread_sigmask"):  # Windows
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)  # delivers a signal that is pending


def _run_item(function: Callable[[Item], Result], item: Item) -> Result:
    """Call the function in a worker; on SIGTERM, it removes its temporary files first."""
    signal.signal(signal.SIGTERM, _interrupt_once)
    try:
        return function(item)
    except KeyboardInterrupt:
        os._exit(1)
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _interrupt_once(number: int, _frame: object) -> None:
    """Raise KeyboardInterrupt, and ignore the signal while files are removed.

    Args:
        number: The signal, which a batch system and this pool may both send.
    """
    signal.signal(number, signal.SIG_IGN)
    raise KeyboardInterrupt


@cache
def _keep_freed_memory() -> None:
    """Let glibc keep 16 MB of freed memory for the next arrays, as a freed block of 8 MB does.

    Otherwise it returns each freed array of 128 KB to the system and gets pages of zeros for the
    next one, which takes as long as the work on arrays of the size of a photograph's masks.
    """
    bytes(8_000_000)


def _initialize_worker(use_torch: bool) -> None:
    """Use one OpenCV thread, heed SIGTERM, and exit when the parent process dies.

    Args:
        use_torch: Whether to import torch, and use one of its threads too.
    """
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    import cv2

    if use_torch:
        import torch

        torch.set_num_threads(1)
    cv2.setNumThreads(1)
    _keep_freed_memory()
    parent = multiprocessing.parent_process()

    def exit_with_parent() -> None:
        if parent is not None:
            parent.join()
            os._exit(1)

    threading.Thread(target=exit_with_parent, daemon=True).start()
