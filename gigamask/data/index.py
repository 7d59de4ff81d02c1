"""The index: tars enter, a folder of memory-mapped columns leaves that says where each entry lies and what its masks are.

On disk: `manifest.json` (schema, tars as they were, what was left out), `images_*.npy` with a row per image and `masks_*.npy` with a row per mask.
Image columns: shard, jpg_offset, jpg_bytes, json_offset (-1 without a json), json_bytes, image_id, width, height, masks (their number), name (the
stem, bytes), and first_mask, one longer: image i owns mask rows first_mask[i] to first_mask[i + 1], in its json's order. Mask columns: area in
pixels, box (xyxy, inclusive ends, from the runs; 1 1 0 0 for an empty mask), predicted_iou, stability_score. Rows go tar by tar in stored order.

Not here: one tar's rows (`data.part`), reading the entries (`data.shards`).
"""

import contextlib
import difflib
import glob
import hashlib
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.lib.format import open_memmap

from gigamask.data.part import IMAGE_COLUMNS, MASK_COLUMNS, LeftOut, Tar, index_tar, read_summary, stored_tar
from gigamask.faults import Fault

SCHEMA = 1
MANIFEST = "manifest.json"
_BEGINNING = b'{"gigamask_index":'
_REBUILD = "build it again with 'gigamask index'"

Paths = str | Path | Sequence[str | Path]


class Manifest(msgspec.Struct, frozen=True):
    """What the columns are about; it is written last."""

    gigamask_index: int
    images: int
    masks: int
    dtypes: dict[str, str]
    tars: list[Tar]
    left_out: LeftOut


@dataclass(frozen=True, eq=False)
class Index:
    """An opened index; `images` and `masks` map each column's name to its array. Pickled, it is the folder's name."""

    folder: Path
    manifest: Manifest
    images: Mapping[str, np.ndarray]
    masks: Mapping[str, np.ndarray]

    @classmethod
    def open(cls, folder: str | Path) -> "Index":
        """Opens an index; raises Fault when the folder holds none that fits, or when a tar is gone or no longer has its size."""
        folder = Path(folder).absolute()
        manifest = _read_manifest(folder)
        images, masks = {}, {}
        for key, dtype in manifest.dtypes.items():
            kind, name = key.split("_", 1)
            rows = manifest.masks if kind == "masks" else manifest.images + (name == "first_mask")
            (masks if kind == "masks" else images)[name] = _open_column(folder / f"{key}.npy", dtype, rows)
        for stored in manifest.tars:
            _check_tar(folder, stored)
        return cls(folder, manifest, images, masks)

    def __len__(self) -> int:
        return self.manifest.images

    def __reduce__(self) -> tuple:
        return Index.open, (self.folder,)

    @property
    def shard_paths(self) -> list[str]:
        """The tars' absolute paths, in the order that the column `shard` counts."""
        return [stored.path for stored in self.manifest.tars]

    def report(self) -> dict[str, Any]:
        """Returns what was indexed and what was left out, as plain data."""
        left_out = self.manifest.left_out
        return {
            "images": len(self),
            "masks": self.manifest.masks,
            "shards": len(self.manifest.tars),
            "without_json": int((self.images["json_offset"] < 0).sum()),
            "without_jpg": left_out.json_without_jpg,
            "other_members": left_out.other_files,
            "rejected": msgspec.to_builtins(left_out.rejected),
        }

    def mask_rows(self, row: int) -> slice:
        """Returns the mask rows of one image."""
        first = self.images["first_mask"]
        return slice(int(first[row]), int(first[row + 1]))

    def entry_name(self, row: int) -> str:
        """Returns the name by which errors and `find` know one image: `sa_000000.tar:sa_1`."""
        path = self.manifest.tars[self.images["shard"][row]].path
        return f"{os.path.basename(path)}:{os.fsdecode(self.images['name'][row])}"

    def find(self, name: str) -> int:
        """Returns the row of `TAR:IMAGE`: a tar's name (with as much of its path as it takes) and an image's name or number."""
        tar, colon, image = name.rpartition(":")
        if not colon:
            raise Fault(f"{name!r} names no entry; write TAR:IMAGE, such as {self.entry_name(0)}")
        shards = [shard for shard, path in enumerate(self.shard_paths) if f"/{path}".endswith("/" + tar.removeprefix("/"))]
        if not shards:
            near = difflib.get_close_matches(tar, [os.path.basename(path) for path in self.shard_paths], 3, 0)
            raise Fault(f"{name!r}: no tar of the index ends in {tar!r}; the nearest: {', '.join(near)}")
        if len(shards) > 1:
            ends = ", ".join(self.shard_paths[shard] for shard in shards[:3])
            raise Fault(f"{name!r}: {len(shards)} tars of the index end in {tar!r}; give more of the path: {ends}")
        first, last = np.searchsorted(self.images["shard"], [shards[0], shards[0] + 1])
        names = self.images["name"][first:last]
        rows = np.flatnonzero(names == os.fsencode(image))
        if not len(rows) and re.fullmatch(r"[0-9]{1,18}", image):
            rows = np.flatnonzero(self.images["image_id"][first:last] == int(image))
        if not len(rows):
            near = difflib.get_close_matches(image, [os.fsdecode(held) for held in names.tolist()], 3, 0)
            raise Fault(f"{name!r}: {tar} holds no image {image!r}; the nearest: {', '.join(near)}")
        return int(first + rows[0])


