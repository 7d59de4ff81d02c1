"""One writer at a time: the file that stands for a folder enters, open and locked it leaves; closing it frees the lock.

The lock of a process that was killed is gone with it (flock(2)), even while processes that it forked live on. Whoever holds it may remove the file's
folder.
"""

import contextlib
import fcntl
import os
import weakref
from pathlib import Path
from typing import IO

from gigamask.faults import Fault


def hold(path: Path, busy: str) -> IO[str]:
    """Makes the file and its folder and locks it; raises Fault, with the words `busy`, when another process has."""
    while True:
        path.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileNotFoundError):  # its holder has removed the folder meanwhile
            file = open(path, "w")  # noqa: SIM115 (the lock lasts as long as the file is open)
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.path.samestat(os.fstat(file.fileno()), os.stat(path)):
                    return _kept_from_children(file)
            except BlockingIOError:
                file.close()
                raise Fault(busy) from None
            except FileNotFoundError:
                pass
            file.close()


def _kept_from_children(file: IO[str]) -> IO[str]:
    """Has processes that are forked from here on close their copy of the file, which would hold the lock when this process is gone."""
    held = weakref.ref(file)
    os.register_at_fork(after_in_child=lambda: (copy := held()) and copy.close())
    return file
