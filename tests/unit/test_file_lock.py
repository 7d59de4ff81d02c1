"""A lock belongs to the process that took it and ends with it."""

import errno
import multiprocessing
import os
import shutil
import signal
import time
from pathlib import Path

import pytest

from gigamask.files import exclusive_lock
from tests.errors import error_line


def check_busy(path: Path) -> None:
    """Check that the lock is not free."""
    with error_line(r"^busy$"), exclusive_lock(path, "busy"):
        pass


def test_the_lock_of_a_killed_process_is_free_though_its_children_live(tmp_path):
    """Loader processes, which are forked, notice the death of their parent only after seconds."""
    ours, theirs = multiprocessing.Pipe(duplex=False)

    def holder():
        with exclusive_lock(tmp_path / "lock", "busy"):
            child = os.fork()
            if not child:
                time.sleep(60)
                os._exit(0)
            theirs.send(child)
            time.sleep(60)

    process = multiprocessing.get_context("fork").Process(target=holder)
    process.start()
    child = ours.recv()
    try:
        check_busy(tmp_path / "lock")
        process.kill()
        process.join()
        os.kill(child, 0)
        with exclusive_lock(tmp_path / "lock", "busy"):
            pass
    finally:
        os.kill(child, signal.SIGKILL)


def test_a_file_system_without_locks_is_named(tmp_path, monkeypatch):
    def refuse(lock):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("filelock.FileLock.acquire", refuse)
    path = tmp_path / "lock"
    with pytest.raises(OSError, match="No locks available") as caught, exclusive_lock(path, "busy"):
        pass
    assert caught.value.filename == str(path)


def test_a_child_that_ends_leaves_it_held(tmp_path):
    with exclusive_lock(tmp_path / "lock", "busy"):
        process = multiprocessing.get_context("fork").Process(target=int)
        process.start()
        process.join()
        check_busy(tmp_path / "lock")
    with exclusive_lock(tmp_path / "lock", "busy"):
        pass


def test_a_lock_that_cannot_be_created_is_not_waited_for():
    with pytest.raises(OSError, match="none"), exclusive_lock(Path("/proc/none/lock"), "busy"):
        pass


def test_the_folder_may_be_removed_while_the_lock_is_held(tmp_path):
    for _ in range(2):
        with exclusive_lock(tmp_path / "folder" / "lock", "busy"):
            shutil.rmtree(tmp_path / "folder")
            with exclusive_lock(tmp_path / "folder" / "lock", "busy"):
                pass
