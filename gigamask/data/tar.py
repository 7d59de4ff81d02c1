"""Scan the members of plain tar archives from their headers, and write reproducible archives.

Only the 512-byte headers are read, and payloads are skipped. Formats: ustar (POSIX 1003.1) with
prefix, GNU long names and base-256 sizes, PAX path and size records. A truncated archive is
rejected, even one cut exactly between two members, which the standard library accepts as complete.

A remote archive is read in windows of 256 KiB, and only if the next header is outside the current
window. That is three times SA-1B's mean json, so one request covers a json and the next header,
while the jpgs, which are larger, are skipped. Each header gives the position of the next one, so
the requests for one tar are sequential; scanning many tars at once makes up for it.
"""

import os
import re
import tarfile
import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import NoReturn

import numpy as np
from jaxtyping import Int64, UInt8

from gigamask import files
from gigamask.data import storage
from gigamask.errors import CorruptSampleError, GigamaskError

BLOCK = 512
RECORD = 20 * BLOCK
MAX_TAIL_BYTES = 2**20
"""More bytes than this after the end mark, or others than zeros, are not padding (usually 10 KB):
the file was preallocated and downloaded in part, or tars were concatenated."""
MAX_EXTENSION_BYTES = 2**20
"""Largest PAX or GNU long-name record that is read; it holds a path."""
WINDOW_BYTES = 2**18
_CHUNK = 8192
_ZEROS = bytes(BLOCK)
_EMPTY = tarfile.TarInfo().tobuf(tarfile.USTAR_FORMAT)
_REGULAR = ord("0")
_WITHOUT_PAYLOAD = b"123456"
_EXTENSIONS = b"xgLK"
_CRC = b"crc:"
"""Begins the unused end of a ustar header if it holds the crc32 of the payload, in hexadecimal."""


@dataclass(frozen=True)
class Members:
    """The regular files of one tar in stored order: names, payload offsets and sizes in bytes.

    `broken` is the reason why the rest of the tar cannot be read, "" if all of it can. `crcs` has
    the known crc32 of members, by number: those whose headers state it, as `write` does.
    """

    names: list[str]
    offsets: Int64[np.ndarray, "n"]
    sizes: Int64[np.ndarray, "n"]
    broken: str = ""
    crcs: dict[int, int] = field(default_factory=dict)


def scan(path: str | Path, salvage: bool = False) -> Members:
    """List the regular files of a tar from its headers.

    Args:
        path: Local path or URL of the tar.
        salvage: Return the complete files before a break instead of raising an error.

    Returns:
        The members in stored order.

    Raises:
        GigamaskError: The tar cannot be read; without `salvage`, also if it is truncated or a
            header is broken.
    """
    path = os.fspath(path)
    if storage.is_remote(path):
        file_bytes = storage.stat(path).bytes
        return _Scanner(path, _Window(path, file_bytes).read, file_bytes).run(salvage)
    try:
        with open(storage.open_file(path), "rb", buffering=0) as file:
            descriptor = file.fileno()
            if hasattr(os, "posix_fadvise"):
                # Without read-ahead a cold scan takes three quarters of the time.
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)
            file_bytes = os.fstat(descriptor).st_size
            return _Scanner(path, partial(storage.pread, descriptor), file_bytes).run(salvage)
    except OSError as error:
        raise GigamaskError(
            f"{path}: cannot be read ({error.strerror}); "
            "check the path, its permissions and the disk"
        ) from error


