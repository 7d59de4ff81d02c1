"""What the user knows of images beyond the index: a CSV file and an index enter, a column of whole numbers for each of its attributes leaves.

The first line names the columns. The first column is `name`, an image as errors name it (`sa_000000.tar:sa_1`) or just `sa_1`, or it is `tar`, a
tar without its folder, `.tar` or not. The others are attributes: whole numbers stay what they are, anything else is numbered in the order of the
sorted texts. A row counts for every image that it names; rows that name none of the index count for nothing.

Not here: the columns that every index has, and where these join them (`data.items`).
"""

import csv
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int, Int32, Int64, Shaped

from gigamask.data import storage
from gigamask.data.index import Index
from gigamask.data.sample_table import COLUMNS
from gigamask.errors import GigamaskError

ROWS_AT_ONCE = 2**9
"""More lists than this, held at once, set off the garbage collector again and again, which doubles the time."""
IMAGES_AT_ONCE = 2**20


@dataclass(frozen=True, eq=False)
class _Column:
    """One attribute, row after row: each text as the number of its first appearance."""

    numbers: dict[str, int] = field(default_factory=dict)
    parts: list[Int32[np.ndarray, "_"]] = field(default_factory=list)

    def add(self, texts: tuple[str, ...]) -> None:
        for text in set(texts) - self.numbers.keys():
            self.numbers[text] = len(self.numbers)
        self.parts.append(np.fromiter(map(self.numbers.__getitem__, texts), np.int32, len(texts)))

    def values(self) -> Int[np.ndarray, "rows"]:
        """Returns the numbers that the texts are, or else each text's place among the sorted ones."""
        texts, values = list(self.numbers), np.zeros(len(self.numbers), np.int32)
        if all(re.fullmatch("-?[0-9]{1,18}", text) for text in texts):
            values = np.array([int(text) for text in texts], np.int64)
        else:
            values[sorted(range(len(texts)), key=texts.__getitem__)] = np.arange(len(texts))
        return values[np.concatenate([np.zeros(0, np.int32), *self.parts])]


@dataclass(frozen=True, eq=False)
class _Table:
    """What a file says: the rows' names, sorted, each one's row, and the attributes by row."""

    path: Path
    key: str
    names: Shaped[np.ndarray, "rows"]
    rows: Int64[np.ndarray, "rows"]
    columns: dict[str, _Column]

    def find(self, names: Shaped[np.ndarray, "n"]) -> Int64[np.ndarray, "n"]:
        """Returns the row of each name, -1 where there is none."""
        if not len(self.names):
            return np.full(len(names), -1)
        places = np.minimum(np.searchsorted(self.names, names), len(self.names) - 1)
        return np.where(self.names[places] == names, self.rows[places], -1)


def read(path: str | Path, index: Index) -> dict[str, Int[np.ndarray, "images"]]:
    """Returns each attribute of the file, a value for each image of the index; raises Fault for a file that is no such table or leaves images out."""
    tars = np.array(
        [os.fsencode(storage.basename(tar).removesuffix(".tar")) for tar in index.shard_paths]
    )
    table = _read(Path(path), tars.itemsize + len(".tar:") + index.images["name"].itemsize)
    rows = (
        table.find(tars)[index.images["shard"]]
        if table.key == "tar"
        else _find_images(table, index)
    )
    missing = np.flatnonzero(rows < 0)
    if len(missing):
        tar, _, image = index.entry_name(int(missing[0])).rpartition(":")
        more = f" and {len(missing) - 1} more of the index's images" if len(missing) > 1 else ""
        raise GigamaskError(
            f"{path}: no row names {tar}:{image}{more}; add one for {tar if table.key == 'tar' else image}, every image needs its attributes"
        )
    return {name: column.values()[rows] for name, column in table.columns.items()}


