"""A cache of a conversion: when its tars may be used again, and when they must be made anew.

The name of a cache's folder is a digest of every file that the conversion reads, by its path below
the folder that it was given in, size, and times of modification and change (inodes are new at every
mount of some disks); and of the absence of those that are missing. A conversion ends with a file
that lists its tars with their checksums; one whose list or tars are damaged is made again.
"""

import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from hashlib import blake2b
from pathlib import Path
from shlex import quote
from typing import Any

from filelock import FileLock

from gigamask import files
from gigamask.data import storage
from gigamask.data.image_folder import CONVERTED_SUFFIX
from gigamask.datatools.convert import convert, lines
from gigamask.datatools.find_source import list_source
from gigamask.datatools.formats import ConvertOptions
from gigamask.datatools.left_out import LeftOutRecord
from gigamask.datatools.objects import SourceListing
from gigamask.datatools.sources import FileSource, Source
from gigamask.errors import GigamaskError, counted
from gigamask.rng import make_rng
from gigamask.serialization import check_checksum, read_json, with_checksum

DONE = "converted.json"
"""File that a complete conversion ends with."""
FORMAT = 5
"""Number of what conversions write; whoever changes what they make of the same files raises it."""
MAX_BYTES = 1 << 30
"""Largest size of the file that a conversion ends with."""
TARS = "tar_files"
"""Field of `DONE` with size, time of modification and crc32 of each tar."""


def convert_once(
    source: Source,
    options: ConvertOptions,
    report: Callable[[str], object],
    strict: bool,
    val_split: float = 0.0,
    seed: int = 0,
) -> tuple[str, ...]:
    """Convert annotations unless that is done.

    Args:
        source: The annotations.
        options: What counts as a mask.
        report: Called with each line about what was converted and left out.
        strict: Whether to raise an error if anything was left out.
        val_split: Fraction of the images that is held out.
        seed: Chooses them.

    Returns:
        The folder of the tars, or those of training and of held-out images.

    Raises:
        GigamaskError: Nothing is left, or the folder cannot be written.
    """
    beside = Path(str(source)).absolute()
    if storage.is_remote(str(source)):
        beside = Path(re.sub(r"\W*://\W*", "_", str(source)).replace("/", "_"))
    cache = beside.with_name(f"{beside.name}{CONVERTED_SUFFIX}")
    listing = list_source(source, options, with_annotations=False)
    split = (val_split, seed) if val_split else ()
    folder = cache / digest(source, listing, options, *split)
    images = f"--images {quote(f'{source.images}')} " if isinstance(source, FileSource) else ""
    advice = f"run gigamask convert {quote(f'{source}')} {images}--out SHARDS"

    def held_out(names: list[str]) -> set[str]:
        order = sorted(names, key=lambda name: make_rng(seed, f"val split {name}").random())
        return set(order[: max(1, round(val_split * len(names)))])

    parts: dict[str, Callable[[list[str]], set[str]]] = {"all": set}
    if val_split:
        parts = {"train": lambda names: set(names) - held_out(names), "val": held_out}
    left_out = {}
    for part, select in parts.items():
        out = folder / part
        make = partial(convert, source, None, out, options, select=select)
        advise = f"{advice}, and give --data SHARDS"
        try:
            counts = reuse_or_make(out, make, advise, report)
        except GigamaskError as error:
            if not val_split:
                raise
            raise GigamaskError(f"of --val-split {val_split:g}, for {part}: {error}") from None
        counts = counts | {"images_without_label": listing.unlabeled}  # photographs may be added
        left_out[f"{out}"] = _report(f"{out}", counts, report)
    for path, number in left_out.items():
        if strict and number:
            raise GigamaskError(
                f"--strict: {number} of the images or masks were left out, listed in "
                f"{path}/{DONE}; repair them, or leave --strict out"
            )
    return tuple(left_out)


def _report(where: str, counts: dict[str, Any], report: Callable[[str], object]) -> int:
    """Print what a part holds and what was left out of it; return how many were left out."""
    images, masks = counted(counts["images"], "image"), counted(counts["masks"], "mask")
    report(f"{where}: {images} with {masks}")
    for line in lines(counts, f"{where}/{DONE}"):
        report(line)
    return len(LeftOutRecord.from_counts(counts))


def digest(source: Source, listing: SourceListing, *settings: object) -> str:
    """Return a digest of all that a conversion reads.

    Args:
        source: The annotations.
        listing: Their images, some of whose files may be missing.
        *settings: What else decides the result.
    """
    lines = [f"format {FORMAT}", *source.cache_lines(listing), *map(str, settings)]
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
        tars = {}
        for path in map(Path, result["tars"]):
            found = os.stat(path)
            tars[path.name] = found.st_size, found.st_mtime_ns, files.crc32(path)
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
