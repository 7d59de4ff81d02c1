"""The index: memory-mapped columns that locate images and annotations and describe their masks.

A shard is a tar, or a folder whose images are used as they are (`data.image_folder`).

Image columns: shard, jpg_offset (0 for a file of a folder), jpg_bytes, json_offset (-1 without a
json), json_bytes, image_id, width, height, masks (their number), jpg_crc32 (valid if the summary of
the shard states `checksums`), json_crc32 (0 without a json), name (bytes: the stem in a tar, the
whole file name in a folder), and first_mask, which has one more row: image i has the mask rows
first_mask[i] to first_mask[i + 1], in the order of its json. Mask columns: area in pixels, box
(xyxy, inclusive ends, from the run lengths; 1 1 0 0 for an empty mask), predicted_iou,
stability_score. The rows are ordered by shard, the shards by path, a tar's images as stored and a
folder's by name, so that the same shards give the same bytes, regardless of how many runs indexed
them.

Finished shards are kept in the hidden folder `.NAME.parts` next to the index until it is complete.
"""

import contextlib
import difflib
import glob
import hashlib
import os
import re
import shutil
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np

from gigamask import files
from gigamask.data import image_folder, index_format, storage, worker_pool
from gigamask.data.index_format import (
    REBUILD,
    SCHEMA,
    Column,
    IndexManifest,
    ShardRows,
    is_index,
    merge,
)
from gigamask.data.shard_index import PART, TarFile, index_shard, stat_shards
from gigamask.data.storage import Paths, path_list
from gigamask.errors import CorruptSampleError, GigamaskError
from gigamask.files import exclusive_lock
from gigamask.serialization import check_regular

LOCK = "lock"
OWN_FILES = re.compile(r"manifest\.json|(images|masks)_.*\.npy")
"""Names of the files of an index."""
MAX_NAMES = 8
"""Maximum number of broken shards that an error lists."""


