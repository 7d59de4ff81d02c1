"""The index: shards enter, a folder of memory-mapped columns leaves that says where each entry lies and what its masks are.

A shard is a tar, or a folder whose images are used as they are (`data.folder`).

Image columns: shard, jpg_offset (0 for a file of a folder), jpg_bytes, json_offset (-1 without a json), json_bytes, image_id, width, height, masks
(their number), name (the stem, of a folder's file the whole name, bytes), and first_mask, one longer: image i owns mask rows first_mask[i] to
first_mask[i + 1], in its json's order. Mask columns: area in pixels, box (xyxy, inclusive ends, from the runs; 1 1 0 0 for an empty mask),
predicted_iou, stability_score. Rows go shard by shard, the shards sorted by path, in stored order, a folder's by name: the same shards give the same
bytes, whoever indexed them, in whatever pieces.

Finished shards are kept in the hidden folder `.NAME.parts` beside the index until it is complete.

Not here: the files (`data.columns`), one shard's rows (`data.part`), reading the entries (`data.shards`).
"""

import contextlib
import difflib
import glob
import hashlib
import os
import re
import shutil
import stat
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np

from gigamask.data import image_folder, index_format, storage, worker_pool
from gigamask.data.file_lock import exclusive_lock
from gigamask.data.index_format import REBUILD, SCHEMA, IndexManifest, ShardRows, is_index, merge
from gigamask.data.shard_index import PART, TarFile, index_shard, stat_shards
from gigamask.errors import GigamaskError

LOCK = "lock"
NAMES_TOLD = 8

Paths = str | Path | Sequence[str | Path]


@dataclass(frozen=True, eq=False)
class Index:
    """An opened index; `images` and `masks` map each column's name to its array. Pickled, it is the folder's name."""

    folder: Path
    manifest: IndexManifest
    images: Mapping[str, np.ndarray]
    masks: Mapping[str, np.ndarray]

    @classmethod
    def open(cls, path: str | Path) -> "Index":
        """Opens an index; raises Fault when the path holds none that fits, when a local shard is gone or a tar no longer has its size."""
        path = Path(path).absolute()
        manifest = index_format.read_manifest(path)
        images, masks = index_format.open_columns(path, manifest)
        for stored in manifest.tars:
            if not storage.is_remote(
                stored.path
            ):  # asking a server for a thousand tars takes longer than a second
                _check_shard(path, stored)
        return cls(path, manifest, images, masks)

    def __len__(self) -> int:
        return self.manifest.images

    def __reduce__(self) -> tuple:
        return Index.open, (self.folder,)

    @property
    def shard_paths(self) -> list[str]:
        """The shards' absolute paths or URLs, in the order that the column `shard` counts."""
        return [stored.path for stored in self.manifest.tars]

    @property
    def digest(self) -> str:
        """Names what the rows are: the tars' names, sizes and counts, also those of each file of a folder, wherever they lie."""
        told, first = hashlib.blake2b(digest_size=16), 0
        for number, part in enumerate(self.manifest.parts):
            line = f"{storage.basename(part.tar.path)} {part.tar.bytes} {part.images} {part.masks}"
            told.update(f"{chr(10) * (number > 0)}{line}".encode("utf-8", "surrogateescape"))
            rows, first = slice(first, first + part.images), first + part.images
            if self.images["jpg_offset"][rows.start] == 0:
                told.update(
                    b"\0".join([b"", *self.images["name"][rows].tolist()])
                    + self.images["jpg_bytes"][rows].tobytes()
                )
        return told.hexdigest()

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
            "broken_tars": [
                part.left_out.broken for part in self.manifest.parts if part.left_out.broken
            ],
        }

    def mask_rows(self, row: int) -> slice:
        """Returns the mask rows of one image."""
        first = self.images["first_mask"]
        return slice(int(first[row]), int(first[row + 1]))

    def entry_name(self, row: int) -> str:
        """Returns the name by which errors and `find` know one image: `sa_000000.tar:sa_1`."""
        path = self.manifest.parts[self.images["shard"][row]].tar.path
        return f"{storage.basename(path)}:{os.fsdecode(self.images['name'][row])}"

    def find_shard_numbers(self, tar: str) -> list[int]:
        """Returns the numbers of the shards whose paths end in this one: a tar's name, with as much of its path as is given."""
        return [
            shard
            for shard, path in enumerate(self.shard_paths)
            if f"/{storage.strip_query(path)}".endswith("/" + tar.removeprefix("/"))
        ]

    def find(self, name: str) -> int:
        """Returns the row of `TAR:IMAGE`: a tar's name (with as much of its path as it takes) and an image's name or number."""
        tar, colon, image = name.rpartition(":")
        if not colon:
            raise GigamaskError(
                f"{name!r} names no entry; write TAR:IMAGE, such as {self.entry_name(0)}"
            )
        shards = self.find_shard_numbers(tar)
        if not shards:
            near = difflib.get_close_matches(
                tar, [storage.basename(path) for path in self.shard_paths], 3, 0
            )
            raise GigamaskError(
                f"{name!r}: no tar of the index ends in {tar!r}; the nearest: {', '.join(near)}"
            )
        if len(shards) > 1:
            ends = ", ".join(self.shard_paths[shard] for shard in shards[:3])
            raise GigamaskError(
                f"{name!r}: {len(shards)} tars of the index end in {tar!r}; give more of the path: {ends}"
            )
        first, last = np.searchsorted(self.images["shard"], [shards[0], shards[0] + 1])
        names = self.images["name"][first:last]
        rows = np.flatnonzero(names == os.fsencode(image))
        if not len(rows) and re.fullmatch(r"[0-9]{1,18}", image):
            rows = np.flatnonzero(self.images["image_id"][first:last] == int(image))
        if not len(rows):
            near = difflib.get_close_matches(
                image, [os.fsdecode(held) for held in names.tolist()], 3, 0
            )
            raise GigamaskError(
                f"{name!r}: {tar} holds no image {image!r}; the nearest: {', '.join(near)}"
            )
        return int(first + rows[0])


