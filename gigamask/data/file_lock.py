"""A lock file that lets only one process write to a folder."""

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout

from gigamask.errors import GigamaskError

try:
    import fcntl
except ImportError:
    fcntl = None

RETRY_S = 0.2
"""How long to wait for the lock: enough for a process that is about to release it."""
MAX_TRIES = 100
"""How often to create the lock file in a folder that another process may be removing."""


@contextmanager
def folder_lock(folder: Path, busy: str) -> Iterator[None]:
    """Hold a lock of a folder itself, which stays when somebody deletes its lock file.

    Args:
        folder: The folder.
        busy: Error message if another process holds the lock.

    Raises:
        GigamaskError: Another process holds the lock.
    """
    if fcntl is None:  # on Windows, where an open lock file cannot be deleted
        yield
        return
    opened = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):  # of file systems that cannot lock folders
            try:
                fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise GigamaskError(busy) from None
        yield
    finally:
        os.close(opened)


@contextmanager
def exclusive_lock(path: Path, busy: str) -> Iterator[None]:
    """Hold a lock file for the duration of a `with` block, which may remove the folder.

    The operating system releases the lock when the process dies, even if processes that it forked
    are still running (`filelock` closes the file in them).

    Args:
        path: The lock file, created with its folder.
        busy: Error message if another process holds the lock.

    Raises:
        GigamaskError: Another process holds the lock.
        OSError: The lock file cannot be created.
    """
    lock, tries = FileLock(path, timeout=RETRY_S), 0
    while True:
        try:
            lock.acquire()
            break
        except FileNotFoundError:  # the folder was removed between its creation and the open
            tries += 1
            if tries == MAX_TRIES:  # it cannot be created, as in /proc
                raise
        except Timeout:
            raise GigamaskError(busy) from None
    try:
        yield
    finally:
        lock.release()


@contextmanager
def lock_folder(folder: Path, subfolder: str, shared: bool = False) -> Iterator[None]:
    """Create a folder and lock it until the block ends; the lock of a killed process is released.

    Args:
        folder: The folder to write to.
        subfolder: Folder within it that holds the lock file.
        shared: Only create the folders, as for one of several processes that write other files.

    Raises:
        GigamaskError: Another process holds the lock, or the folder cannot be written.
    """
    busy = f"{folder}: another process is writing to it; wait for it, or give another folder"
    with ExitStack() as stack:
        try:
            if shared:
                (folder / subfolder).mkdir(parents=True, exist_ok=True)
            else:
                stack.enter_context(exclusive_lock(folder / subfolder / "lock", busy))
        except OSError as error:
            raise GigamaskError(
                f"{folder}: cannot be written ({error.strerror}); give a writable folder"
            ) from error
        yield
