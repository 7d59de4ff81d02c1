"""Downloads: links enter, files leave in a folder, each under its name only when it is whole and its checksum holds.

A file that was begun goes on where it stopped, whatever ended the call before. HTTP/1.1 (RFC 9110): `Range` with `If-Range`; an answer that is not
the range that was asked for is never appended.

Not here: lists of links (`links`) and of checksums (`checksums`), what lies in the folder meanwhile (`partial`), what the files hold (`verify`).
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
from gigamask.datatools.links import Link
from gigamask.datatools.partial_download import DownloadState, PartialDownload, RetryLater, locked
from gigamask.errors import GigamaskError

ATTEMPTS = 8
"""In a row that bring nothing new; with doubling pauses they take two minutes."""
MAX_PAUSE_S = 60.0
PIECE_BYTES = 2**20
REDIRECTS = 10
LAST_WORDS_S = 1.0
_PASSING = {408, 425, 429, 500, 502, 503, 504}
_FULL = {errno.ENOSPC, errno.EDQUOT}
_TIMEOUT = urllib3.Timeout(connect=15, read=60)
_FOLLOW = urllib3.Retry(
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
Say = Callable[[str], object]
"""Called with a line about what goes wrong and is tried again, from any thread."""


@dataclass(frozen=True)
class DownloadResult:
    """What became of one file: `fetched`, `resumed` (an earlier call began it), `skipped` (it was there) or `failed`, with the reason."""

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
    say: Say = lambda line: None,
) -> list[DownloadResult]:
    """Fetches the files that are not there yet, `workers` at a time, and returns what became of each, in the links' order.

    Raises Fault when another download uses the folder or the disk has no room. `pause_s` is the pause before a second attempt, each further one is
    twice as long.
    """
    if workers < 1:
        raise GigamaskError(
            f"{workers} workers: at least one has to do the work; give a number from 1 on"
        )
    folder = Path(out)
    with locked(folder), _Downloader(workers, progress, proxy, pause_s, say) as crew:
        crew.files = [
            PartialDownload(link, folder, (checksums or {}).get(link.name)) for link in links
        ]
        outcomes = {
            outcome.name: outcome
            for outcome in crew.each(crew.look, crew.files)
            if outcome is not None
        }
        missing = [file for file in crew.files if file.link.name not in outcomes]
        needed, free = (
            sum(max(0, (file.total or 0) - file.held) for file in missing),
            shutil.disk_usage(folder).free,
        )
        if needed > free:
            sizes = f"{needed / 1e9:.1f} GB are to be fetched, {free / 1e9:.1f} GB are free"
            raise GigamaskError(
                f"{folder}: {sizes}; make room, or fetch fewer files with --count or --names"
            )
        outcomes |= {outcome.name: outcome for outcome in crew.each(crew.fetch, missing)}
    return [outcomes[link.name] for link in links]


@dataclass(eq=False)
class _Downloader:
    """Threads that fetch, and what they share; what one of them raises is raised where `each` is consumed."""

    workers: int
    progress: Progress | None
    proxy: str | None
    pause_s: float
    say: Say
    files: Sequence[PartialDownload] = ()
    files_done: int = 0
    stop: threading.Event = field(default_factory=threading.Event)
    threads: list[threading.Thread] = field(default_factory=list)
    answers: set[Any] = field(default_factory=set)

    def __enter__(self) -> "_Downloader":
        known: dict[str, Any] = {"maxsize": self.workers, "retries": _FOLLOW, "timeout": _TIMEOUT}
        self.pool = (
            urllib3.ProxyManager(self.proxy, **known)
            if self.proxy
            else urllib3.PoolManager(**known)
        )
        return self

    def __exit__(self, *_: object) -> None:
        """Ends the threads, also those that wait for a byte."""
        self.stop.set()
        for answer in list(self.answers):
            with contextlib.suppress(OSError, RuntimeError, ValueError):
                answer.shutdown()
        latest = time.monotonic() + LAST_WORDS_S
        for thread in self.threads:
            thread.join(max(0.0, latest - time.monotonic()))
        self.pool.clear()

    def each(
        self, function: Callable[[PartialDownload], Any], files: Sequence[PartialDownload]
    ) -> Iterator[Any]:
        """Yields `function(file)` of every file as they come."""
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

        # Daemons, so that one that hangs in a connection does not keep the process from ending.
        threads = [threading.Thread(target=work, daemon=True) for _ in files[: self.workers]]
        self.threads += threads
        for thread in threads:
            thread.start()
        for _ in files:
            yield self._next(done)

    def _try(self, function: Callable[[PartialDownload], Any], file: PartialDownload) -> Any:
        """Returns what the function returns, or how it failed for this file; raises Fault when it would fail for all."""
        try:
            return function(file)
        except GigamaskError as fault:
            reason = str(fault)
        except OSError as error:
            if error.errno in _FULL:
                raise GigamaskError(
                    f"{file.folder}: the disk is full; make room and run the same command again, it goes on from here"
                ) from error
            reason = f"it cannot be written ({error.strerror}); check the folder and the disk"
        return DownloadResult(file.link.name, "failed", file.held, file.received, reason)

    def _next(self, done: queue.SimpleQueue[Any]) -> Any:
        """Waits for one result, and says meanwhile how far things are."""
        while True:
            if self.progress is not None:
                known = [file for file in self.files if file.total is not None]
                self.progress(
                    sum(file.held for file in known),
                    sum(file.total or 0 for file in known),
                    self.files_done,
                )
            with contextlib.suppress(queue.Empty):
                result = done.get(timeout=0.1)
                if isinstance(result, BaseException):
                    raise result
                self.files_done += result is not None
                return result

    def look(self, file: PartialDownload) -> DownloadResult | None:
        """Returns what became of a file whose name is taken already, or None when it is to be fetched, then its size is known if it can be."""
        if not file.path.exists():
            if file.total is None:
                file.total = self._stated_size(file)
            return None
        name, size = file.link.name, file.path.stat().st_size
        if not file.was_whole():
            if file.checksum is None:
                found, wanted = size, self._stated_size(file)
                words = f"{size} bytes, the server " + (
                    "states no size" if wanted is None else f"states {wanted}"
                )
            else:
                found, wanted = digest(file.path, file.checksum), file.checksum
                words = f"the checksum {found}, the list says {wanted}"
            if found != wanted:
                return DownloadResult(
                    name,
                    "failed",
                    size,
                    reason=f"a file of that name is there with {words}; remove it to fetch it",
                )
            file.note_whole()
        return DownloadResult(name, "skipped", size)

    def fetch(self, file: PartialDownload) -> DownloadResult:
        """Returns what became of a file that is not there yet."""
        self._fill(file)
        file.settle()
        return DownloadResult(
            file.link.name, "resumed" if file.resumed else "fetched", file.held, file.received
        )

    def _fill(self, file: PartialDownload) -> None:
        """Asks until the file is whole and its checksum holds; each attempt goes on where the one before stopped."""
        attempts, furthest, starts = 0, file.held, file.starts
        while True:
            try:
                if not file.is_whole():
                    self._ask(file)
                if not file.is_whole():  # a range may be answered with less of it
                    raise RetryLater(f"the server sent {file.held} of {file.receipt.size} bytes")
                if file.checksum is None:
                    return
                found = digest(file.part, file.checksum)
                if found == file.checksum:
                    return
                file.start_again(f"its checksum is {found}, the list says {file.checksum}")
            except (RetryLater, HTTPError) as error:
                why = _why(error)
                if file.starts > starts:
                    starts, furthest = file.starts, -1
                attempts = 0 if file.held > furthest else attempts + 1
                furthest = max(furthest, file.held)
                if attempts == ATTEMPTS:
                    raise GigamaskError(
                        f"{ATTEMPTS} attempts in a row failed, the last: {why}; run the same command again, it goes on from here"
                    ) from error
                if attempts and not self.stop.is_set():
                    self.say(f"retrying {file.link.name} ({why}), try {attempts + 1} of {ATTEMPTS}")
                asked_s = error.wait_s if isinstance(error, RetryLater) else 0.0
                if self.stop.wait(
                    min(MAX_PAUSE_S, max(asked_s, self.pause_s * 2 ** (attempts - 1)))
                ):
                    raise GigamaskError("it was interrupted") from error

    def _stated_size(self, file: PartialDownload) -> int | None:
        """Asks for one byte to learn the size; None where that does not tell."""
        try:
            with self._answer(file, {"Range": "bytes=0-0"}) as answer:
                return _described(answer).size if answer.status in (200, 206) else None
        except HTTPError as error:
            self.say(f"{file.link.name} states no size yet ({_why(error)})")
            return None

    @contextlib.contextmanager
    def _answer(self, file: PartialDownload, headers: Mapping[str, str]) -> Iterator[Any]:
        """The answer to a request for a file, its body not read yet."""
        known = {"Accept-Encoding": "identity", "User-Agent": "gigamask"}
        answer = self.pool.request(
            "GET", file.link.url, headers={**known, **headers}, preload_content=False
        )
        self.answers.add(answer)
        try:
            yield answer
        finally:
            self.answers.discard(answer)
            answer.close()

    def _ask(self, file: PartialDownload) -> None:
        """Makes one attempt at what is missing; raises `RetryLater`, or Fault when another attempt would be in vain."""
        headers = {"Range": f"bytes={file.held}-"} if file.held else {}
        if file.held and file.receipt.validator:
            headers["If-Range"] = file.receipt.validator
        with self._answer(file, headers) as answer:
            stated = _described(answer)
            if answer.status == 416 and file.held:
                if stated.size != file.held or not (file.checksum or file.receipt.agrees(stated)):
                    file.start_again(
                        f"the server states {file.receipt.size} bytes for it, and then {stated.size}"
                    )
                file.keep(stated)
                return
            _check_status(answer, file)
            if answer.status == 206:
                start = re.match(r"bytes (\d+)-", answer.headers.get("Content-Range", ""))
                if start is None or int(start[1]) != file.held or not file.receipt.agrees(stated):
                    file.start_again(
                        "the server answered with a part of another version than was begun"
                    )
            elif stated.size is None and not answer.chunked and file.checksum is None:
                raise GigamaskError(
                    "the server does not say how long it is, so a broken connection would go unnoticed; give its checksum with --checksums"
                )
            self._take(file, answer, stated)

    def _take(self, file: PartialDownload, answer: Any, stated: DownloadState) -> None:
        """Writes what an answer brings behind what is held, or in its place when it is the whole file."""
        with open(file.part, "ab", buffering=0) as part:
            if answer.status == 200 and file.held:
                part.truncate(0)
                file.held, file.resumed = 0, False
            if file.held == 0:
                file.keep(stated)
            file.total = stated.size
            while piece := answer.read1(PIECE_BYTES, decode_content=False):
                if self.stop.is_set():
                    raise RetryLater("it was interrupted")
                view = memoryview(piece)
                while view:
                    written = part.write(view)
                    file.held, view = file.held + written, view[written:]
                file.received += len(piece)
        if file.receipt.size is None:
            file.keep(DownloadState(file.held, stated.etag, stated.modified))


def _described(answer: Any) -> DownloadState:
    """Returns what an answer's headers say of the whole file."""
    headers = answer.headers
    ranged = re.fullmatch(r"bytes (?:\d+-\d+|\*)/(\d+)", headers.get("Content-Range", ""))
    size = (
        ranged[1] if ranged else headers.get("Content-Length", "") if answer.status == 200 else ""
    )
    return DownloadState(
        int(size) if re.fullmatch(r"\d{1,18}", size) else None,
        headers.get("ETag", ""),
        headers.get("Last-Modified", ""),
    )