class BuildResult(NamedTuple):
    """A built index, and how many of its tars were scanned and how many of their rows were there already."""

    index: Index
    scanned: int
    reused: int


def as_list(paths: Paths) -> list[str | Path]:
    """Returns the paths, one alone as a list."""
    return [paths] if isinstance(paths, str | Path) else list(paths)


def find_tars(paths: Paths) -> list[str]:
    """Returns the tars of `shards`; raises Fault where folders of images are among them."""
    found = find_shards(paths)
    for path in found:
        if image_folder.is_folder(path):
            act = "pack them into tars first; as they are, 'gigamask index', 'stats' and 'pretrain' take them"
            raise GigamaskError(f"{path}: is a folder of images where tars are wanted; {act}")
    return found


def find_shards(paths: Paths) -> list[str]:
    """Returns the absolute paths and URLs of the shards that are meant, each once and sorted.

    A path is a tar, a folder (its `.tar` files, or else it and those in it that hold images), a glob of tars (`**` goes deeper), or an index (its
    shards); tars, their folders and globs may be remote.
    """
    found = []
    for path in as_list(paths):
        text = storage.normalize(path)
        if storage.is_remote(text):
            found += storage.find_tars(text)
        elif is_index(text):
            found += [stored.path for stored in index_format.read_manifest(Path(text)).tars]
        elif os.path.isdir(text):
            found += glob.glob(os.path.join(glob.escape(text), "*.tar")) or image_folder.find_folders(text)
        elif os.path.exists(text):
            found.append(text)
        elif glob.has_magic(text):
            held = list(filter(os.path.isfile, glob.glob(text, recursive=True)))
            if not held:
                raise GigamaskError(
                    f"{path}: the glob matches no file; check it with 'ls', and quote it so that the shell leaves it alone"
                )
            found += held
        else:
            raise GigamaskError(
                f"{path}: no such path; give a tar, a folder of tars or images, a glob or an index"
            )
    if not found:
        raise GigamaskError(
            "no path was given; give a tar, a folder of tars or images, a glob or an index"
        )
    for path in found:
        if image_folder.is_image(path) and not os.path.isdir(path):
            raise GigamaskError(
                f"{path}: is an image; give the folder that it is in, or a tar of images"
            )
    return sorted(set(found))


def build(
    paths: Paths, out: str | Path, workers: int = 1, progress: worker_pool.Progress | None = None
) -> Index:
    """Indexes the shards into the folder `out` and returns the index; see `extend`."""
    return extend(paths, out, workers, progress).index


def extend(
    paths: Paths,
    out: str | Path,
    workers: int = 1,
    progress: worker_pool.Progress | None = None,
    salvage: bool = False,
) -> BuildResult:
    """Indexes the shards into the folder `out`, which appears when it is complete; an index that is there is replaced, anything else refused.

    Only shards are scanned whose rows are not to be had, unchanged, from an index among `paths`, from the one at `out`, or from an earlier call that
    did not come to its end. `progress(done, total)` is called after each shard.
    Raises Fault when shards are unusable, after the others are done; with `salvage`, of a tar that breaks off what lies before the break is taken.
    """
    out = Path(out).absolute()
    if out.exists() and not is_index(out) and not (out.is_dir() and not any(out.iterdir())):
        raise GigamaskError(
            f"{out}: exists and is no index, so it is not overwritten; give another folder"
        )
    found = find_shards(paths)
    given = [
        Path(storage.normalize(path)) for path in as_list(paths) if is_index(storage.normalize(path))
    ]
    try:
        with _only_writer(out) as work:
            held = {
                tar: rows
                for tar, rows in _held_rows(given, out, work).items()
                if salvage or not rows.summary.left_out.broken
            }
            now = _as_now(found)
            missing = [stored.path for stored in now if stored not in held]
            reused = len(found) - len(missing)
            if reused and progress is not None:
                progress(reused, len(found))
            moved = (
                None if progress is None else lambda done, _: progress(reused + done, len(found))
            )
            results = worker_pool.parallel_map(
                partial(_index_into, work, salvage=salvage), missing, workers, moved
            )
            _check_all([result for result in results if isinstance(result, str)], len(found))
            scanned = {
                rows.summary.tar.path: rows for rows in results if isinstance(rows, ShardRows)
            }
            merge([scanned.get(stored.path) or held[stored] for stored in now], work / "index")
            if out.exists():
                out.rename(work / "before")
            (work / "index").rename(out)
            shutil.rmtree(work)
    except OSError as error:
        act = "check the disk and the permissions, then run the same command again: finished tars are kept"
        raise GigamaskError(
            f"{out}: the index cannot be written ({error.filename}: {error.strerror}); {act}"
        ) from error
    return BuildResult(Index.open(out), len(missing), reused)


