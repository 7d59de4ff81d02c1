"""Reading of LabelMe's JSON, one file for each image: polygons, and masks as PNGs in the JSON."""

import base64
import binascii
import math
import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from gigamask.data.annotation import MAX_BYTES
from gigamask.datatools.coco_json import StatedId, canonical_id
from gigamask.datatools.convert_labels import decode_labels
from gigamask.datatools.image_files import size_of
from gigamask.datatools.other_formats import describe
from gigamask.datatools.outlines import MAX_NUMBERS, MAX_PIXELS_OF_MASKS, check_count, crop_mask
from gigamask.datatools.pairing import names_within
from gigamask.errors import CorruptSampleError, GigamaskError
from gigamask.masks.rle import RLEMasks
from gigamask.plugins.formats.polygon_files import PolygonImage, ShapeObject
from gigamask.serialization import JSON_ERRORS, decode_json, read_limited

IGNORED = ("__ignore__", "_background_")
"""Labels that LabelMe's own exporters leave out."""


class Shape(msgspec.Struct):
    """A shape of LabelMe; `mask` is a PNG in base64, whose corners are the points."""

    points: list[tuple[float | None, float | None]]
    label: StatedId | None = ""
    shape_type: str | None = "polygon"
    group_id: StatedId | None = None
    mask: str | None = None


class LabelMe(msgspec.Struct):
    """A file of LabelMe, but for the shapes, which are decoded one by one."""

    shapes: list[msgspec.Raw]
    imageHeight: Any = None  # noqa: N815  (LabelMe's names)
    imageWidth: Any = None  # noqa: N815


class StatedPath(msgspec.Struct):
    """The part of a file of LabelMe that says whose shapes they are."""

    imagePath: str | None = None  # noqa: N815


_SHAPE = msgspec.json.Decoder(Shape, strict=False)


@dataclass(frozen=True)
class LabelMeImage(PolygonImage):
    """An image with a JSON file of LabelMe; shapes of one group are one object."""

    def parse(self, raw: bytes) -> LabelMe:
        """Return the file with undecoded shapes.

        Args:
            raw: The bytes of the file.

        Raises:
            GigamaskError: The file is not LabelMe's.
        """
        check_count(raw.count(b","), "numbers", MAX_NUMBERS, self.source)
        try:
            return decode_json(raw, "its JSON", LabelMe, strict=False)
        except GigamaskError as error:
            told = describe(self.file)
            needs = f"is {told}" if told and "LabelMe" not in told else "needs the list 'shapes'"
            raise CorruptSampleError(
                f"{self.source}: is not a file of LabelMe ({error}); it {needs}"
            ) from None

    def stated_size(self, content: LabelMe) -> tuple[int, int] | None:
        """Return height and width of the image as a file states them; None if it does not.

        Args:
            content: The file.
        """
        size = content.imageHeight, content.imageWidth
        if all(isinstance(side, int | float) and 0 < side < math.inf for side in size):
            return int(size[0]), int(size[1])
        return None

    def shapes(self, content: LabelMe, size: tuple[int, int]) -> list[ShapeObject]:
        """Return the objects of a file; shapes that are no outline, such as circles, have an error.

        Args:
            content: The file.
            size: Height and width of the image in pixels.

        Raises:
            MaskLimitError: Its masks have more pixels than are decoded.
        """
        objects: dict[Any, ShapeObject] = {}
        left = MAX_PIXELS_OF_MASKS
        for i, raw in enumerate(content.shapes):
            name = f"{self.source}: shape {i}"
            try:
                shape = _SHAPE.decode(raw)
                if shape.label in IGNORED:
                    raise CorruptSampleError(f"it has the label {shape.label}", "ignored")
                kind = (shape.shape_type or "polygon")[:40]
                if kind == "mask":
                    box = _box(shape, size)
                    left -= (box[2] - box[0] + 1) * (box[3] - box[1] + 1)
                    check_count(
                        MAX_PIXELS_OF_MASKS - left, "pixels of masks", MAX_PIXELS_OF_MASKS, name
                    )
                    rings, masks = [], [_decode_mask(shape, box, size)]
                elif kind == "polygon":
                    rings, masks = [[value for point in shape.points for value in point]], []
                else:
                    raise CorruptSampleError(
                        f"it is a {kind}, not a polygon; draw its outline", f"{kind}, not a polygon"
                    )
            except (*JSON_ERRORS, CorruptSampleError) as error:
                objects[i] = ShapeObject(name, error=error)
                continue
            key = i if shape.group_id is None else (canonical_id(shape.group_id), shape.label)
            known = objects.setdefault(key, ShapeObject(name, shape.label))
            known.rings += rings
            known.masks += masks
        return list(objects.values())

    def fields_of(self, shape: ShapeObject) -> dict[str, Any]:
        """Return the label of an object.

        Args:
            shape: The object.
        """
        label = "" if shape.category is None else str(shape.category)
        return {"category": label} if label else {}


def _box(shape: Shape, size: tuple[int, int]) -> tuple[int, int, int, int]:
    """Return the corners of a mask, inclusive; raise CorruptSampleError if there are none."""
    flat = [value for point in shape.points for value in point]
    if len(flat) != 4 or any(value is None or abs(value) > 2**20 for value in flat):
        raise CorruptSampleError("it is a mask without two corners; draw it again")
    x0, y0, x1, y1 = (int(value or 0) for value in flat)
    if not (0 <= x0 <= x1 < size[1] and 0 <= y0 <= y1 < size[0]):
        raise CorruptSampleError(
            f"it is a mask from ({x0}, {y0}) to ({x1}, {y1}), which is not within the image of "
            f"{size[0]} x {size[1]} pixels; draw it again",
            "size differs from its image",
        )
    return x0, y0, x1, y1


def _decode_mask(shape: Shape, box: tuple[int, int, int, int], size: tuple[int, int]) -> RLEMasks:
    x0, y0, x1, y1 = box
    try:
        png = base64.b64decode(shape.mask or "", validate=True)
    except (binascii.Error, ValueError):
        raise CorruptSampleError("it has a mask that is not base64; draw it again") from None
    stated = size_of(png, "its mask")
    if stated != (y1 - y0 + 1, x1 - x0 + 1):
        raise CorruptSampleError(
            f"it has a mask of {stated[0]} x {stated[1]} pixels, but corners of {y1 - y0 + 1} x "
            f"{x1 - x0 + 1}; draw it again",
            "size differs from its image",
        )
    return crop_mask(decode_labels(png, "its mask") != 0, (x0, y0), size)


def image_names(path: Path, folder: Path, image_folder: Path) -> list[str]:
    """Return where below the folder of images the image of a file may be, by its `imagePath`.

    Args:
        path: A file of LabelMe.
        folder: The folder of all.
        image_folder: The folder of images.
    """
    stated = None
    with suppress(GigamaskError):
        raw = read_limited(path, MAX_BYTES)
        stated = decode_json(raw, str(path), StatedPath, strict=False).imagePath
    if not stated or "\0" in stated:
        return []
    beside = Path(os.path.normpath(path.parent.absolute() / stated.replace("\\", "/")))
    root = Path(os.path.normpath(image_folder.absolute()))
    names = [beside.relative_to(root).as_posix()] if beside.is_relative_to(root) else []
    return [*names, *names_within(stated, image_folder, str(path.parent.relative_to(folder)))]