@dataclass(frozen=True, eq=False)
class Index:
    """An open index; `images` and `masks` map column names to arrays.

    It is pickled as the path of its folder.
    """

    folder: Path
    manifest: IndexManifest
    images: Mapping[str, Column]
    masks: Mapping[str, Column]

    @classmethod
    def open(cls, path: str | Path) -> "Index":
        """Open an index.

        Raises:
            GigamaskError: It is missing or damaged, a local shard is missing, or a tar's size has
                changed.
        """
        path = Path(path).absolute()
        manifest = index_format.read_manifest(path)
        images, masks = index_format.open_columns(path, manifest)
        for stored in manifest.tars:
            # Remote tars are not checked: a thousand requests take more than a second.
            if not storage.is_remote(stored.path):
                _check_shard(path, stored)
        return cls(path, manifest, images, masks)

    def verify(self) -> None:
        """Read all columns; raise GigamaskError if one is damaged."""
        index_format.column_folder(self.folder, self.manifest).verify()

    def __len__(self) -> int:
        return self.manifest.images

    def __reduce__(self) -> tuple:
        return Index.open, (self.folder,)

    @property
    def shard_paths(self) -> list[str]:
        """Absolute paths or URLs of the shards; the column `shard` indexes this list."""
        return [stored.path for stored in self.manifest.tars]

    @property
    def digest(self) -> str:
        """Hash of the names, sizes and counts of tars, and of the files of image folders.

        It does not depend on where the shards are stored.
        """
        digest, first = hashlib.blake2b(digest_size=16), 0
        for number, part in enumerate(self.manifest.parts):
            line = f"{storage.basename(part.tar.path)} {part.tar.bytes} {part.images} {part.masks}"
            digest.update(f"{chr(10) * (number > 0)}{line}".encode("utf-8", "surrogateescape"))
            rows, first = slice(first, first + part.images), first + part.images
            if self.images["jpg_offset"][rows.start] == 0:
                digest.update(
                    b"\0".join([b"", *self.images["name"][rows].tolist()])
                    + self.images["jpg_bytes"][rows].tobytes()
                )
        return digest.hexdigest()

    def report(self) -> dict[str, Any]:
        """Return counts of what was indexed and what was left out, as plain data."""
        left_out = self.manifest.left_out
        return {
            "images": len(self),
            "masks": self.manifest.masks,
            "shards": len(self.manifest.tars),
            "without_json": int((self.images["json_offset"] < 0).sum()),
            "without_jpg": left_out.json_without_jpg,
            "other_members": left_out.other_files,
            "skipped": msgspec.to_builtins(left_out.skipped),
            "broken_tars": [
                part.left_out.broken for part in self.manifest.parts if part.left_out.broken
            ],
        }

    def mask_rows(self, row: int) -> slice:
        """Return the mask rows of one image."""
        first = self.images["first_mask"]
        return slice(int(first[row]), int(first[row + 1]))

    def entry_name(self, row: int) -> str:
        """Return an image's name for error messages and `find`, such as `sa_000000.tar:sa_1`."""
        path = self.manifest.parts[self.images["shard"][row]].tar.path
        return f"{storage.basename(path)}:{os.fsdecode(self.images['name'][row])}"

    def find_shard_numbers(self, tar: str) -> list[int]:
        """Return the numbers of the shards whose paths end in `tar`, a name or a partial path."""
        return [
            shard
            for shard, path in enumerate(self.shard_paths)
            if f"/{storage.strip_query(path)}".endswith("/" + tar.removeprefix("/"))
        ]

    def find(self, name: str) -> int:
        """Return the row of the image `TAR:IMAGE`.

        `TAR` is a tar's name, with as much of its path as makes it unique; `IMAGE` is an image's
        name or number.

        Raises:
            GigamaskError: There is no such image, or several tars match.
        """
        tar, colon, image = name.rpartition(":")
        if not colon:
            raise GigamaskError(
                f"{name!r} is not an image of the index; "
                f"write TAR:IMAGE, such as {self.entry_name(0)}"
            )
        shards = self.find_shard_numbers(tar)
        if not shards:
            tar_names = [storage.basename(path) for path in self.shard_paths]
            nearest = ", ".join(difflib.get_close_matches(tar, tar_names, 3, 0))
            raise GigamaskError(
                f"{name!r}: no tar of the index ends in {tar!r}; the nearest: {nearest}"
            )
        if len(shards) > 1:
            matches = ", ".join(self.shard_paths[shard] for shard in shards[:3])
            raise GigamaskError(
                f"{name!r}: {len(shards)} tars of the index end in {tar!r}; "
                f"give more of the path: {matches}"
            )
        first, last = np.searchsorted(self.images["shard"], [shards[0], shards[0] + 1])
        names = self.images["name"][first:last]
        rows = np.flatnonzero(names == os.fsencode(image))
        if not len(rows) and re.fullmatch(r"[0-9]{1,18}", image):
            rows = np.flatnonzero(self.images["image_id"][first:last] == int(image))
        if not len(rows):
            image_names = [os.fsdecode(stored) for stored in names.tolist()]
            nearest = ", ".join(difflib.get_close_matches(image, image_names, 3, 0))
            raise GigamaskError(f"{name!r}: {tar} has no image {image!r}; the nearest: {nearest}")
        return int(first + rows[0])


class BuildResult(NamedTuple):
    """A built index, and the numbers of shards that were scanned and reused."""

    index: Index
    scanned: int
    reused: int


def find_tars(paths: Paths) -> list[str]:
    """Return `find_shards(paths)`; raise GigamaskError if an image folder is among them."""
    shards = find_shards(paths)
    for path in shards:
        if image_folder.is_folder(path):
            raise GigamaskError(
                f"{path}: is a folder of images where tars are expected; pack them into tars with "
                "'gigamask convert', or give 'gigamask train' their masks with --masks ('gigamask "
                "index' without --checksums, 'stats' and 'pretrain' also read folders); unpacked "
                f"files of SA-1B are packed again with: {image_folder.pack_command(path)}"
            )
    return shards


