"""Opens what PATH means on the command line: an index, or tars, indexed in passing.

Not here: which words are paths (`data.index.tars`).
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gigamask.data.index import Index


@contextmanager
def opened(paths: Sequence[str]) -> Iterator[Index]:
    """Opens the index of some paths; tars that have none are indexed into a folder that is gone afterwards."""
    from gigamask.data import index as indexes

    with tempfile.TemporaryDirectory() as folder:
        yield indexes.open_or_build(paths, folder)
