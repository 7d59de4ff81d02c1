"""Reading of COCO's instances json; the masks of an image are decoded when it is converted.

Valid polygons are rasterized by faster-coco-eval exactly as in pycocotools; time and memory grow
with the length of their outlines, not with the size of the image. Annotations are decoded image by
image, so even a file of several gigabytes takes little more memory than its own size.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path, PurePath
from typing import Any

import msgspec
import numpy as np
from faster_coco_eval import mask_api_new_cpp  # pyrefly: ignore[missing-module-attribute]  (compiled, without stubs)
from jaxtyping import Float64

from gigamask.data.annotation import MAX_SIDE, RleSegmentation
from gigamask.data.image import MAX_PIXELS
from gigamask.datatools.left_out import CROWD, LeftOutEntry, LeftOutRecord
from gigamask.datatools.objects import (
    EMPTY,
    NO_PIXEL,
    Objects,
    SourceImage,
    SourceListing,
    image_ids,
)
from gigamask.errors import CorruptSampleError, GigamaskError
from gigamask.masks.rle import RLEMasks, union
from gigamask.serialization import JSON_ERRORS, check_regular

MAX_COORDINATE = 2 * MAX_SIDE
"""Largest coordinate of a corner in pixels; the time to draw an outline grows with its length."""
TWICE = "id of several images"
MAX_OUTLINE = 2**22
"""Maximum length of one annotation's outlines in pixels, hundreds of times what annotators draw."""

Id = int | str


class Instances(msgspec.Struct):
    """The whole file; its entries are decoded one by one, so that a broken one affects no other."""

    images: list[msgspec.Raw]
    annotations: list[msgspec.Raw]
    categories: list[msgspec.Raw] = []


class ImageRow(msgspec.Struct, frozen=True):
    """An entry of `images`; LVIS states only the URL, whose end is the folder and the name."""

    id: Id
    width: int
    height: int
    file_name: str = ""
    coco_url: str = ""

    @property
    def path(self) -> PurePath:
        """Path of the file in the folder of images."""
        return PurePath(self.file_name or "/".join(self.coco_url.split("/")[-2:]))

    def file(self, folder: Path) -> Path:
        """Return the file; `folder` may be the subfolder that the URL names, such as val2017."""
        nested, flat = folder / self.path, folder / self.path.name
        return flat if not self.file_name and not nested.exists() and flat.exists() else nested


class CategoryRow(msgspec.Struct, frozen=True):
    """An entry of `categories`."""

    id: Id
    name: str


class AnnotationImage(msgspec.Struct, frozen=True):
    """The field of an annotation that assigns it to an image."""

    image_id: Id


class AnnotationRow(msgspec.Struct, frozen=True):
    """An entry of `annotations`."""

    segmentation: list[list[float]] | RleSegmentation
    id: Id | None = None
    iscrowd: int | bool = 0
    category_id: Id | None = None
    area: Any = None
    bbox: Any = None
    predicted_iou: Any = None
    stability_score: Any = None


_ANNOTATION = msgspec.json.Decoder(AnnotationRow)
_ANNOTATION_IMAGE = msgspec.json.Decoder(AnnotationImage)
_IMAGE = msgspec.json.Decoder(ImageRow)
_CATEGORY = msgspec.json.Decoder(CategoryRow)


