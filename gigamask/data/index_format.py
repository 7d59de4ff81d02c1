"""The index on disk: merge saved shard indexes into a folder of columns, and open it again.

`manifest.json` (schema, dtypes, and for each shard its version and what was left out) is written
last; `images_*.npy` have a row per image, `masks_*.npy` a row per mask, shard by shard. The rows of
a shard depend on that shard alone, so merging them in the same order gives the same bytes,
whichever indexes they come from.
"""

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np

from gigamask.data.shard_index import (
    IMAGE_COLUMNS,
    MASK_COLUMNS,
    LeftOut,
    ShardSummary,
    TarFile,
    read_summary,
)
from gigamask.errors import GigamaskError

SCHEMA = 2
MANIFEST = "manifest.json"
REBUILD = "build it again with 'gigamask index'"
ROWS_AT_ONCE = 2**22
_PREFIX = b'{"gigamask_index":'


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
class ShardRows:
    """The rows of one shard on disk: a folder of columns, and the shard's first rows in them."""

    summary: ShardSummary
    folder: Path
    first_image: int = 0
    first_mask: int = 0


def rows_of_shard(folder: Path) -> ShardRows:
    """Return the rows of a saved `ShardIndex`."""
    return ShardRows(read_summary(folder), folder)


def rows_of_index(folder: Path) -> list[ShardRows]:
    """Return the rows of each shard of an index; raise GigamaskError if it is damaged."""
    manifest = read_manifest(folder)
    open_columns(folder, manifest)
    rows, images, masks = [], 0, 0
    for part in manifest.parts:
        rows.append(ShardRows(part, folder, images, masks))
        images, masks = images + part.images, masks + part.masks
    return rows


def merge(rows: Sequence[ShardRows], folder: Path) -> None:
    """Write an index; memory and open files do not grow with the number of shards.

    Args:
        rows: The shards' rows, in the order of the index.
        folder: The index folder, which must not exist.
    """
    folder.mkdir()
    summaries = [shard.summary for shard in rows]
    images, masks = sum(part.images for part in summaries), sum(part.masks for part in summaries)
    name_dtype = f"|S{max(part.name_bytes for part in summaries)}"
    dtypes = {
        f"images_{name}": dtype for name, dtype in {**IMAGE_COLUMNS, "name": name_dtype}.items()
    }
    dtypes |= {f"masks_{name}": dtype for name, dtype in MASK_COLUMNS.items()}
    for key, dtype in dtypes.items():
        count = images if key.startswith("images") else masks
        write_column(folder / f"{key}.npy", dtype, count, _pieces(rows, key))
    dtypes |= {"images_shard": "<i4", "images_first_mask": "<i8"}
    np.save(
        folder / "images_shard.npy",
        np.repeat(np.arange(len(rows), dtype="<i4"), [part.images for part in summaries]),
    )
    first_mask = np.zeros(images + 1, "<i8")
    np.cumsum(np.load(folder / "images_masks.npy"), out=first_mask[1:])
    np.save(folder / "images_first_mask.npy", first_mask)
    (folder / MANIFEST).write_bytes(
        msgspec.json.encode(IndexManifest(SCHEMA, images, masks, dtypes, summaries))
    )


def _pieces(rows: Sequence[ShardRows], key: str) -> Iterator[np.ndarray]:
    """Yield one column of every shard."""
    opened, column = None, np.zeros(0)
    for shard in rows:
        if shard.folder != opened:
            opened, column = shard.folder, np.load(shard.folder / f"{key}.npy", mmap_mode="r")
        first, count = (
            (shard.first_image, shard.summary.images)
            if key.startswith("images")
            else (shard.first_mask, shard.summary.masks)
        )
        for start in range(first, first + count, ROWS_AT_ONCE):
            yield column[start : min(start + ROWS_AT_ONCE, first + count)]


def write_column(path: Path, dtype: str, rows: int, pieces: Iterator[np.ndarray]) -> None:
    """Write an .npy file piece by piece.

    It is not memory-mapped, because a full disk would then kill the process without an error.

    Args:
        path: The file; its stem determines the shape.
        dtype: NumPy's type string.
        rows: Total number of rows.
        pieces: Consecutive rows.
    """
    shape = (rows, 4) if path.stem == "masks_box" else (rows,)
    with open(path, "wb") as file:
        np.lib.format.write_array_header_1_0(
            file, {"descr": dtype, "fortran_order": False, "shape": shape}
        )
        for piece in pieces:
            file.write(np.ascontiguousarray(piece, dtype).data)


def is_index(folder: str | Path) -> bool:
    """Return whether the folder has the manifest of an index, not of another program."""
    try:
        with open(os.path.join(folder, MANIFEST), "rb") as file:
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
    raw = path.read_bytes()
    try:
        schema = msgspec.json.decode(raw, type=dict)["gigamask_index"]
        if schema != SCHEMA:
            raise GigamaskError(
                f"{folder}: the index has schema {schema}, but this version reads {SCHEMA}; "
                f"{REBUILD}"
            )
        return msgspec.json.decode(raw, type=IndexManifest)
    except (msgspec.DecodeError, KeyError) as error:
        raise GigamaskError(f"{path}: is not a valid manifest ({error}); {REBUILD}") from error


def open_columns(
    folder: Path, manifest: IndexManifest
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Memory-map the columns of an index.

    Args:
        folder: The index.
        manifest: Its manifest.

    Returns:
        The columns of images and those of masks, by name.

    Raises:
        GigamaskError: A column is missing or does not match the manifest.
    """
    images, masks = {}, {}
    for key, dtype in manifest.dtypes.items():
        kind, name = key.split("_", 1)
        rows = manifest.masks if kind == "masks" else manifest.images + (name == "first_mask")
        columns = masks if kind == "masks" else images
        columns[name] = _open_column(folder / f"{key}.npy", dtype, rows)
    return images, masks


def _open_column(path: Path, dtype: str, rows: int) -> np.ndarray:
    try:
        column = np.asarray(np.load(path, mmap_mode="r"))
    except (OSError, ValueError, EOFError) as error:
        raise GigamaskError(
            f"{path}: a column of the index is missing or cut short ({error}); {REBUILD}"
        ) from error
    if len(column) != rows or column.dtype != np.dtype(dtype):
        raise GigamaskError(
            f"{path}: the column has {len(column)} rows of {column.dtype.str}, "
            f"but the manifest says {rows} of {dtype}; {REBUILD}"
        )
    return column
