"""Locks are the process's that took them, and end with it."""

import multiprocessing
import os
import signal
import time

import pytest

from gigamask.data import lock
from gigamask.faults import Fault


def test_a_killed_holder_lets_go_though_its_children_live(tmp_path):
    """Loader processes, which are forked, notice only after seconds that nobody waits for them."""
    ours, theirs = multiprocessing.Pipe(duplex=False)

    def holder():
        file = lock.hold(tmp_path / "lock", "busy")
        child = os.fork()
        if not child:
            time.sleep(60)
            os._exit(0)
        theirs.send(child)
        time.sleep(60)
        file.close()

    process = multiprocessing.get_context("fork").Process(target=holder)
    process.start()
    child = ours.recv()
    try:
        with pytest.raises(Fault, match=r"^busy$"):
            lock.hold(tmp_path / "lock", "busy")
        process.kill()
        process.join()
        os.kill(child, 0)
        lock.hold(tmp_path / "lock", "busy").close()
    finally:
        os.kill(child, signal.SIGKILL)


def test_a_child_that_ends_leaves_it_held(tmp_path):
    with lock.hold(tmp_path / "lock", "busy"):
        process = multiprocessing.get_context("fork").Process(target=int)
        process.start()
        process.join()
        with pytest.raises(Fault, match=r"^busy$"):
            lock.hold(tmp_path / "lock", "busy")
    lock.hold(tmp_path / "lock", "busy").close()
