"""Opens what PATH means on the command line: an index, or tars, indexed in passing.

Not here: which words are paths (`data.index.tars`).
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from gigamask.errors import GigamaskError

if TYPE_CHECKING:
    from gigamask.data.index import Index


@contextmanager
def opened(paths: Sequence[str]) -> Iterator[Index]:
    """Opens the index of some paths; tars that have none are indexed into a folder that is gone afterwards."""
    from gigamask.data import index as indexes

    with tempfile.TemporaryDirectory() as folder:
        yield indexes.open_or_build(paths, folder)


@contextmanager
def opened_sample(words: str) -> Iterator[tuple[Index, int]]:
    """Opens the index of the tar, and gives the row of the image, that TAR:IMAGE means."""
    from gigamask.data import storage

    tar, colon, image = words.rpartition(":")
    if not colon:
        raise GigamaskError(f"{words!r} names no sample; write TAR:IMAGE, such as {words}:0")
    with opened([tar]) as index:
        yield index, index.find(f"{storage.name(tar)}:{image}")
