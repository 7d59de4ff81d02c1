"""Memory of processes, of this one and of others."""

import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path

import numpy as np
import pytest

from gigamask.data import process_memory

pytestmark = pytest.mark.skipif(not process_memory.PROC.is_dir(), reason="this system has no /proc")
MB = 10**6


@pytest.fixture
def fresh():
    """Calls a function in a process of its own: one full of tests takes from memory it has, and
    lets go of some meanwhile."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        yield lambda function, *given: pool.submit(function, *given).result()


@pytest.mark.slow
def test_what_is_written_counts_and_what_is_freed_does_not(fresh):
    fresh(check_written)


def check_written() -> None:
    before = process_memory.memory_of(os.getpid())
    held = np.ones(40 * MB, np.uint8)
    during = process_memory.memory_of(os.getpid())
    assert 39 * MB < during.allocated - before.allocated < 45 * MB
    assert during.rss >= during.allocated
    assert during.rss >= during.pss > 0
    del held
    assert process_memory.memory_of(os.getpid()).allocated < during.allocated - 35 * MB


@pytest.mark.slow
def test_what_the_allocator_keeps_is_written_but_not_in_use(fresh):
    fresh(check_in_use)


def check_in_use() -> None:
    """The last array keeps the heap from shrinking."""
    before_written, before = process_memory.allocated_bytes(), process_memory.in_use_bytes()
    held = [np.ones(1000, np.uint8) for _ in range(40_000)]
    assert 39 * MB < process_memory.in_use_bytes() - before < 50 * MB
    del held[:-1]
    assert process_memory.allocated_bytes() - before_written > 30 * MB
    assert process_memory.in_use_bytes() - before < 5 * MB


def test_where_the_c_library_does_not_say_what_it_keeps_all_is_in_use(monkeypatch):
    monkeypatch.setattr(process_memory.ctypes, "CDLL", lambda name: object())
    monkeypatch.setattr(process_memory, "allocated_bytes", lambda: 70 * MB)
    assert process_memory.in_use_bytes() == 70 * MB
    monkeypatch.setattr(process_memory, "allocated_bytes", lambda: None)
    assert process_memory.in_use_bytes() is None


def test_allocated_bytes_alone_equal_those_of_all_figures():
    alone, among = process_memory.allocated_bytes(), process_memory.memory_of(os.getpid())
    assert abs(alone - among.allocated) < 5 * MB
    assert process_memory.allocated_bytes(2**22 + 1) is None  # above the largest process id


@pytest.mark.slow
def test_shared_memory_is_allocated(fresh):
    fresh(check_shared)


def check_shared() -> None:
    """A batch that a worker sends lies in shared memory; keeping it is a leak like any other."""
    before = process_memory.allocated_bytes()
    held = SharedMemory(create=True, size=40 * MB)
    try:
        held.buf[:] = bytes(40 * MB)
        assert 39 * MB < process_memory.allocated_bytes() - before < 85 * MB
    finally:
        held.close()
        held.unlink()


@pytest.mark.slow
def test_what_is_only_mapped_does_not_count(fresh, tmp_path):
    fresh(check_mapped, tmp_path)


def check_mapped(tmp_path: Path) -> None:
    np.save(tmp_path / "column.npy", np.ones(20 * MB, np.uint8))
    before = process_memory.memory_of(os.getpid())
    assert np.load(tmp_path / "column.npy", mmap_mode="r").sum() == 20 * MB
    column = np.load(tmp_path / "column.npy", mmap_mode="r")
    assert column.sum() == 20 * MB
    during = process_memory.memory_of(os.getpid())
    assert during.rss - before.rss > 15 * MB
    assert during.allocated - before.allocated < 5 * MB


@pytest.mark.slow
def test_the_high_water_remembers_what_was_freed(fresh):
    fresh(check_high_water)


def check_high_water() -> None:
    process_memory.reset_peak_rss()
    before = process_memory.rss_bytes()
    assert np.ones(40 * MB, np.uint8).all()
    assert process_memory.peak_rss_bytes() - before > 35 * MB
    process_memory.reset_peak_rss()
    assert process_memory.peak_rss_bytes() - process_memory.rss_bytes() < 20 * MB


def _hold(connection, size: int) -> None:
    held = np.ones(size, np.uint8)
    connection.send(len(held))
    connection.recv()


def test_children_are_seen_while_they_live():
    here, there = multiprocessing.Pipe()
    process = multiprocessing.Process(target=_hold, args=(there, 30 * MB), daemon=True)
    process.start()
    here.recv()
    seen = process_memory.workers_memory()
    assert list(seen) == [process.pid]
    assert seen[process.pid].allocated > 30 * MB
    assert process_memory.workers_allocated_bytes() == {process.pid: seen[process.pid].allocated}
    here.send(None)
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert (
        process_memory.memory_of(process.pid) is process_memory.allocated_bytes(process.pid) is None
    )
    process.join()
    assert process_memory.workers_memory() == {}
    assert process_memory.memory_of(process.pid) is None


def test_a_kernel_that_refuses_keeps_its_high_water(monkeypatch, tmp_path):
    monkeypatch.setattr(process_memory, "PROC", tmp_path)
    assert process_memory.reset_peak_rss() is None
