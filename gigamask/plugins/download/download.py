"""Resumable parallel downloads with checksums; a file gets its final name only when complete.

Requests follow RFC 9110: `Range` with `If-Range`. A response that is not the requested range is
never appended.
"""

import contextlib
import errno
import queue
import re
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import urllib3
from urllib3.exceptions import (
    HTTPError,
    IncompleteRead,
    LocationValueError,
    MaxRetryError,
    ResponseError,
)

from gigamask.datatools.checksums import digest
from gigamask.errors import GigamaskError, check_range
from gigamask.files import lock_folder
from gigamask.plugins.download.links import Link
from gigamask.plugins.download.partial_download import (
    STATE_FOLDER,
    DownloadState,
    PartialDownload,
    RetryLater,
    not_a_tar,
)

ATTEMPTS = 8
"""Consecutive attempts without a new byte; with doubling pauses, they take two minutes."""
MAX_PAUSE_S = 60.0
CHUNK_BYTES = 2**20
REDIRECTS = 10
JOIN_TIMEOUT_S = 1.0
_TRANSIENT = {408, 425, 429, 500, 502, 503, 504}
_DISK_FULL = {errno.ENOSPC, errno.EDQUOT}
_TIMEOUT = urllib3.Timeout(connect=15, read=60)
_RETRY = urllib3.Retry(
    total=None,
    connect=0,
    read=0,
    status=0,
    other=0,
    redirect=REDIRECTS,
    respect_retry_after_header=False,
)

Progress = Callable[[int, int, int], object]
"""Called as `progress(bytes_done, bytes_total, files_done)`."""
Warn = Callable[[str], object]
"""Called from any thread with one line about a problem that is retried."""


@dataclass(frozen=True)
class DownloadResult:
    """Result of one file.

    `status` is `fetched`, `resumed` (an earlier call began it), `skipped` (it existed) or `failed`,
    with the reason.
    """

    name: str
    status: str
    bytes: int = 0
    received_bytes: int = 0
    reason: str = ""


def download(
    links: Sequence[Link],
    out: str | Path,
    checksums: Mapping[str, str] | None = None,
    workers: int = 4,
    progress: Progress | None = None,
    proxy: str | None = None,
    pause_s: float = 1.0,
    warn: Warn = lambda line: None,
) -> list[DownloadResult]:
    """Download the files that are missing from a folder.

    Args:
        links: Names and addresses of the files.
        out: The folder; it is created if needed.
        checksums: Checksums by file name (md5, sha1 or sha256, by their length).
        workers: Number of files downloaded at a time.
        progress: Called about ten times a second.
        proxy: Address of an HTTP proxy.
        pause_s: Pause before the second attempt in seconds; it doubles with each further attempt.
        warn: Called with a line about each attempt that is repeated.

    Returns:
        The result of each file, in the order of the links.

    Raises:
        GigamaskError: Another download uses the folder, or the disk has no room.
    """
    check_range("--workers", workers, 1)
    folder = Path(out)
    running = _Downloader(workers, progress, proxy, pause_s, warn)
    with lock_folder(folder, STATE_FOLDER), running as downloader:
        downloader.files = [
            PartialDownload(link, folder, (checksums or {}).get(link.name)) for link in links
        ]
        results = {
            result.name: result
            for result in downloader.map(downloader.check_existing, downloader.files)
            if result is not None
        }
        missing = [file for file in downloader.files if file.link.name not in results]
        needed = sum(max(0, (file.total_bytes or 0) - file.bytes_on_disk) for file in missing)
        free = shutil.disk_usage(folder).free
        if needed > free:
            raise GigamaskError(
                f"{folder}: the download needs {needed / 1e9:.1f} GB, but only {free / 1e9:.1f} GB"
                " are free; make room, or fetch fewer files with --count or --names"
            )
        results |= {result.name: result for result in downloader.map(downloader.fetch, missing)}
    return [results[link.name] for link in links]