def tars(paths: Paths) -> list[str]:
    """Returns the absolute paths of the tars that are meant, each once: a tar, a folder's `.tar` files, a glob (`**` goes deeper), or an index's."""
    found = []
    for path in [paths] if isinstance(paths, str | Path) else paths:
        text = os.path.abspath(path)
        if _is_index(text):
            found += [stored.path for stored in _read_manifest(Path(text)).tars]
        elif os.path.isdir(text):
            held = sorted(glob.glob(os.path.join(glob.escape(text), "*.tar")))
            if not held:
                raise Fault(f"{path}: the folder holds no .tar file; give the folder the tars are in, or a glob such as '{path}/**/*.tar'")
            found += held
        elif os.path.exists(text):
            found.append(text)
        elif glob.has_magic(text):
            held = sorted(filter(os.path.isfile, glob.glob(text, recursive=True)))
            if not held:
                raise Fault(f"{path}: the glob matches no file; check it with 'ls', and quote it so that the shell leaves it alone")
            found += held
        else:
            raise Fault(f"{path}: no such path; give a tar, a folder of tars, a glob or an index")
    if not found:
        raise Fault("no path was given; give a tar, a folder of tars, a glob or an index")
    return list(dict.fromkeys(found))


def build(paths: Paths, out: str | Path, progress: Callable[[int, int], None] | None = None) -> Index:
    """Indexes the tars into the folder `out`, which appears when it is complete; an index that is there is replaced, anything else refused.

    `progress(done, total)` is called after each tar.
    """
    out = Path(out).absolute()
    if out.exists() and not _is_index(out) and not (out.is_dir() and not any(out.iterdir())):
        raise Fault(f"{out}: exists and is no index, so it is not overwritten; give another folder")
    found = tars(paths)
    out.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=f".{out.name}.", dir=out.parent))
    try:
        folders = [work / "parts" / f"{number:06d}" for number in range(len(found))]
        for number, (path, folder) in enumerate(zip(found, folders, strict=True)):
            index_tar(path).save(folder)
            if progress is not None:
                progress(number + 1, len(found))
        merge(folders, work / "index")
        if out.exists():
            out.rename(work / "before")
        (work / "index").rename(out)
    finally:
        shutil.rmtree(work)
    return Index.open(out)


def open_or_build(paths: Paths, cache: str | Path, progress: Callable[[int, int], None] | None = None) -> Index:
    """Opens the index that `paths` is, or the one kept for these tars under `cache`, built first where it is missing or a tar has changed."""
    paths = [paths] if isinstance(paths, str | Path) else list(paths)
    if len(paths) == 1 and _is_index(paths[0]):
        return Index.open(paths[0])
    found = tars(paths)
    key = hashlib.blake2b("\0".join(found).encode("utf-8", "surrogateescape"), digest_size=8).hexdigest()
    folder = Path(cache) / f"index-{key}"
    with contextlib.suppress(Fault):  # none there, or no longer sound: both mean building it
        index = Index.open(folder)
        if index.manifest.tars == [stored_tar(path) for path in found]:
            return index
    return build(found, folder, progress)


