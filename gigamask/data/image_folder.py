"""Folders of images, used as they are: a folder enters; the folders in it that hold images, what such a folder is now, and its files' bytes leave.

A folder that holds images is a shard whose entries are its files, known by their whole names, ordered by these. Each lies at offset 0, which in a tar
none does. Where images lie in folders of classes, as ImageNet's, each class is a shard: it is indexed, kept and indexed again on its own.

Not here: the folder's rows in the index (`data.part`), what an image's bytes mean (`data.image`).
"""

import os
from collections.abc import Iterator
from hashlib import blake2b
from typing import NamedTuple

from gigamask.data import storage
from gigamask.data.storage import ByteRange, FileStat
from gigamask.errors import CorruptSampleError, GigamaskError

EXTENSIONS = (".jpg", ".jpeg", ".png", ".webp")


class FolderListing(NamedTuple):
    """The images of one folder by name, how many other files it holds, and its state: the images' bytes, and a version that any change changes."""

    names: list[str]
    sizes: list[int]
    others: int
    state: FileStat


def is_folder(path: str) -> bool:
    """Says whether a shard is a folder of images."""
    return not storage.is_remote(path) and os.path.isdir(path)


def is_image(name: str) -> bool:
    """Says whether a file is an image by its name; hidden ones, as macOS leaves beside each file, are none."""
    return name.lower().endswith(EXTENSIONS) and not os.path.basename(name).startswith(".")


def find_folders(root: str) -> list[str]:
    """Returns the folders that hold images, `root` and those in it at any depth, sorted; hidden ones are passed over.

    Raises Fault where there are none, or where there are tars, too: then it is not clear what is meant.
    """
    try:
        found = sorted(_walk(root, frozenset()))
    except OSError as error:
        raise GigamaskError(
            f"{error.filename}: cannot be read ({error.strerror}); check the path, its permissions and the disk"
        ) from error
    if not found:
        act = f"give the folder that tars or images are in, or a glob such as '{root}/**/*.tar'"
        raise GigamaskError(
            f"{root}: the folder holds no .tar file and, at any depth, no image ({', '.join(EXTENSIONS)}); {act}"
        )
    return found


def _walk(folder: str, above: frozenset[tuple[int, int]]) -> Iterator[str]:
    """Yields the folders with images; `above` are those that lead here, into which a link may lead back."""
    status = os.stat(folder)
    here = status.st_dev, status.st_ino
    if here in above:
        return
    inner, images = [], False
    with os.scandir(folder) as entries:
        for entry in entries:
            images = images or (is_image(entry.name) and entry.is_file())
            if entry.name.endswith(".tar") and above:
                act = "give a glob of the tars such as '**/*.tar' in quotes, or the folder that holds images only"
                raise GigamaskError(
                    f"{entry.path}: a tar among what is taken for a folder of images, since there is none at its top; {act}"
                )
            if not entry.name.startswith(".") and entry.is_dir():
                inner.append(entry.path)
    if images:
        yield folder
    for path in inner:
        yield from _walk(path, above | {here})


def scan(folder: str) -> FolderListing:
    """Returns what a folder holds, without opening a file; raises OSError where that cannot be told."""
    told, others = [], 0
    with os.scandir(folder) as entries:
        for entry in entries:
            if is_image(entry.name) and entry.is_file():
                status = entry.stat()
                told.append((entry.name, status.st_size, status.st_mtime_ns))
            else:
                others += not entry.is_dir()
    told.sort()
    names, sizes = [name for name, _, _ in told], [size for _, size, _ in told]
    version = blake2b(
        "\0".join(f"{name}/{size}/{time}" for name, size, time in told).encode(
            "utf-8", "surrogateescape"
        ),
        digest_size=16,
    )
    return FolderListing(names, sizes, others, FileStat(sum(sizes), version.hexdigest()))


def read_file(path: str, size: int) -> bytes | CorruptSampleError:
    """Returns the bytes of an image that had `size` of them when it was indexed, or why they are not to be had."""
    try:
        with open(path, "rb", buffering=0) as file:
            data = file.read(size + 1)
    except OSError as error:
        return storage.read_error(ByteRange(path, 0, size), error)
    if len(data) != size:
        return CorruptSampleError(
            f"{path}: no longer has the {size} bytes it was indexed with; index its folder again"
        )
    return data
