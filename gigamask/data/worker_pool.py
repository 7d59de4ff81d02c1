"""Map a function over many items, such as tars, with worker processes.

The processes that load batches are torch's (`data.loader`).
"""

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from multiprocessing import resource_tracker
from typing import TypeVar

from gigamask.errors import GigamaskError

Item = TypeVar("Item")
Result = TypeVar("Result")
Progress = Callable[[int, int], object]
"""Called as `progress(done, total)` after each item."""


def parallel_map(
    function: Callable[[Item], Result],
    items: Sequence[Item],
    workers: int = 1,
    progress: Progress | None = None,
) -> list[Result]:
    """Apply a function to every item, in worker processes if there is more than one worker.

    Args:
        function: The function; with more than one worker, it and its results must be picklable.
        items: The function's arguments, one per call.
        workers: Number of processes; 1 runs everything in this process.
        progress: Called as `progress(done, total)` after each item.

    Returns:
        The results in the order of the items.

    Raises:
        GigamaskError: `workers` is less than 1, or a worker process died.
        Exception: The first exception raised by `function`; no further items are started.
    """
    if workers < 1:
        raise GigamaskError(f"workers must be at least 1, got {workers}")
    results: dict[int, Result] = {}

    def collect(position: int, result: Result) -> None:
        results[position] = result
        if progress is not None:
            progress(len(results), len(items))

    if min(workers, len(items)) <= 1:
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
    # Forked processes would inherit the locks and threads of torch and of remote file systems.
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(workers, mp_context=context, initializer=_initialize_worker)
    other_processes = set(multiprocessing.active_children())
    try:
        with _sigint_blocked():
            futures = {pool.submit(function, item): i for i, item in enumerate(items)}
        for future in as_completed(futures):
            collect(futures[future], future.result())
    except KeyboardInterrupt:  # do not wait for items in progress, which may take long
        for process in set(multiprocessing.active_children()) - other_processes:
            process.terminate()
        raise
    except BrokenProcessPool as error:
        raise GigamaskError(
            f"one of {workers} worker processes died, often because memory ran out; "
            "run the same command again with fewer --workers"
        ) from error
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


@contextmanager
def _sigint_blocked() -> Iterator[None]:
    """Block SIGINT while workers start: Ctrl-C must reach only the parent, which stops them."""
    resource_tracker.ensure_running()  # starting it later would unblock SIGINT
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)  # delivers a SIGINT that is pending


def _initialize_worker() -> None:
    """Use one torch and OpenCV thread, and exit when the parent process dies."""
    import cv2
    import torch

    torch.set_num_threads(1)
    cv2.setNumThreads(1)
    parent = multiprocessing.parent_process()

    def exit_with_parent() -> None:
        if parent is not None:
            parent.join()
            os._exit(1)

    threading.Thread(target=exit_with_parent, daemon=True).start()
