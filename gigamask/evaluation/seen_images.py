"""Find the images of an evaluation that a model was trained on."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np

from gigamask.data import index_format
from gigamask.data.index import Index
from gigamask.errors import GigamaskError, counted
from gigamask.progress import say


def say_seen(index: Index, rows: Sequence[int], run: str | Path, data: Sequence[str]) -> None:
    """Say how many of the scored images are in the training data of a run.

    Images are the same if their names and the sizes of their files are.

    Args:
        index: Index of the images that are scored.
        rows: Their rows.
        run: The run folder, with the indexes of its tars.
        data: The run's `--data`.
    """
    scored = _names_by_size(index.images, np.array(rows))
    seen = set()
    for path in filter(index_format.is_index, map(Path, [*data, *Path(run).glob("index-*")])):
        with suppress(GigamaskError):  # written by another version, or damaged
            images, _ = index_format.open_columns(path, index_format.read_manifest(path))
            known = np.isin(images["jpg_bytes"][:], [size for size, _ in scored])
            seen |= _names_by_size(images, np.flatnonzero(known))
    if count := len(scored & seen):
        say(
            f"  {count:,} of {counted(len(rows), 'image')} are training data of {run}, so these "
            "scores tell little about new images"
        )


def _names_by_size(
    images: Mapping[str, index_format.Column], rows: np.ndarray
) -> set[tuple[int, bytes]]:
    """Return the sizes of images' files in bytes, with their names."""
    sizes, names = (images[column][rows].tolist() for column in ("jpg_bytes", "name"))
    return set(zip(sizes, names, strict=True))
