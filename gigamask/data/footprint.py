"""Memory of running processes: a process id enters, bytes leave. Source: Linux's /proc (proc_pid_smaps(5), proc_pid_status(5)).

Not here: memory of a GPU (`train.watch`), what is made of the numbers (`memory.loading`, `memory.leaks`).
"""

import ctypes
import multiprocessing
import os
import re
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

PROC = Path("/proc")


class Footprint(NamedTuple):
    """Memory of one process in bytes.

    `resident` counts every page it uses; `proportional` (PSS) counts a page that n processes use as an n-th. `written` counts what would have to be
    swapped: all it has allocated, shared memory with it, but no library and no index, which the kernel can drop and read again. A process that was
    forked begins with what its parent had written, whether or not the pages are copied since.
    """

    resident: int
    proportional: int
    written: int


def of(pid: int) -> Footprint | None:
    """Returns the memory of a process now; None where it is gone, another user's, or the system does not say."""
    try:
        status = _sizes((PROC / str(pid) / "status").read_text())
        pages = _sizes((PROC / str(pid) / "smaps_rollup").read_text())
    except OSError:
        return None
    if "VmRSS" not in status or "Pss" not in pages:  # it has ended, and nobody has asked how
        return None
    return Footprint(status["VmRSS"], pages["Pss"], _written(status))


def written(pid: int | None = None) -> int | None:
    """Returns what `Footprint.written` counts, of this process by default: some microseconds, where the pages take milliseconds.

    None where the process is gone or the system does not say.
    """
    try:
        status = _sizes((PROC / str(os.getpid() if pid is None else pid) / "status").read_text())
    except OSError:
        return None
    return _written(status) if "VmRSS" in status else None


def in_use() -> int | None:
    """Returns what this process has written without what its allocator keeps of it for later, so that only what is held makes it grow.

    Some tenths of a millisecond; `written` where the C library does not say what it keeps (glibc does, from 2.33 on: mallinfo2(3)).
    """
    size, ask = written(), getattr(ctypes.CDLL(None), "mallinfo2", None)
    if size is None or ask is None:
        return size
    ask.restype = _Mallinfo
    return size - ask().fordblks


def written_by_children() -> dict[int, int]:
    """Returns what `written` says of the processes that this one started with multiprocessing, by process id."""
    found = {child.pid: written(child.pid) for child in multiprocessing.active_children() if child.pid is not None}
    return {pid: size for pid, size in sorted(found.items()) if size is not None}


def of_children() -> dict[int, Footprint]:
    """Returns the memory of the processes that this one started with multiprocessing, as the loader does, by process id."""
    found = {child.pid: of(child.pid) for child in multiprocessing.active_children() if child.pid is not None}
    return {pid: footprint for pid, footprint in sorted(found.items()) if footprint is not None}


def high_water() -> int:
    """Returns the most bytes this process has had resident since its start, or since `forget_high_water`.

    Not `ru_maxrss`, which begins with the memory of the process that started this one.
    """
    return _sizes((PROC / "self" / "status").read_text())["VmHWM"]


def resident() -> int:
    """Returns the bytes this process has resident now."""
    return _sizes((PROC / "self" / "status").read_text())["VmRSS"]


def forget_high_water() -> None:
    """Sets the high water to what is resident now; where the kernel does not allow it, it stays what it was."""
    with suppress(OSError):
        (PROC / "self" / "clear_refs").write_text("5")


class _Mallinfo(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_size_t)
        for name in ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")
    ]


def _written(status: dict[str, int]) -> int:
    return status["RssAnon"] + status["RssShmem"] + status["VmSwap"]


def _sizes(text: str) -> dict[str, int]:
    """Returns the lines `Name: 12 kB` as bytes by name."""
    return {name: 1024 * int(size) for name, size in re.findall(r"^(\w+):\s+(\d+) kB$", text, re.MULTILINE)}