def open_or_build(paths: Paths, cache: str | Path) -> Index:
    """Opens the index that `paths` is, or the one kept for these shards under `cache`, built first where it is missing or one has changed."""
    paths = as_list(paths)
    if len(paths) == 1 and is_index(paths[0]):
        return Index.open(paths[0])
    found = find_shards(paths)
    key = hashlib.blake2b(
        "\0".join(found).encode("utf-8", "surrogateescape"), digest_size=8
    ).hexdigest()
    place = Path(cache) / f"index-{key}"
    with contextlib.suppress(
        GigamaskError
    ):  # none there, or no longer sound: both mean building it
        index = Index.open(place)
        if index.manifest.tars == _as_now(found):
            return index
    return build(paths, place)


@contextlib.contextmanager
def _only_writer(out: Path) -> Iterator[Path]:
    """Holds the folder of finished tars beside `out` for this process, swept of what a killed one left; it goes unless it holds finished tars."""
    work = out.parent / f".{out.name}.parts"
    with exclusive_lock(
        work / LOCK,
        f"{out}: another process is writing this index; wait for it, or give another --out",
    ):
        if not out.exists() and (work / "before").exists():  # killed between the two renames
            (work / "before").rename(out)
        for path in work.iterdir():
            if path.name != LOCK and not (
                path.name.startswith(f"{SCHEMA}-") and (path / PART).is_file()
            ):
                shutil.rmtree(path)
        try:
            yield work
        finally:
            if work.exists() and not any(
                path.name.startswith(f"{SCHEMA}-") for path in work.iterdir()
            ):
                shutil.rmtree(work)


def _held_rows(given: list[Path], out: Path, work: Path) -> dict[TarFile, ShardRows]:
    """Returns the rows that need no scan, by the tar as it was: of the given indexes, of the one at `out`, and finished before a kill."""
    held = [index_format.rows_of_shard(path) for path in work.iterdir() if path.name != LOCK]
    with contextlib.suppress(GigamaskError):
        held += index_format.rows_of_index(out)
    for path in given:
        held += index_format.rows_of_index(path)
    return {rows.summary.tar: rows for rows in held}


def _as_now(found: list[str]) -> list[TarFile]:
    try:
        return stat_shards(found)
    except OSError as error:
        raise GigamaskError(
            f"{error.filename}: cannot be read ({error.strerror}); check the path, its permissions and the disk"
        ) from error


def _check_all(faults: list[str], total: int) -> None:
    """Raises Fault when there were any."""
    if len(faults) == 1:
        raise GigamaskError(faults[0])
    if faults:
        others = ", ".join(fault.split(": ")[0] for fault in faults[1:NAMES_TOLD])
        more = f" and {len(faults) - NAMES_TOLD} more" * (len(faults) > NAMES_TOLD)
        raise GigamaskError(
            f"{len(faults)} of {total} shards are unusable, the others are done and kept: {faults[0]}; so are {others}{more}"
        )


def _index_into(work: Path, path: str, salvage: bool) -> ShardRows | str:
    """Indexes one shard and keeps its part under a name that says which shard, as it was; returns why not, when it is unusable."""
    try:
        part = index_shard(path, salvage)
    except GigamaskError as fault:
        return str(fault)
    key = "\0".join(map(str, msgspec.structs.astuple(part.tar))).encode("utf-8", "surrogateescape")
    place = work / f"{SCHEMA}-{hashlib.blake2b(key, digest_size=16).hexdigest()}"
    part.save(place)
    return index_format.rows_of_shard(place)


def _check_shard(index: Path, stored: TarFile) -> None:
    try:
        status = os.stat(stored.path)
    except OSError as error:
        raise GigamaskError(
            f"{stored.path}: the index {index} was made of it, and it is gone ({error.strerror}); put it back or {REBUILD}"
        ) from error
    # Of a folder that much would be asked of every file; each is compared with its size when it is read.
    if status.st_size != stored.bytes and not stat.S_ISDIR(status.st_mode):
        raise GigamaskError(
            f"{stored.path}: has {status.st_size} bytes, the index {index} was made when it had {stored.bytes}; {REBUILD}"
        )