def _find_images(table: _Table, index: Index) -> Int64[np.ndarray, "images"]:
    """Returns each image's row, which may be there under its short or its long name."""
    rows = np.empty(len(index), np.int64)
    tars = np.array([os.fsencode(storage.basename(tar) + ":") for tar in index.shard_paths])
    long = any(b":" in name for name in table.names.tolist())
    for start in range(0, len(index), IMAGES_AT_ONCE):
        at = slice(start, start + IMAGES_AT_ONCE)
        names = index.images["name"][at]
        rows[at] = table.find(names)
        if long:
            by_long = table.find(np.char.add(tars[index.images["shard"][at]], names))
            both = np.flatnonzero((rows[at] >= 0) & (by_long >= 0))
            if len(both):
                name = index.entry_name(start + int(both[0]))
                raise GigamaskError(
                    f"{table.path}: {name} has a row under this name and one under the image's name alone; keep one"
                )
            rows[at] = np.maximum(rows[at], by_long)
    return rows


def _read(path: Path, longest: int) -> _Table:
    """Returns what the file says of names of at most `longest` bytes; other names are none of the index."""
    try:
        with open(path, newline="", encoding="utf-8-sig", errors="surrogateescape") as file:
            lines = csv.reader(file, strict=True, skipinitialspace=True)
            try:
                header = _check_header(next(lines, []), path)
                rows = _whole_rows(lines, len(header), path)
                columns, names = {name: _Column() for name in header[1:]}, [np.zeros(0, "S1")]
                while some := list(islice(rows, ROWS_AT_ONCE)):
                    _add(some, header[0], longest, names, columns)
            except csv.Error as error:
                raise GigamaskError(
                    f"{path}: line {lines.line_num} is no CSV ({error}); mend it"
                ) from error
    except OSError as error:
        raise GigamaskError(
            f"{path}: the table of attributes cannot be read ({error.strerror}); give a CSV file"
        ) from error
    listed = np.concatenate(names)
    order = np.argsort(listed, kind="stable")
    listed = listed[order]
    twice = np.flatnonzero(listed[1:] == listed[:-1])
    if len(twice):
        raise GigamaskError(
            f"{path}: {header[0]} {os.fsdecode(listed[twice[0]])} has more than one row; keep one"
        )
    return _Table(path, header[0], listed, order, columns)


def _add(
    rows: list[list[str]],
    key: str,
    longest: int,
    names: list[Shaped[np.ndarray, "_"]],
    columns: dict[str, _Column],
) -> None:
    """Adds some rows to what was read."""
    encoded = [row[0].encode("utf-8", "surrogateescape") for row in rows]
    if key == "tar":
        encoded = [name.removesuffix(b".tar") for name in encoded]
    if max(map(len, encoded)) > longest:
        rows = [row for row, name in zip(rows, encoded, strict=True) if len(name) <= longest]
        encoded = [name for name in encoded if len(name) <= longest]
    if encoded:
        names.append(np.array(encoded))
        for column, texts in zip(columns.values(), list(zip(*rows, strict=True))[1:], strict=True):
            column.add(texts)


def _whole_rows(lines: Any, width: int, path: Path) -> Iterator[list[str]]:
    """Yields the rows, empty lines left out; raises Fault for one that does not have a field for each column."""
    for row in lines:
        if len(row) == width:
            yield row
        elif row:
            raise GigamaskError(
                f"{path}: line {lines.line_num} has {len(row)} fields, the first line has {width}; mend the line"
            )


def _check_header(header: list[str], path: Path) -> list[str]:
    """Returns the columns' names, the key first; raises Fault where they cannot be used."""
    if not header:
        raise GigamaskError(
            f"{path}: its first line is empty; write the columns' names there: 'name' or 'tar', then the attributes"
        )
    if header[0] not in ("name", "tar"):
        raise GigamaskError(
            f"{path}: its first line begins with {header[0][:40]!r}, not with 'name' or 'tar'; write the columns' names there"
        )
    if len(header) == 1:
        raise GigamaskError(f"{path}: it has no column beside {header[0]!r}; add an attribute's")
    for number, name in enumerate(header[1:], 1):
        if not name:
            raise GigamaskError(
                f"{path}: column {number + 1} has no name; write one into the first line"
            )
        if name in COLUMNS:
            raise GigamaskError(
                f"{path}: {name!r} is a column that every index has; call yours otherwise"
            )
        if name in header[:number]:
            raise GigamaskError(f"{path}: two columns are called {name!r}; call one otherwise")
    return header
