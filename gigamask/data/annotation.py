"""Parse and check SA-1B annotations.

Format (segment-anything README, "Dataset"): `{"image": {image_id, width, height, file_name},
"annotations": [{segmentation: {size, counts}, predicted_iou, stability_score, ...}]}`. Other fields
are not read: `area` and `bbox` follow from the run lengths, and SA-1B's boxes are a pixel short.
"""

from typing import Annotated

import msgspec
import numpy as np
from jaxtyping import Float32

from gigamask.data.image import MAX_PIXELS
from gigamask.errors import CorruptSampleError, GigamaskError
from gigamask.masks.rle import RLEMasks
from gigamask.types import ImageAnnotation

MAX_BYTES = 2**26
"""64 MiB; SA-1B's largest files have about 1 MiB."""
MAX_MASKS = 10_000
"""SA-1B's images have 100 masks on average, several hundred at most."""
MAX_SIDE = 65_535
"""Pixels; the limit of JPEG and of the index's box columns."""


class RleSegmentation(msgspec.Struct):
    """One mask as COCO run lengths: `size` is [H, W], `counts` a compressed string or a list."""

    size: tuple[int, int]
    counts: str | list[int]


class Annotation(msgspec.Struct):
    """One mask with the scores of the model that made it."""

    segmentation: RleSegmentation
    predicted_iou: float
    stability_score: float


class ImageRecord(msgspec.Struct):
    """The image that a json describes."""

    image_id: Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]
    width: int
    height: int
    file_name: str = ""


class Sa1bRecord(msgspec.Struct):
    """One decoded json; only the types are checked."""

    image: ImageRecord
    annotations: list[Annotation]


_DECODER = msgspec.json.Decoder(Sa1bRecord)


def parse(raw: bytes, name: str) -> ImageAnnotation:
    """Parse and check one json.

    Args:
        raw: The file's bytes.
        name: Name of the image, with which errors begin.

    Returns:
        The masks and scores.

    Raises:
        CorruptSampleError: It is not a valid annotation.
    """
    return check(read(raw, name), name)


def read(raw: bytes, name: str) -> Sa1bRecord:
    """Decode one json and check its types only.

    Args:
        raw: The file's bytes.
        name: Name of the image, with which errors begin.

    Raises:
        CorruptSampleError: It is too large or not an SA-1B annotation.
    """
    if len(raw) > MAX_BYTES:
        raise CorruptSampleError(
            f"{name}: its json has {len(raw)} bytes, at most {MAX_BYTES} are read; leave it out"
        )
    try:
        return _DECODER.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise CorruptSampleError(
            f"{name}: its json of {len(raw)} bytes is not an SA-1B annotation ({error}); "
            "leave it out or download its tar again"
        ) from error


def check(record: Sa1bRecord, name: str) -> ImageAnnotation:
    """Check sizes, run lengths and scores of a decoded json.

    Args:
        record: The decoded json.
        name: Name of the image, with which errors begin.

    Returns:
        The masks and scores.

    Raises:
        CorruptSampleError: A size, run length or score is invalid.
    """
    height, width = size = record.image.height, record.image.width
    if not (0 < height <= MAX_SIDE and 0 < width <= MAX_SIDE and height * width <= MAX_PIXELS):
        raise CorruptSampleError(
            f"{name}: its json states {height} x {width} pixels, sides must be 1 to {MAX_SIDE} "
            f"and pixels at most {MAX_PIXELS}; leave it out"
        )
    annotations = record.annotations
    if len(annotations) > MAX_MASKS:
        raise CorruptSampleError(
            f"{name}: its json has {len(annotations)} annotations, at most {MAX_MASKS} are read; "
            "leave it out"
        )
    for number, annotation in enumerate(annotations):
        if annotation.segmentation.size != size:
            stated = " x ".join(map(str, annotation.segmentation.size))
            raise CorruptSampleError(
                f"{name}: annotation {number} has size {stated}, its image {height} x {width}; "
                "leave it out"
            )
    try:
        masks = RLEMasks.from_coco(
            [annotation.segmentation.counts for annotation in annotations], size
        )
    except GigamaskError as error:
        raise CorruptSampleError(f"{name}: {error}") from error
    predicted_iou = _scores(
        [annotation.predicted_iou for annotation in annotations], "predicted_iou", name
    )
    stability_score = _scores(
        [annotation.stability_score for annotation in annotations], "stability_score", name
    )
    return ImageAnnotation(name, size, masks, predicted_iou, stability_score)


def _scores(values: list[float], key: str, name: str) -> Float32[np.ndarray, "n"]:
    with np.errstate(over="ignore"):
        scores = np.array(values, np.float32)
    invalid = np.flatnonzero(~np.isfinite(scores))
    if len(invalid):
        number = invalid[0]
        raise CorruptSampleError(
            f"{name}: annotation {number} has {key} {values[number]}, it must be finite; "
            "leave it out"
        )
    return scores