def find_shards(paths: Paths) -> list[str]:
    """Return the absolute paths and URLs of the shards, sorted, each tar once.

    Args:
        paths: Tars, folders (their `.tar` files; without any, the folder and its subfolders that
            contain images), globs of tars (`**` matches at any depth), or indexes (their shards).
            Tars, folders of tars and globs may be remote.

    Raises:
        GigamaskError: A path does not exist, matches nothing, or is an image or JSON.
    """
    shards: list[str] = []
    for path in path_list(paths):
        text = storage.normalize(path)
        if reason := image_folder.why_unread(text):
            raise CorruptSampleError(f"{text}: {reason}")
        if text.endswith(".json"):
            raise GigamaskError(
                f"{path}: annotations need the folder of their images: --images, or, for commands "
                "without it, tars from 'gigamask convert'"
            )
        if storage.is_remote(text):
            shards += storage.find_tars(text)
        elif is_index(text):
            shards += [stored.path for stored in index_format.read_manifest(Path(text)).tars]
        elif os.path.isdir(text):
            tars = glob.glob(os.path.join(glob.escape(text), "*.tar"))
            folders = tars or image_folder.find_folders(text)
            found = [folder for folder in folders if not is_index(folder)]
            if not found:
                raise GigamaskError(
                    f"{path}: has no tars or images, but an index; give {folders[0]}"
                )
            shards += found
        elif os.path.exists(text):
            shards.append(text)
        elif glob.has_magic(text):
            matches = list(filter(os.path.isfile, glob.glob(text, recursive=True)))
            if not matches:
                raise GigamaskError(
                    f"{path}: the glob matches no file; check it with 'ls', "
                    "and quote it so that the shell does not expand it"
                )
            shards += matches
        else:
            raise GigamaskError(
                f"{path}: no such path{files.relative_to(path)}; give a tar, a folder of tars or "
                "images, a glob or an index"
            )
    if not shards:
        raise GigamaskError(
            "no path was given; give a tar, a folder of tars or images, a glob or an index"
        )
    for path in shards:
        if storage.is_remote(path) or os.path.isdir(path):
            continue
        check_regular(path)
        if path.endswith(".parquet"):
            raise GigamaskError(storage.is_parquet(path))
        if image_folder.is_image(path):
            raise GigamaskError(f"{path}: is an image; give its folder, or a tar of images")
    # Of several paths of a file, as links make them, one.
    return sorted(
        {
            os.path.realpath(path) if os.path.isfile(path) else path: path
            for path in sorted(shards, reverse=True)
        }.values()
    )


def build(
    paths: Paths,
    out: str | Path,
    workers: int = 1,
    progress: worker_pool.Progress | None = None,
    checksums: bool = False,
) -> Index:
    """Index shards into a folder and open the index; see `extend`.

    Args:
        paths: Shards, as for `find_shards`.
        out: The index folder.
        workers: Number of processes.
        progress: Called as `progress(done, total)` after each shard.
        checksums: Read every jpg and record its crc32.

    Returns:
        The index.

    Raises:
        GigamaskError: A shard is unusable, or `out` is not an index or cannot be written.
    """
    return extend(paths, out, workers, progress, checksums=checksums).index


