"""Folders of images as shards: find them, list their images, read a file.

Each folder that contains images is a shard, whose entries are its files in order of their names.
The offset of a file is 0, which no member of a tar has. If images are sorted into folders by class,
as ImageNet's are, each class is a shard of its own, indexed and updated separately.
"""

import os
from collections.abc import Iterator
from hashlib import blake2b
from pathlib import Path
from shlex import quote
from typing import NamedTuple

from gigamask import files
from gigamask.data import storage
from gigamask.data.storage import ByteRange, FileStat
from gigamask.errors import CorruptSampleError, GigamaskError

JPEG = (".jpg", ".jpeg", ".jfif", ".jpe")
"""File name extensions of JPEGs."""
EXTENSIONS = (*JPEG, ".png", ".webp", ".tif", ".tiff", ".npy")
"""File name extensions of images."""
UNREAD = (
    *(".heic", ".heif", ".avif", ".gif", ".bmp", ".cr2", ".cr3", ".nef", ".arw", ".dng", ".czi"),
    *(".jp2", ".jxl", ".dcm"),
)
"""File name extensions of images that are not read."""
CONVERTED_SUFFIX = ".gigamask"
"""End of the name of the folder of tars that a training makes of images and masks beside it."""


class FolderListing(NamedTuple):
    """The images of one folder: names, sizes in bytes, names of other files, and state.

    `state` has the total size, and a version that changes whenever an image changes.
    """

    names: list[str]
    sizes: list[int]
    others: list[str]
    state: FileStat


def is_folder(path: str) -> bool:
    """Return whether a shard is an image folder."""
    return not storage.is_remote(path) and os.path.isdir(path)


def is_image(name: str) -> bool:
    """Return whether a file name has an image extension and is not hidden, as macOS's `._*` are."""
    return _has_extension(name, EXTENSIONS)


def _has_extension(path: str, extensions: tuple[str, ...]) -> bool:
    return path.lower().endswith(extensions) and not files.is_foreign(os.path.basename(path))


def why_unread(path: str) -> str:
    """Return why an image of this name is not read; "" if its kind is read, or it is no image.

    Args:
        path: Its path or name.
    """
    if not _has_extension(path, UNREAD):
        return ""
    return f"{path[path.rindex('.') + 1 :].upper()} is not read; save it as JPEG, PNG or TIFF"


def find_folders(root: str) -> list[str]:
    """Return the sorted folders at or below `root` that contain images, except hidden ones.

    Raises:
        GigamaskError: There is none, or a folder below `root` contains tars, which is ambiguous.
    """
    try:
        folders = sorted(_walk(root, frozenset()))
    except OSError as error:
        raise GigamaskError(
            f"{error.filename}: cannot be read ({error.strerror}); "
            "check the path, its permissions and the disk"
        ) from error
    if folders:
        return folders
    if next(Path(root).rglob("*.parquet"), None):
        raise GigamaskError(storage.is_parquet(root))
    if files.find_tars(Path(root)):  # where a command reads no tars
        raise GigamaskError(
            f"{root}: contains tars, but no image file; unpack them ('tar xf'), or give a folder "
            "of images"
        )
    raise GigamaskError(
        f"{root}: contains no .tar file and, at any depth, no image ({', '.join(EXTENSIONS)}); "
        f"give the folder of the tars or images, or a glob such as '{root}/**/*.tar'"
    )


def _walk(folder: str, ancestors: frozenset[tuple[int, int]]) -> Iterator[str]:
    """Yield the folders with images; links back to one of the `ancestors` are not followed."""
    status = os.stat(folder)
    inode = status.st_dev, status.st_ino
    if inode in ancestors:
        return
    subfolders, has_images = [], False
    with os.scandir(folder) as entries:
        for entry in entries:
            has_images = has_images or (is_image(entry.name) and entry.is_file())
            if entry.name.endswith(".tar") and ancestors and not files.is_foreign(entry.name):
                raise GigamaskError(
                    f"{entry.path}: is a tar within a folder that is read as "
                    "a folder of images; give a quoted glob of the tars such as '**/*.tar', "
                    "or a folder of images only"
                )
            if not is_left_out(entry.name) and entry.is_dir():
                subfolders.append(entry.path)
    if has_images:
        yield folder
    for path in subfolders:
        yield from _walk(path, ancestors | {inode})


def check_for_tars(out: Path | str) -> None:
    """Raise `GigamaskError` if a folder holds images, which tars written there would hide."""
    files.check_out(out, "a folder of tars", lambda entry: not is_image(entry.name))


def pack_command(folder: Path | str) -> str:
    """Return the command that packs unpacked files of SA-1B into a tar again."""
    return f"tar cf shard.tar -C {quote(str(folder))} ."


def is_left_out(name: str) -> bool:
    """Return whether a subfolder is hidden, foreign, or holds what a training made of images."""
    return files.is_foreign(name) or name.endswith(CONVERTED_SUFFIX)


def scan(folder: str) -> FolderListing:
    """List a folder without opening its files; raise OSError if it cannot be read."""
    images, others = [], []
    with os.scandir(folder) as entries:
        for entry in entries:
            if is_image(entry.name) and entry.is_file():
                status = entry.stat()
                images.append((entry.name, status.st_size, status.st_mtime_ns))
            elif not entry.is_dir():
                others.append(entry.name)
    images.sort()
    names, sizes = [name for name, _, _ in images], [size for _, size, _ in images]
    text = "\0".join(f"{name}/{size}/{time}" for name, size, time in images)
    version = blake2b(text.encode("utf-8", "surrogateescape"), digest_size=16)
    return FolderListing(names, sizes, others, FileStat(sum(sizes), version.hexdigest()))


def read_file(path: str, size: int) -> bytes | CorruptSampleError:
    """Read an image of a folder.

    Args:
        path: The file.
        size: Its size in bytes when it was indexed.

    Returns:
        The bytes, or the error if they cannot be read or the size changed.
    """
    try:
        with open(storage.open_file(path), "rb", buffering=0) as file:
            data = file.read(size + 1)
    except OSError as error:
        return storage.read_error(ByteRange(path, 0, size), error)
    if len(data) != size:
        return CorruptSampleError(
            f"{path}: no longer has the {size} bytes it had when indexed; index its folder again"
        )
    return data
