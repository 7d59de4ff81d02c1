"""Plain tar archives: a path enters, where each file's bytes lie leaves; and archives written byte for byte the same every time.

Only the 512-byte headers are read, never a payload that can be passed over. Formats: ustar (POSIX 1003.1) with prefix, GNU long names and
base-256 sizes, PAX path and size records. An archive that was cut short is refused, also one cut exactly between two members, which the
standard library takes for complete.

Of a remote archive windows of 256 KiB are fetched, and only where the next header is not in the one at hand: three times SA-1B's mean json, so that
one request passes a json and the next header while the jpgs, which are larger, are jumped over. Each header says where the next one lies, so requests
wait for each other; scanning many tars at once makes up for it.

Not here: which members belong together (`data.part`), reading payloads (`data.shards`), servers and their errors (`data.store`).
"""

import os
import re
import tarfile
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import NoReturn

import numpy as np
from jaxtyping import Int64, UInt8

from gigamask.data import storage
from gigamask.errors import CorruptSampleError, GigamaskError

BLOCK = 512
RECORD = 20 * BLOCK
MAX_TAIL_BYTES = 2**20
"""More than this behind the end mark is no padding (usually 10 KB): the file was preallocated and downloaded in part, or tars were joined."""
MAX_EXTENSION_BYTES = 2**20
"""A PAX or GNU long-name record holds a path; one above this is not worth reading."""
WINDOW_BYTES = 2**18
_CHUNK = 8192
_ZEROS = bytes(BLOCK)
_REGULAR = ord("0")
_WITHOUT_PAYLOAD = b"123456"
_EXTENSIONS = b"xgLK"


@dataclass(frozen=True)
class Members:
    """The regular files of one tar in stored order: name, first byte of the payload in the tar, and its length.

    `broken` says why nothing behind them can be read, where that was no error.
    """

    names: list[str]
    offsets: Int64[np.ndarray, "n"]
    sizes: Int64[np.ndarray, "n"]
    broken: str = ""


def scan(path: str | Path, salvage: bool = False) -> Members:
    """Returns the regular files of a tar from its headers alone.

    Raises Fault where the tar is cut short or a header is broken; with `salvage` returns the whole files before that place instead.
    """
    path = os.fspath(path)
    if storage.is_remote(path):
        file_bytes = storage.stat(path).bytes
        return _Walk(path, _Window(path, file_bytes).read, file_bytes).run(salvage)
    try:
        with open(path, "rb", buffering=0) as file:
            if hasattr(
                os, "posix_fadvise"
            ):  # without read-ahead a cold scan takes three quarters of the time
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
            return _Walk(
                path, partial(os.pread, file.fileno()), os.fstat(file.fileno()).st_size
            ).run(salvage)
    except OSError as error:
        raise GigamaskError(
            f"{path}: cannot be read ({error.strerror}); check the path, its permissions and the disk"
        ) from error


def write(path: str | Path, members: Iterable[tuple[str, bytes]]) -> None:
    """Writes an ustar archive whose bytes depend on the members alone (no times, no owner); it appears under its name when it is complete.

    Raises Fault for a name that ustar cannot hold (over 100 bytes, or 255 with folders).
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, partial = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(descriptor, "wb") as file:
            for name, payload in members:
                file.write(_header(path, name, len(payload)))
                file.write(payload)
                file.write(bytes(-len(payload) % BLOCK))
            file.write(bytes(2 * BLOCK))
            file.write(bytes(-file.tell() % RECORD))
        os.chmod(partial, 0o644)
        os.replace(partial, path)
    except BaseException:
        os.unlink(partial)
        raise


def _header(path: Path, name: str, size: int) -> bytes:
    info = tarfile.TarInfo(name)
    info.size = size
    try:
        return info.tobuf(tarfile.USTAR_FORMAT, "utf-8", "strict")
    except ValueError as error:
        raise GigamaskError(
            f"{path}: member {name!r} of {size} bytes does not fit a ustar header ({error}); shorten the name to 100 bytes"
        ) from error


class _Window:
    """The part of a remote file that was fetched last."""

    def __init__(self, path: str, file_bytes: int) -> None:
        self.path, self.file_bytes = path, file_bytes
        self.start, self.held = 0, b""

    def read(self, size: int, position: int) -> bytes:
        """Returns `size` bytes from `position` on, fewer at the file's end, as `os.pread` does."""
        size = min(size, self.file_bytes - position)
        if size <= 0:
            return b""
        if not self.start <= position <= self.start + len(self.held) - size:
            self.start = position
            try:
                self.held = storage.read(
                    self.path, position, min(max(size, WINDOW_BYTES), self.file_bytes - position)
                )
            except CorruptSampleError as bad:
                raise GigamaskError(str(bad)) from bad
        return self.held[position - self.start : position - self.start + size]


