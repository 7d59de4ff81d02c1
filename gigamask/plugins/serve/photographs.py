"""The photographs of a project: their names, their files of annotations, and their content."""

import os
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from hashlib import blake2b, file_digest
from pathlib import Path

from gigamask.data.image_folder import why_unread
from gigamask.errors import GigamaskError, counted
from gigamask.serialization import read_json

ANNOTATIONS = "annotations"
SUFFIX = ".json"


@dataclass(frozen=True)
class FileContent:
    """What identifies the content of a file."""

    bytes: int
    digest: str


@dataclass(frozen=True)
class _Annotated:
    content: FileContent | None = None


def folder_of_images(path: str | Path) -> str:
    """Return the absolute path of a folder of images.

    Args:
        path: The folder.

    Raises:
        GigamaskError: It is none.
    """
    root = os.path.abspath(path)
    if not os.path.isdir(root):
        raise GigamaskError(f"--images {root}: is not a folder; give the one of the images")
    return root


def annotations_of(folder: Path, name: str) -> Path:
    """Return the file of the edits of an image.

    Args:
        folder: The project folder.
        name: Path of the image within the folder of images.
    """
    return folder / ANNOTATIONS / f"{name}{SUFFIX}"


def utf8_name(name: str) -> str:
    """Return a file name with escapes for what is not UTF-8."""
    return os.fsencode(name).decode(errors="backslashreplace")


def unread_files(root: str) -> list[str]:
    """Return a line for each kind of photographs below a folder that is not read."""
    reasons = (why_unread(name) for _, _, names in os.walk(root) for name in names)
    kinds = Counter(filter(None, reasons)).items()
    return [f"{counted(number, 'file')} in {root} left out: {reason}" for reason, number in kinds]


def stamp_of(path: Path | str) -> tuple[int, ...] | None:
    """Return what differs whenever a file was written again; None if there is no such file."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino


def content_of(path: Path | str) -> FileContent | None:
    """Return the content of a file; None if it cannot be read."""
    try:
        with open(path, "rb") as file:
            digest = file_digest(file, lambda: blake2b(digest_size=16))
            return FileContent(file.tell(), digest.hexdigest())
    except OSError:
        return None


def annotated_names(folder: Path) -> set[str]:
    """Return the names of the images that have a file of annotations in a project folder."""
    root = folder / ANNOTATIONS
    return {
        os.path.relpath(os.path.join(found, name), root)[: -len(SUFFIX)]
        for found, _, names in os.walk(root)
        for name in names
        if name.endswith(SUFFIX) and not name.startswith(".")
    }


def find_by_content(
    folder: Path, missing: Iterable[str], root: Path, candidates: Iterable[str]
) -> dict[str, str]:
    """Return the new names of missing images, found by their content.

    Args:
        folder: The project folder, whose annotations state what each image contained.
        missing: Names of annotated images that are not there.
        root: Folder of the images.
        candidates: Names of images without annotations.

    Returns:
        New name by old name, of the images that one candidate equals, and no other.
    """
    wanted: dict[str, FileContent] = {}
    for name in missing:
        with suppress(GigamaskError):
            if content := read_json(annotations_of(folder, name), _Annotated).content:
                wanted[name] = content
    sizes = {content.bytes for content in wanted.values()}
    found: Mapping[FileContent, list[str]] = defaultdict(list)
    for name in candidates:
        stamp = stamp_of(root / name)
        if stamp and stamp[0] in sizes and (content := content_of(root / name)):
            found[content].append(name)
    claims = Counter(wanted.values())
    return {
        name: found[content][0]
        for name, content in wanted.items()
        if len(found[content]) == claims[content] == 1
    }


def missing_names(folder: Path, root: str, names: list[str]) -> list[str]:
    """Return the annotated images that are not in the folder of images.

    Args:
        folder: The project folder.
        root: Folder of the images.
        names: Names of the images in it.

    Raises:
        GigamaskError: Most are not, and none was renamed within it: it is another folder.
    """
    known = annotated_names(folder)
    missing = sorted(known - set(names))
    if 2 * len(missing) <= len(known):
        return missing
    others = (name for name in names if name not in known)
    renamed = find_by_content(folder, missing, Path(root), others).items()
    if all(f"/{new}".endswith(f"/{old}") or f"/{old}".endswith(f"/{new}") for old, new in renamed):
        raise GigamaskError(
            f"--images {root}: {counted(len(missing), 'annotated image')} of --project {folder} "
            f"are not there, such as {missing[0]}; give the folder of the project's images"
        )
    return missing
