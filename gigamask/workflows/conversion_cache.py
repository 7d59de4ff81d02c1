"""A cache of a conversion: when its tars may be used again, and when they must be made anew.

The name of a cache's folder is a digest of every file that the conversion reads, by its path below
the folder that it was given in, size, times of modification and change, and inode; and of the
absence of those that are missing. A conversion ends with a file that lists its tars with their
checksums; one whose list or tars are damaged is made again.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from hashlib import blake2b
from pathlib import Path
from typing import Any

from filelock import FileLock

from gigamask import files
from gigamask.data import storage
from gigamask.data.storage import FileStat
from gigamask.datatools.convert_panoptic import PanopticImage
from gigamask.datatools.convert_parquet import ParquetFiles
from gigamask.datatools.image_files import files_of
from gigamask.datatools.objects import SourceListing
from gigamask.errors import GigamaskError
from gigamask.serialization import check_checksum, read_json, with_checksum

DONE = "converted.json"
"""File that a complete conversion ends with."""
FORMAT = 2
"""Number of what conversions write; whoever changes what they make of the same files raises it."""
MAX_BYTES = 1 << 30
"""Largest size of the file that a conversion ends with."""
CLASS_FILES = (
    *("*.yaml", "*.yml", "*.names", "*.data", "classes.txt", "class_names.txt", "labelmap.txt"),
    *("label_names.txt", "labels.txt", "predefined_classes.txt"),
)
"""Files with names of classes, in the folders of annotations or images, or up to two above."""
TARS = "tar_files"
"""Field of `DONE` with size, time of modification and crc32 of each tar."""


def digest(
    source: Path | ParquetFiles, images: Path | None, listing: SourceListing, *settings: object
) -> str:
    """Return a digest of all that a conversion reads.

    Args:
        source: The annotations.
        images: The folder of their images; None for parquet files.
        listing: The images of the source, with their files, some of which may be missing.
        *settings: What else decides the result.
    """
    if isinstance(source, ParquetFiles):
        stats = storage.stat_all(source.files)
        lines = [_parquet_line(*each) for each in zip(source.files, stats, strict=True)]
        columns = f"{source.image_column} {source.mask_column}"
        return _hash([*lines, columns, *map(str, settings)])
    root = source if source.is_dir() else source.parent
    lines = [] if source.is_dir() else [_line(source, root)]
    lines += [_line(path, root) for path in _shared_files(source, images, listing)]
    lines += [_line(path, root) for image in listing.images for path in image.files]
    lines += [f"{each.name} {each.kind}" for each in listing.left_out.images]
    return _hash([*lines, *map(str, settings)])


def _shared_files(source: Path, images: Path | None, listing: SourceListing) -> list[Path]:
    """Return files of all images: those that may name classes, and the PNGs of a panoptic JSON."""
    folders = {each.folder for each in listing.images if isinstance(each, PanopticImage)}
    found = {path for folder in folders for path in files_of(folder)}
    if source.is_dir():
        roots = [path.absolute() for path in (source, images) if path is not None]
        for folder in {parent for root in roots for parent in (root, *root.parents[:2])}:
            found.update(path for pattern in CLASS_FILES for path in folder.glob(pattern))
    return sorted(found)


def _line(path: Path, root: Path) -> str:
    """Return what identifies the content of a file without reading it."""
    name = os.path.relpath(path, root)
    try:
        found = os.stat(path)
    except (OSError, ValueError):
        return f"{name} is missing"
    times = f"{found.st_mtime_ns} {found.st_ctime_ns}"
    return f"{name} {found.st_size} {times} {found.st_ino}"


def _parquet_line(path: str, stat: FileStat) -> str:
    if storage.is_remote(path):
        return f"{path} {stat}"
    return _line(Path(path), Path(path).parent)


def _hash(lines: Sequence[str]) -> str:
    lines = [f"format {FORMAT}", *lines]
    return blake2b("\0".join(lines).encode("utf-8", "surrogateescape"), digest_size=6).hexdigest()


def reuse_or_make(
    folder: Path,
    make: Callable[[], dict[str, Any]],
    advice: str,
    report: Callable[[str], object],
) -> dict[str, Any]:
    """Return the result of a conversion: the one in a folder if it is whole, otherwise a new one.

    Several processes wait for the first. A whole conversion is used without a lock, so also in a
    folder that cannot be written.

    Args:
        folder: The folder of the tars.
        make: Converts into the folder, and returns the result.
        advice: What to do if the folder cannot be written.
        report: Called with a line if a damaged conversion is made again.

    Raises:
        GigamaskError: The folder cannot be written.
    """
    if (result := _read(folder)) is not None and not isinstance(result, str):
        return result
    with _locked(folder, advice):
        result = _read(folder)  # another process may have made it meanwhile
        if isinstance(result, dict):
            return result
        if result is not None:
            report(f"{folder}: {result}; it is converted again")
        for path in (folder / DONE, *folder.glob("*.tar")):  # or of one that was stopped
            path.unlink(missing_ok=True)
        result = make()
        tars = {path.name: _described(path) for path in map(Path, result["tars"])}
        files.write_bytes(folder / DONE, with_checksum(result | {TARS: tars}))
        return result


@contextmanager
def _locked(folder: Path, advice: str) -> Iterator[None]:
    """Hold the lock of a conversion; a folder that cannot be written is an error."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = FileLock(folder.parent / "lock")
        lock.acquire()
    except OSError as error:
        raise GigamaskError(
            f"{folder}: cannot be written ({error.strerror or error}); {advice}"
        ) from None
    try:
        yield
    finally:
        lock.release()


def _read(folder: Path) -> dict[str, Any] | str | None:
    """Return the result of a whole conversion, what is wrong with it, or None if there is none."""
    done = folder / DONE
    if not done.exists():
        return None
    try:
        result = read_json(done, dict, MAX_BYTES)
        check_checksum(result, str(done))
        tars, _ = result.pop(TARS), result.pop("crc32")
        problem = _damage(folder, tars)
    except (GigamaskError, KeyError, ValueError, TypeError, OSError) as error:
        return f"{DONE} is damaged ({type(error).__name__})"
    return problem or result


def _damage(folder: Path, tars: dict[str, list[int]]) -> str:
    """Return what is wrong with the tars of a conversion; "" if nothing is."""
    existing = {path.name for path in folder.glob("*.tar")}
    if missing := sorted(tars.keys() - existing):
        return f"{missing[0]} is missing"
    if others := sorted(existing - tars.keys()):
        return f"{others[0]} is not of this conversion"
    for name, (size, time_ns, crc) in tars.items():
        found = os.stat(folder / name)
        is_same = (found.st_size, found.st_mtime_ns) == (size, time_ns)
        if not is_same and (found.st_size != size or files.crc32(folder / name) != crc):
            return f"{name} is damaged"
    return ""


def _described(path: Path) -> list[int]:
    found = os.stat(path)
    return [found.st_size, found.st_mtime_ns, files.crc32(path)]