@dataclass
class _Walk:
    """One pass over the headers. Checksums, kinds and names are taken for thousands of headers at once, which is where the speed comes from."""

    path: str
    read: Callable[[int, int], bytes]
    file_bytes: int
    found: list[Members] = field(default_factory=list)
    members: int = 0
    last: str = ""
    headers: list[bytes] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    renamed: dict[int, str] = field(default_factory=dict)
    once: dict[str, str] = field(default_factory=dict)
    lasting: dict[str, str] = field(default_factory=dict)

    def run(self, salvage: bool) -> Members:
        """Follows the chain of headers to the end mark, or with `salvage` to where it breaks."""
        broken = ""
        try:
            self._follow()
            self._flush()
        except GigamaskError as fault:
            if not salvage:
                raise
            broken = str(fault)
            sound = min([len(self.sizes), *_broken_rows(self.headers)])
            for held in (self.headers, self.starts, self.sizes):
                del held[sound:]
            self.renamed = {row: name for row, name in self.renamed.items() if row < sound}
            self._flush()
        return Members(
            [name for members in self.found for name in members.names],
            np.concatenate([members.offsets for members in self.found]),
            np.concatenate([members.sizes for members in self.found]),
            broken,
        )

    def _follow(self) -> None:
        """Collects the headers up to the end mark."""
        position, special = 0, False
        file_bytes, read = self.file_bytes, self.read
        headers, starts, sizes = self.headers, self.starts, self.sizes
        while True:
            header = read(BLOCK, position)
            payload = position + BLOCK
            if len(headers) == _CHUNK:
                self._flush()
            headers.append(header)
            starts.append(position)
            try:
                size = int(header[124:135], 8)
            except ValueError:
                size = -1
            if (
                size < 0
                or payload + size > file_bytes
                or header[156] != _REGULAR
                or header[135] not in b"\0 "
                or special
            ):
                if len(header) < BLOCK or header == _ZEROS:
                    break
                size = self._special(header, payload)
                special = bool(self.once or self.lasting)
            sizes.append(size)
            position = payload + (size + BLOCK - 1) // BLOCK * BLOCK
        headers.pop()
        starts.pop()
        self._check_tail(position, header)

    def _special(self, header: bytes, payload: int) -> int:
        """Deals with any header that is not a plain regular file's and returns the bytes that follow it."""
        size = (
            int.from_bytes(header[125:136], "big")
            if header[124] == 0x80
            else _octal(header[124:136])
        )
        if size is None or size < 0:
            self._fail(
                f"the header at byte {self.starts[-1]} states no size ({header[124:136]!r}); it is damaged, fetch the tar again"
            )
        kind = header[156]
        if kind in _EXTENSIONS:
            self._check_end(payload + size)
            self._extend(chr(kind), payload, size)
            return size
        records = self.lasting | self.once
        self.once = {}
        size = int(records.get("size", size))
        if "path" in records:
            self.renamed[len(self.headers) - 1] = records["path"]
        if kind == ord("S") or any(key.startswith("GNU.sparse") for key in records):
            self._fail(
                f"member {self.members + _count(self.headers)} is a sparse file, which cannot be read by offset; pack the folder again with plain tar"
            )
        size = 0 if kind in _WITHOUT_PAYLOAD else size
        self._check_end(payload + size)
        return size

    def _extend(self, kind: str, payload: int, size: int) -> None:
        """Keeps what a PAX (x, g) or GNU long-name (L) header says of the members to come; K names a link's target, which is of no use."""
        if size > MAX_EXTENSION_BYTES:
            self._fail(
                f"the extension at byte {self.starts[-1]} has {size} bytes, at most {MAX_EXTENSION_BYTES} are read; pack the tar again"
            )
        data = self.read(size, payload)
        if kind == "L":
            self.once["path"] = _text(data)
        elif kind in "xg":
            records = _pax_records(data)
            if records is None or not re.fullmatch(r"[0-9]{1,18}", records.get("size", "0")):
                self._fail(
                    f"the PAX header at byte {self.starts[-1]} is broken; fetch the tar again"
                )
            (self.once if kind == "x" else self.lasting).update(records)

    def _check_tail(self, position: int, header: bytes) -> None:
        """Tells the end mark from a file that merely ends."""
        if header != _ZEROS:
            number = self.members + _count(self.headers)
            where = (
                f"after member {number} ({self._last_name()})"
                if number
                else "before its first member"
            )
            self._fail(
                f"the file ends at {self.file_bytes} bytes {where} without the zero blocks that end a tar; it was cut short, fetch it again"
            )
        if self.read(BLOCK, position + BLOCK).strip(b"\0"):
            self._fail(
                f"one zero block at byte {position} stands between members, where two end a tar; it is damaged, fetch it again"
            )
        if self.file_bytes - position > MAX_TAIL_BYTES:
            self._fail(
                f"the archive ends at {position}, the file has {self.file_bytes} bytes; it was fetched in part or joined, fetch it again"
            )

    def _check_end(self, end: int) -> None:
        if end > self.file_bytes:
            number = self.members + _count(self.headers)
            self._fail(
                f"member {number} ({self._last_name()}) ends at {end}, the file has {self.file_bytes} bytes; it was cut short, fetch it again"
            )

    def _fail(self, what: str) -> NoReturn:
        self._verify()  # a broken header further up is the cause, this its consequence
        raise GigamaskError(f"{self.path}: {what}")

    def _last_name(self) -> str:
        row = len(self.headers) - 1
        return (
            self.renamed.get(row)
            or self.once.get("path")
            or (_names(_rows(self.headers[-1:]))[0] if self.headers else self.last)
        )

    def _verify(self) -> None:
        """Raises Fault for the first of the headers at hand that is none."""
        for row in _broken_rows(self.headers):
            act = (
                "it is damaged, fetch it again"
                if self.starts[row]
                else "this is no plain tar (unpack a .tar.gz first)"
            )
            raise GigamaskError(
                f"{self.path}: the {BLOCK} bytes at {self.starts[row]} are no tar header, their checksum is wrong; {act}"
            )

    def _flush(self) -> None:
        """Verifies the headers at hand, takes what they say of regular files, and lets them go."""
        self._verify()
        rows = _rows(self.headers)
        names = _names(rows)
        for row, name in self.renamed.items():
            names[row] = name
        kinds = rows[:, 156]
        folders = [
            kind == 0 and name.endswith("/")
            for kind, name in zip(kinds.tolist(), names, strict=True)
        ]  # as V7 tars mark them
        regular = np.isin(kinds, np.frombuffer(b"0\x007", np.uint8)) & ~np.array(folders, bool)
        offsets = np.array(self.starts, np.int64) + BLOCK
        self.found.append(
            Members(
                [names[row] for row in np.flatnonzero(regular)],
                offsets[regular],
                np.array(self.sizes, np.int64)[regular],
            )
        )
        self.members, self.last = (
            self.members + _count(self.headers),
            names[-1] if names else self.last,
        )
        for held in (self.headers, self.starts, self.sizes, self.renamed):
            held.clear()