@dataclass(frozen=True)
class CocoImage(SourceImage):
    """One image, its undecoded annotations, and the names of categories by id."""

    size: tuple[int, int]
    annotations: list[msgspec.Raw]
    keep_crowds: bool
    names: Mapping[Id, str] = field(default_factory=dict)

    def objects(self, stored: bytes) -> Objects:
        """Decode the masks; broken annotations are left out and listed with their reasons."""
        masks, rows, skipped = self.read_annotations()
        filled = masks.areas() > 0
        for i in np.array(list(rows), np.int64)[~filled].tolist():
            skipped[i] = _skip(self.source, i, rows[i], CorruptSampleError(EMPTY, NO_PIXEL))
        extras = [extra_fields(row, self.names) for i, row in rows.items() if i not in skipped]
        return Objects(masks[filled], extras, [skipped[i] for i in sorted(skipped)])

    def read_annotations(
        self,
    ) -> tuple[RLEMasks, dict[int, AnnotationRow], dict[int, LeftOutEntry]]:
        """Decode the masks, some of which may be empty.

        Returns:
            The masks; their annotations by number; and those that are left out.
        """
        rows: dict[int, AnnotationRow] = {}
        rings: list[list[float]] = []
        ring_rows: list[int] = []
        rle_masks: dict[int, RLEMasks] = {}
        skipped: dict[int, LeftOutEntry] = {}
        for i, raw in enumerate(self.annotations):
            row = None
            try:
                row = _ANNOTATION.decode(raw)
                if row.iscrowd and not self.keep_crowds:
                    raise CorruptSampleError("is marked iscrowd; --keep-crowds keeps it", CROWD)
                if isinstance(row.segmentation, RleSegmentation):
                    rle_masks[i] = _decode_rle(row.segmentation, self.size)
                else:
                    new = _check_polygons(row.segmentation)
                    rings += new
                    ring_rows += [i] * len(new)
                rows[i] = row
            except (*JSON_ERRORS, GigamaskError) as error:
                skipped[i] = _skip(self.source, i, row, error)
        drawn = (
            [rle["counts"] for rle in mask_api_new_cpp.frPoly(rings, *self.size)] if rings else []
        )
        parts = RLEMasks.concatenate([RLEMasks.from_coco(drawn, self.size), *rle_masks.values()])
        indices = np.array(list(rows), np.int64)
        owners = np.searchsorted(indices, np.array([*ring_rows, *rle_masks], np.int64))
        masks = union(parts, owners, len(rows))
        return masks, rows, skipped


def read(path: Path, image_folder: Path, keep_crowds: bool = False) -> SourceListing:
    """List the images of an instances json.

    Args:
        path: The instances json.
        image_folder: The folder that `file_name` is relative to.
        keep_crowds: Whether to keep annotations with `iscrowd`.

    Returns:
        The images, and the entries that were left out with their reasons.

    Raises:
        GigamaskError: The file cannot be read as an instances json.
    """
    check_regular(path)
    try:
        instances = msgspec.json.decode(path.read_bytes(), type=Instances)
    except OSError as error:
        raise GigamaskError(
            f"{path}: cannot be read ({error.strerror}); give COCO's instances json, or a folder of"
            " label images"
        ) from error
    except JSON_ERRORS as error:
        raise GigamaskError(
            f"{path}: is not a COCO instances json ({error}); it needs the lists 'images' and"
            " 'annotations'"
        ) from error
    left_out = LeftOutRecord()
    rows, left_out.images = _image_rows(instances.images)
    image_annotations: dict[str, list[msgspec.Raw]] = defaultdict(list)
    for i, raw in enumerate(instances.annotations):
        name = f"annotation {i} of {path.name}"
        try:
            image_id = str(_ANNOTATION_IMAGE.decode(raw).image_id)
            if image_id not in rows:
                raise CorruptSampleError(
                    f"its image_id {image_id} belongs to no image, or to one that was left out;"
                    " add the image, or remove the annotation",
                    "image_id of no image",
                )
            image_annotations[image_id].append(raw)
        except (*JSON_ERRORS, CorruptSampleError) as error:
            left_out.masks.append(LeftOutEntry.of(name, error, f"{name}: "))
    names = _category_names(instances.categories)
    ids, renumbered = image_ids(list(rows))
    images = [
        CocoImage(
            number,
            str(row.path),
            row.file(image_folder),
            (row.height, row.width),
            image_annotations[key],
            keep_crowds,
            names,
        )
        for number, (key, row) in zip(ids, rows.items(), strict=True)
    ]
    return SourceListing(images, left_out, renumbered)


def _category_names(entries: Sequence[msgspec.Raw]) -> dict[Id, str]:
    """Return the names of categories by id; those without a name keep their id alone."""
    names: dict[Id, str] = {}
    for raw in entries:
        with suppress(*JSON_ERRORS):
            row = _CATEGORY.decode(raw)
            names[row.id] = row.name
    return names


