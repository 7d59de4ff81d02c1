"""Read image attributes from a CSV file, as one column of integers per attribute.

The first line names the columns. The first column is either `name`, an image as error messages name
it (`sa_000000.tar:sa_1`) or just `sa_1`; or `tar`, the name of a tar with or without `.tar`. The
others are attributes: a column of integers is kept, and the values of any other column are numbered
in sorted order. A row applies to every image that it names; rows that match no image of the index
are ignored.
"""

import csv
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int, Int32, Int64, Shaped

from gigamask.data import storage
from gigamask.data.index import Index, find_shards
from gigamask.data.sample_table import COLUMNS, DEFAULT_COLUMNS
from gigamask.errors import GigamaskError
from gigamask.serialization import check_regular

ROWS_AT_ONCE = 2**9
"""Larger chunks trigger the garbage collector repeatedly, which doubles the time."""
IMAGES_AT_ONCE = 2**20


@dataclass(frozen=True, eq=False)
class _Column:
    """One attribute: `codes` maps each distinct text to a number, `chunks` are the rows' codes."""

    codes: dict[str, int] = field(default_factory=dict)
    chunks: list[Int32[np.ndarray, "_"]] = field(default_factory=list)

    def add(self, texts: tuple[str, ...]) -> None:
        for text in set(texts) - self.codes.keys():
            self.codes[text] = len(self.codes)
        self.chunks.append(np.fromiter(map(self.codes.__getitem__, texts), np.int32, len(texts)))

    def values(self) -> Int[np.ndarray, "rows"]:
        """Return the values as integers if all of them are, else their ranks in sorted order."""
        texts, values = list(self.codes), np.zeros(len(self.codes), np.int32)
        if all(re.fullmatch("-?[0-9]{1,18}", text) for text in texts):
            values = np.array([int(text) for text in texts], np.int64)
        else:
            values[sorted(range(len(texts)), key=texts.__getitem__)] = np.arange(len(texts))
        return values[np.concatenate([np.zeros(0, np.int32), *self.chunks])]


@dataclass(frozen=True, eq=False)
class _Table:
    """A parsed file: the sorted names, the row of each, and the attributes by row."""

    path: Path
    key: str
    names: Shaped[np.ndarray, "rows"]
    rows: Int64[np.ndarray, "rows"]
    columns: dict[str, _Column]

    def find(self, names: Shaped[np.ndarray, "n"]) -> Int64[np.ndarray, "n"]:
        """Return the row of each name, -1 if there is none."""
        if not len(self.names):
            return np.full(len(names), -1)
        positions = np.minimum(np.searchsorted(self.names, names), len(self.names) - 1)
        return np.where(self.names[positions] == names, self.rows[positions], -1)


def read(path: str | Path, index: Index) -> dict[str, Int[np.ndarray, "images"]]:
    """Read the attributes of an index's images.

    Args:
        path: The CSV file.
        index: The index.

    Returns:
        The values of each attribute, one per image of the index.

    Raises:
        GigamaskError: The file is not a valid table, or has no row for an image.
    """
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
        more = f" and {len(missing) - 1} more images" if len(missing) > 1 else ""
        raise GigamaskError(
            f"{path}: every image of the index needs a row, but there is none for "
            f"{tar}:{image}{more}; add one for {tar if table.key == 'tar' else image}"
        )
    return {name: column.values()[rows] for name, column in table.columns.items()}


def source_of_images(index: Index, paths: Sequence[str]) -> Int64[np.ndarray, "images"]:
    """Return which of some paths each image of an index is from, counted from 0.

    Args:
        index: The index of the shards of the paths.
        paths: The paths; of those that have the same shard, it counts for the first.
    """
    numbers: dict[str, int] = {}
    for number, path in enumerate(paths):
        for shard in find_shards(path):
            numbers.setdefault(shard, number)
    return np.array([numbers[path] for path in index.shard_paths])[index.images["shard"]]