def extend(
    paths: Paths,
    out: str | Path,
    workers: worker_pool.Workers = 1,
    progress: worker_pool.Progress | None = None,
    salvage: bool = False,
    checksums: bool = False,
) -> BuildResult:
    """Index shards into a folder, scanning only those that are new or changed.

    Unchanged rows are reused from the indexes among `paths`, from the one at `out`, and from an
    earlier call that was interrupted.

    Args:
        paths: Shards, as for `find_shards`.
        out: The index folder, written atomically. An index there is replaced.
        workers: Number of processes, or a part of a command.
        progress: Called as `progress(done, total)` after each shard.
        salvage: Use the complete entries of a truncated tar.
        checksums: Read every jpg and record its crc32; rows without it are not reused.

    Returns:
        The index, with the number of shards scanned and reused.

    Raises:
        GigamaskError: A shard is unusable (the others are indexed first and kept), `out` is not
            an index or cannot be written, or checksums of an image folder are requested.
    """
    if part := worker_pool.part_in(workers):
        return _extend_by_parts(paths, Path(out), part, progress, (salvage, checksums))
    out = Path(out).absolute()
    if is_index(out):
        files.check_out(out, "an index alone", lambda entry: bool(OWN_FILES.fullmatch(entry.name)))
    else:
        files.check_out(out, "an index")
    shards = find_tars(paths) if checksums else find_shards(paths)
    normalized = [storage.normalize(path) for path in path_list(paths)]
    indexes = [Path(path) for path in normalized if is_index(path)]
    try:
        with _only_writer(out) as work:
            reusable = {
                tar: rows
                for tar, rows in _saved_rows(indexes, out, work).items()
                if (salvage or not rows.summary.left_out.broken)
                and (rows.summary.checksums or not checksums)
            }
            current = _stat_shards(shards)
            missing = [stored.path for stored in current if stored not in reusable]
            reused = len(shards) - len(missing)
            if reused and progress is not None:
                progress(reused, len(shards))
            scan_progress = (
                None if progress is None else lambda done, _: progress(reused + done, len(shards))
            )
            results = worker_pool.parallel_map(
                partial(_index_into, work, salvage=salvage, checksums=checksums),
                missing,
                workers,
                scan_progress,
            )
            _raise_errors([result for result in results if isinstance(result, str)], len(shards))
            scanned = {
                rows.summary.tar.path: rows for rows in results if isinstance(rows, ShardRows)
            }
            rows = [scanned.get(stored.path) or reusable[stored] for stored in current]
            merge(rows, work / "index")
            if out.exists():
                out.rename(work / "before")
            (work / "index").rename(out)
            shutil.rmtree(work)
    except OSError as error:
        raise GigamaskError(
            f"{out}: the index cannot be written ({error.filename}: {error.strerror}); check the "
            "disk and the permissions, then run the same command again: finished shards are kept"
        ) from error
    return BuildResult(Index.open(out), len(missing), reused)


def _extend_by_parts(
    paths: Paths,
    out: Path,
    part: worker_pool.Part,
    progress: worker_pool.Progress | None,
    flags: tuple[bool, bool],
) -> BuildResult:
    """Index a part's shards into a folder of its own and exit; or join these indexes.

    `flags` are `salvage` and `checksums`. Shards that an index has already are left to the join.
    """
    shards = find_shards(paths)
    folders = [part.folder / f"index-{number}" for number in range(part.count)]
    if part.number is not None:
        indexes = [Path(path) for path in [out, *path_list(paths)] if is_index(path)]
        known = {tar for path in indexes for tar in index_format.read_manifest(path).tars}
        share = _stat_shards(list(part.share(shards)))
        own = [stored.path for stored in share if stored not in known]
        if own:
            extend(own, folders[part.number], part.workers, progress, *flags)
        part.finish(len(shards), [len(own)])
    scanned = sum(part.join(len(shards), int))
    # Earlier runs may have left indexes of other data.
    ready = [path for path in folders if is_index(path) and {*find_shards(path)} <= {*shards}]
    result = extend([*path_list(paths), *ready], out, part.workers, progress, *flags)
    return BuildResult(result.index, result.scanned + scanned, result.reused - scanned)


def is_cached_index(name: str) -> bool:
    """Return whether a folder's name is one that `open_or_build` gives to an index."""
    return re.fullmatch(r"index-[0-9a-f]{16}|\.index-[0-9a-f]{16}\.parts", name) is not None


