"""Lists of checksums as md5sum and sha256sum write them, and the checksum of a file.

A line has a checksum and a file name in either order; SA-1B's own list holds md5 sums. The number
of digits selects the algorithm. Folders before a name are ignored. Names with spaces are read from
lines as md5sum writes them, `SUM  NAME` or `SUM *NAME`, also with --tag: `MD5 (NAME) = SUM`.
"""

import hashlib
import os
import re
from pathlib import Path, PurePosixPath
from typing import Any

from gigamask.data import storage
from gigamask.errors import GigamaskError
from gigamask.serialization import check_regular, read_lines

ALGORITHMS = {32: "md5", 40: "sha1", 64: "sha256"}
CHUNK_BYTES = 2**25
NAMED = re.compile(r"[0-9a-fA-F]+ [ *](.+)|\w+ \((.+)\) = [0-9a-fA-F]+")
"""A line as md5sum writes it, in which all but the sum is the name."""


def read(path: str | Path) -> dict[str, str]:
    """Return the checksum of each name, in lower-case hexadecimal digits.

    Raises:
        GigamaskError: A line is not a name and a checksum, or a name has two checksums.
    """
    sums: dict[str, str] = {}
    lines = read_lines(path)
    for i, (number, line) in enumerate(lines):
        fields = line.split()
        values = [
            field
            for field in fields
            if len(field) in ALGORITHMS and re.fullmatch("[0-9a-fA-F]+", field)
        ]
        if not values and i == 0 and len(lines) > 1:  # names of the columns
            continue
        named = NAMED.fullmatch(line.rstrip())
        others = [field for field in fields if field not in values]
        others = [named[1] or named[2]] if named else others
        if len(values) != 1 or len(others) != 1:
            lengths = ", ".join(f"{digits} ({name})" for digits, name in ALGORITHMS.items())
            raise GigamaskError(
                f"{path}: line {number} is not a name and a sum of {lengths} hexadecimal digits:"
                f" {line[:80]!r}; give a list as md5sum writes it"
            )
        name, value = PurePosixPath(others[0].replace("\\", "/")).name, values[0].lower()
        if sums.setdefault(name, value) != value:
            raise GigamaskError(
                f"{path}: line {number} gives {name} the sum {value}, an earlier line"
                f" {sums[name]}; keep the right one"
            )
    if not lines:
        raise GigamaskError(
            f"{path}: holds no checksum; give a list with a line 'SUM  NAME' for each file"
        )
    return sums


def digest(path: str | Path, like: str) -> str:
    """Return a file's checksum.

    Args:
        path: The file; it may be remote.
        like: A checksum whose length selects the algorithm.

    Returns:
        The checksum in lower-case hexadecimal digits.
    """
    name = os.fspath(path)
    if not storage.is_remote(name):
        check_regular(name)
        with open(name, "rb") as file:
            return hashlib.file_digest(file, lambda: _new(like)).hexdigest()
    total, size = _new(like), storage.stat(name).bytes
    for start in range(0, size, CHUNK_BYTES):
        total.update(storage.read(name, start, min(CHUNK_BYTES, size - start)))
    return total.hexdigest()


def _new(like: str) -> Any:
    return hashlib.new(ALGORITHMS[len(like)], usedforsecurity=False)
