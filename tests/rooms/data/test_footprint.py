"""Memory of processes, of this one and of others."""

import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from gigamask.data import footprint

pytestmark = pytest.mark.skipif(not footprint.PROC.is_dir(), reason="this system has no /proc")
MB = 10**6


@pytest.fixture
def fresh():
    """Calls a function in a process of its own: one full of tests takes from memory it has, and lets go of some meanwhile."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        yield lambda function, *given: pool.submit(function, *given).result()


def test_what_is_written_counts_and_what_is_freed_does_not(fresh):
    fresh(check_written)


def check_written() -> None:
    before = footprint.of(os.getpid())
    held = np.ones(40 * MB, np.uint8)
    during = footprint.of(os.getpid())
    assert 39 * MB < during.written - before.written < 45 * MB
    assert during.resident >= during.written
    assert during.resident >= during.proportional > 0
    del held
    assert footprint.of(os.getpid()).written < during.written - 35 * MB


def test_what_the_allocator_keeps_is_written_but_not_in_use(fresh):
    fresh(check_in_use)


def check_in_use() -> None:
    """The last array keeps the heap from shrinking."""
    before_written, before = footprint.written(), footprint.in_use()
    held = [np.ones(1000, np.uint8) for _ in range(40_000)]
    assert 39 * MB < footprint.in_use() - before < 50 * MB
    del held[:-1]
    assert footprint.written() - before_written > 30 * MB
    assert footprint.in_use() - before < 5 * MB


def test_where_the_c_library_does_not_say_what_it_keeps_all_is_in_use(monkeypatch):
    monkeypatch.setattr(footprint.ctypes, "CDLL", lambda name: object())
    monkeypatch.setattr(footprint, "written", lambda: 70 * MB)
    assert footprint.in_use() == 70 * MB
    monkeypatch.setattr(footprint, "written", lambda: None)
    assert footprint.in_use() is None


def test_what_is_written_is_read_alone_and_not_known_without_proc(monkeypatch, tmp_path):
    alone, among = footprint.written(), footprint.of(os.getpid())
    assert abs(alone - among.written) < 5 * MB
    assert footprint.written(2**22 + 1) is None  # above the largest process id
    monkeypatch.setattr(footprint, "PROC", tmp_path / "none")
    assert footprint.written() is footprint.in_use() is None


def test_what_is_only_mapped_does_not_count(fresh, tmp_path):
    fresh(check_mapped, tmp_path)


def check_mapped(tmp_path: Path) -> None:
    np.save(tmp_path / "column.npy", np.ones(20 * MB, np.uint8))
    before = footprint.of(os.getpid())
    assert np.load(tmp_path / "column.npy", mmap_mode="r").sum() == 20 * MB
    column = np.load(tmp_path / "column.npy", mmap_mode="r")
    assert column.sum() == 20 * MB
    during = footprint.of(os.getpid())
    assert during.resident - before.resident > 15 * MB
    assert during.written - before.written < 5 * MB


def test_the_high_water_remembers_what_was_freed(fresh):
    fresh(check_high_water)


def check_high_water() -> None:
    footprint.forget_high_water()
    before = footprint.resident()
    assert np.ones(40 * MB, np.uint8).all()
    assert footprint.high_water() - before > 35 * MB
    footprint.forget_high_water()
    assert footprint.high_water() - footprint.resident() < 20 * MB


def _hold(connection, size: int) -> None:
    held = np.ones(size, np.uint8)
    connection.send(len(held))
    connection.recv()


def test_children_are_seen_while_they_live(monkeypatch, tmp_path):
    here, there = multiprocessing.Pipe()
    process = multiprocessing.Process(target=_hold, args=(there, 30 * MB), daemon=True)
    process.start()
    here.recv()
    seen = footprint.of_children()
    assert list(seen) == [process.pid]
    assert seen[process.pid].written > 30 * MB
    assert footprint.written_by_children() == {process.pid: seen[process.pid].written}
    monkeypatch.setattr(footprint, "PROC", tmp_path)
    assert footprint.of_children() == footprint.written_by_children() == {}
    monkeypatch.undo()
    here.send(None)
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert footprint.of(process.pid) is footprint.written(process.pid) is None
    process.join()
    assert footprint.of_children() == {}
    assert footprint.of(process.pid) is None


def test_a_kernel_that_refuses_keeps_its_high_water(monkeypatch, tmp_path):
    monkeypatch.setattr(footprint, "PROC", tmp_path)
    assert footprint.forget_high_water() is None
