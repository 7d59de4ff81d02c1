"""Files on local disks and remote storage: sizes, versions, byte ranges, and the tars of a URL.

A URL is anything with `protocol://` (s3, gs, http, hf, memory...). Its endpoint and keys are set in
fsspec's own configuration; fsspec and the library of a protocol are imported when the first URL is
used. Transient errors are retried here and not in any layer below. Only local files are written.
"""

import errno
import importlib
import os
import posixpath
import re
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from functools import partial
from pathlib import Path
from shlex import quote
from typing import Any, NamedTuple, TypeVar

from gigamask.errors import CorruptSampleError, GigamaskError
from gigamask.files import expand_home, is_foreign
from gigamask.rng import make_rng

MAX_TRIES = 5
FIRST_WAIT_S = 0.5
"""Wait before the second try; it doubles with each further try and is multiplied by a random factor
in [0.5, 1], so that readers do not all retry at the same time. All waits take about 6 s."""
MAX_CONCURRENT = 64
"""Maximum number of concurrent requests; object stores have high latency but serve many at once."""
CONNECT_TIMEOUT_S, READ_TIMEOUT_S = 15, 60
EXTRAS = {
    "s3": "s3",
    "s3a": "s3",
    "gs": "gcs",
    "gcs": "gcs",
    "http": "http",
    "https": "http",
    "hf": "hf",
}
_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)(://|::)")
_VERSIONS = (
    *("ETag", "etag", "blob_id", "Last-Modified", "LastModified", "mtime", "updated", "created"),
)
_BUGS = (TypeError, AttributeError, NotImplementedError, AssertionError, ImportError)
_PERMANENT = {errno.EINVAL, errno.ENOSYS, errno.EPERM, errno.ENAMETOOLONG}

Paths = str | Path | Sequence[str | Path]
"""Tars, folders of tars, globs, URLs, or an index."""
Result = TypeVar("Result")


def path_list(paths: Paths) -> tuple[str, ...]:
    """Return one or several paths as strings.

    Raises:
        GigamaskError: They are something else, such as None.
    """
    listed = list(paths) if isinstance(paths, Iterable) and not isinstance(paths, str) else [paths]
    for path in listed:
        if not isinstance(path, str | os.PathLike):
            raise GigamaskError(f"{path!r:.60} is not a path, nor a list of paths")
    return tuple(os.fspath(path) for path in listed)


class ByteRange(NamedTuple):
    """A range of one file's bytes."""

    path: str
    offset: int
    size: int


class FileStat(NamedTuple):
    """Size and version of a file.

    `version` is the local modification time in ns, or the server's ETag or timestamp ("" if none).
    """

    bytes: int
    version: str


def is_remote(path: str) -> bool:
    """Return whether a path is a URL."""
    return _URL.match(path) is not None


def normalize(path: str | os.PathLike) -> str:
    """Return a URL unchanged, and any other path (or `file://`) as an absolute local path.

    `~` is the home folder.
    """
    text = os.fspath(path).removeprefix("file://")
    return text if is_remote(text) else os.path.abspath(expand_home(text))


def strip_query(path: str) -> str:
    """Remove the query and fragment, such as a signature, of an http URL."""
    if not path.startswith("http") or not is_remote(path):
        return path
    return re.split(r"[?#]", path, maxsplit=1)[0]


def basename(path: str) -> str:
    """Return the file name of a path or URL."""
    return posixpath.basename(strip_query(path))


def stat(path: str) -> FileStat:
    """Return a file's size and version.

    Raises:
        OSError: A local file cannot be read.
        GigamaskError: A remote file cannot be read.
    """
    if not is_remote(path):
        status = os.stat(path)
        return FileStat(status.st_size, str(status.st_mtime_ns))
    filesystem, inner = _open(path)
    info = _retry(lambda: filesystem.info(inner), path, "its size")
    if info["type"] != "file":
        raise GigamaskError(f"{path}: is a folder, but must be a file; give the URL of a tar")
    if info["size"] is None:
        raise GigamaskError(
            f"{path}: the server does not state the file's size; "
            "download it with 'gigamask download' first"
        )
    version = next((info[key] for key in _VERSIONS if info.get(key)), "")
    text = version.isoformat() if isinstance(version, datetime) else str(version)
    return FileStat(int(info["size"]), text)


def stat_all(paths: Sequence[str]) -> list[FileStat]:
    """Return `stat` of each path; remote files are queried concurrently."""
    if not any(map(is_remote, paths)):
        return list(map(stat, paths))
    with ThreadPoolExecutor(MAX_CONCURRENT) as threads:
        return list(threads.map(stat, paths))


def read(path: str, offset: int, size: int) -> bytes:
    """Read one range of a file.

    Args:
        path: Local path or URL.
        offset: First byte.
        size: Number of bytes.

    Returns:
        The bytes.

    Raises:
        CorruptSampleError: The bytes cannot be read.
    """
    [data] = read_ranges([ByteRange(path, offset, size)])
    if isinstance(data, CorruptSampleError):
        raise data
    return data


def read_ranges(ranges: Sequence[ByteRange]) -> list[bytes | CorruptSampleError]:
    """Return the bytes of each range, or the error; remote ranges are fetched concurrently."""
    results: list[bytes | CorruptSampleError] = [b""] * len(ranges)
    local: dict[str, list[int]] = defaultdict(list)
    remote: dict[int, tuple[Any, list[tuple[int, str]]]] = {}
    opened: dict[str, tuple[Any, str]] = {}
    for i, byte_range in enumerate(ranges):
        if not is_remote(byte_range.path):
            local[byte_range.path].append(i)
        elif byte_range.size:
            if byte_range.path not in opened:
                opened[byte_range.path] = _open(byte_range.path)
            filesystem, inner = opened[byte_range.path]
            remote.setdefault(id(filesystem), (filesystem, []))[1].append((i, inner))
    for path, numbers in local.items():
        for i, data in zip(numbers, _read_local(path, [ranges[i] for i in numbers]), strict=True):
            results[i] = data
    for filesystem, requests in remote.values():
        wanted = {i: (inner, ranges[i]) for i, inner in requests}
        for i, data in _read_remote(filesystem, wanted).items():
            results[i] = data
    return results


def open_file(path: str) -> int:
    """Open a local file for reading; a pipe is opened without waiting, and reading it fails."""
    return os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))


