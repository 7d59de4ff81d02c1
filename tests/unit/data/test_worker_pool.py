import multiprocessing
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import cv2
import psutil
import pytest
import torch

from gigamask.data import worker_pool
from gigamask.data.worker_pool import AHEAD, ordered_map, parallel_map, part_of
from gigamask.errors import GigamaskError
from tests.errors import error_line


def double(number: int) -> int:
    return 2 * number


def fail_at_two(number: int) -> int:
    if number == 2:
        raise GigamaskError("two.tar: is broken")
    return number


def die(number: int) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2])
def test_results_are_in_the_order_of_the_items_and_progress_counts(workers):
    seen = []
    assert parallel_map(
        double, range(5), workers, lambda done, total: seen.append((done, total))
    ) == [0, 2, 4, 6, 8]
    assert seen == [(done, 5) for done in range(1, 6)]
    assert parallel_map(double, [], workers) == []


def test_results_of_an_earlier_run_of_a_part_are_not_joined(tmp_path):
    joining = part_of(f"join/1@{tmp_path}")
    with pytest.raises(SystemExit):
        parallel_map(double, [1], part_of(f"0/1@{tmp_path}"))
    assert parallel_map(double, [1], joining, kind=int) == [2]
    with error_line("part-0.json: has results of another command"):
        parallel_map(double, [1], joining, kind=dict)
    part_of(f"0/1@{tmp_path}")
    with error_line("part-0.json: part 0 has not ended; run it first$"):
        parallel_map(double, [1], joining)


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2])
def test_ordered_results_are_few_items_ahead(forked_workers, workers):
    taken = []
    items = (taken.append(number) or number for number in range(40))
    results = ordered_map(double, items, workers)
    for number in range(40):
        assert next(results) == 2 * number
        assert len(taken) <= number + 1 + AHEAD * workers
    assert next(results, None) is None
    with error_line(r"^two.tar: is broken$"):
        list(ordered_map(fail_at_two, range(4), workers))


@pytest.mark.long
@pytest.mark.parametrize("workers", [1, 2])
def test_an_exception_in_a_worker_is_raised_in_the_parent(workers):
    with error_line(r"^two.tar: is broken$"):
        parallel_map(fail_at_two, range(4), workers)


@pytest.mark.slow
def test_a_dead_worker_is_reported():
    with error_line(r"one of 2 worker processes died.*--workers"):
        parallel_map(die, range(3), 2)


def threads(_: int) -> tuple[int, int]:
    return torch.get_num_threads(), cv2.getNumThreads()


@pytest.mark.long
def test_workers_use_one_thread():
    assert parallel_map(threads, range(2), 2) == [(1, 1)] * 2


WITHOUT_TORCH = """
import sys
from gigamask.data.worker_pool import parallel_map

def has_torch(_):
    return "torch" in sys.modules

if __name__ == "__main__":
    assert parallel_map(has_torch, range(2), 2) == [False, False]
    import torch
    assert parallel_map(has_torch, range(2), 2) == [True, True]
"""


@pytest.mark.long
def test_workers_import_torch_only_where_their_parent_has_it(tmp_path):
    """It takes over a second of each worker of `index`, `verify` and `convert`."""
    (tmp_path / "work.py").write_text(WITHOUT_TORCH)
    subprocess.run([sys.executable, tmp_path / "work.py"], check=True)


def wait(path: str) -> None:
    Path(path, str(os.getpid())).touch()
    time.sleep(60)


def start(path: str) -> None:
    parallel_map(wait, [path, path], 2)


@pytest.mark.long
def test_workers_exit_when_the_parent_is_killed(tmp_path):
    parent = multiprocessing.get_context("spawn").Process(target=start, args=(str(tmp_path),))
    parent.start()
    while parent.is_alive() and len(list(tmp_path.iterdir())) < 2:
        time.sleep(0.02)
    parent.kill()
    parent.join()
    left = {int(path.name) for path in tmp_path.iterdir()}
    deadline = time.monotonic() + 60
    while left and time.monotonic() < deadline:
        left = {
            pid
            for pid in left
            if psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
        }
        time.sleep(0.02)
    assert not left


INTERRUPTED = """
import signal, sys, time
from pathlib import Path
from gigamask.data import worker_pool
from gigamask.data.worker_pool import AHEAD, ordered_map, parallel_map, part_of

def work(path):
    try:
        Path(path).touch()
        time.sleep(600)
    finally:
        time.sleep(0.1)  # the pool's own signal arrives meanwhile
        Path(path).unlink(missing_ok=True)

if __name__ == "__main__":
    for number in (signal.SIGTERM, signal.SIGUSR2):
        signal.signal(number, signal.default_int_handler)
    try:
        parallel_map(work, sys.argv[1:], 2)
    except KeyboardInterrupt:
        sys.exit("interrupted")
"""


SLOW_IMPORT = """
import time

time.sleep(0.3)
setNumThreads = print
"""
"""In place of OpenCV, which workers import for this function alone."""


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR2])
@pytest.mark.parametrize("started", [0, 2])
def test_a_signal_to_all_processes_ends_them_with_one_message(tmp_path, number, started):
    """A terminal sends SIGINT to every process, also to those that are still importing."""
    (tmp_path / "work.py").write_text(INTERRUPTED)
    (tmp_path / "cv2.py").write_text(SLOW_IMPORT)
    (tmp_path / "temporary").mkdir()
    paths = [tmp_path / "temporary" / str(item) for item in range(4)]
    process = subprocess.Popen(
        [sys.executable, tmp_path / "work.py", *paths],
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env=os.environ,
    )
    try:
        # Two workers, and what tracks their resources.
        while process.poll() is None and len(psutil.Process(process.pid).children()) < 3:
            time.sleep(0.01)
        while process.poll() is None and sum(path.exists() for path in paths) < started:
            time.sleep(0.01)
        os.killpg(process.pid, number)
        assert process.communicate(timeout=60)[1] == "interrupted\n"
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 1
    assert not list((tmp_path / "temporary").iterdir())


@pytest.mark.parametrize("run", [parallel_map, lambda *words: list(ordered_map(*words))])
def test_workers_are_at_least_one_and_no_more_than_the_machine_holds(run, monkeypatch):
    monkeypatch.setattr(worker_pool, "ProcessPoolExecutor", None)
    with error_line("--workers 9999: more than four for each of the .* at most "):
        run(double, range(10_000), 9999)
    with error_line(r"--workers must be at least 1 .got 0"):
        parallel_map(double, range(3), 0)
