"""Parse, check and write SA-1B annotations.

Format (segment-anything README, "Dataset"): `{"image": {image_id, width, height, file_name},
"annotations": [{segmentation: {size, counts}, predicted_iou, stability_score, ...}]}`. A mask may
have a `category`, the name of its class, or else a `category_id`, which then serves as the name.
Other fields are written but not read: `area` and `bbox` follow from the run lengths, and SA-1B's
boxes are one pixel too small.
"""

import json
from codecs import BOM_UTF8
from collections.abc import Iterator, Sequence
from typing import Annotated, Any

import msgspec
import numpy as np
from jaxtyping import Float, Float32, Int, Int64

from gigamask.data.image import MAX_PIXELS, check_size
from gigamask.errors import CorruptSampleError, GigamaskError
from gigamask.masks.rle import RLEMasks, spans_of, write_masks
from gigamask.records import ImageAnnotation
from gigamask.serialization import JSON_ERRORS

MAX_BYTES = 2**26
"""64 MiB; SA-1B's largest files have about 1 MiB."""
MAX_MASKS = 10_000
"""SA-1B's images have 100 masks on average, several hundred at most."""
MAX_SIDE = 65_535
"""Pixels; the limit of JPEG and of the index's box columns."""
MAX_CATEGORY = 100
"""Most characters of the name of a category."""


class RleSegmentation(msgspec.Struct):
    """One mask as COCO run lengths: `size` is [H, W], `counts` a compressed string or a list."""

    size: tuple[int, int]
    counts: str | list[int]


class Annotation(msgspec.Struct):
    """One mask with the scores of the model that made it, and its category if it has one."""

    segmentation: RleSegmentation
    predicted_iou: float
    stability_score: float
    category_id: int | str | None = None
    category: str | None = None

    @property
    def category_name(self) -> str:
        """Name of the category; "" without one."""
        named = self.category_id if self.category is None else self.category
        return "" if named is None else str(named)


class ImageRecord(msgspec.Struct):
    """The image that a json describes; `gigamask segment` states the crc32 of its file."""

    image_id: Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]
    width: int
    height: int
    file_name: str = ""
    source_crc32: int | None = None
    source: object = ""


class Sa1bRecord(msgspec.Struct):
    """One decoded json; only the types are checked."""

    image: ImageRecord
    annotations: list[Annotation]


_DECODER = msgspec.json.Decoder(Sa1bRecord)


def parse(raw: bytes, name: str) -> ImageAnnotation:
    """Parse and check one json.

    Args:
        raw: The file's bytes.
        name: Name of the image for error messages.

    Returns:
        The masks and scores.

    Raises:
        CorruptSampleError: The json is not a valid annotation.
    """
    return check(read(raw, name), name)


def read(raw: bytes, name: str) -> Sa1bRecord:
    """Decode one json and check its types only.

    Args:
        raw: The file's bytes.
        name: Name of the image for error messages.

    Raises:
        CorruptSampleError: The json is too large or not an SA-1B annotation.
    """
    if len(raw) > MAX_BYTES:
        raise CorruptSampleError(
            f"{name}: its json has {len(raw)} bytes, but at most {MAX_BYTES} are read; leave it out"
        )
    try:
        return _DECODER.decode(raw.removeprefix(BOM_UTF8))
    except JSON_ERRORS as error:
        raise CorruptSampleError(
            f"{name}: its json of {len(raw)} bytes is not an SA-1B annotation ({error}); "
            "leave it out, or put the whole file back"
        ) from error


def check(record: Sa1bRecord, name: str, masks: RLEMasks | None = None) -> ImageAnnotation:
    """Check sizes, run lengths and scores of a decoded json.

    Args:
        record: The decoded json.
        name: Name of the image for error messages.
        masks: Its masks, if they were decoded before.

    Returns:
        The masks and scores.

    Raises:
        CorruptSampleError: A size, run length or score is invalid.
    """
    check_sizes(record, name)
    annotations, size = record.annotations, (record.image.height, record.image.width)
    try:
        counts = [each.segmentation.counts for each in annotations]
        masks = RLEMasks.from_coco(counts, size) if masks is None else masks
    except GigamaskError as error:
        raise CorruptSampleError(f"{name}: {error}") from error
    predicted_iou = read_scores(annotations, "predicted_iou", name)
    stability_score = read_scores(annotations, "stability_score", name)
    categories = read_categories(record, name)
    source = str(record.image.source or "")
    return ImageAnnotation(name, size, masks, predicted_iou, stability_score, categories, source)


def check_sizes(record: Sa1bRecord, name: str) -> None:
    """Check the sizes and the number of the masks of a decoded json.

    Args:
        record: The decoded json.
        name: Name of the image for error messages.

    Raises:
        CorruptSampleError: One of them is invalid.
    """
    size = record.image.height, record.image.width
    check_image_size(size, f"{name}: ")
    annotations = record.annotations
    if len(annotations) > MAX_MASKS:
        raise CorruptSampleError(
            f"{name}: its json has {len(annotations)} annotations, but at most {MAX_MASKS} are "
            "read; leave it out"
        )
    for number, annotation in enumerate(annotations):
        if annotation.segmentation.size != size:
            check_size(annotation.segmentation.size, size, f"{name}: annotation {number}")


