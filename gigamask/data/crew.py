"""Many processes over many items, such as tars: a function and its arguments enter, results in the items' order leave.

Not here: the processes that load batches (`data.loader`).
"""

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing, contextmanager
from multiprocessing import resource_tracker
from typing import TypeVar

from gigamask.faults import Fault

Item = TypeVar("Item")
Result = TypeVar("Result")
Progress = Callable[[int, int], object]
"""Called as `progress(done, total)` after each item."""


def each(function: Callable[[Item], Result], items: Sequence[Item], workers: int = 1, progress: Progress | None = None) -> list[Result]:
    """Returns `function(item)` of every item; with more than one worker, processes share the work.

    The function and its results must be picklable then. The first error that a process raises ends all of them; raises Fault when a process dies.
    """
    if workers < 1:
        raise Fault(f"{workers} workers: at least one has to do the work; give a number from 1 on")
    results: dict[int, Result] = {}
    with closing(_finished(function, items, min(workers, len(items)))) as finished:
        for number, result in finished:
            results[number] = result
            if progress is not None:
                progress(len(results), len(items))
    return [results[number] for number in range(len(items))]


def _finished(function: Callable[[Item], Result], items: Sequence[Item], workers: int) -> Generator[tuple[int, Result], None, None]:
    """Yields each item's number and result as they come."""
    if workers <= 1:
        yield from enumerate(map(function, items))
        return
    # Forked processes would inherit the locks and threads of torch and of remote file systems.
    pool = ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn"), initializer=_begin)
    others = set(multiprocessing.active_children())
    try:
        with _deaf_to_interrupts():
            futures = {pool.submit(function, item): number for number, item in enumerate(items)}
        for future in as_completed(futures):
            yield futures[future], future.result()
    except (KeyboardInterrupt, GeneratorExit):  # the item that each is at may take long
        for process in set(multiprocessing.active_children()) - others:
            process.terminate()
        raise
    except BrokenProcessPool as error:
        raise Fault(f"one of {workers} worker processes died; often memory ran out: run the same command again with fewer --workers") from error
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


@contextmanager
def _deaf_to_interrupts() -> Iterator[None]:
    """Lets processes that are started meanwhile never hear of Ctrl-C, which a terminal sends to all: who started them ends them, and tells of it."""
    resource_tracker.ensure_running()  # which would unblock it when it is started first
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)  # one that has come meanwhile is heard now


def _begin() -> None:
    """Makes this process a good member: it computes with one thread, and ends when the process that started it is gone, however that ended."""
    import torch

    torch.set_num_threads(1)
    parent = multiprocessing.parent_process()

    def follow() -> None:
        if parent is not None:
            parent.join()
            os._exit(1)

    threading.Thread(target=follow, daemon=True).start()
