import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from gigamask.data.crew import each
from gigamask.faults import Fault


def double(number: int) -> int:
    return 2 * number


def fail_at_two(number: int) -> int:
    if number == 2:
        raise Fault("two.tar: is broken")
    return number


def die(number: int) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("workers", [1, 2])
def test_results_come_in_the_items_order_and_progress_counts(workers):
    seen = []
    assert each(double, range(5), workers, lambda done, total: seen.append((done, total))) == [0, 2, 4, 6, 8]
    assert seen == [(done, 5) for done in range(1, 6)]
    assert each(double, [], workers) == []


@pytest.mark.parametrize("workers", [1, 2])
def test_an_error_ends_the_work(workers):
    with pytest.raises(Fault, match=r"^two.tar: is broken$"):
        each(fail_at_two, range(4), workers)


def test_a_dead_process_is_told():
    with pytest.raises(Fault, match=r"one of 2 worker processes died; often memory ran out: run the same command again with fewer --workers"):
        each(die, range(3), 2)


def wait(path: str) -> None:
    Path(path, str(os.getpid())).touch()
    time.sleep(60)


def start(path: str) -> None:
    each(wait, [path, path], 2)


def test_nobody_outlives_a_parent_that_was_killed(tmp_path):
    parent = multiprocessing.get_context("spawn").Process(target=start, args=(str(tmp_path),))
    parent.start()
    while len(list(tmp_path.iterdir())) < 2:
        time.sleep(0.02)
    parent.kill()
    parent.join()
    left = {int(path.name) for path in tmp_path.iterdir()}
    deadline = time.monotonic() + 10
    while left and time.monotonic() < deadline:
        left = {pid for pid in left if psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE}
        time.sleep(0.02)
    assert not left


INTERRUPTED = """
import sys, time
from gigamask.data.crew import each
if __name__ == "__main__":
    try:
        each(time.sleep, [60, 60], 2)
    except KeyboardInterrupt:
        sys.exit("interrupted")
"""


@pytest.mark.parametrize("wait_s", [0.0, 0.3, 4.0])
def test_an_interrupt_ends_all_at_once_and_only_one_speaks(tmp_path, wait_s):
    """A terminal sends it to every process, also to those that are still importing."""
    (tmp_path / "work.py").write_text(INTERRUPTED)
    process = subprocess.Popen([sys.executable, tmp_path / "work.py"], stderr=subprocess.PIPE, text=True, start_new_session=True, env=os.environ)
    while len(psutil.Process(process.pid).children()) < 3:  # two, and what tracks their resources
        time.sleep(0.01)
    time.sleep(wait_s)
    os.killpg(process.pid, signal.SIGINT)
    assert process.communicate(timeout=20)[1] == "interrupted\n"
    assert process.returncode == 1


def test_somebody_has_to_work():
    with pytest.raises(Fault, match=r"0 workers: at least one has to do the work"):
        each(double, range(3), 0)