def _image_rows(entries: Sequence[msgspec.Raw]) -> tuple[dict[str, ImageRow], list[LeftOutEntry]]:
    """Return images by id, and those left out: broken ones and those whose id is not unique."""
    rows: dict[str, ImageRow] = {}
    clashing: set[str] = set()
    skipped = []
    for i, raw in enumerate(entries):
        name = f"image {i}"
        try:
            row = _IMAGE.decode(raw)
            key, name = str(row.id), f"{row.path} (id {row.id})"
            if not row.path.name:
                raise CorruptSampleError("it needs file_name, or LVIS's coco_url")
            if not (
                0 < row.height <= MAX_SIDE
                and 0 < row.width <= MAX_SIDE
                and row.height * row.width <= MAX_PIXELS
            ):
                raise CorruptSampleError(
                    f"its stated size is {row.height} x {row.width} pixels, but sides must be 1 to"
                    f" {MAX_SIDE} and pixels at most {MAX_PIXELS}",
                    "size beyond the limits",
                )
            if row.path.is_absolute() or ".." in row.path.parts:
                raise CorruptSampleError(
                    "its file_name is outside the folder of images; give names within it",
                    "outside the folder of images",
                )
            if key in rows:
                clashing |= {key} if rows[key] != row else set()
                raise CorruptSampleError(
                    f"id {key} is used by an earlier image; give each image its own id",
                    TWICE,
                )
            rows[key] = row
        except (*JSON_ERRORS, CorruptSampleError) as error:
            skipped.append(LeftOutEntry.of(name, error, f"{name}: "))
    for key in clashing:
        name = f"{rows[key].path} (id {key})"
        skipped.append(
            LeftOutEntry(
                name,
                f"{name}: another image has the same id, so its masks are ambiguous; give each"
                " image its own id",
                TWICE,
            )
        )
        del rows[key]
    return rows, skipped


def _skip(source: str, i: int, row: AnnotationRow | None, error: Exception) -> LeftOutEntry:
    name = f"{source}: its annotation {i}" + (f" (id {row.id})" if row is not None else "")
    return LeftOutEntry.of(name, error, f"{name}: ")


def _decode_rle(segmentation: RleSegmentation, size: tuple[int, int]) -> RLEMasks:
    """Return one mask given as run lengths; raise an error if they are invalid."""
    if segmentation.size != size:
        stated = " x ".join(map(str, segmentation.size))
        raise CorruptSampleError(
            f"its size is {stated} pixels, its image has {size[0]} x {size[1]}; remove it or write"
            " it again",
            "size differs from its image",
        )
    return RLEMasks.from_coco([segmentation.counts], size)


def _check_polygons(polygons: list[list[float]]) -> list[list[float]]:
    """Return one object's polygons; raise an error if they are not safe to draw."""
    if not polygons:
        raise CorruptSampleError("it has no polygon; a box alone is not a mask", "no outline")
    rings = [_corners(i, numbers) for i, numbers in enumerate(polygons)]
    outline = sum(float(np.abs(ring - np.roll(ring, 1, 0)).max(1).sum()) for ring in rings)
    if outline > MAX_OUTLINE:
        raise CorruptSampleError(
            f"its outline is {outline:.0f} px long, at most {MAX_OUTLINE} are drawn; remove it or"
            " write it again",
            "outline beyond the limits",
        )
    return polygons


def _corners(i: int, numbers: list[float]) -> Float64[np.ndarray, "k 2"]:
    """Return a polygon's corners; raise an error if they are not safe to draw."""
    if len(numbers) < 6 or len(numbers) % 2:
        raise CorruptSampleError(
            f"polygon {i} has {len(numbers)} numbers, it needs an even number of at least 6 (three"
            " corners); remove it or write it again",
            "fewer than three corners",
        )
    ring = np.array(numbers, np.float64).reshape(-1, 2)
    wrong = ~(np.abs(ring) <= MAX_COORDINATE)  # NaN too
    if wrong.any():
        raise CorruptSampleError(
            f"polygon {i} has a coordinate of {ring[wrong][0]:g}, at most {MAX_COORDINATE} px from"
            " 0 are allowed; remove it",
            "coordinates beyond the limits",
        )
    return ring


def extra_fields(row: AnnotationRow, names: Mapping[Id, str]) -> dict[str, Any]:
    """Return the fields of an annotation to keep in addition to its mask.

    Args:
        row: The annotation.
        names: Names of categories by id.
    """
    extras: dict[str, Any] = {"id": row.id} if isinstance(row.id, int) else {}
    if isinstance(row.category_id, int):
        extras["category_id"] = row.category_id
    name = None if row.category_id is None else names.get(row.category_id, row.category_id)
    if isinstance(name, str) and name:
        extras["category"] = name
    if row.iscrowd:
        extras["iscrowd"] = 1
    for name in ("predicted_iou", "stability_score"):
        if isinstance(score := getattr(row, name), int | float) and 0 <= score <= 2:
            extras[name] = score
    return extras