def pread(descriptor: int, size: int, offset: int) -> bytes:
    """Read `size` bytes at an offset of an open file, fewer at its end.

    Windows has no `os.pread`; there, threads of a process must not share a descriptor.

    Args:
        descriptor: The open file.
        size: Number of bytes.
        offset: Position of the first one.
    """
    if hasattr(os, "pread"):
        return os.pread(descriptor, size, offset)
    os.lseek(descriptor, offset, os.SEEK_SET)
    return os.read(descriptor, size)


def read_at(descriptor: int, byte_range: ByteRange) -> bytes | CorruptSampleError:
    """Read a range of an open local file.

    Args:
        descriptor: The open file.
        byte_range: The range; its path is used in the error only.

    Returns:
        The bytes, or the error if they cannot be read.
    """
    try:
        data = pread(descriptor, byte_range.size, byte_range.offset)
    except OSError as error:
        return read_error(byte_range, error)
    return data if len(data) == byte_range.size else _short_read(byte_range, len(data))


def read_error(byte_range: ByteRange, error: OSError) -> CorruptSampleError:
    """Return the error for a local file that cannot be read.

    Args:
        byte_range: The bytes to read.
        error: The operating system's error.
    """
    path, offset, size = byte_range
    return CorruptSampleError(
        f"{path}: cannot read {size} bytes at {offset} ({error.strerror}); check the disk"
    )


def find_tars(url: str) -> list[str]:
    """Return the tars at a URL: the URL itself if it names a tar, or those in a folder or glob.

    Returns:
        Sorted URLs.

    Raises:
        GigamaskError: There are none, or the folder cannot be listed.
    """
    names = list_files(url)
    tars = names if is_glob(url) else [name for name in names if _has_suffix(name, ".tar")]
    if any(_has_suffix(name, ".parquet") for name in tars or names):
        raise GigamaskError(is_parquet(url))
    if not tars:
        problem = "the glob matches no file" if is_glob(url) else "the folder lists no .tar file"
        raise GigamaskError(
            f"{url}: {problem}; give the URL of a tar, of a folder of tars, "
            "or a quoted glob such as 's3://bucket/folder/*.tar'; convert a data set of parquet "
            "files first: gigamask convert URL --out shards/"
        )
    return tars


def is_parquet(path: str) -> str:
    """Return the error message for data that are parquet where tars are expected."""
    return (
        f"{path}: is parquet, which only 'gigamask train', 'plan', 'evaluate', 'stats' and "
        "gigamask.DataLoader read; convert it, and give the tars instead: "
        f"gigamask convert {quote(path)} --out shards/"
    )


def _has_suffix(url: str, suffix: str) -> bool:
    return strip_query(url).endswith(suffix)


def is_glob(url: str) -> bool:
    """Return whether a URL is a pattern of names."""
    return bool(re.search(r"[*?\[]", strip_query(url)))


