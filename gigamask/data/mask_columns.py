"""What an index has of the jsons of a tar; the masks of many jsons are decoded together."""

import posixpath
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

import numpy as np

from gigamask.data import annotation
from gigamask.data.annotation import Sa1bRecord
from gigamask.errors import CorruptSampleError, GigamaskError
from gigamask.masks.coco_rle import read_spans

MASK_COLUMNS = {"area": "<i4", "box": "<u2", "predicted_iou": "<f4", "stability_score": "<f4"}
Entry = TypeVar("Entry")
Record = tuple[str, Sa1bRecord]
"""Name of an image, `TAR:STEM`, and its decoded json."""


class Described(NamedTuple):
    """What an index has of one image besides places, checksums and the columns of its masks.

    Attributes:
        about: Image id, width, height and number of masks.
        categories: Categories of its masks; () for none.
    """

    about: tuple[int, int, int, int]
    categories: Sequence[str]


def read_record(raw: bytes, name: str) -> Sa1bRecord:
    """Decode a json, and check that it describes the image of its name.

    Args:
        raw: The file's bytes.
        name: Name of the image, `TAR:STEM`.

    Raises:
        CorruptSampleError: It describes another image, or cannot be decoded.
    """
    record = annotation.read(raw, name)
    stem = posixpath.splitext(posixpath.basename(record.image.file_name))[0]
    if stem and stem != name.rpartition(":")[2]:
        raise CorruptSampleError(
            f"{name}: its json describes {record.image.file_name!r}; "
            "put each json beside its own jpg"
        )
    return record


def describe(
    read: Callable[[Entry], Record], entries: Sequence[Entry], tables: list[dict[str, np.ndarray]]
) -> list[Described | CorruptSampleError]:
    """Return what an index has of each entry of a tar, or why it is not valid.

    Args:
        read: Returns the name and the decoded json of an entry, or raises a `CorruptSampleError`.
        entries: The entries.
        tables: The mask columns of the valid ones are added to it.
    """
    try:
        records = [read(entry) for entry in entries]
        columns = _columns(records)
        found: list[Described | CorruptSampleError] = [
            Described(
                (about.image_id, about.width, about.height, len(record.annotations)),
                annotation.read_categories(record, name),
            )
            for name, record in records
            for about in [record.image]
        ]
        tables.append(columns)
        return found
    except CorruptSampleError as bad:
        if len(entries) == 1:
            return [bad]
    return [found for entry in entries for found in describe(read, [entry], tables)]


def _columns(records: Sequence[Record]) -> dict[str, np.ndarray]:
    """Return the mask columns of valid jsons; raise CorruptSampleError if one is not."""
    name, masks = records[0][0], [mask for _, record in records for mask in record.annotations]
    counts = [len(record.annotations) for _, record in records]
    stated = [(record.image.height, record.image.width) for _, record in records]
    sizes = np.repeat(np.array(stated, np.int64), counts, axis=0)
    try:
        spans = read_spans([mask.segmentation.counts for mask in masks], sizes)
    except GigamaskError as error:
        raise CorruptSampleError(f"{name}: {error}") from error
    columns = {
        "area": spans.areas(),
        "box": spans.boxes(sizes[:, 0]),
        "predicted_iou": annotation.read_scores(masks, "predicted_iou", name),
        "stability_score": annotation.read_scores(masks, "stability_score", name),
    }
    columns["box"][columns["area"] == 0] = (1, 1, 0, 0)
    return {key: columns[key].astype(dtype) for key, dtype in MASK_COLUMNS.items()}
