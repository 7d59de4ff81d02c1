"""Open data by path: an index, or tars, which are indexed temporarily."""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from gigamask.data.sample_config import OwnDataOptions
from gigamask.data.storage import Paths, path_list
from gigamask.errors import GigamaskError

if TYPE_CHECKING:
    from gigamask.data.index import Index


@dataclass(frozen=True, kw_only=True)
class AnnotationOptions(OwnDataOptions):
    """Annotations in other formats, and whether all of them must be usable."""

    strict: bool = False
    """with --images or --masks: end with exit code 2 if any image or mask is left out"""


@contextmanager
def open_or_build_temporary(paths: Paths) -> Iterator[Index]:
    """Open the index of the data; tars without one are indexed in a temporary folder."""
    from gigamask.data import index as indexes

    with tempfile.TemporaryDirectory() as folder:
        yield indexes.open_or_build(path_list(paths), folder)


@contextmanager
def open_sample(name: str) -> Iterator[tuple[Index, int]]:
    """Open the index of the tar in TAR:IMAGE, and yield it with the row of the image."""
    from gigamask.data import storage

    tar, colon, image = name.rpartition(":")
    if not colon:
        raise GigamaskError(f"{name!r} is not a sample; write TAR:IMAGE, such as {name}:0")
    with open_or_build_temporary([tar]) as index:
        yield index, index.find(f"{storage.basename(tar)}:{image}")


def open_index(paths: Paths, out: str | Path | None = None) -> Index:
    """Open the index of the data; build it first if there is none.

    Args:
        paths: Tars, folders of tars, globs, URLs, or an index.
        out: Folder to keep a new index in; None keeps it until the program ends.

    Returns:
        The index: image and mask metadata as memory-mapped columns.

    Raises:
        GigamaskError: The files do not exist, or none of them can be read.
    """
    from gigamask.data import index as indexes

    if out is not None:
        return indexes.open_or_build(path_list(paths), str(out))
    folder = tempfile.mkdtemp()
    atexit.register(_remove, folder, os.getpid())
    return indexes.open_or_build(path_list(paths), folder)


def _remove(folder: str, process: int) -> None:
    """Remove a folder when a program ends, but not when a process that it forked does."""
    if os.getpid() == process:
        shutil.rmtree(folder, ignore_errors=True)