def _check_status(answer: Any, file: PartialDownload) -> None:
    """Raises `RetryLater` for what passes, Fault for what does not."""
    words = f"HTTP {answer.status} {answer.reason or ''}".strip()
    if answer.status in _PASSING:
        wait = answer.headers.get("Retry-After", "")
        raise RetryLater(words, float(wait) if re.fullmatch(r"\d{1,9}", wait) else 0.0)
    if answer.status in (401, 403, 410):
        raise GigamaskError(
            f"{words}: the link {_expiry(file.link.url)}; fetch a new links file and run the command with it, what is there is kept"
        )
    if answer.status not in (200, 206):
        raise GigamaskError(
            f"{words}: there is no such file behind the link; fetch a new links file"
        )
    if answer.headers.get("Content-Type", "").startswith(
        "text/html"
    ) and not file.link.name.endswith((".html", ".htm")):
        raise GigamaskError(
            "a web page came instead of the file; open the link in a browser to see what it asks for"
        )


def _expiry(url: str) -> str:
    """Returns when a link expired, which Meta's state as a hexadecimal time in `oe`; else that it may have."""
    stated = parse_qs(urlsplit(url).query).get("oe", [""])[0]
    if re.fullmatch(r"[0-9A-Fa-f]{8}", stated) and (
        time := datetime.fromtimestamp(int(stated, 16), UTC)
    ) < datetime.now(UTC):
        return f"expired on {time:%Y-%m-%d}"
    return "is refused, as links are that have expired"


def _why(error: Exception) -> str:
    """Returns an error's words without the address, which is long and secret; raises Fault when it redirects without end."""
    reason = (
        error.reason if isinstance(error, MaxRetryError) and error.reason is not None else error
    )
    if isinstance(reason, LocationValueError):
        raise GigamaskError(
            "its link is no address that can be used; fetch a new links file"
        ) from error
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
