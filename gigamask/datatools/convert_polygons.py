"""Reading of polygons in one file for each image: LabelMe's JSON, or YOLO's segmentation text.

A file belongs to the image of its name and subfolder. Polygons are drawn as COCO's are.
"""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from gigamask.datatools import convert_labels
from gigamask.datatools.convert_coco import CocoImage, Id
from gigamask.datatools.image_files import files_of, meant_size, read_file
from gigamask.datatools.left_out import LeftOutEntry
from gigamask.datatools.objects import Objects, SourceImage, SourceListing, match_images
from gigamask.errors import CorruptSampleError, GigamaskError
from gigamask.serialization import JSON_ERRORS, read_yaml

SUFFIXES = (".json", ".txt")
"""Suffixes of LabelMe's and of YOLO's files."""
YOLO_DATA, YOLO_CLASSES = "data.yaml", "classes.txt"
"""Files with the names of YOLO's classes."""


class Shape(msgspec.Struct):
    """A shape of LabelMe."""

    points: list[tuple[float, float]]
    label: str = ""
    shape_type: str = "polygon"
    group_id: int | str | None = None


class LabelMe(msgspec.Struct):
    """A file of LabelMe, but for the shapes, which are decoded one by one."""

    shapes: list[msgspec.Raw]
    imageHeight: Any = None  # noqa: N815  (LabelMe's names)
    imageWidth: Any = None  # noqa: N815


@dataclass(frozen=True)
class Polygon:
    """The polygons of one object, with its class; `reason` and `kind` say why it has none."""

    rings: list[list[float]]
    category: str | int
    reason: str = ""
    kind: str = "unreadable"


@dataclass(frozen=True)
class PolygonImage(SourceImage):
    """One image, its file of polygons, and the names of classes by number."""

    file: Path
    names: Mapping[Id, str] = field(default_factory=dict)

    @abstractmethod
    def polygons(self, text: bytes, size: tuple[int, int]) -> list[Polygon]:
        """Return the objects of a file.

        Args:
            text: The content of the file.
            size: Height and width of the image in pixels.

        Raises:
            CorruptSampleError: The file is not of this format.
        """

    def stated_size(self, text: bytes) -> tuple[int, int] | None:
        """Return height and width of the image as a file states them; None if it does not.

        Args:
            text: The content of the file.
        """
        return None

    def objects(self, stored: bytes) -> Objects:
        """Draw the polygons; broken ones are left out and listed with their reasons."""
        text = read_file(self.file, self.source)
        stated = self.stated_size(text)
        size = meant_size(stored, stated, self.source)
        found = self.polygons(text, size)
        annotations = [
            msgspec.Raw(
                msgspec.json.encode({"segmentation": each.rings, "category_id": each.category})
            )
            for each in found
            if not each.reason
        ]
        image = CocoImage(self.number, self.source, self.path, size, annotations, True, self.names)
        drawn = image.objects(stored)
        reasons = [
            LeftOutEntry(self.source, each.reason, each.kind) for each in found if each.reason
        ]
        skipped = [*reasons, *drawn.skipped]
        return replace(drawn, skipped=skipped, size_is_stated=stated is not None)


@dataclass(frozen=True)
class LabelMeImage(PolygonImage):
    """An image with a JSON file of LabelMe; shapes of one group are one object."""

    def stated_size(self, text: bytes) -> tuple[int, int] | None:
        """Return height and width of the image as a file states them; None if it does not.

        Args:
            text: The content of the file.
        """
        with suppress(*JSON_ERRORS):
            stated = msgspec.json.decode(text, type=LabelMe)
            size = stated.imageHeight, stated.imageWidth
            if all(isinstance(side, int | float) and side > 0 for side in size):
                return int(size[0]), int(size[1])
        return None

    def polygons(self, text: bytes, size: tuple[int, int]) -> list[Polygon]:
        """Return the polygons of a file; other shapes, such as rectangles, are left out.

        Args:
            text: The content of the file.
            size: Height and width of the image in pixels.

        Raises:
            CorruptSampleError: The file is not LabelMe's.
        """
        try:
            shapes = msgspec.json.decode(text, type=LabelMe).shapes
        except JSON_ERRORS as error:
            raise CorruptSampleError(
                f"{self.source}: is not a file of LabelMe ({error}); it needs the list 'shapes'"
            ) from None
        objects: dict[Any, Polygon] = {}
        for i, raw in enumerate(shapes):
            name = f"{self.source}: shape {i}"
            try:
                shape = msgspec.json.decode(raw, type=Shape)
            except JSON_ERRORS as error:
                objects[i] = Polygon([], "", f"{name} cannot be read ({error}); draw it again")
                continue
            if shape.shape_type != "polygon":
                kind = shape.shape_type[:40]
                reason = f"{name} is a {kind}, not a polygon; draw its outline"
                objects[i] = Polygon([], "", reason, f"{kind}, not a polygon")
                continue
            key = i if shape.group_id is None else (shape.group_id, shape.label)
            ring = [value for point in shape.points for value in point]
            known = objects.get(key, Polygon([], shape.label))
            objects[key] = replace(known, rings=[*known.rings, ring])
        return list(objects.values())