def list_files(url: str, recursive: bool = False) -> list[str]:
    """Return the sorted URLs of the files that a URL names: itself, or those of a folder or glob.

    Args:
        url: A file with one of the suffixes .tar and .parquet, a glob, or a folder.
        recursive: Whether to list the files of subfolders too.

    Raises:
        GigamaskError: The folder cannot be listed.
    """
    if strip_query(url).endswith((".tar", ".parquet")) and not is_glob(url):
        return [url]
    filesystem, inner = _open(url)
    listing = filesystem.find if recursive else partial(filesystem.ls, detail=False)
    listing = filesystem.glob if is_glob(url) else listing
    names = _retry(lambda: listing(inner), url, "its folder")
    scheme = url[: url.index("://") + 3]
    names = [name for name in names if not is_foreign(name.rpartition("/")[2])]
    return sorted(name if is_remote(name) else scheme + name.lstrip("/") for name in names)


def _read_local(path: str, ranges: list[ByteRange]) -> list[bytes | CorruptSampleError]:
    try:
        descriptor = open_file(path)
    except OSError as error:
        return [read_error(byte_range, error) for byte_range in ranges]
    try:
        return [read_at(descriptor, byte_range) for byte_range in ranges]
    finally:
        os.close(descriptor)


def _read_remote(
    filesystem: Any, wanted: dict[int, tuple[str, ByteRange]]
) -> dict[int, bytes | CorruptSampleError]:
    """Return the bytes or the error of each range; only transient failures are retried."""
    results: dict[int, bytes | CorruptSampleError] = {}
    pending = list(wanted)
    for attempt in range(1, MAX_TRIES + 1):
        if attempt > 1:
            _wait(attempt)
        paths, ranges = zip(*(wanted[i] for i in pending), strict=True)
        starts = [byte_range.offset for byte_range in ranges]
        stops = [byte_range.offset + byte_range.size for byte_range in ranges]
        responses = _cat_ranges(filesystem, list(paths), starts, stops)
        failed = []
        for i, byte_range, response in zip(pending, ranges, responses, strict=True):
            results[i], transient = _check_response(byte_range, response, attempt)
            if transient:
                failed.append(i)
        pending = failed
        if not pending:
            break
    return results


def _cat_ranges(
    filesystem: Any, paths: list[str], starts: list[int], stops: list[int]
) -> list[bytes | Exception]:
    """Return the bytes or the error of each range, fetched concurrently."""
    if filesystem.protocol != "hf":
        options = {"batch_size": MAX_CONCURRENT} if filesystem.async_impl else {}
        return filesystem.cat_ranges(paths, starts, stops, on_error="return", **options)

    def cat(path: str, start: int, stop: int) -> bytes | Exception:
        try:  # without a cache, which would read 5 MB ahead
            return filesystem.cat_file(path, start, stop, cache_type="none")
        except Exception as error:
            return error

    first = cat(paths[0], starts[0], stops[0])  # lists the folder, once for all
    with ThreadPoolExecutor(MAX_CONCURRENT) as threads:
        return [first, *threads.map(cat, paths[1:], starts[1:], stops[1:])]


def _short_read(byte_range: ByteRange, size: int) -> CorruptSampleError:
    return CorruptSampleError(
        f"{byte_range.path}: expected {byte_range.size} bytes at {byte_range.offset}, got {size}; "
        "download the tar and index it again"
    )


def _check_response(
    byte_range: ByteRange, response: bytes | Exception, attempt: int
) -> tuple[bytes | CorruptSampleError, bool]:
    """Return the bytes or the error, and whether a retry may help."""
    if not isinstance(response, Exception):
        if len(response) > byte_range.size:
            return CorruptSampleError(_ignores_ranges(byte_range.path)), False
        if len(response) == byte_range.size:
            return response, False
        return _short_read(byte_range, len(response)), True
    path, offset, size = byte_range
    transient, reason = _classify_error(path, response, attempt)
    if not isinstance(response, GigamaskError):
        reason = f"{path}: cannot read {size} bytes at {offset}{reason}"
    bad = CorruptSampleError(reason)
    bad.__cause__ = response
    return bad, transient


def _retry(action: Callable[[], Result], url: str, what: str) -> Result:
    """Return the result of `action`; raise GigamaskError if it fails permanently or too often."""
    attempt = 1
    while True:
        try:
            return action()
        except Exception as error:
            transient, reason = _classify_error(url, error, attempt)
            if not transient or attempt == MAX_TRIES:
                raise GigamaskError(f"{url}: cannot read {what}{reason}") from error
        attempt += 1
        _wait(attempt)


def _wait(attempt: int) -> None:
    # The jitter must differ between processes; no result depends on it.
    jitter = make_rng(os.getpid(), "retry", time.monotonic_ns()).uniform(0.5, 1)
    time.sleep(FIRST_WAIT_S * 2 ** (attempt - 2) * jitter)


