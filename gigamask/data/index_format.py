"""The index on disk: merge saved shard indexes into a folder of columns, and open it again.

`manifest.json` (schema, dtypes, and for each shard its version and what was left out) is written
last; `images_*.npy` have a row per image, `masks_*.npy` a row per mask, shard by shard.
`data.index` describes the columns, `data.shard_index.column_dtypes` their types. All have checksums
(`data.checked_files`). The rows of a shard depend on that shard alone, so merging them in the same
order gives the same bytes, whichever indexes they come from.
"""

import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np

from gigamask.data.checked_files import CheckedArray, encode_json, read_json, write_array
from gigamask.data.shard_index import (
    COLUMNS,
    LeftOut,
    ShardSummary,
    TarFile,
    column_dtypes,
    read_summary,
    row_type,
)
from gigamask.errors import GigamaskError

SCHEMA = 5
MANIFEST = "manifest.json"
REBUILD = "build it again with 'gigamask index'"
ROWS_AT_ONCE = 2**22
_PREFIX = b'{"gigamask_index":'


Column = np.ndarray | CheckedArray


def category_order(name: str) -> tuple[bool, int, str]:
    """Return the key by which categories are sorted: numbers by value, then names."""
    number = int(name) if name.isdecimal() and name.isascii() else -1
    return number < 0, number, name


class IndexManifest(msgspec.Struct, frozen=True):
    """Contents of `manifest.json`: schema, row counts, dtypes of the columns, shard summaries."""

    gigamask_index: int
    images: int
    masks: int
    dtypes: dict[str, str]
    parts: list[ShardSummary]

    @property
    def tars(self) -> list[TarFile]:
        """The shards as they were when indexed, in the order of the column `shard`."""
        return [part.tar for part in self.parts]

    @property
    def categories(self) -> dict[str, int]:
        """The number of masks of each category, in the order of `category_order`."""
        counts: Counter[str] = Counter()
        for part in self.parts:
            counts.update(part.categories)
        return {name: counts[name] for name in sorted(counts, key=category_order)}

    @property
    def left_out(self) -> LeftOut:
        """What was left out of all shards."""
        left_out = [part.left_out for part in self.parts]
        return LeftOut(
            [sample for shard in left_out for sample in shard.skipped],
            sum(shard.json_without_jpg for shard in left_out),
            sum(shard.other_files for shard in left_out),
            "; ".join(shard.broken for shard in left_out if shard.broken),
        )


@dataclass(frozen=True)
class ColumnFolder:
    """A folder of columns, their dtypes, and the numbers of images and masks."""

    path: Path
    dtypes: dict[str, str]
    images: int
    masks: int

    def open(self, key: str) -> CheckedArray:
        """Memory-map a column; raise GigamaskError if it is missing or has another size."""
        rows = _row_count(key, self.images, self.masks)
        return CheckedArray(self.path / f"{key}.npy", self.dtypes[key], _shape(key, rows), REBUILD)

    def verify(self) -> None:
        """Read all columns; raise GigamaskError if one is damaged."""
        for key in self.dtypes:
            self.open(key).verify()


@dataclass(frozen=True)
class SavedColumns:
    """The columns of a saved `ShardIndex`."""

    path: Path
    summary: ShardSummary

    def open(self, key: str) -> np.ndarray:
        """Read a column; raise GigamaskError if the file is missing or damaged."""
        return CheckedArray(self.path / COLUMNS, row_type(self.summary), (1,), REBUILD)[:][key][0]

    def verify(self) -> None:
        """Read the file; raise GigamaskError if it is damaged."""
        self.open("images_name")


@dataclass(frozen=True)
class ShardRows:
    """The rows of one shard on disk: its columns, and the shard's first rows in them."""

    summary: ShardSummary
    columns: ColumnFolder | SavedColumns
    first_image: int = 0
    first_mask: int = 0


def rows_of_shard(folder: Path, verify: bool = True) -> ShardRows:
    """Return the rows of a saved `ShardIndex`.

    Args:
        folder: Its folder.
        verify: Whether to read all columns.

    Raises:
        GigamaskError: It is damaged.
    """
    summary = read_summary(folder)
    columns = SavedColumns(folder, summary)
    if verify:
        columns.verify()
    return ShardRows(summary, columns)


def rows_of_index(folder: Path) -> list[ShardRows]:
    """Return the rows of each shard of an index; merging verifies them."""
    manifest = read_manifest(folder)
    columns = column_folder(folder, manifest)
    rows, images, masks = [], 0, 0
    for part in manifest.parts:
        rows.append(ShardRows(part, columns, images, masks))
        images, masks = images + part.images, masks + part.masks
    return rows


