"""Annotations: the bytes of one SA-1B json enter, checked masks with their scores leave.

Format (segment-anything README, "Dataset"): `{"image": {image_id, width, height, file_name}, "annotations": [{segmentation: {size, counts},
predicted_iou, stability_score, ...}]}`. The other fields are not read: `area` and `bbox` follow from the runs, and genuine boxes are a pixel short.

Not here: what run lengths must satisfy (`geometry.coco`), choosing among the masks (`data.choose`).
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
"""64 MiB; SA-1B's largest are about one."""
MAX_MASKS = 10_000
"""SA-1B's images have 100 masks on average, several hundred at most."""
MAX_SIDE = 65_535
"""JPEG's own limit, and what the index's box columns hold."""


class RleSegmentation(msgspec.Struct):
    """One mask as COCO run lengths: `size` is [H, W], `counts` the compressed string or the plain list."""

    size: tuple[int, int]
    counts: str | list[int]


class Annotation(msgspec.Struct):
    """One mask with the scores its maker gave it."""

    segmentation: RleSegmentation
    predicted_iou: float
    stability_score: float


class ImageRecord(msgspec.Struct):
    """What the json says of the photograph."""

    image_id: Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]
    width: int
    height: int
    file_name: str = ""


class Sa1bRecord(msgspec.Struct):
    """One json as it stands, its types checked and nothing else."""

    image: ImageRecord
    annotations: list[Annotation]


_DECODER = msgspec.json.Decoder(Sa1bRecord)


def parse(raw: bytes, name: str) -> ImageAnnotation:
    """Returns the masks and scores of one json; raises CorruptSampleError, with `name` in front, for anything that does not hold together."""
    return check(read(raw, name), name)


def read(raw: bytes, name: str) -> Sa1bRecord:
    """Returns the json as typed records, unchecked beyond that."""
    if len(raw) > MAX_BYTES:
        raise CorruptSampleError(
            f"{name}: its json has {len(raw)} bytes, at most {MAX_BYTES} are read; leave it out"
        )
    try:
        return _DECODER.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise CorruptSampleError(
            f"{name}: its json of {len(raw)} bytes is not an SA-1B annotation ({error}); leave it out or fetch its tar again"
        ) from error


def check(record: Sa1bRecord, name: str) -> ImageAnnotation:
    """Returns the record as masks and scores once sizes, run lengths and scores hold together."""
    height, width = size = record.image.height, record.image.width
    if not (0 < height <= MAX_SIDE and 0 < width <= MAX_SIDE and height * width <= MAX_PIXELS):
        raise CorruptSampleError(
            f"{name}: its json states {height} x {width} pixels, sides are 1 to {MAX_SIDE} and pixels at most {MAX_PIXELS}; leave it out"
        )
    annotations = record.annotations
    if len(annotations) > MAX_MASKS:
        raise CorruptSampleError(
            f"{name}: its json has {len(annotations)} annotations, at most {MAX_MASKS} are read; leave it out"
        )
    for number, annotation in enumerate(annotations):
        if annotation.segmentation.size != size:
            stated = " x ".join(map(str, annotation.segmentation.size))
            raise CorruptSampleError(
                f"{name}: annotation {number} lies on {stated} pixels, its image has {height} x {width}; leave it out"
            )
    try:
        masks = RLEMasks.from_coco(
            [annotation.segmentation.counts for annotation in annotations], size
        )
    except GigamaskError as fault:
        raise CorruptSampleError(f"{name}: {fault}") from fault
    predicted_iou = _scores(
        [annotation.predicted_iou for annotation in annotations], "predicted_iou", name
    )
    stability_score = _scores(
        [annotation.stability_score for annotation in annotations], "stability_score", name
    )
    return ImageAnnotation(name, size, masks, predicted_iou, stability_score)


def _scores(values: list[float], what: str, name: str) -> Float32[np.ndarray, "n"]:
    with np.errstate(over="ignore"):
        scores = np.array(values, np.float32)
    bad = np.flatnonzero(~np.isfinite(scores))
    if len(bad):
        raise CorruptSampleError(
            f"{name}: annotation {bad[0]} has {what} {values[bad[0]]}, a finite number is needed; leave it out"
        )
    return scores
