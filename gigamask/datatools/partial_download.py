"""Files that are not complete yet: a link and a folder enter; a part, and the receipt that says what it is a part of, stay until it is whole.

Parts and receipts lie under `.download/` in the folder; a file appears under its name only when it is whole. Whatever ends the process, a part and
its receipt fit together: the receipt is written before the first byte, and the part only grows.

Not here: where the bytes come from (`download`).
"""

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec

from gigamask.data import storage
from gigamask.data.file_lock import exclusive_lock
from gigamask.datatools.links import Link
from gigamask.errors import GigamaskError

KEPT = ".download"
STARTS = 2
"""How often a file is begun because what came was not what was promised."""


class RetryLater(Exception):  # noqa: N818
    """This attempt failed, another may not; not before `wait_s` when the server asked for that."""

    def __init__(self, why: str, wait_s: float = 0.0) -> None:
        super().__init__(why)
        self.wait_s = wait_s


class DownloadState(msgspec.Struct):
    """What is known of one file: its size and version at the server; and once it is whole, when it was and which checksum held."""

    size: int | None = None
    etag: str = ""
    modified: str = ""
    checksum: str = ""
    mtime_ns: int = 0

    @property
    def validator(self) -> str:
        """What `If-Range` may name: a strong ETag, or a date."""
        return self.modified if self.etag.startswith("W/") else self.etag or self.modified

    def agrees(self, other: "DownloadState") -> bool:
        """Says whether the other may be of the same version: nothing that both know differs."""
        known = ((self.size, other.size), (self.etag, other.etag), (self.modified, other.modified))
        return all(
            one == another or one in (None, "") or another in (None, "") for one, another in known
        )


@dataclass(eq=False)
class PartialDownload:
    """One file on its way. `total` is its size as far as known, `held` the bytes of it that are here, `received` those that came in this call."""

    link: Link
    folder: Path
    checksum: str | None
    total: int | None = None
    received: int = 0
    starts: int = 0

    def __post_init__(self) -> None:
        self.path = self.folder / self.link.name
        self.part = self.folder / KEPT / f"{self.link.name}.part"
        self._paper = self.folder / KEPT / f"{self.link.name}.json"
        self.receipt = self._read_receipt()
        self.held = self.part.stat().st_size if self.part.exists() else 0
        if self.receipt.size is not None and self.held:
            self.total = self.receipt.size
        elif self.held and self.receipt == DownloadState():  # nobody knows of what it is a part
            self.drop()
        self.resumed = self.held > 0

    def _read_receipt(self) -> DownloadState:
        try:
            return msgspec.json.decode(self._paper.read_bytes(), type=DownloadState)
        except (OSError, msgspec.DecodeError):
            return DownloadState()

    def keep(self, receipt: DownloadState) -> None:
        """Writes the receipt."""
        storage.write(self._paper, msgspec.json.encode(receipt))
        self.receipt = receipt

    def drop(self) -> None:
        """Throws the part away."""
        self.part.unlink(missing_ok=True)
        self.held, self.resumed = 0, False

    def start_again(self, why: str) -> None:
        """Throws the part away because of `why` and raises `RetryLater`, or Fault when that was its last chance."""
        self.drop()
        self.starts += 1
        if self.starts == STARTS:
            raise GigamaskError(f"{why}, {STARTS} times over; try later, or fetch a new links file")
        raise RetryLater(why)

    def is_whole(self) -> bool:
        """Says whether all bytes are here."""
        return self.held == self.receipt.size and self.part.exists()

    def was_whole(self) -> bool:
        """Says whether the file is, under its name, as an earlier call left it, with the checksum that is asked for."""
        held = self.path.stat()
        same = (self.receipt.mtime_ns, self.receipt.size) == (held.st_mtime_ns, held.st_size)
        return same and self.checksum in (None, self.receipt.checksum)

    def settle(self) -> None:
        """Gives the whole part its name."""
        with open(self.part, "rb") as file:
            os.fsync(file.fileno())
        os.replace(self.part, self.path)
        self.note_whole()

    def note_whole(self) -> None:
        """Writes down that the file under its name is whole."""
        held, receipt = self.path.stat(), self.receipt
        self.keep(
            DownloadState(
                held.st_size, receipt.etag, receipt.modified, self.checksum or "", held.st_mtime_ns
            )
        )


@contextlib.contextmanager
def locked(folder: Path, kept: str = KEPT) -> Iterator[None]:
    """Makes the folder, and `kept` in it, and keeps both to this process until the block ends; the lock of a killed process is gone with it."""
    busy = f"{folder}: another process is writing into it; let it end, or give another folder"
    with contextlib.ExitStack() as held:
        try:
            held.enter_context(exclusive_lock(folder / kept / "lock", busy))
        except OSError as error:
            raise GigamaskError(
                f"{folder}: cannot be written ({error.strerror}); give a folder that can"
            ) from error
        yield