def _classify_error(url: str, error: Exception, attempt: int) -> tuple[bool, str]:
    """Return whether a failure is transient, and the rest of its message: reason and advice."""
    if isinstance(error, _BUGS):
        raise error
    if isinstance(error, GigamaskError):
        return False, str(error)
    if (
        url.startswith("http")
        and isinstance(error, FileNotFoundError)
        and isinstance(error.__cause__, Exception)
    ):
        error = error.__cause__  # fsspec raises FileNotFoundError for any http failure
    status = getattr(error, "status", None) or getattr(error, "code", None)
    status = status or getattr(getattr(error, "response", None), "status_code", None)
    log_in = ", or log in with hf auth login" if url.startswith("hf://") else ""
    status = status if isinstance(status, int) else 0
    reason = " ".join(str(error).split())[:200] or type(error).__name__
    if isinstance(error, FileNotFoundError) or status in (404, 410):
        return False, f" (not found: {reason}); check the URL{log_in}"
    if (
        isinstance(error, PermissionError)
        or status in (401, 403)
        or "Credentials" in type(error).__name__
    ):
        advice = f"check fsspec's credentials or re-sign the URL{log_in}"
        return False, f" (no permission: {reason}); {advice}"
    if status == 416 or "not satisfiable" in reason:
        return False, f" ({reason}); the file is shorter than when it was indexed, index it again"
    refused = 400 <= status < 500 and status not in (408, 425, 429)
    if (
        refused
        or isinstance(error, IsADirectoryError | NotADirectoryError | ValueError)
        or getattr(error, "errno", None) in _PERMANENT
    ):
        return False, f" ({reason}); check the URL"
    tries = f"{attempt} {'try' if attempt == 1 else 'tries'}"
    advice = "check the network and the server, then run the same command again"
    return True, f" after {tries} ({reason}); {advice}"


def _open(url: str) -> tuple[Any, str]:
    """Return this process's own file system for a URL, and the path within it."""
    import fsspec

    protocol = url.split("::", 1)[0].split("://", 1)[0]
    # A listing is never cached, since the files on the server may change.
    options: dict[str, Any] = {"use_listings_cache": False}
    configured = fsspec.config.conf.get(protocol, {})
    if protocol in ("http", "https"):
        options["get_client"] = _http_session
    if protocol in ("s3", "s3a") and "config_kwargs" not in configured:
        # Otherwise the retries of three layers multiply, and giving up takes an hour.
        options["config_kwargs"] = {"retries": {"max_attempts": 0}}
    # The Hub has models, data sets and spaces; tars are expected in data sets.
    full = re.sub(r"^hf://(?!(datasets|models|spaces|buckets)/)", "hf://datasets/", url)
    try:
        filesystem, inner = fsspec.core.url_to_fs(full, **options)
    except ImportError as error:
        extra = EXTRAS.get(protocol)
        advice = f"pip install 'gigamask[{extra}]'" if extra else f"install it ({error})"
        raise GigamaskError(
            f"{url}: the library for {protocol}:// is not installed; {advice}"
        ) from error
    except Exception as error:
        raise GigamaskError(f"{url}: cannot open{_classify_error(url, error, 1)[1]}") from error
    if protocol in ("s3", "s3a"):
        filesystem.retries = 1
    # A forked process must never free a file system that its parent opened: closing it would
    # disturb the event loop that both share.
    _open_filesystems[id(filesystem)] = filesystem
    return filesystem, inner


_open_filesystems: dict[int, Any] = {}


async def _http_session(**kwargs: Any) -> Any:
    """Create fsspec's http session, with timeouts and a check that servers honor ranges."""
    aiohttp = importlib.import_module("aiohttp")
    trace = aiohttp.TraceConfig()
    trace.on_request_end.append(_refuse_whole_files)
    timeout = aiohttp.ClientTimeout(
        total=None, sock_connect=CONNECT_TIMEOUT_S, sock_read=READ_TIMEOUT_S
    )
    return aiohttp.ClientSession(
        trace_configs=[trace],
        **{"timeout": timeout, "headers": {"Accept-Encoding": "identity"}, **kwargs},
    )


async def _refuse_whole_files(session: Any, context: Any, request: Any) -> None:
    if "Range" in request.headers and request.response.status == 200:
        request.response.close()
        raise GigamaskError(_ignores_ranges(str(request.url)))


def _ignores_ranges(url: str) -> str:
    return (
        f"{url}: the server ignores ranges and sends the whole file; "
        "download it with 'gigamask download' first"
    )