def write(path: str | Path, members: Iterable[tuple[str, bytes]]) -> None:
    """Write a ustar archive atomically; its bytes depend on the members only (no times, no owner).

    The twelve bytes of a header that ustar does not use hold the crc32 of the payload.

    Args:
        path: The tar; missing folders are created.
        members: Name and payload of each file.

    Raises:
        GigamaskError: A name does not fit into ustar (over 100 bytes, or 255 with folders).
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)

    def write_members(partial: Path) -> None:
        with open(partial, "wb") as file:
            for name, payload in members:
                file.write(_header(path, name, payload))
                file.write(payload)
                file.write(bytes(-len(payload) % BLOCK))
            file.write(bytes(2 * BLOCK))
            file.write(bytes(-file.tell() % RECORD))

    files.write_atomically(path, write_members)


def _header(path: Path, name: str, payload: bytes) -> bytes:
    info = tarfile.TarInfo(name)
    info.size = size = len(payload)
    try:
        short = name.encode()
        # The library takes five times as long.
        if len(short) <= tarfile.LENGTH_NAME and size < 8**11:
            header = bytearray(_EMPTY)
            header[: len(short)], header[124:135] = short, b"%011o" % size
        else:
            header = bytearray(info.tobuf(tarfile.USTAR_FORMAT, "utf-8", "strict"))
    except ValueError as error:
        raise GigamaskError(
            f"{path}: member {name!r} of {size} bytes does not fit a ustar header ({error}); "
            "shorten the name to 100 bytes"
        ) from error
    header[500:] = _CRC + b"%08x" % zlib.crc32(payload)
    header[148:156] = b" " * 8
    header[148:156] = b"%06o\0 " % sum(header)
    return bytes(header)


class _Window:
    """A remote file, read through a buffer of its most recent range."""

    def __init__(self, path: str, file_bytes: int) -> None:
        self.path, self.file_bytes = path, file_bytes
        self.start, self.buffer = 0, b""

    def read(self, size: int, position: int) -> bytes:
        """Return `size` bytes at `position`, fewer at the file's end, as `os.pread` does."""
        size = min(size, self.file_bytes - position)
        if size <= 0:
            return b""
        if not self.start <= position <= self.start + len(self.buffer) - size:
            self.start = position
            window = min(max(size, WINDOW_BYTES), self.file_bytes - position)
            try:
                self.buffer = storage.read(self.path, position, window)
            except CorruptSampleError as bad:
                raise GigamaskError(str(bad)) from bad
        return self.buffer[position - self.start : position - self.start + size]


