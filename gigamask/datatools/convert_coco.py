"""COCO's instances json: the file enters, one `CocoImage` for each image leaves, which reads its masks when asked.

Polygons are rasterised exactly as pycocotools does, by faster-coco-eval, once they are known to be sound: the time and memory that takes are
those of their outlines, not of the image. Run lengths are read and checked by `geometry.runs`.
An annotation is decoded when its image's turn comes, so a file of gigabytes takes little more memory than its bytes.

Not here: pictures (`prepare.pictures`), shards (`prepare.convert`).
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any

import msgspec
import numpy as np
from faster_coco_eval import mask_api_new_cpp  # pyrefly: ignore[missing-module-attribute]  (compiled, without stubs)
from jaxtyping import Float64

from gigamask.data.annotation import MAX_SIDE, RleSegmentation
from gigamask.data.image import MAX_PIXELS
from gigamask.datatools.objects import EMPTY, Annotated, Objects, SourceListing, numbers, unite
from gigamask.errors import CorruptSampleError, GigamaskError
from gigamask.masks.rle import RLEMasks
from gigamask.types import SkippedSample

MAX_COORDINATE = 2 * MAX_SIDE
"""Pixels that a corner may lie from the image's; the time to draw an outline is that of its length."""
MAX_OUTLINE = 2**22
"""Pixels of one annotation's outlines together: hundreds of times those of anything drawn by hand."""

Id = int | str


class Instances(msgspec.Struct):
    """The whole file; what it lists is decoded one by one, so that one that is broken spoils no other."""

    images: list[msgspec.Raw]
    annotations: list[msgspec.Raw]


class ImageRow(msgspec.Struct, frozen=True):
    """What the file says of one image."""

    id: Id
    file_name: str
    width: int
    height: int


class Belongs(msgspec.Struct, frozen=True):
    """The one thing that sorting annotations needs to know."""

    image_id: Id


class AnnotationRow(msgspec.Struct, frozen=True):
    """What the file says of one object."""

    segmentation: list[list[float]] | RleSegmentation
    id: Id | None = None
    iscrowd: int | bool = 0
    category_id: Id | None = None


_ANNOTATION = msgspec.json.Decoder(AnnotationRow)
_BELONGS = msgspec.json.Decoder(Belongs)
_IMAGE = msgspec.json.Decoder(ImageRow)


@dataclass(frozen=True)
class CocoImage(Annotated):
    """One image and its annotations as they stand in the file."""

    size: tuple[int, int]
    annotations: list[msgspec.Raw]
    keep_crowds: bool

    def objects(self) -> Objects:
        """Reads the masks; a broken annotation is left out and named."""
        rows: dict[int, AnnotationRow] = {}
        rings: list[list[float]] = []
        of_ring: list[int] = []
        coded: dict[int, RLEMasks] = {}
        rejected: dict[int, SkippedSample] = {}
        crowds = 0
        for place, raw in enumerate(self.annotations):
            row = None
            try:
                row = _ANNOTATION.decode(raw)
                if row.iscrowd and not self.keep_crowds:
                    crowds += 1
                    continue
                if isinstance(row.segmentation, RleSegmentation):
                    coded[place] = _run_lengths(row.segmentation, self.size)
                else:
                    new = _rings(row.segmentation)
                    rings += new
                    of_ring += [place] * len(new)
                rows[place] = row
            except (msgspec.DecodeError, UnicodeDecodeError, GigamaskError) as error:
                rejected[place] = _reject(self.source, place, row, error)
        drawn = (
            [each["counts"] for each in mask_api_new_cpp.frPoly(rings, *self.size)] if rings else []
        )
        pieces = RLEMasks.concatenate([RLEMasks.from_coco(drawn, self.size), *coded.values()])
        places = np.array(list(rows), np.int64)
        masks = unite(
            pieces, np.searchsorted(places, np.array([*of_ring, *coded], np.int64)), len(rows)
        )
        filled = masks.areas() > 0
        for place in places[~filled].tolist():
            rejected[place] = _reject(self.source, place, rows[place], CorruptSampleError(EMPTY))
        extras = [_extras(rows[place]) for place in places[filled].tolist()]
        return Objects(
            masks[filled], extras, [rejected[place] for place in sorted(rejected)], crowds
        )


