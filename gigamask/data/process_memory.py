"""Memory of this process, of other processes, and of the loader's worker processes."""

import ctypes
import multiprocessing
import os
import re
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import psutil

PROC = Path("/proc")


class ProcessMemory(NamedTuple):
    """Memory of one process in bytes.

    `rss` is resident; `pss` divides pages shared by n processes by n (equal to `rss` where the
    system does not report it); `allocated` is `rss` without file-backed pages such as libraries
    and memory-mapped indices.
    """

    rss: int
    pss: int
    allocated: int


def memory_of(pid: int) -> ProcessMemory | None:
    """Return the memory of a process, or None if it has ended or may not be read."""
    allocated = allocated_bytes(pid)
    try:
        full = psutil.Process(pid).memory_full_info()
    except psutil.Error:
        return None
    if allocated is None:
        return None
    return ProcessMemory(full.rss, getattr(full, "pss", full.rss), allocated)


def allocated_bytes(pid: int | None = None) -> int | None:
    """Return `ProcessMemory.allocated` of a process, by default this one; takes microseconds.

    Returns None if the process has ended or may not be read.
    """
    try:
        memory = psutil.Process(pid).memory_info()
    except psutil.Error:
        return None
    if not memory.rss:  # a zombie
        return None
    # psutil's `shared` is file-backed pages and shared memory; the latter is allocated.
    file_backed = getattr(memory, "shared", 0) - _status_bytes("RssShmem", pid)
    return memory.rss - file_backed


def in_use_bytes() -> int | None:
    """Return the allocated bytes of this process without freed memory that malloc keeps.

    Only glibc since 2.33 reports freed memory (mallinfo2); elsewhere, all allocated bytes count.
    """
    library = None if os.name == "nt" else ctypes.CDLL(None)
    allocated, mallinfo = allocated_bytes(), getattr(library, "mallinfo2", None)
    if allocated is None or mallinfo is None:
        return allocated
    mallinfo.restype = _Mallinfo
    return allocated - mallinfo().fordblks


def workers_allocated_bytes() -> dict[int, int]:
    """Return the allocated bytes of each process started with multiprocessing, by process id."""
    found = {pid: allocated_bytes(pid) for pid in _worker_pids()}
    return {pid: size for pid, size in found.items() if size is not None}


def workers_memory() -> dict[int, ProcessMemory]:
    """Return the memory of each process started with multiprocessing, by process id."""
    found = {pid: memory_of(pid) for pid in _worker_pids()}
    return {pid: memory for pid, memory in found.items() if memory is not None}


def rss_bytes() -> int:
    """Return the resident bytes of this process."""
    return psutil.Process().memory_info().rss


def peak_rss_bytes() -> int:
    """Return the largest RSS of this process since it began or since `reset_peak_rss`.

    On Linux this is VmHWM, because `ru_maxrss` would include the memory of the parent process.
    """
    return _status_bytes("VmHWM") or rss_bytes()


def reset_peak_rss() -> None:
    """Reset the peak to the current RSS, if the kernel allows it."""
    with suppress(OSError):
        (PROC / "self" / "clear_refs").write_text("5")


def in_bytes(count: int | float) -> str:
    """Format bytes with a unit: 10.1 MB, 1.35 GB."""
    for unit, digits in (("B", 0), ("KB", 1), ("MB", 1)):
        if count < 1000:
            return f"{count:.{digits}f} {unit}"
        count /= 1000
    return f"{count:.2f} GB"


class _Mallinfo(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    ]


def _worker_pids() -> list[int]:
    return sorted(child.pid for child in multiprocessing.active_children() if child.pid)


def _status_bytes(name: str, pid: int | None = None) -> int:
    """Return a value of Linux's /proc/PID/status in bytes; 0 if there is none."""
    try:
        text = (PROC / str(pid or "self") / "status").read_text()
    except OSError:
        return 0
    found = re.search(rf"^{name}:\s+(\d+) kB$", text, re.MULTILINE)
    return 1024 * int(found[1]) if found else 0