@dataclass(eq=False)
class _Downloader:
    """Download threads and their shared state; their errors are raised where `map` is consumed."""

    workers: int
    progress: Progress | None
    proxy: str | None
    pause_s: float
    warn: Warn
    files: Sequence[PartialDownload] = ()
    files_done: int = 0
    stop: threading.Event = field(default_factory=threading.Event)
    threads: list[threading.Thread] = field(default_factory=list)
    responses: set[Any] = field(default_factory=set)

    def __enter__(self) -> "_Downloader":
        options: dict[str, Any] = {"maxsize": self.workers, "retries": _RETRY, "timeout": _TIMEOUT}
        self.pool = (
            urllib3.ProxyManager(self.proxy, **options)
            if self.proxy
            else urllib3.PoolManager(**options)
        )
        return self

    def __exit__(self, *_: object) -> None:
        """Stop the threads, including those waiting for data."""
        self.stop.set()
        for response in list(self.responses):
            with contextlib.suppress(OSError, RuntimeError, ValueError):
                response.shutdown()
        deadline = time.monotonic() + JOIN_TIMEOUT_S
        for thread in self.threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        self.pool.clear()

    def map(
        self, function: Callable[[PartialDownload], Any], files: Sequence[PartialDownload]
    ) -> Iterator[Any]:
        """Yield `function(file)` for every file, in the order of completion."""
        waiting: queue.SimpleQueue[PartialDownload] = queue.SimpleQueue()
        done: queue.SimpleQueue[Any] = queue.SimpleQueue()
        for file in files:
            waiting.put(file)

        def work() -> None:
            while not self.stop.is_set():
                try:
                    done.put(self._try(function, waiting.get_nowait()))
                except queue.Empty:
                    return
                except BaseException as error:
                    done.put(error)

        # Daemons, so that a hanging connection does not keep the process from ending.
        threads = [threading.Thread(target=work, daemon=True) for _ in files[: self.workers]]
        self.threads += threads
        for thread in threads:
            thread.start()
        for _ in files:
            yield self._next(done)

    def _try(self, function: Callable[[PartialDownload], Any], file: PartialDownload) -> Any:
        """Return the function's result or the file's failure; raise errors that affect all."""
        try:
            return function(file)
        except GigamaskError as fault:
            reason = str(fault)
        except OSError as error:
            if error.errno in _DISK_FULL:
                raise GigamaskError(
                    f"{file.folder}: the disk is full; make room and run the same command again"
                    " to resume"
                ) from error
            reason = f"it cannot be written ({error.strerror}); check the folder and the disk"
        name = file.link.name
        return DownloadResult(name, "failed", file.bytes_on_disk, file.received_bytes, reason)

    def _next(self, done: queue.SimpleQueue[Any]) -> Any:
        """Wait for one result, reporting progress meanwhile."""
        while True:
            if self.progress is not None:
                sized = [file for file in self.files if file.total_bytes is not None]
                self.progress(
                    sum(file.bytes_on_disk for file in sized),
                    sum(file.total_bytes or 0 for file in sized),
                    self.files_done,
                )
            with contextlib.suppress(queue.Empty):
                result = done.get(timeout=0.1)
                if isinstance(result, BaseException):
                    raise result
                self.files_done += result is not None
                return result

    def check_existing(self, file: PartialDownload) -> DownloadResult | None:
        """Return the result of a file that exists; otherwise request its size and return None."""
        if not file.path.exists():
            if file.total_bytes is None:
                file.total_bytes = self._stated_size(file)
            return None
        name, size = file.link.name, file.path.stat().st_size
        if not file.was_completed():
            if file.checksum is None:
                actual, expected = size, self._stated_size(file)
                stated = "states no size" if expected is None else f"states {expected}"
                difference = f"{size} bytes, the server {stated}"
            else:
                actual, expected = digest(file.path, file.checksum), file.checksum
                difference = f"the checksum {actual}, the list says {expected}"
            if actual != expected:
                reason = f"a file of that name exists with {difference}; remove it to fetch it"
                return DownloadResult(name, "failed", size, reason=reason)
        if problem := not_a_tar(file.path):
            reason = f"a file of that name exists, with {problem}; remove it to fetch it"
            return DownloadResult(name, "failed", size, reason=reason)
        if not file.was_completed():
            file.mark_complete()
        return DownloadResult(name, "skipped", size)

    def fetch(self, file: PartialDownload) -> DownloadResult:
        """Download a file that does not exist yet."""
        self._download(file)
        file.finish()
        status = "resumed" if file.resumed else "fetched"
        return DownloadResult(file.link.name, status, file.bytes_on_disk, file.received_bytes)

    def _download(self, file: PartialDownload) -> None:
        """Request a file until it is complete with the right checksum, resuming each time."""
        attempts, furthest, starts = 0, file.bytes_on_disk, file.starts
        while True:
            try:
                if not file.is_complete():
                    self._attempt(file)
                if not file.is_complete():  # a server may send less than the requested range
                    raise RetryLater(
                        f"the server sent {file.bytes_on_disk} of {file.state.size} bytes"
                    )
                if file.checksum is None:
                    return
                actual = digest(file.part, file.checksum)
                if actual == file.checksum:
                    return
                file.restart(f"its checksum is {actual}, the list says {file.checksum}")
            except (RetryLater, HTTPError) as error:
                reason = _error_text(error)
                if file.starts > starts:
                    starts, furthest = file.starts, -1
                attempts = 0 if file.bytes_on_disk > furthest else attempts + 1
                furthest = max(furthest, file.bytes_on_disk)
                if attempts == ATTEMPTS:
                    raise GigamaskError(
                        f"{ATTEMPTS} attempts in a row failed, the last: {reason}; run the same"
                        " command again to resume"
                    ) from error
                if attempts and not self.stop.is_set():
                    attempt = f"attempt {attempts + 1} of {ATTEMPTS}"
                    self.warn(f"retrying {file.link.name} ({reason}), {attempt}")
                requested_s = getattr(error, "wait_s", 0.0)
                pause_s = max(requested_s, self.pause_s * 2 ** (attempts - 1))
                if self.stop.wait(min(MAX_PAUSE_S, pause_s)):
                    raise GigamaskError("it was interrupted") from error

    def _stated_size(self, file: PartialDownload) -> int | None:
        """Request one byte to get the file's size; return None if the server does not state it."""
        try:
            with self._request(file, {"Range": "bytes=0-0"}) as response:
                return _stated(response).size if response.status in (200, 206) else None
        except HTTPError as error:
            self.warn(f"{file.link.name}: its size is not known yet ({_error_text(error)})")
            return None

    @contextlib.contextmanager
    def _request(self, file: PartialDownload, headers: Mapping[str, str]) -> Iterator[Any]:
        """Yield the response to a request for a file; its body is not read yet."""
        defaults = {"Accept-Encoding": "identity", "User-Agent": "gigamask"}
        response = self.pool.request(
            "GET", file.link.url, headers={**defaults, **headers}, preload_content=False
        )
        self.responses.add(response)
        try:
            yield response
        finally:
            self.responses.discard(response)
            response.close()

    def _attempt(self, file: PartialDownload) -> None:
        """Request the missing bytes once; raise `RetryLater` where another attempt may succeed."""
        headers = {"Range": f"bytes={file.bytes_on_disk}-"} if file.bytes_on_disk else {}
        if file.bytes_on_disk and file.state.validator:
            headers["If-Range"] = file.state.validator
        with self._request(file, headers) as response:
            stated = _stated(response)
            if response.status == 416 and file.bytes_on_disk:
                if stated.size != file.bytes_on_disk or not (
                    file.checksum or file.state.matches(stated)
                ):
                    file.restart(
                        f"the server first stated {file.state.size} bytes, then {stated.size}"
                    )
                file.save_state(stated)
                return
            _check_status(response, file)
            if response.status == 206:
                start = re.match(r"bytes (\d+)-", response.headers.get("Content-Range", ""))
                if (
                    start is None
                    or int(start[1]) != file.bytes_on_disk
                    or not file.state.matches(stated)
                ):
                    file.restart("the server sent a part of another version of the file")
            elif stated.size is None and not response.chunked and file.checksum is None:
                raise GigamaskError(
                    "the server states no size, so a broken connection could not be noticed;"
                    " give its checksum with --checksums"
                )
            self._write_body(file, response, stated)

    def _write_body(self, file: PartialDownload, response: Any, stated: DownloadState) -> None:
        """Append a response's body to the part; a response with the whole file replaces it."""
        with open(file.part, "ab", buffering=0) as part:
            if response.status == 200 and file.bytes_on_disk:
                part.truncate(0)
                file.bytes_on_disk, file.resumed = 0, False
            if file.bytes_on_disk == 0:
                file.save_state(stated)
            file.total_bytes = stated.size
            while chunk := response.read1(CHUNK_BYTES, decode_content=False):
                if self.stop.is_set():
                    raise RetryLater("it was interrupted")
                view = memoryview(chunk)
                while view:
                    written = part.write(view)
                    file.bytes_on_disk, view = file.bytes_on_disk + written, view[written:]
                file.received_bytes += len(chunk)
        if file.state.size is None:
            file.save_state(DownloadState(file.bytes_on_disk, stated.etag, stated.modified))


