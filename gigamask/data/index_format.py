"""An index as it lies on disk: saved parts or other indexes enter, a folder of columns with its manifest leaves; and such folders opened again.

`manifest.json` (schema, dtypes, what each tar was and what was left out of it) is written last; `images_*.npy` have a row per image, `masks_*.npy`
a row per mask, tar by tar. One tar's rows depend on that tar alone, so joined in the same order they are the same bytes, wherever they come from.

Not here: what the columns mean and who may use them (`data.index`), one tar's rows (`data.part`).
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
_BEGINNING = b'{"gigamask_index":'


class IndexManifest(msgspec.Struct, frozen=True):
    """What the columns are about."""

    gigamask_index: int
    images: int
    masks: int
    dtypes: dict[str, str]
    parts: list[ShardSummary]

    @property
    def tars(self) -> list[TarFile]:
        """The tars as they were, in the order that the column `shard` counts."""
        return [part.tar for part in self.parts]

    @property
    def left_out(self) -> LeftOut:
        """What was left out of all tars."""
        held = [part.left_out for part in self.parts]
        rejected = [rejected for each in held for rejected in each.rejected]
        broken = "; ".join(each.broken for each in held if each.broken)
        return LeftOut(
            rejected,
            sum(each.json_without_jpg for each in held),
            sum(each.other_files for each in held),
            broken,
        )


@dataclass(frozen=True)
class ShardRows:
    """One tar's rows, somewhere on disk: a folder of columns, and where in them they begin."""

    summary: ShardSummary
    folder: Path
    first_image: int = 0
    first_mask: int = 0


def rows_of_shard(folder: Path) -> ShardRows:
    """Returns a saved part's rows."""
    return ShardRows(read_summary(folder), folder)


def rows_of_index(folder: Path) -> list[ShardRows]:
    """Returns the rows of each tar of an index; raises Fault when it is not sound."""
    manifest = read_manifest(folder)
    open_columns(folder, manifest)
    rows, images, masks = [], 0, 0
    for part in manifest.parts:
        rows.append(ShardRows(part, folder, images, masks))
        images, masks = images + part.images, masks + part.masks
    return rows


def merge(rows: Sequence[ShardRows], folder: Path) -> None:
    """Joins tars' rows in the order given into an index folder; neither memory nor open files grow with their number."""
    folder.mkdir()
    summaries = [each.summary for each in rows]
    images, masks = sum(each.images for each in summaries), sum(each.masks for each in summaries)
    name_dtype = f"|S{max(each.name_bytes for each in summaries)}"
    dtypes = {
        f"images_{name}": dtype for name, dtype in {**IMAGE_COLUMNS, "name": name_dtype}.items()
    }
    dtypes |= {f"masks_{name}": dtype for name, dtype in MASK_COLUMNS.items()}
    for key, dtype in dtypes.items():
        write_column(
            folder / f"{key}.npy",
            dtype,
            images if key.startswith("images") else masks,
            _pieces(rows, key),
        )
    dtypes |= {"images_shard": "<i4", "images_first_mask": "<i8"}
    np.save(
        folder / "images_shard.npy",
        np.repeat(np.arange(len(rows), dtype="<i4"), [each.images for each in summaries]),
    )
    first_mask = np.zeros(images + 1, "<i8")
    np.cumsum(np.load(folder / "images_masks.npy"), out=first_mask[1:])
    np.save(folder / "images_first_mask.npy", first_mask)
    (folder / MANIFEST).write_bytes(
        msgspec.json.encode(IndexManifest(SCHEMA, images, masks, dtypes, summaries))
    )


def _pieces(rows: Sequence[ShardRows], key: str) -> Iterator[np.ndarray]:
    """Yields one column of every tar."""
    opened, column = None, np.zeros(0)
    for each in rows:
        if each.folder != opened:
            opened, column = each.folder, np.load(each.folder / f"{key}.npy", mmap_mode="r")
        first, count = (
            (each.first_image, each.summary.images)
            if key.startswith("images")
            else (each.first_mask, each.summary.masks)
        )
        for start in range(first, first + count, ROWS_AT_ONCE):
            yield column[start : min(start + ROWS_AT_ONCE, first + count)]


def write_column(path: Path, dtype: str, rows: int, pieces: Iterator[np.ndarray]) -> None:
    """Writes an .npy piece by piece; into a mapped file a full disk would end the process without a word."""
    shape = (rows, 4) if path.stem == "masks_box" else (rows,)
    with open(path, "wb") as file:
        np.lib.format.write_array_header_1_0(
            file, {"descr": dtype, "fortran_order": False, "shape": shape}
        )
        for piece in pieces:
            file.write(np.ascontiguousarray(piece, dtype).data)


def is_index(folder: str | Path) -> bool:
    """Says whether the folder's manifest begins as an index's does; other programs write a `manifest.json` too."""
    try:
        with open(os.path.join(folder, MANIFEST), "rb") as file:
            return file.read(len(_BEGINNING)) == _BEGINNING
    except OSError:
        return False


def read_manifest(folder: Path) -> IndexManifest:
    """Returns an index's manifest; raises Fault when the folder holds none that fits."""
    path = folder / MANIFEST
    if not is_index(folder):
        raise GigamaskError(
            f"{folder}: is no index, it holds no {MANIFEST} of one; build one with 'gigamask index'"
        )
    raw = path.read_bytes()
    try:
        schema = msgspec.json.decode(raw, type=dict)["gigamask_index"]
        if schema != SCHEMA:
            raise GigamaskError(
                f"{folder}: the index has schema {schema}, this version reads {SCHEMA}; {REBUILD}"
            )
        return msgspec.json.decode(raw, type=IndexManifest)
    except (msgspec.DecodeError, KeyError) as error:
        raise GigamaskError(f"{path}: is no index's manifest ({error}); {REBUILD}") from error


def open_columns(
    folder: Path, manifest: IndexManifest
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Returns the memory-mapped columns of images and of masks; raises Fault for one that is missing or not as the manifest says."""
    images, masks = {}, {}
    for key, dtype in manifest.dtypes.items():
        kind, name = key.split("_", 1)
        rows = manifest.masks if kind == "masks" else manifest.images + (name == "first_mask")
        (masks if kind == "masks" else images)[name] = _open_column(
            folder / f"{key}.npy", dtype, rows
        )
    return images, masks


def _open_column(path: Path, dtype: str, rows: int) -> np.ndarray:
    try:
        column = np.asarray(np.load(path, mmap_mode="r"))
    except (OSError, ValueError, EOFError) as error:
        raise GigamaskError(
            f"{path}: the index's column is missing or cut short ({error}); {REBUILD}"
        ) from error
    if len(column) != rows or column.dtype != np.dtype(dtype):
        raise GigamaskError(
            f"{path}: the column has {len(column)} rows of {column.dtype.str}, the manifest says {rows} of {dtype}; {REBUILD}"
        )
    return column