@dataclass
class _Scanner:
    """One pass over the headers.

    Checksums, kinds and names are parsed for thousands of headers at once, for speed.
    """

    path: str
    read: Callable[[int, int], bytes]
    file_bytes: int
    chunks: list[Members] = field(default_factory=list)
    crcs: dict[int, int] = field(default_factory=dict)
    member_count: int = 0
    last_name: str = ""
    headers: list[bytes] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    long_names: dict[int, str] = field(default_factory=dict)
    next_records: dict[str, str] = field(default_factory=dict)
    global_records: dict[str, str] = field(default_factory=dict)

    def run(self, salvage: bool) -> Members:
        """Follow the chain of headers to the end mark, or with `salvage` to where it breaks."""
        broken = ""
        try:
            self._follow()
            self._flush()
        except GigamaskError as error:
            if not salvage:
                raise
            broken = str(error)
            sound = min([len(self.sizes), *_broken_rows(self.headers)])
            for column in (self.headers, self.starts, self.sizes):
                del column[sound:]
            self.long_names = {row: name for row, name in self.long_names.items() if row < sound}
            self._flush()
        return Members(
            [name for chunk in self.chunks for name in chunk.names],
            np.concatenate([chunk.offsets for chunk in self.chunks]),
            np.concatenate([chunk.sizes for chunk in self.chunks]),
            broken,
            self.crcs,
        )

    def _follow(self) -> None:
        """Collect the headers up to the end mark."""
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
                special = bool(self.next_records or self.global_records)
            sizes.append(size)
            position = payload + (size + BLOCK - 1) // BLOCK * BLOCK
        headers.pop()
        starts.pop()
        self._check_tail(position, header)

    def _special(self, header: bytes, payload: int) -> int:
        """Parse a header that is not a plain regular file's; return the size of its payload."""
        size = (
            int.from_bytes(header[125:136], "big")
            if header[124] == 0x80
            else _octal(header[124:136])
        )
        if size is None or size < 0:
            self._fail(
                f"the header at byte {self.starts[-1]} states no size ({header[124:136]!r}); "
                "the file is damaged, download it again"
            )
        kind = header[156]
        if kind in _EXTENSIONS:
            self._check_end(payload + size)
            self._extend(chr(kind), payload, size)
            return size
        records = self.global_records | self.next_records
        self.next_records = {}
        size = int(records.get("size", size))
        if "path" in records:
            self.long_names[len(self.headers) - 1] = records["path"]
        if kind == ord("S") or any(key.startswith("GNU.sparse") for key in records):
            number = self.member_count + _count(self.headers)
            self._fail(
                f"member {number} is a sparse file, which cannot be read by offset; "
                "pack the folder again with plain tar"
            )
        size = 0 if kind in _WITHOUT_PAYLOAD else size
        self._check_end(payload + size)
        return size

    def _extend(self, kind: str, payload: int, size: int) -> None:
        """Store the records of a PAX (x, g) or GNU long-name (L) header; ignore link names (K)."""
        if size > MAX_EXTENSION_BYTES:
            self._fail(
                f"the extension at byte {self.starts[-1]} has {size} bytes, "
                f"at most {MAX_EXTENSION_BYTES} are read; pack the tar again"
            )
        data = self.read(size, payload)
        if kind == "L":
            self.next_records["path"] = _text(data)
        elif kind in "xg":
            records = _pax_records(data)
            if records is None or not re.fullmatch(r"[0-9]{1,18}", records.get("size", "0")):
                self._fail(
                    f"the PAX header at byte {self.starts[-1]} is broken; download the tar again"
                )
            (self.next_records if kind == "x" else self.global_records).update(records)

    def _check_tail(self, position: int, header: bytes) -> None:
        """Raise an error if the file ends without an end mark, or continues after it."""
        if header != _ZEROS:
            number = self.member_count + _count(self.headers)
            where = (
                f"after member {number} ({self._current_name()})"
                if number
                else "before its first member"
            )
            self._fail(
                f"the file ends at {self.file_bytes} bytes {where} without the zero blocks that "
                f"end a tar; it {'' if number else 'is not a tar, or '}was cut short, download it "
                "again"
            )
        tail = self.read(MAX_TAIL_BYTES, position + BLOCK)
        if tail[:BLOCK].strip(b"\0"):
            self._fail(
                f"one zero block at byte {position} lies between members, but two end a tar; "
                "the file is damaged, download it again"
            )
        if self.file_bytes - position > MAX_TAIL_BYTES or tail.strip(b"\0"):
            self._fail(
                f"the archive ends at {position}, but the file has {self.file_bytes} bytes; it was "
                "downloaded in part, download it again, or is several tars in one, give each"
            )

    def _check_end(self, end: int) -> None:
        if end > self.file_bytes:
            number = self.member_count + _count(self.headers)
            self._fail(
                f"member {number} ({self._current_name()}) ends at {end}, but the file has "
                f"{self.file_bytes} bytes; it was cut short, download it again"
            )

    def _fail(self, message: str) -> NoReturn:
        self._verify()  # an earlier broken header would be the cause of this error
        raise GigamaskError(f"{self.path}: {message}")

    def _current_name(self) -> str:
        row = len(self.headers) - 1
        return (
            self.long_names.get(row)
            or self.next_records.get("path")
            or (_names(_rows(self.headers[-1:]))[0] if self.headers else self.last_name)
        )

    def _verify(self) -> None:
        """Raise an error for the first collected header that has a wrong checksum."""
        for row in _broken_rows(self.headers):
            advice = (
                "the file is damaged, download it again"
                if self.starts[row]
                else "give a plain tar (unpack a .tar.gz first)"
            )
            raise GigamaskError(
                f"{self.path}: the {BLOCK} bytes at {self.starts[row]} are not a tar header "
                f"(wrong checksum); {advice}"
            )

    def _flush(self) -> None:
        """Verify the collected headers, store their regular files, and clear them."""
        self._verify()
        rows = _rows(self.headers)
        names = _names(rows)
        for row, name in self.long_names.items():
            names[row] = name
        kinds = rows[:, 156]
        v7_folders = [
            kind == 0 and name.endswith("/")
            for kind, name in zip(kinds.tolist(), names, strict=True)
        ]
        regular = np.isin(kinds, np.frombuffer(b"0\x007", np.uint8)) & ~np.array(v7_folders, bool)
        offsets = np.array(self.starts, np.int64) + BLOCK
        first = sum(len(chunk.names) for chunk in self.chunks)
        for number, row in enumerate(np.flatnonzero(regular).tolist(), first):
            header = self.headers[row]
            if header[500:504] == _CRC and (crc := re.fullmatch(rb"[0-9a-f]{8}", header[504:])):
                self.crcs[number] = int(crc[0], 16)
        self.chunks.append(
            Members(
                [names[row] for row in np.flatnonzero(regular)],
                offsets[regular],
                np.array(self.sizes, np.int64)[regular],
            )
        )
        self.member_count += _count(self.headers)
        self.last_name = names[-1] if names else self.last_name
        for column in (self.headers, self.starts, self.sizes, self.long_names):
            column.clear()