def open_or_build(paths: Paths, cache: str | Path) -> Index:
    """Open the index at `paths`, or the cached index of these shards.

    Args:
        paths: An index, or shards as for `find_shards`.
        cache: Folder of cached indexes; a missing or outdated one is built first.

    Returns:
        The index.

    Raises:
        GigamaskError: A shard is unusable, or the index cannot be written.
    """
    paths = path_list(paths)
    if len(paths) == 1 and is_index(paths[0]):
        return Index.open(paths[0])
    shards = find_shards(paths)
    key = hashlib.blake2b(
        "\0".join(shards).encode("utf-8", "surrogateescape"), digest_size=8
    ).hexdigest()
    folder = Path(cache) / f"index-{key}"
    with contextlib.suppress(GigamaskError):  # missing or damaged: it is built below
        index = Index.open(folder)
        if index.manifest.tars == _stat_shards(shards):
            index.verify()
            return index
    if folder.is_dir() and not is_index(folder):  # its manifest is damaged
        shutil.rmtree(folder)
    return build(paths, folder)


@contextlib.contextmanager
def _only_writer(out: Path) -> Iterator[Path]:
    """Lock and clean up the folder of finished shards; remove it afterwards if none are left."""
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


def _saved_rows(indexes: list[Path], out: Path, work: Path) -> dict[TarFile, ShardRows]:
    """Return the rows of finished shards, of the index at `out`, and of the given indexes.

    Of several rows of a shard, one with checksums is chosen.
    """
    saved = []
    for path in work.iterdir():
        if path.name != LOCK:
            try:
                saved.append(index_format.rows_of_shard(path))
            except GigamaskError:  # damaged: the shard is scanned again
                shutil.rmtree(path)
    with contextlib.suppress(GigamaskError):  # missing or damaged, as well
        rows = index_format.rows_of_index(out)
        rows[0].columns.verify()
        saved += rows
    for path in indexes:
        saved += index_format.rows_of_index(path)
    saved.sort(key=lambda rows: rows.summary.checksums)
    return {rows.summary.tar: rows for rows in saved}


def _stat_shards(shards: list[str]) -> list[TarFile]:
    try:
        return stat_shards(shards)
    except OSError as error:
        raise GigamaskError(
            f"{error.filename}: cannot be read ({error.strerror}); "
            "check the path, its permissions and the disk"
        ) from error


def _raise_errors(errors: list[str], total: int) -> None:
    """Raise GigamaskError if there are any errors."""
    if len(errors) == 1:
        raise GigamaskError(errors[0])
    if errors:
        others = ", ".join(error.split(": ")[0] for error in errors[1:MAX_NAMES])
        more = f" and {len(errors) - MAX_NAMES} more" * (len(errors) > MAX_NAMES)
        raise GigamaskError(
            f"{len(errors)} of {total} shards are unusable; the others are indexed and kept: "
            f"{errors[0]}; also unusable: {others}{more}"
        )


def _index_into(work: Path, path: str, salvage: bool, checksums: bool) -> ShardRows | str:
    """Index one shard and save it under a hash of path, size and version; or return the error."""
    try:
        shard = index_shard(path, salvage, checksums)
    except GigamaskError as error:
        return str(error)
    key = "\0".join(map(str, (*msgspec.structs.astuple(shard.tar), shard.checksums)))
    digest = hashlib.blake2b(key.encode("utf-8", "surrogateescape"), digest_size=16).hexdigest()
    folder = work / f"{SCHEMA}-{digest}"
    shard.save(folder)
    return index_format.rows_of_shard(folder, verify=False)  # merging verifies them


def _check_shard(index: Path, stored: TarFile) -> None:
    try:
        status = os.stat(stored.path)
    except OSError as error:
        raise GigamaskError(
            f"{stored.path}: is indexed in {index} but cannot be found ({error.strerror}); "
            f"put it back or {REBUILD}"
        ) from error
    # The files of an image folder are not checked here; each is compared with its size when read.
    if status.st_size != stored.bytes and not stat.S_ISDIR(status.st_mode):
        raise GigamaskError(
            f"{stored.path}: has {status.st_size} bytes, but had {stored.bytes} when the "
            f"index {index} was built; {REBUILD}"
        )
