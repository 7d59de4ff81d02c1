"""Where bytes lie: a local path or an fsspec URL enters; its size and version, ranges of its bytes, or the tars it leads to leave.

A URL is anything with `protocol://` (s3, gs, http, memory...). What fsspec is told (endpoint, keys) is fsspec's own configuration; it and the
library behind a protocol are imported when the first URL is used. Transient errors are retried, here and nowhere below. Written are local files only.

Not here: files that are held open (`data.shards`), what the bytes mean (`data.tar`, `data.part`).
"""

import errno
import importlib
import os
import posixpath
import re
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from gigamask.errors import CorruptSampleError, GigamaskError
from gigamask.rng import make_rng

MAX_TRIES = 5
FIRST_WAIT_S = 0.5
"""Doubled after each try, and cut to between a half and the whole so that many readers do not come back together: about 6 s in all."""
MAX_CONCURRENT = 64
"""Requests under way at once; object stores answer each slowly and any number of them."""
CONNECT_S, SILENCE_S = 15, 60
EXTRAS = {"s3": "s3", "s3a": "s3", "gs": "gcs", "gcs": "gcs", "http": "http", "https": "http"}
_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)(://|::)")
_VERSIONS = ("ETag", "etag", "Last-Modified", "LastModified", "mtime", "updated", "created")
_BUGS = (TypeError, AttributeError, NotImplementedError, AssertionError, ImportError)
_PERMANENT = {errno.EINVAL, errno.ENOSYS, errno.EPERM, errno.ENAMETOOLONG}

Result = TypeVar("Result")


class ByteRange(NamedTuple):
    """A range of one file's bytes."""

    path: str
    offset: int
    size: int


class FileStat(NamedTuple):
    """A file as it is now; `version` is the local modification time in ns, or whatever a server tells versions apart by ("" when nothing)."""

    bytes: int
    version: str


def is_remote(path: str) -> bool:
    """Says whether a path is a URL."""
    return _URL.match(path) is not None


def normalize(path: str | os.PathLike) -> str:
    """Returns a path as it is kept: a URL as given, anything else (also `file://`) as an absolute local path."""
    text = os.fspath(path).removeprefix("file://")
    return text if is_remote(text) else os.path.abspath(text)


def strip_query(path: str) -> str:
    """Returns a path without the query and fragment that sign an http link."""
    return (
        re.split(r"[?#]", path, maxsplit=1)[0] if path.startswith("http") and is_remote(path) else path
    )


def basename(path: str) -> str:
    """Returns the last part of a path, by which a tar is known."""
    return posixpath.basename(strip_query(path))


def stat(path: str) -> FileStat:
    """Returns a file's size and version; raises OSError for a local file that is not there, Fault for a remote one."""
    if not is_remote(path):
        status = os.stat(path)
        return FileStat(status.st_size, str(status.st_mtime_ns))
    files, inner = _open(path)
    info = _retried(lambda: files.info(inner), path, "its size")
    if info["type"] != "file":
        raise GigamaskError(
            f"{path}: is a folder where one file is wanted; give the address of a tar"
        )
    if info["size"] is None:
        raise GigamaskError(
            f"{path}: the server does not state the file's size; fetch it with 'gigamask download' first"
        )
    version = next((info[key] for key in _VERSIONS if info.get(key)), "")
    return FileStat(
        int(info["size"]), version.isoformat() if isinstance(version, datetime) else str(version)
    )


def stat_all(paths: Sequence[str]) -> list[FileStat]:
    """Returns `state` of each path, many servers' answers waited for at once."""
    if not any(map(is_remote, paths)):
        return [stat(path) for path in paths]
    with ThreadPoolExecutor(MAX_CONCURRENT) as threads:
        return list(threads.map(stat, paths))


def read(path: str, offset: int, size: int) -> bytes:
    """Returns one range of bytes; raises CorruptSampleError where it is not to be had."""
    [data] = read_ranges([ByteRange(path, offset, size)])
    if isinstance(data, CorruptSampleError):
        raise data
    return data


def read_ranges(places: Sequence[ByteRange]) -> list[bytes | CorruptSampleError]:
    """Returns the bytes of each place, or why they are not to be had; remote ones are fetched together."""
    found: list[bytes | CorruptSampleError] = [b""] * len(places)
    local: dict[str, list[int]] = defaultdict(list)
    served: dict[int, tuple[Any, list[tuple[int, str]]]] = {}
    opened: dict[str, tuple[Any, str]] = {}
    for number, place in enumerate(places):
        if not is_remote(place.path):
            local[place.path].append(number)
        elif place.size:
            if place.path not in opened:
                opened[place.path] = _open(place.path)
            files, inner = opened[place.path]
            served.setdefault(id(files), (files, []))[1].append((number, inner))
    for path, numbers in local.items():
        for number, data in zip(
            numbers, _read_local(path, [places[number] for number in numbers]), strict=True
        ):
            found[number] = data
    for files, wanted in served.values():
        for number, data in _read_remote(
            files, {number: (inner, places[number]) for number, inner in wanted}
        ).items():
            found[number] = data
    return found


def read_at(descriptor: int, place: ByteRange) -> bytes | CorruptSampleError:
    """Returns the bytes of a place in a local file that is open, or why they are not to be had."""
    try:
        data = os.pread(descriptor, place.size, place.offset)
    except OSError as error:
        return read_error(place, error)
    return data if len(data) == place.size else _short(place, len(data))


def write(path: Path, content: bytes) -> None:
    """Writes a local file that appears whole."""
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    beside.write_bytes(content)
    beside.replace(path)


def read_error(place: ByteRange, error: OSError) -> CorruptSampleError:
    """Returns the complaint that a local file cannot be read."""
    return CorruptSampleError(
        f"{place.path}: {place.size} bytes at {place.offset} cannot be read ({error.strerror}); check the disk"
    )


def find_tars(url: str) -> list[str]:
    """Returns the tars that a URL means: itself when it ends in `.tar`, a glob's files, or a folder's `.tar` files; sorted."""
    pattern = bool(re.search(r"[*?\[]", strip_query(url)))
    if strip_query(url).endswith(".tar") and not pattern:
        return [url]
    files, inner = _open(url)
    if pattern:
        names = _retried(lambda: files.glob(inner), url, "its folder")
    else:
        names = [
            each["name"]
            for each in _retried(lambda: files.ls(inner, detail=True), url, "its folder")
            if strip_query(each["name"]).endswith(".tar")
        ]
    if not names:
        what = "the glob matches no file" if pattern else "the address lists no .tar file"
        raise GigamaskError(
            f"{url}: {what}; give the address of a tar, of a folder of tars, or a glob such as s3://bucket/folder/*.tar in quotes"
        )
    scheme = url[: url.index("://") + 3]
    return sorted(name if is_remote(name) else scheme + name.lstrip("/") for name in names)


def _read_local(path: str, places: list[ByteRange]) -> list[bytes | CorruptSampleError]:
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except OSError as error:
        return [read_error(place, error) for place in places]
    try:
        return [read_at(descriptor, place) for place in places]
    finally:
        os.close(descriptor)


def _read_remote(
    files: Any, wanted: dict[int, tuple[str, ByteRange]]
) -> dict[int, bytes | CorruptSampleError]:
    """Returns each numbered place's bytes from one file system; only what failed transiently is asked for again."""
    found: dict[int, bytes | CorruptSampleError] = {}
    pending, most = list(wanted), {"batch_size": MAX_CONCURRENT} if files.async_impl else {}
    for tried in range(1, MAX_TRIES + 1):
        if tried > 1:
            _wait(tried)
        paths, places = zip(*(wanted[number] for number in pending), strict=True)
        starts, stops = (
            [place.offset for place in places],
            [place.offset + place.size for place in places],
        )
        answers = files.cat_ranges(list(paths), starts, stops, on_error="return", **most)
        failed = []
        for number, place, answer in zip(pending, places, answers, strict=True):
            found[number], again = _judge_answer(place, answer, tried)
            if again:
                failed.append(number)
        pending = failed
        if not pending:
            break
    return found


def _short(place: ByteRange, there: int) -> CorruptSampleError:
    """Returns the complaint that a file ends too early."""
    return CorruptSampleError(
        f"{place.path}: {place.size} bytes were wanted at {place.offset}, {there} are there; fetch the tar and index it again"
    )


def _judge_answer(
    place: ByteRange, answer: bytes | Exception, tried: int
) -> tuple[bytes | CorruptSampleError, bool]:
    """Returns the bytes or the complaint, and whether asking again may help."""
    if not isinstance(answer, Exception):
        if len(answer) > place.size:
            return CorruptSampleError(_ignores_ranges(place.path)), False
        return (answer, False) if len(answer) == place.size else (_short(place, len(answer)), True)
    again, why = _judge(place.path, answer, tried)
    bad = CorruptSampleError(
        why
        if isinstance(answer, GigamaskError)
        else f"{place.path}: {place.size} bytes at {place.offset} cannot be read{why}"
    )
    bad.__cause__ = answer
    return bad, again


def _retried(action: Callable[[], Result], url: str, what: str) -> Result:
    """Returns what the action returns; raises Fault when it fails for good, or transiently too often."""
    tried = 1
    while True:
        try:
            return action()
        except Exception as error:
            again, why = _judge(url, error, tried)
            if not again or tried == MAX_TRIES:
                raise GigamaskError(f"{url}: {what} cannot be read{why}") from error
        tried += 1
        _wait(tried)


def _wait(tried: int) -> None:
    # Two processes must not wait alike; what is computed does not depend on it.
    part = make_rng(os.getpid(), "retry", time.monotonic_ns()).uniform(0.5, 1)
    time.sleep(FIRST_WAIT_S * 2 ** (tried - 2) * part)


def _judge(url: str, error: Exception, tried: int) -> tuple[bool, str]:
    """Returns whether a failure is transient, and the end of the sentence that names it: how often, what it was, what to do."""
    if isinstance(error, _BUGS):
        raise error
    if isinstance(error, GigamaskError):
        return False, str(error)
    if (
        url.startswith("http")
        and isinstance(error, FileNotFoundError)
        and isinstance(error.__cause__, Exception)
    ):
        error = error.__cause__  # fsspec says so of whatever went wrong
    status = getattr(error, "status", None) or getattr(error, "code", None)
    status = status if isinstance(status, int) else 0
    reason = " ".join(str(error).split())[:200] or type(error).__name__
    if isinstance(error, FileNotFoundError) or status in (404, 410):
        return False, f" (not found: {reason}); check the address"
    if (
        isinstance(error, PermissionError)
        or status in (401, 403)
        or "Credentials" in type(error).__name__
    ):
        return (
            False,
            f" (no permission: {reason}); check the credentials that fsspec is given, or sign the link again",
        )
    if status == 416 or "not satisfiable" in reason:
        return (
            False,
            f" ({reason}); the file is shorter than it was, fetch the tar and index it again",
        )
    refused = 400 <= status < 500 and status not in (408, 425, 429)
    if (
        refused
        or isinstance(error, IsADirectoryError | NotADirectoryError | ValueError)
        or getattr(error, "errno", None) in _PERMANENT
    ):
        return False, f" ({reason}); check the address"
    return (
        True,
        f" after {tried} {'try' if tried == 1 else 'tries'} ({reason}); check the network and the server, then run the same command again",
    )


def _open(url: str) -> tuple[Any, str]:
    """Returns the file system behind a URL, this process's own, and the path within it."""
    import fsspec

    protocol = url.split("::", 1)[0].split("://", 1)[0]
    options: dict[str, Any] = {
        "use_listings_cache": False
    }  # what is on a server is looked up when it is asked for
    told = fsspec.config.conf.get(protocol, {})
    if protocol in ("http", "https"):
        options["get_client"] = _client
    if protocol in ("s3", "s3a") and "config_kwargs" not in told:
        options["config_kwargs"] = {
            "retries": {"max_attempts": 0}
        }  # else three layers retry each other, and an hour goes by
    try:
        files, inner = fsspec.core.url_to_fs(url, **options)
    except ImportError as error:
        extra = EXTRAS.get(protocol)
        act = f"pip install 'gigamask[{extra}]'" if extra else f"install what it names ({error})"
        raise GigamaskError(f"{url}: a library for {protocol}:// is missing; {act}") from error
    except Exception as error:
        raise GigamaskError(
            f"{url}: the address cannot be used{_judge(url, error, 1)[1]}"
        ) from error
    if protocol in ("s3", "s3a"):
        files.retries = 1
    # A forked process must never let go of what its parent opened: closing it there disturbs the event loop that both share.
    _held[id(files)] = files
    return files, inner


_held: dict[int, Any] = {}


async def _client(**kwargs: Any) -> Any:
    """Makes the session of fsspec's http: silence is noticed, and an answer that is not the range asked for is not read."""
    aiohttp = importlib.import_module("aiohttp")
    trace = aiohttp.TraceConfig()
    trace.on_request_end.append(_refuse_whole_files)
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S, sock_read=SILENCE_S)
    return aiohttp.ClientSession(
        trace_configs=[trace],
        **{"timeout": timeout, "headers": {"Accept-Encoding": "identity"}, **kwargs},
    )


async def _refuse_whole_files(session: Any, context: Any, answered: Any) -> None:
    if "Range" in answered.headers and answered.response.status == 200:
        answered.response.close()
        raise GigamaskError(_ignores_ranges(str(answered.url)))


def _ignores_ranges(url: str) -> str:
    return f"{url}: the server ignores ranges and sends the whole file; fetch it with 'gigamask download' first"
