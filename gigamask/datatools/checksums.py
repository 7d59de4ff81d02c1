"""Checksums: a list of them enters, each file's sum leaves; and the sum of a file.

A list has a line for each file, its sum and its name in either order, as md5sum and sha256sum write them; SA-1B's own holds md5 sums.
The algorithm follows from the number of digits. Folders in front of a name are not looked at.

Not here: what is done with a file whose sum is another (`download`, `verify`).
"""

import hashlib
import os
import re
from pathlib import Path, PurePosixPath
from typing import Any

from gigamask.data import storage
from gigamask.errors import GigamaskError

ALGORITHMS = {32: "md5", 40: "sha1", 64: "sha256"}
PIECE_BYTES = 2**25


def read(path: str | Path) -> dict[str, str]:
    """Returns each name's sum, in small hexadecimal digits; raises Fault for a line that is not a name and a sum, or a name with two sums."""
    sums: dict[str, str] = {}
    lines = [
        (number, line)
        for number, line in enumerate(read_text(path).splitlines(), 1)
        if line.strip() and line[0] != "#"
    ]
    for place, (number, line) in enumerate(lines):
        fields = line.split()
        found = [
            field
            for field in fields
            if len(field) in ALGORITHMS and re.fullmatch("[0-9a-fA-F]+", field)
        ]
        if not found and place == 0 and len(lines) > 1:  # the columns' names
            continue
        others = [field for field in fields if field not in found]
        if len(found) != 1 or len(others) != 1:
            lengths = ", ".join(f"{digits} ({name})" for digits, name in ALGORITHMS.items())
            raise GigamaskError(
                f"{path}: line {number} is not a name and a sum of {lengths} hexadecimal digits: {line[:80]!r}; give a list as md5sum writes it"
            )
        name, value = PurePosixPath(others[0].removeprefix("*")).name, found[0].lower()
        if sums.setdefault(name, value) != value:
            raise GigamaskError(
                f"{path}: line {number} gives {name} the sum {value}, an earlier line {sums[name]}; keep the right one"
            )
    if not lines:
        raise GigamaskError(
            f"{path}: holds no checksum; give a list with a line 'SUM  NAME' for each file"
        )
    return sums


def read_text(path: str | Path) -> str:
    """Returns a text file that a user names; raises Fault where it cannot be read as text."""
    try:
        return Path(path).read_text("utf-8-sig")
    except OSError as error:
        raise GigamaskError(f"{path}: cannot be read ({error.strerror}); check the path") from error
    except UnicodeDecodeError as error:
        raise GigamaskError(
            f"{path}: is no text ({error.reason} at byte {error.start}); give the list itself, unpacked"
        ) from error


def digest(path: str | Path, like: str) -> str:
    """Returns a file's sum by the algorithm that `like`, a sum, was made with; the file may be remote."""
    name = os.fspath(path)
    if not storage.remote(name):
        with open(name, "rb") as file:
            return hashlib.file_digest(file, lambda: _new(like)).hexdigest()
    total, size = _new(like), storage.state(name).bytes
    for start in range(0, size, PIECE_BYTES):
        total.update(storage.read(name, start, min(PIECE_BYTES, size - start)))
    return total.hexdigest()


def _new(like: str) -> Any:
    return hashlib.new(ALGORITHMS[len(like)], usedforsecurity=False)