def merge(parts: Sequence[Path], folder: Path) -> None:
    """Joins saved parts into an index folder, one column of one part at a time, so that neither memory nor open files grow with their number."""
    folder.mkdir()
    summaries = [read_summary(part) for part in parts]
    images, masks = sum(each.images for each in summaries), sum(each.masks for each in summaries)
    name_bytes = max(each.name_bytes for each in summaries)
    dtypes = {f"images_{name}": dtype for name, dtype in {**IMAGE_COLUMNS, "name": f"|S{name_bytes}"}.items()}
    dtypes |= {f"masks_{name}": dtype for name, dtype in MASK_COLUMNS.items()}
    for key, dtype in dtypes.items():
        merged, start = None, 0
        for part in parts:
            column = np.load(part / f"{key}.npy")
            if merged is None:
                merged = open_memmap(folder / f"{key}.npy", "w+", dtype, (images if key.startswith("images") else masks, *column.shape[1:]))
            merged[start : start + len(column)] = column
            start += len(column)
    dtypes |= {"images_shard": "<i4", "images_first_mask": "<i8"}
    np.save(folder / "images_shard.npy", np.repeat(np.arange(len(parts), dtype="<i4"), [each.images for each in summaries]))
    first_mask = np.zeros(images + 1, "<i8")
    np.cumsum(np.load(folder / "images_masks.npy"), out=first_mask[1:])
    np.save(folder / "images_first_mask.npy", first_mask)
    left_out = LeftOut(
        [rejected for each in summaries for rejected in each.left_out.rejected],
        sum(each.left_out.json_without_jpg for each in summaries),
        sum(each.left_out.other_files for each in summaries),
    )
    manifest = Manifest(SCHEMA, images, masks, dtypes, [each.tar for each in summaries], left_out)
    (folder / MANIFEST).write_bytes(msgspec.json.encode(manifest))


def _is_index(folder: str | Path) -> bool:
    """Says whether the folder's manifest begins as an index's does; other programs write a `manifest.json` too."""
    try:
        with open(os.path.join(folder, MANIFEST), "rb") as file:
            return file.read(len(_BEGINNING)) == _BEGINNING
    except OSError:
        return False


def _read_manifest(folder: Path) -> Manifest:
    path = folder / MANIFEST
    if not _is_index(folder):
        raise Fault(f"{folder}: is no index, it holds no {MANIFEST} of one; build one with 'gigamask index'")
    raw = path.read_bytes()
    try:
        schema = msgspec.json.decode(raw, type=dict)["gigamask_index"]
        if schema != SCHEMA:
            raise Fault(f"{folder}: the index has schema {schema}, this version reads {SCHEMA}; {_REBUILD}")
        return msgspec.json.decode(raw, type=Manifest)
    except (msgspec.DecodeError, KeyError) as error:
        raise Fault(f"{path}: is no index's manifest ({error}); {_REBUILD}") from error


def _open_column(path: Path, dtype: str, rows: int) -> np.ndarray:
    try:
        column = np.asarray(np.load(path, mmap_mode="r"))
    except (OSError, ValueError, EOFError) as error:
        raise Fault(f"{path}: the index's column is missing or cut short ({error}); {_REBUILD}") from error
    if len(column) != rows or column.dtype != np.dtype(dtype):
        raise Fault(f"{path}: the column has {len(column)} rows of {column.dtype.str}, the manifest says {rows} of {dtype}; {_REBUILD}")
    return column


def _check_tar(folder: Path, stored: Tar) -> None:
    try:
        size = os.path.getsize(stored.path)
    except OSError as error:
        raise Fault(f"{stored.path}: the index {folder} was made of it, and it is gone ({error.strerror}); put it back or {_REBUILD}") from error
    if size != stored.bytes:
        raise Fault(f"{stored.path}: has {size} bytes, the index {folder} was made when it had {stored.bytes}; {_REBUILD}")
