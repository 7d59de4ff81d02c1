"""State of unfinished downloads: a partial file, and a record of the version that it is part of.

Both are under `.download/` in the folder; a file gets its final name only when it is complete. They
match even if the process is killed: the record is written before the first byte, and the partial
file only grows.
"""

import os
from dataclasses import dataclass
from pathlib import Path

import msgspec

from gigamask import files
from gigamask.data import tar
from gigamask.errors import GigamaskError
from gigamask.plugins.download.links import Link
from gigamask.serialization import JSON_ERRORS

STATE_FOLDER = ".download"
COMPRESSED = {b"\x1f\x8b": "gzip", b"\x28\xb5\x2f\xfd": "zstd", b"PK\x03\x04": "zip"}
"""Kinds of compressed data by their first bytes."""
MAX_STARTS = 2
"""Number of times a file is started if the server sends other bytes than it announced."""


class RetryLater(Exception):  # noqa: N818
    """A failed attempt that may be repeated, after `wait_s` seconds if the server requires it."""

    def __init__(self, reason: str, wait_s: float = 0.0) -> None:
        super().__init__(reason)
        self.wait_s = wait_s


class DownloadState(msgspec.Struct):
    """Size and version of a file on the server; once complete, also its checksum and time."""

    size: int | None = None
    etag: str = ""
    modified: str = ""
    checksum: str = ""
    mtime_ns: int = 0

    @property
    def validator(self) -> str:
        """Value for `If-Range`: a strong ETag, or a date."""
        return self.modified if self.etag.startswith("W/") else self.etag or self.modified

    def matches(self, other: "DownloadState") -> bool:
        """Return whether both may be the same version: no field that both state differs."""
        pairs = ((self.size, other.size), (self.etag, other.etag), (self.modified, other.modified))
        return all(
            one == another or one in (None, "") or another in (None, "") for one, another in pairs
        )


@dataclass(eq=False)
class PartialDownload:
    """One file being downloaded.

    `total_bytes` is its size if known, `bytes_on_disk` the length of the partial file, and
    `received_bytes` the number of bytes that this process has received.
    """

    link: Link
    folder: Path
    checksum: str | None
    total_bytes: int | None = None
    received_bytes: int = 0
    starts: int = 0

    def __post_init__(self) -> None:
        self.path = self.folder / self.link.name
        self.part = self.folder / STATE_FOLDER / f"{self.link.name}.part"
        self._state_path = self.folder / STATE_FOLDER / f"{self.link.name}.json"
        self.state = self._read_state()
        self.bytes_on_disk = self.part.stat().st_size if self.part.exists() else 0
        if self.state.size is not None and self.bytes_on_disk:
            self.total_bytes = self.state.size
        elif self.bytes_on_disk and self.state == DownloadState():  # of an unknown file
            self.discard()
        self.resumed = self.bytes_on_disk > 0

    def _read_state(self) -> DownloadState:
        try:
            return msgspec.json.decode(self._state_path.read_bytes(), type=DownloadState)
        except (OSError, *JSON_ERRORS):
            return DownloadState()

    def save_state(self, state: DownloadState) -> None:
        """Write the state to disk."""
        files.write_bytes(self._state_path, msgspec.json.encode(state))
        self.state = state

    def discard(self) -> None:
        """Delete the partial file."""
        self.part.unlink(missing_ok=True)
        self.bytes_on_disk, self.resumed = 0, False

    def restart(self, reason: str) -> None:
        """Delete the partial file and raise `RetryLater`, or `GigamaskError` after `MAX_STARTS`."""
        self.discard()
        self.starts += 1
        if self.starts == MAX_STARTS:
            raise GigamaskError(
                f"{reason} ({MAX_STARTS} times); try later, or fetch a new links file"
            )
        raise RetryLater(reason)

    def is_complete(self) -> bool:
        """Return whether the partial file has all bytes."""
        return self.bytes_on_disk == self.state.size and self.part.exists()

    def was_completed(self) -> bool:
        """Return whether an earlier call completed the file, unchanged and with this checksum."""
        status = self.path.stat()
        same = (self.state.mtime_ns, self.state.size) == (status.st_mtime_ns, status.st_size)
        return same and self.checksum in (None, self.state.checksum)

    def finish(self) -> None:
        """Give the complete partial file its final name, unless it is no tar."""
        if problem := not_a_tar(self.part):
            self.discard()
            raise GigamaskError(
                f"the server sent {problem} instead of the file; open the link in a browser to see "
                "why, or fetch a new links file"
            )
        files.flush(self.part)
        os.replace(self.part, self.path)
        self.mark_complete()

    def mark_complete(self) -> None:
        """Record that the file under its final name is complete."""
        status, state = self.path.stat(), self.state
        self.save_state(
            DownloadState(
                status.st_size,
                state.etag,
                state.modified,
                self.checksum or "",
                status.st_mtime_ns,
            )
        )


def not_a_tar(path: Path) -> str:
    """Return what a file holds instead of a tar; "" if it is one, or has the name of another kind.

    Args:
        path: The file, or its part.
    """
    with open(path, "rb") as file:
        block = file.read(tar.BLOCK)
    if not block:
        return "an empty body"
    if not path.name.removesuffix(".part").endswith(".tar") or tar.is_header(block):
        return ""
    if block.lstrip(b"\xef\xbb\xbf \t\r\n")[:1] == b"<":
        return "a web page"
    kinds = [kind for start, kind in COMPRESSED.items() if block.startswith(start)]
    return f"{kinds[0]}-compressed data" if kinds else "something without a tar header"