def check_image_size(size: tuple[int, int], prefix: str = "") -> None:
    """Check the size of an image that annotations state.

    Args:
        size: Height and width in pixels.
        prefix: What an error message begins with.

    Raises:
        CorruptSampleError: It is beyond the limits.
    """
    if not (min(size) > 0 and max(size) <= MAX_SIDE and size[0] * size[1] <= MAX_PIXELS):
        raise CorruptSampleError(
            f"{prefix}its json states {size[0]} x {size[1]} pixels, but sides must be 1 to "
            f"{MAX_SIDE} and pixels at most {MAX_PIXELS}; leave it out",
            "size beyond the limits",
        )


def read_categories(record: Sa1bRecord, name: str) -> tuple[str, ...]:
    """Return the category of each mask of a decoded json; () if none has one.

    Args:
        record: The decoded json.
        name: Name of the image for error messages.

    Raises:
        CorruptSampleError: A name is too long.
    """
    categories = tuple(annotation.category_name for annotation in record.annotations)
    if (longest := max(map(len, categories), default=0)) > MAX_CATEGORY:
        raise CorruptSampleError(
            f"{name}: the name of a category has {longest} characters, but at most {MAX_CATEGORY} "
            "are read; shorten it"
        )
    return categories if any(categories) else ()


def read_scores(annotations: Sequence[Annotation], key: str, name: str) -> Float32[np.ndarray, "n"]:
    """Return a score of each mask.

    Args:
        annotations: The masks.
        key: Name of the score.
        name: Name of the image for error messages.

    Raises:
        CorruptSampleError: One of them is not finite.
    """
    values = [getattr(each, key) for each in annotations]
    with np.errstate(over="ignore"):
        scores = np.array(values, np.float32)
    invalid = np.flatnonzero(~np.isfinite(scores))
    if len(invalid):
        number = invalid[0]
        raise CorruptSampleError(
            f"{name}: annotation {number} has {key} {values[number]}, which must be finite; "
            "leave it out"
        )
    return scores


def image_record(
    image_id: int,
    masks: RLEMasks,
    ids: Sequence[int],
    points_xy: Int[np.ndarray, "n 2"] | Float[np.ndarray, "n 2"],
    predicted_iou: Float[np.ndarray, "n"],
    stability_score: Float[np.ndarray, "n"],
    crops: Int[np.ndarray, "n 4"] | None = None,
    fields: Sequence[dict[str, Any]] | None = None,
) -> dict[str, Any]:
    """Return the annotation of the image `sa_<image_id>`.

    Args:
        image_id: Number of the image.
        masks: The masks.
        ids: Id of each mask.
        points_xy: Prompt point of each mask in pixels.
        predicted_iou: Predicted IoU of each mask.
        stability_score: Stability score of each mask.
        crops: Image crop that each mask was made from, xyxy in pixels with exclusive ends; None for
            the whole image.
        fields: What `mask_fields` returned of the masks, if it was called for several images.

    Returns:
        The json as a dict.
    """
    height, width = masks.size
    return {
        "image": {
            "image_id": image_id,
            "width": width,
            "height": height,
            "file_name": f"sa_{image_id}.jpg",
        },
        "annotations": [
            {
                **shape,
                "predicted_iou": float(predicted_iou[i]),
                "point_coords": [[float(points_xy[i, 0]), float(points_xy[i, 1])]],
                "crop_box": [float(x0), float(y0), float(x1 - x0), float(y1 - y0)],
                "id": ids[i],
                "stability_score": float(stability_score[i]),
            }
            for i, (shape, (x0, y0, x1, y1)) in enumerate(
                zip(
                    mask_fields([masks]) if fields is None else fields,
                    [(0, 0, width, height)] * len(masks) if crops is None else crops.tolist(),
                    strict=True,
                )
            )
        ],
    }


def image_records(
    images: Sequence[tuple[int, RLEMasks, Sequence[int]]],
) -> Iterator[dict[str, Any]]:
    """Yield annotations whose scores are 1 and whose points are in the middle of the masks.

    The middle is that of the pixels in column order.

    Args:
        images: Number, masks and ids of the masks of each image.
    """
    parts, start = [masks for _, masks, _ in images], 0
    fields, spans, heights = mask_fields(parts), spans_of(parts), _heights(parts)
    middles = spans.points(np.full((len(fields), 1), 0.5), heights)[:, 0]
    for image_id, masks, ids in images:
        own, ones = slice(start, start + len(masks)), np.ones(len(masks))
        start = own.stop
        yield image_record(image_id, masks, ids, middles[own], ones, ones, fields=fields[own])


def _heights(images: Sequence[RLEMasks]) -> Int64[np.ndarray, "n"]:
    """Return the height of each mask of several images."""
    return np.repeat([masks.size[0] for masks in images], list(map(len, images)))


def mask_fields(images: Sequence[RLEMasks]) -> list[dict[str, Any]]:
    """Return the fields `bbox`, `area` and `segmentation` of each mask of several images."""
    spans = spans_of(images)
    return [
        {
            "bbox": [float(x0), float(y0), float(x1 - x0), float(y1 - y0)],
            "area": area,
            "segmentation": {"size": size, "counts": counts.decode()},
        }
        for (x0, y0, x1, y1), area, size, counts in zip(
            spans.boxes(_heights(images)).tolist(),
            spans.areas().tolist(),
            [list(masks.size) for masks in images for _ in range(len(masks))],
            write_masks(images),
            strict=True,
        )
    ]


def encode(record: dict[str, Any]) -> bytes:
    """Encode an annotation as the bytes of its file."""
    return json.dumps(record).encode()