@dataclass(frozen=True)
class YoloImage(PolygonImage):
    """An image with a text file of YOLO: a line is a class, then x and y as fractions of a side."""

    def polygons(self, text: bytes, size: tuple[int, int]) -> list[Polygon]:
        """Return the polygons of a file; boxes are left out.

        Args:
            text: The content of the file.
            size: Height and width of the image in pixels.
        """
        height, width = size
        found = []
        for number, line in enumerate(text.decode(errors="replace").splitlines(), 1):
            words, name = line.split(), f"{self.source}: line {number}"
            if not words:
                continue
            try:
                category, values = int(words[0]), [float(word) for word in words[1:]]
            except ValueError:
                reason = f"{name} is not a class and numbers; write it again"
                found.append(Polygon([], 0, reason))
                continue
            if len(values) == 4:
                reason = f"{name} is a box, not a polygon; draw its outline"
                found.append(Polygon([], 0, reason, "box, not a polygon"))
                continue
            sides = [width, height] * (len(values) // 2 + 1)
            scaled = [value * side for value, side in zip(values, sides, strict=False)]
            found.append(Polygon([scaled], category))
        return found


def find(folder: Path, image_folder: Path) -> list[Path]:
    """Return the files of polygons of a folder and its subfolders; none if it has label images.

    Args:
        folder: The folder.
        image_folder: The folder of images; if it is the same, its PNGs are images.

    Raises:
        GigamaskError: It holds files of several kinds.
    """
    listed = files_of(folder, *SUFFIXES, *convert_labels.SUFFIXES)
    files = [path for path in listed if path.name != YOLO_CLASSES]
    found = [path for path in files if path.suffix.lower() in SUFFIXES]
    if folder != image_folder and len(found) < len(files):
        return []
    if len({path.suffix.lower() for path in found}) > 1:
        raise GigamaskError(
            f"{folder}: holds files of LabelMe (.json) and of YOLO (.txt); give a folder of one"
        )
    return found


def read(files: Sequence[Path], folder: Path, image_folder: Path) -> SourceListing:
    """List files of polygons with their images.

    Args:
        files: The result of `find`, not empty.
        folder: Their folder.
        image_folder: The folder of images, which may be the same.
    """
    if files[0].suffix.lower() == ".json":
        return match_images(files, folder, image_folder, LabelMeImage)
    return match_images(
        files, folder, image_folder, partial(YoloImage, names=yolo_names(folder.absolute()))
    )


def yolo_names(folder: Path) -> dict[Id, str]:
    """Return the names of YOLO's classes by number; empty if no file states them.

    They are in `data.yaml` or `classes.txt` in the folder of labels, or up to two folders above.

    Args:
        folder: The folder of labels.

    Raises:
        GigamaskError: The file has no names.
    """
    for parent in (folder, *folder.parents[:2]):
        if (path := parent / YOLO_DATA).is_file():
            names = read_yaml(path).get("names")
            if isinstance(names, list):
                names = dict(enumerate(names))
            if not isinstance(names, dict) or not all(str(key).isdecimal() for key in names):
                raise GigamaskError(
                    f"{path}: needs 'names', a list of the classes or their names by number"
                )
            return {int(key): str(name) for key, name in names.items()}
        if (path := parent / YOLO_CLASSES).is_file():
            lines = read_file(path, str(path)).decode(errors="replace").splitlines()
            return {number: line.strip() for number, line in enumerate(lines)}
    return {}