def _count(headers: list[bytes]) -> int:
    """Returns how many members some headers stand for, the one with them that an extension header at the end announces."""
    kinds = [header[156] in _EXTENSIONS for header in headers]
    return kinds.count(False) + (kinds[-1:] == [True])


def _broken_rows(headers: list[bytes]) -> list[int]:
    """Returns which headers do not have the checksum they state."""
    rows = _rows(headers)
    found = (
        rows.sum(1, dtype=np.uint32).astype(np.int64)
        - rows[:, 148:156].sum(1, dtype=np.int64)
        + 8 * ord(" ")
    )
    digits = rows[:, 148:154].astype(np.int64) - ord("0")
    ended = (rows[:, 154] == 0) | (
        (rows[:, 154] == ord(" ")) & np.isin(rows[:, 155], (0, ord(" ")))
    )
    stated = np.where(
        ((digits >= 0) & (digits < 8)).all(1) & ended, digits @ 8 ** np.arange(5, -1, -1), -1
    )
    doubtful = np.flatnonzero(stated != found).tolist()
    return [
        row
        for row in doubtful
        if _octal(headers[row][148:156]) not in (found[row], _signed_sum(rows[row]))
    ]


def _names(rows: UInt8[np.ndarray, "n 512"]) -> list[str]:
    """Returns the names in ustar headers, the prefix field put in front where it is used."""
    stored = np.ascontiguousarray(rows[:, :100]).view("S100")[:, 0].tolist()
    names = _decode(b"\0".join(stored)).split("\0") if stored else []
    if len(names) > len(stored):  # something stands behind a name's end
        names = [_text(name) for name in stored]
    posix = (rows[:, 257:263] == np.frombuffer(b"ustar\0", np.uint8)).all(1) & (
        rows[:, 345] != 0
    )  # GNU keeps other things there
    for row in np.flatnonzero(posix):
        names[row] = f"{_text(rows[row, 345:500].tobytes())}/{names[row]}"
    return names


def _rows(headers: list[bytes]) -> UInt8[np.ndarray, "n 512"]:
    return np.frombuffer(bytearray().join(headers), np.uint8).reshape(-1, BLOCK)


def _decode(data: bytes) -> str:
    return data.decode("utf-8", "surrogateescape")


def _text(field: bytes) -> str:
    return _decode(field.split(b"\0", 1)[0])


def _octal(field: bytes) -> int | None:
    try:
        return int(field.strip(b"\0 ") or b"0", 8)
    except ValueError:
        return None


def _signed_sum(row: UInt8[np.ndarray, "512"]) -> int:
    """The checksum as some old tars took it, over signed bytes."""
    signed = row.view(np.int8)
    return int(signed.sum(dtype=np.int64) - signed[148:156].sum(dtype=np.int64)) + 8 * ord(" ")


def _pax_records(data: bytes) -> dict[str, str] | None:
    """Returns the `length key=value` lines of a PAX header, or None where one is broken."""
    records = {}
    while data and data[0]:
        digits, _, _ = data[:20].partition(b" ")
        length = int(digits) if digits.isdigit() else 0
        key, equals, value = data[len(digits) + 1 : length].partition(b"=")
        if not equals or length > len(data) or not value.endswith(b"\n"):
            return None
        records[_decode(key)] = _decode(value[:-1])
        data = data[length:]
    return records