def check_crc(members: Members, member: int, payload: bytes, name: str) -> None:
    """Check a payload against its crc32, if that is known.

    Args:
        members: The members of the tar.
        member: Number of the member.
        payload: All of its bytes.
        name: Name of the image for error messages.

    Raises:
        CorruptSampleError: The payload was changed.
    """
    stated = members.crcs.get(member)
    if stated is not None and zlib.crc32(payload) != stated:
        raise CorruptSampleError(
            f"{name}: {members.names[member]} was changed since it was written or indexed (crc32); "
            "write or fetch its tar again"
        )


def _count(headers: list[bytes]) -> int:
    """Count the members among the headers, including one that a trailing extension announces."""
    extensions = [header[156] in _EXTENSIONS for header in headers]
    return extensions.count(False) + (extensions[-1:] == [True])


def is_header(block: bytes) -> bool:
    """Return whether bytes are the header of a tar's member."""
    return len(block) == BLOCK and block != _ZEROS and not _broken_rows([block])


def _broken_rows(headers: list[bytes]) -> list[int]:
    """Return the indices of the headers with a wrong checksum."""
    rows = _rows(headers)
    actual = (
        rows.sum(1, dtype=np.uint32).astype(np.int64)
        - rows[:, 148:156].sum(1, dtype=np.int64)
        + 8 * ord(" ")
    )
    digits = rows[:, 148:154].astype(np.int64) - ord("0")
    terminated = (rows[:, 154] == 0) | (
        (rows[:, 154] == ord(" ")) & np.isin(rows[:, 155], (0, ord(" ")))
    )
    stated = np.where(
        ((digits >= 0) & (digits < 8)).all(1) & terminated, digits @ 8 ** np.arange(5, -1, -1), -1
    )
    suspects = np.flatnonzero(stated != actual).tolist()
    return [
        row
        for row in suspects
        if _octal(headers[row][148:156]) not in (actual[row], _signed_sum(rows[row]))
    ]


def _names(rows: UInt8[np.ndarray, "n 512"]) -> list[str]:
    """Return the names in ustar headers, with the prefix field if it is used."""
    stored = np.ascontiguousarray(rows[:, :100]).view("S100")[:, 0].tolist()
    names = _decode(b"\0".join(stored)).split("\0") if stored else []
    if len(names) > len(stored):  # a name contains a zero byte
        names = [_text(name) for name in stored]
    # GNU's magic differs, and it uses the prefix field for other things.
    posix = (rows[:, 257:263] == np.frombuffer(b"ustar\0", np.uint8)).all(1) & (rows[:, 345] != 0)
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
    """Return the checksum over signed bytes, as some old programs computed it."""
    signed = row.view(np.int8)
    return int(signed.sum(dtype=np.int64) - signed[148:156].sum(dtype=np.int64)) + 8 * ord(" ")


def _pax_records(data: bytes) -> dict[str, str] | None:
    """Parse the `length key=value` lines of a PAX header; return None if one is broken."""
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
