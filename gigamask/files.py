"""Writing files that get their name only once they are complete; locks and checksums of files.

A reader never sees half a file: whatever stops a write, the earlier file stays as it was.
"""

import errno
import os
import re
import secrets
import stat
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from safetensors import SafetensorError

from gigamask.errors import GigamaskError

try:
    import fcntl
except ImportError:
    fcntl = None
PARTIAL = ".partial"
"""End of the name of a file that is being written; a killed process may leave one."""
CHUNK_BYTES = 1 << 24
MAX_FILES = 4096
"""Files that a command lets itself open, if it may."""
RETRY_S = 0.2
"""How long to wait for the lock: enough for a process that is about to release it."""
MAX_TRIES = 100
"""How often to create the lock file in a folder that another process may be removing."""
UNSUPPORTED = (errno.EPERM, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)
"""What file systems answer that have no symbolic links or cannot flush folders, as of buckets."""
FOREIGN = (
    *("__macosx", "icon\r", "thumbs.db", "ehthumbs.db", "desktop.ini", "$recycle.bin"),
    *("system volume information", "@eadir", "#recycle"),
)
"""What macOS, Windows and disk stations leave among files, in lower case."""


def is_foreign(name: str) -> bool:
    """Return whether a file or folder is hidden, or left by a system or an editor, by its name."""
    return name.startswith((".", "~$")) or name.lower() in FOREIGN


def expand_home(path: str) -> str:
    """Return a path with the home folder in place of `~`, which shells leave in `--data=~/x`.

    A file or folder that is named so keeps its name.
    """
    is_home = path == "~" or path.startswith(("~/", "~\\"))
    return os.path.expanduser(path) if is_home and not os.path.exists(path) else path


def relative_to(path: str | os.PathLike) -> str:
    """Return " in FOLDER", the working directory, for a relative path; "" for any other.

    Args:
        path: A path that was not found, as it was given.
    """
    text = os.fspath(path)
    is_whole = "://" in text or os.path.isabs(text) or text.startswith("~")
    return "" if is_whole else f" in {os.getcwd()}"


def find_tars(folder: Path) -> list[Path]:
    """Return the sorted tars of a folder; none if it is no folder."""
    return sorted(path for path in folder.glob("*.tar") if not is_foreign(path.name))


def write_atomically(path: Path | str, write: Callable[[Path], object]) -> None:
    """Write a file atomically, with the permissions that the umask gives.

    Args:
        path: The file; it is replaced if it exists. A device or pipe, such as `/dev/stdout`, is
            written directly.
        write: Writes to the path it is called with; a partial file is removed on any error.

    Raises:
        OSError: The file cannot be written; the error names it.
    """
    path = Path(path)
    if path.exists() and not path.is_file() and not path.is_dir():
        with report_write_errors(path):
            write(path)
        return
    path = Path(os.path.realpath(path))
    name = os.fsencode(path.name)[:200].decode(errors="ignore")  # names have at most 255 bytes
    partial = path.with_name(f".{name}.{secrets.token_hex(4)}{PARTIAL}")
    try:
        with report_write_errors(path):
            partial.touch(exist_ok=False)
            mode = stat.S_IMODE(partial.stat().st_mode)
            write(partial)
            with suppress(PermissionError):  # of a mount that has no permissions
                partial.chmod(mode)  # some libraries write with 0600
            flush(partial)
            partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def is_partial(name: str, of: str) -> bool:
    """Return whether a file's name is one that `write_atomically` gives to an unfinished file.

    Args:
        name: Name of the file.
        of: Regular expression of the name of the finished file.
    """
    return re.fullmatch(rf"\.(?:{of})\.[0-9a-f]{{8}}{re.escape(PARTIAL)}", name) is not None


def write_bytes(path: Path | str, content: bytes) -> None:
    """Write a file atomically.

    Args:
        path: The file.
        content: Its bytes.
    """
    write_atomically(path, lambda partial: partial.write_bytes(content))


def write_text(path: Path | str, content: str) -> None:
    """Write a text file atomically, in UTF-8.

    Args:
        path: The file.
        content: Its text.
    """
    write_bytes(path, content.encode())