def read(path: Path, pictures: Path, keep_crowds: bool = False) -> SourceListing:
    """Lists the images of an instances json, whose pictures lie in the folder `pictures`."""
    try:
        held = msgspec.json.decode(path.read_bytes(), type=Instances)
    except OSError as error:
        raise GigamaskError(
            f"{path}: cannot be read ({error.strerror}); give COCO's instances json, or a folder of label images"
        ) from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise GigamaskError(
            f"{path}: is no COCO instances json ({error}); it needs the lists 'images' and 'annotations'"
        ) from error
    rows, rejected = _images(held.images)
    of_image: dict[str, list[msgspec.Raw]] = defaultdict(list)
    strays = []
    for place, raw in enumerate(held.annotations):
        name = f"annotation {place} of {path.name}"
        try:
            image_id = str(_BELONGS.decode(raw).image_id)
            if image_id not in rows:
                raise CorruptSampleError(
                    f"its image_id {image_id} is that of no image, or of one that was left out; list the image, or leave it out"
                )
            of_image[image_id].append(raw)
        except (msgspec.DecodeError, UnicodeDecodeError, CorruptSampleError) as error:
            strays.append(SkippedSample(name, f"{name}: {error}"))
    given, renumbered = numbers(list(rows))
    images = [
        CocoImage(
            number,
            row.file_name,
            pictures / row.file_name,
            (row.height, row.width),
            of_image[key],
            keep_crowds,
        )
        for number, (key, row) in zip(given, rows.items(), strict=True)
    ]
    return SourceListing(images, rejected, renumbered, strays)


def _images(listed: Sequence[msgspec.Raw]) -> tuple[dict[str, ImageRow], list[SkippedSample]]:
    """Returns the images by id, and those left out: broken ones, repetitions, and all that share an id but differ."""
    rows: dict[str, ImageRow] = {}
    clashing: set[str] = set()
    rejected = []
    for place, raw in enumerate(listed):
        name = f"image {place}"
        try:
            row = _IMAGE.decode(raw)
            key, name = str(row.id), f"{row.file_name} (id {row.id})"
            if not (
                0 < row.height <= MAX_SIDE
                and 0 < row.width <= MAX_SIDE
                and row.height * row.width <= MAX_PIXELS
            ):
                raise CorruptSampleError(
                    f"it is said to have {row.height} x {row.width} pixels, sides are 1 to {MAX_SIDE} and pixels at most {MAX_PIXELS}"
                )
            if PurePath(row.file_name).is_absolute() or ".." in PurePath(row.file_name).parts:
                raise CorruptSampleError(
                    "its file_name leads out of the folder of pictures; give names within it"
                )
            if key in rows:
                clashing |= {key} if rows[key] != row else set()
                raise CorruptSampleError(
                    f"id {key} was given before; give each image an id of its own"
                )
            rows[key] = row
        except (msgspec.DecodeError, UnicodeDecodeError, CorruptSampleError) as error:
            rejected.append(SkippedSample(name, f"{name}: {error}"))
    for key in clashing:
        name = f"{rows[key].file_name} (id {key})"
        rejected.append(
            SkippedSample(
                name,
                f"{name}: another image has this id too, and no one can tell whose its masks are; give each an id of its own",
            )
        )
        del rows[key]
    return rows, rejected


def _reject(source: str, place: int, row: AnnotationRow | None, error: Exception) -> SkippedSample:
    name = f"{source}: its annotation {place}" + (f" (id {row.id})" if row is not None else "")
    return SkippedSample(name, f"{name}: {error}")


def _run_lengths(segmentation: RleSegmentation, size: tuple[int, int]) -> RLEMasks:
    """Returns one mask that is given as run lengths; raises Fault for what is not sound."""
    if segmentation.size != size:
        stated = " x ".join(map(str, segmentation.size))
        raise CorruptSampleError(
            f"it lies on {stated} pixels, its image has {size[0]} x {size[1]}; leave it out or write it again"
        )
    return RLEMasks.from_coco([segmentation.counts], size)


def _rings(polygons: list[list[float]]) -> list[list[float]]:
    """Returns one object's polygons once they are safe to draw."""
    if not polygons:
        raise CorruptSampleError("it has no polygon; a box alone is no mask")
    rings = [_ring(place, corners) for place, corners in enumerate(polygons)]
    outline = sum(float(np.abs(ring - np.roll(ring, 1, 0)).max(1).sum()) for ring in rings)
    if outline > MAX_OUTLINE:
        raise CorruptSampleError(
            f"its outline is {outline:.0f} px long, at most {MAX_OUTLINE} are drawn; leave it out or write it again"
        )
    return polygons


def _ring(place: int, corners: list[float]) -> Float64[np.ndarray, "k 2"]:
    """Returns a polygon's corners once they are safe to draw."""
    if len(corners) < 6 or len(corners) % 2:
        raise CorruptSampleError(
            f"polygon {place} has {len(corners)} numbers, three corners or more are needed, two numbers each; leave it out or write it again"
        )
    ring = np.array(corners, np.float64).reshape(-1, 2)
    wrong = ~(np.abs(ring) <= MAX_COORDINATE)  # NaN too
    if wrong.any():
        raise CorruptSampleError(
            f"polygon {place} has a corner at {ring[wrong][0]:g}, at most {MAX_COORDINATE} px lie between it and 0; leave it out"
        )
    return ring


def _extras(row: AnnotationRow) -> dict[str, Any]:
    """Returns what is kept of an annotation beside its mask."""
    kept: dict[str, Any] = {"id": row.id} if isinstance(row.id, int) else {}
    if row.category_id is not None:
        kept["category_id"] = row.category_id
    if row.iscrowd:
        kept["iscrowd"] = 1
    return kept