def _find_images(table: _Table, index: Index) -> Int64[np.ndarray, "images"]:
    """Return each image's row, by `TAR:IMAGE` or by the image's name alone."""
    rows = np.empty(len(index), np.int64)
    tars = np.array([os.fsencode(storage.basename(tar) + ":") for tar in index.shard_paths])
    has_long_names = any(b":" in name for name in table.names.tolist())
    for start in range(0, len(index), IMAGES_AT_ONCE):
        block = slice(start, start + IMAGES_AT_ONCE)
        names = index.images["name"][block]
        rows[block] = table.find(names)
        if has_long_names:
            by_long_name = table.find(np.char.add(tars[index.images["shard"][block]], names))
            both = np.flatnonzero((rows[block] >= 0) & (by_long_name >= 0))
            if len(both):
                name = index.entry_name(start + int(both[0]))
                raise GigamaskError(
                    f"{table.path}: {name} has two rows, "
                    "one by this name and one by the image's name alone; keep one"
                )
            rows[block] = np.maximum(rows[block], by_long_name)
    return rows


def _read(path: Path, max_name_bytes: int) -> _Table:
    """Parse a file; names longer than `max_name_bytes` are not in the index and are skipped."""
    check_regular(path)
    try:
        with open(path, newline="", encoding="utf-8-sig", errors="surrogateescape") as file:
            lines = csv.reader(file, strict=True, skipinitialspace=True)
            try:
                header = _check_header(next(lines, []), path)
                rows = _complete_rows(lines, len(header), path)
                columns, chunks = {name: _Column() for name in header[1:]}, [np.zeros(0, "S1")]
                while chunk := list(islice(rows, ROWS_AT_ONCE)):
                    _add(chunk, header[0], max_name_bytes, chunks, columns)
            except csv.Error as error:
                raise GigamaskError(
                    f"{path}: line {lines.line_num} is not valid CSV ({error}); correct it"
                ) from error
    except OSError as error:
        raise GigamaskError(
            f"{path}: the attributes cannot be read ({error.strerror}); give a CSV file"
        ) from error
    names = np.concatenate(chunks)
    order = np.argsort(names, kind="stable")
    names = names[order]
    duplicates = np.flatnonzero(names[1:] == names[:-1])
    if len(duplicates):
        name = os.fsdecode(names[duplicates[0]])
        raise GigamaskError(f"{path}: {header[0]} {name} has more than one row; keep one")
    return _Table(path, header[0], names, order, columns)


def _add(
    rows: list[list[str]],
    key: str,
    max_name_bytes: int,
    chunks: list[Shaped[np.ndarray, "_"]],
    columns: dict[str, _Column],
) -> None:
    """Append the rows' names to `chunks` and their values to `columns`."""
    names = [row[0].encode("utf-8", "surrogateescape") for row in rows]
    if key == "tar":
        names = [name.removesuffix(b".tar") for name in names]
    if max(map(len, names)) > max_name_bytes:
        rows = [row for row, name in zip(rows, names, strict=True) if len(name) <= max_name_bytes]
        names = [name for name in names if len(name) <= max_name_bytes]
    if names:
        chunks.append(np.array(names))
        for column, texts in zip(columns.values(), list(zip(*rows, strict=True))[1:], strict=True):
            column.add(texts)


def _complete_rows(lines: Any, width: int, path: Path) -> Iterator[list[str]]:
    """Yield the non-empty rows; raise GigamaskError if one has the wrong number of fields."""
    for row in lines:
        if len(row) == width:
            yield row
        elif row:
            raise GigamaskError(
                f"{path}: line {lines.line_num} has {len(row)} fields, but the first line has "
                f"{width}; correct the line"
            )


def _check_header(header: list[str], path: Path) -> list[str]:
    """Return the names of the columns, the key first; raise GigamaskError if they are invalid."""
    if not header:
        raise GigamaskError(
            f"{path}: the first line is empty; "
            "it must name the columns: 'name' or 'tar', then the attributes"
        )
    if header[0] not in ("name", "tar"):
        raise GigamaskError(
            f"{path}: the first column must be 'name' or 'tar', got {header[0][:40]!r}; "
            "name the columns in the first line"
        )
    if len(header) == 1:
        raise GigamaskError(f"{path}: there is no column after {header[0]!r}; add an attribute")
    for number, name in enumerate(header[1:], 1):
        if not name:
            raise GigamaskError(
                f"{path}: column {number + 1} has no name; add one to the first line"
            )
        if name in COLUMNS and name not in DEFAULT_COLUMNS:
            raise GigamaskError(
                f"{path}: {name!r} is a column of every index; rename the attribute"
            )
        if name in header[:number]:
            raise GigamaskError(f"{path}: two columns are named {name!r}; rename one")
    return header
