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
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)
STOP_INTERVAL_S = 1.0
"""Seconds between two requests to stop."""
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
        resource_tracker.ensure_running()  # starting it later would unblock the signals
        with stop_signals_blocked():
            futures = {pool.submit(_run_item, function, item): i for i, item in enumerate(items)}
        for future in as_completed(futures):
            collect(futures[future], future.result())
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
    """Block SIGINT and SIGTERM in this process and in workers that it starts meanwhile.

    Terminals and batch systems signal all processes. Workers that are still starting must not die
    of it: this process stops them.
    """
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


def _initialize_worker() -> None:
    """Use one torch and OpenCV thread, heed SIGTERM, and exit when the parent process dies."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
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