def _stated(response: Any) -> DownloadState:
    """Return size and version of the whole file from a response's headers."""
    headers = response.headers
    content_range = re.fullmatch(r"bytes (?:\d+-\d+|\*)/(\d+)", headers.get("Content-Range", ""))
    if content_range:
        size = content_range[1]
    else:
        size = headers.get("Content-Length", "") if response.status == 200 else ""
    return DownloadState(
        int(size) if re.fullmatch(r"\d{1,18}", size) else None,
        headers.get("ETag", ""),
        headers.get("Last-Modified", ""),
    )


def _check_status(response: Any, file: PartialDownload) -> None:
    """Raise `RetryLater` for a transient status, `GigamaskError` for a permanent one."""
    status = f"HTTP {response.status} {response.reason or ''}".strip()
    if response.status in _TRANSIENT:
        wait = response.headers.get("Retry-After", "")
        raise RetryLater(status, float(wait) if re.fullmatch(r"\d{1,9}", wait) else 0.0)
    if response.status in (401, 403, 410):
        raise GigamaskError(
            f"{status}: the link {_expiry(file.link.url)}; fetch a new links file and run the"
            " command with it, finished and partial files are kept"
        )
    if response.status not in (200, 206):
        raise GigamaskError(f"{status}: the link leads to no file; fetch a new links file")
    encoding = response.headers.get("Content-Encoding", "").strip().lower()
    if encoding not in ("", "identity"):
        raise GigamaskError(
            f"the server sent the file encoded as {encoding}, although it was asked for its own "
            "bytes; fetch it from another server"
        )
    kind = response.headers.get("Content-Type", "").partition(";")[0].strip().lower()
    is_html = kind in ("text/html", "application/xhtml+xml")
    if is_html and not file.link.name.endswith((".html", ".htm")):
        raise GigamaskError(
            "the server sent a web page instead of the file; open the link in a browser to see why"
        )


def _expiry(url: str) -> str:
    """Return when a link expired, if known; Meta's links state it as a hexadecimal time in `oe`."""
    stated = parse_qs(urlsplit(url).query).get("oe", [""])[0]
    if re.fullmatch(r"[0-9A-Fa-f]{8}", stated) and (
        time := datetime.fromtimestamp(int(stated, 16), UTC)
    ) < datetime.now(UTC):
        return f"expired on {time:%Y-%m-%d}"
    return "was refused and may have expired"


def _error_text(error: Exception) -> str:
    """Describe an error without the address, which is long and secret; raise if it is permanent."""
    reason = (
        error.reason if isinstance(error, MaxRetryError) and error.reason is not None else error
    )
    if isinstance(reason, LocationValueError):
        raise GigamaskError("its link is not a valid address; fetch a new links file") from error
    if isinstance(reason, ResponseError):
        raise GigamaskError(
            f"its link redirects more than {REDIRECTS} times; fetch a new links file"
        ) from error
    if isinstance(reason, IncompleteRead):
        return f"the connection broke {reason.expected} bytes before the end"
    return (
        str(reason)
        if isinstance(reason, RetryLater)
        else f"{type(reason).__name__} ({str(reason)[:200]})"
    )