def merge(rows: Sequence[ShardRows], folder: Path) -> None:
    """Write an index; memory and open files do not grow with the number of shards.

    Args:
        rows: The shards' rows, in the order of the index.
        folder: The index folder, which must not exist.

    Raises:
        GigamaskError: A column of the rows is damaged.
    """
    summaries = [shard.summary for shard in rows]
    columns = {
        key: _pieces(rows, key) for key in column_dtypes(max(part.name_bytes for part in summaries))
    }
    write(folder, summaries, columns)


def write(
    folder: Path, summaries: list[ShardSummary], columns: Mapping[str, Iterable[np.ndarray]]
) -> None:
    """Write an index.

    Args:
        folder: The index folder, which must not exist.
        summaries: The shards.
        columns: Consecutive rows of each column of `column_dtypes`.
    """
    folder.mkdir()
    images, masks = sum(part.images for part in summaries), sum(part.masks for part in summaries)
    dtypes = column_dtypes(max(part.name_bytes for part in summaries))
    dtypes |= {"images_shard": "<i4", "images_first_mask": "<i8"}
    counts = [part.images for part in summaries]
    manifest = IndexManifest(SCHEMA, images, masks, dtypes, summaries)
    opened = column_folder(folder, manifest)
    derived: dict[str, Callable[[], list[np.ndarray]]] = {
        "images_shard": lambda: [np.repeat(np.arange(len(summaries)), counts)],
        "images_first_mask": lambda: [np.zeros(1), np.cumsum(opened.open("images_masks"))],
    }
    for key, dtype in dtypes.items():
        pieces = derived[key]() if key in derived else columns[key]
        shape = _shape(key, _row_count(key, images, masks))
        write_array(folder / f"{key}.npy", dtype, shape, pieces)
    (folder / MANIFEST).write_bytes(encode_json(manifest))


def column_folder(folder: Path, manifest: IndexManifest) -> ColumnFolder:
    """Return the columns of an index.

    Args:
        folder: The index.
        manifest: Its manifest.
    """
    return ColumnFolder(folder, manifest.dtypes, manifest.images, manifest.masks)


def _pieces(rows: Sequence[ShardRows], key: str) -> Iterator[np.ndarray]:
    """Yield one column of every shard."""
    opened, column = None, np.zeros(0)
    for shard in rows:
        if shard.columns != opened:
            opened, column = shard.columns, shard.columns.open(key)
        first, count = (
            (shard.first_image, shard.summary.images)
            if key.startswith("images")
            else (shard.first_mask, shard.summary.masks)
        )
        for start in range(first, first + count, ROWS_AT_ONCE):
            yield column[start : min(start + ROWS_AT_ONCE, first + count)]


def _row_count(key: str, images: int, masks: int) -> int:
    return masks if key.startswith("masks") else images + (key == "images_first_mask")


def _shape(key: str, rows: int) -> tuple[int, ...]:
    return (rows, 4) if key == "masks_box" else (rows,)


def is_index(folder: str | Path) -> bool:
    """Return whether the folder has the manifest of an index, not of another program."""
    path = os.path.join(folder, MANIFEST)
    try:
        if not os.path.isfile(path):
            return False
        with open(path, "rb") as file:
            return file.read(len(_PREFIX)) == _PREFIX
    except OSError:
        return False


def read_manifest(folder: Path) -> IndexManifest:
    """Read a manifest; raise GigamaskError if it is missing, damaged or of another schema."""
    path = folder / MANIFEST
    if not is_index(folder):
        raise GigamaskError(
            f"{folder}: is not an index (it has no gigamask {MANIFEST}); "
            "build one with 'gigamask index'"
        )
    return read_json(path, IndexManifest, REBUILD, SCHEMA)


def open_columns(
    folder: Path, manifest: IndexManifest
) -> tuple[dict[str, Column], dict[str, Column]]:
    """Memory-map the columns of an index.

    Args:
        folder: The index.
        manifest: Its manifest.

    Returns:
        The columns of images and those of masks, by name.

    Raises:
        GigamaskError: A column is missing or does not match the manifest.
    """
    columns = column_folder(folder, manifest)
    images, masks = {}, {}
    for key in manifest.dtypes:
        kind, name = key.split("_", 1)
        (masks if kind == "masks" else images)[name] = columns.open(key)
    return images, masks