@contextmanager
def report_write_errors(path: Path) -> Iterator[None]:
    """Convert a library's write error, such as a full disk, to an `OSError` with the file name."""
    try:
        yield
    except (OSError, RuntimeError, SafetensorError) as error:
        number = _system_errno(error)
        if number is None:
            raise
        raise OSError(number, os.strerror(number), str(path)) from None


def _system_errno(error: BaseException | None) -> int | None:
    """Return the errno of a library's write error; None for any other error.

    safetensors has it in its message; torch chains its own error to the system's.
    """
    if isinstance(error, SafetensorError):
        match = re.search(r"os error (\d+)", str(error))
        return int(match[1]) if match else errno.EIO
    while error is not None and not isinstance(error, OSError):
        error = error.__context__
    return error.errno if error else None


def check_out(
    out: Path | str, kind: str, allowed: Callable[[os.DirEntry[str]], bool] = lambda entry: False
) -> None:
    """Check that an output folder does not hold what its new contents would mix with.

    Args:
        out: The folder; one that does not exist yet is fine, and so is an empty one, or one of
            hidden files, such as what a killed process left unfinished.
        kind: What the folder is to be, such as "an index".
        allowed: Returns whether an entry may stay beside the new contents.

    Raises:
        GigamaskError: The folder holds anything else, or is a file.
    """
    try:
        with os.scandir(out) as entries:
            others = sorted(
                entry.name for entry in entries if not (is_foreign(entry.name) or allowed(entry))
            )
    except FileNotFoundError:
        return
    except NotADirectoryError as error:
        raise GigamaskError(f"{out}: cannot be {kind} ({error.strerror}); give a folder") from None
    if others:
        more = f" and {len(others) - 1} more" if len(others) > 1 else ""
        raise GigamaskError(
            f"{out}: is not {kind}, but holds {others[0]}{more}, so nothing is written into it; "
            "give another folder"
        )


def check_absent(paths: Iterable[Path], advice: str) -> None:
    """Check that files that are to be written do not exist.

    Args:
        paths: The files or folders.
        advice: Why one that exists is not replaced, and what to do.

    Raises:
        GigamaskError: One exists.
    """
    if path := next((path for path in paths if path.exists()), None):
        raise GigamaskError(f"{path}: would be replaced, but {advice}")


def flush(path: Path) -> None:
    """Flush a file or folder to the disk, so that it survives a loss of power."""
    if os.name == "nt" and path.is_dir():  # Windows cannot open folders
        return
    descriptor = os.open(path, os.O_RDWR if os.name == "nt" else os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:  # network mounts flush no folder
        if error.errno not in UNSUPPORTED:
            raise
    finally:
        os.close(descriptor)


def uncache(path: Path) -> None:
    """Let the next reader of a flushed file read the disk, where the system can."""
    if hasattr(os, "posix_fadvise"):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


def crc32(path: Path | str) -> int:
    """Return the crc32 of a file."""
    crc = 0
    with open(path, "rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            crc = zlib.crc32(chunk, crc)
    return crc


def raise_file_limit() -> None:
    """Let this process open as many files as it may without an administrator, up to `MAX_FILES`."""
    try:
        import resource
    except ImportError:  # Windows has no such limit
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def file_limit() -> int:
    """Return how many files this process may have open."""
    try:
        import resource
    except ImportError:
        return MAX_FILES
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return MAX_FILES if soft == resource.RLIM_INFINITY else soft


def check_file_limit(error: Exception) -> None:
    """Raise `GigamaskError` if an error is that too many files are open.

    Args:
        error: The error of opening a file or shared memory.
    """
    is_limit = getattr(error, "errno", None) in (errno.EMFILE, errno.ENFILE)
    if is_limit or os.strerror(errno.EMFILE) in str(error):
        raise GigamaskError(
            f"too many open files: the limit of a process is {file_limit()} here; raise it, as in "
            "'ulimit -n 1024', or use fewer --loader.workers"
        ) from error


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
    from filelock import FileLock, Timeout  # every command would import it, few lock

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
        except OSError as error:  # as of a file system without locks
            raise OSError(error.errno, error.strerror, str(path)) from None
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
