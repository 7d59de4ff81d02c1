"""Rows of COCO's JSON files, read leniently: 1.0, "1" and 1 are one id, NaN is a missing number."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from gigamask.data.annotation import RleSegmentation, check_image_size
from gigamask.datatools.other_formats import describe
from gigamask.datatools.outlines import Polygons
from gigamask.errors import GigamaskError
from gigamask.serialization import JSON_ERRORS, decode_json, read_limited

NEEDS = "a COCO instances json needs the lists 'images' and 'annotations'"
_WHOLE = re.compile(r"-?(?:0|[1-9]\d{0,17})(?:\.0*)?")

Id = int | str
"""An id: a whole number, or text that is none."""
StatedId = int | float | str
"""An id as a file states it."""


def canonical_id(stated: StatedId) -> Id:
    """Return an id as a whole number if it is one, however it is written, and else as text.

    Args:
        stated: The id in a file: pandas writes 1.0, other programs "1".
    """
    if isinstance(stated, str):
        text = stated.strip()
        return int(text.partition(".")[0]) if _WHOLE.fullmatch(text) else text
    whole = int(stated)
    return whole if whole == stated else str(stated)


class Instances(msgspec.Struct):
    """The whole file; its entries are decoded one by one, so that a broken one affects no other."""

    images: list[msgspec.Raw] | None = None
    annotations: list[msgspec.Raw] | None = None
    categories: list[msgspec.Raw] | None = None


class ImageRow(msgspec.Struct, frozen=True):
    """An entry of `images`; LVIS states only the URL, whose end is the folder and the name."""

    id: StatedId
    width: int | None = None
    height: int | None = None
    file_name: str | None = None
    coco_url: str | None = None

    @property
    def name(self) -> str:
        """Name of the file in the folder of images; "" if none is stated."""
        return self.file_name or "/".join((self.coco_url or "").split("/")[-2:])

    @property
    def size(self) -> tuple[int, int] | None:
        """Height and width in pixels; None if one is not stated.

        Raises:
            CorruptSampleError: They are beyond the limits.
        """
        if self.height is None or self.width is None:
            return None
        check_image_size((self.height, self.width))
        return self.height, self.width


class CategoryRow(msgspec.Struct, frozen=True):
    """An entry of `categories`."""

    id: StatedId
    name: StatedId


class AnnotationImage(msgspec.Struct, frozen=True):
    """The field of an annotation that assigns it to an image."""

    image_id: StatedId


class AnnotationRow(msgspec.Struct, frozen=True):
    """An entry of `annotations`."""

    segmentation: Polygons | RleSegmentation | None = None
    id: StatedId | None = None
    iscrowd: int | bool | None = 0
    category_id: StatedId | None = None
    area: Any = None
    bbox: Any = None
    predicted_iou: Any = None
    stability_score: Any = None


class PanopticRow(msgspec.Struct, frozen=True):
    """An entry of `annotations` of a panoptic file: the label image of one image."""

    file_name: str
    segments_info: list[msgspec.Raw]


class AnnotationKind(msgspec.Struct, frozen=True):
    """The fields of an annotation by which files of other tasks are told apart."""

    segmentation: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    segments_info: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    caption: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    keypoints: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET


ANNOTATION = msgspec.json.Decoder(AnnotationRow, strict=False)
ANNOTATION_IMAGE = msgspec.json.Decoder(AnnotationImage, strict=False)
IMAGE = msgspec.json.Decoder(ImageRow, strict=False)
CATEGORY = msgspec.json.Decoder(CategoryRow, strict=False)
PANOPTIC = msgspec.json.Decoder(PanopticRow, strict=False)
_KIND = msgspec.json.Decoder(AnnotationKind, strict=False)


def read_json(path: Path) -> tuple[Instances, bool]:
    """Read a file of instances or of panoptic segments.

    Args:
        path: The file.

    Returns:
        Its lists, and whether its masks are panoptic segments in PNGs.

    Raises:
        GigamaskError: The file cannot be read, or has no masks because it is of another kind.
    """
    raw = read_limited(path, 2**36)  # as much as memory holds
    try:
        instances = decode_json(raw, str(path), Instances, strict=False)
    except GigamaskError as error:
        if told := describe(path):
            raise GigamaskError(f"{path}: is {told}") from None
        if raw[:64].lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"["):
            raise _other_kind(path, "a list, as COCO's results of a detector are") from None
        raise GigamaskError(f"{error}; {NEEDS}") from None
    for name in ("images", "annotations"):
        if getattr(instances, name) is None:
            told = describe(path) or f"without a list {name!r}; {NEEDS}"
            raise GigamaskError(f"{path}: is {told}")
    kind = _kind_of(instances)
    if kind.segmentation is msgspec.UNSET:
        if kind.caption is not msgspec.UNSET:
            raise _other_kind(path, "COCO's captions of images")
        if kind.keypoints is not msgspec.UNSET:
            raise _other_kind(path, "COCO's keypoints without masks")
    return instances, kind.segments_info is not msgspec.UNSET


def extra_fields(row: AnnotationRow, names: Mapping[Id, str]) -> dict[str, Any]:
    """Return the fields of an annotation to keep in addition to its mask.

    Args:
        row: The annotation.
        names: Names of categories by id.
    """
    number, category = (
        None if stated is None else canonical_id(stated) for stated in (row.id, row.category_id)
    )
    extras: dict[str, Any] = {"id": number} if isinstance(number, int) else {}
    if isinstance(category, int):
        extras["category_id"] = category
    name = None if category is None else names.get(category, category)
    if isinstance(name, str) and name:
        extras["category"] = name
    if row.iscrowd:
        extras["iscrowd"] = 1
    for name in ("predicted_iou", "stability_score"):
        if isinstance(score := getattr(row, name), int | float) and 0 <= score <= 2:
            extras[name] = score
    return extras


def _kind_of(instances: Instances) -> AnnotationKind:
    """Return what the first annotation that can be read has."""
    for raw in (instances.annotations or [])[:100]:
        try:
            return _KIND.decode(raw)
        except JSON_ERRORS:
            continue
    return AnnotationKind()


def _other_kind(path: object, kind: str) -> GigamaskError:
    return GigamaskError(
        f"{path}: holds {kind}, which are no masks; give the instances or panoptic json of the "
        "same images, which has the lists 'images' and 'annotations'"
    )
