"""Reading of YOLO's segmentation text, one file for each image, and of its names of classes."""

import io
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path

from gigamask.data.annotation import MAX_BYTES, MAX_MASKS
from gigamask.datatools.coco_json import Id, canonical_id
from gigamask.datatools.outlines import MAX_NUMBERS, check_count, check_masks
from gigamask.datatools.sources import class_files
from gigamask.errors import CorruptSampleError, GigamaskError
from gigamask.plugins.formats.polygon_files import PolygonImage, ShapeObject
from gigamask.serialization import decode_text, read_limited, read_text, read_yaml

DATA, YAML = "data.yaml", (".yaml", ".yml")
"""The file with the names of the classes, and suffixes of others that may have them."""
OTHER_FILES = re.compile(
    r"(classes|labels?|label_?names|class_?names|label_?map|predefined_classes|obj_train_data"
    r"|train|val|valid|test|notes|license.*|read_?me.*|requirements)",
    re.IGNORECASE,
)
"""Names of text files, without suffix, that are no labels unless an image has their name."""
SAMPLED_FILES, SAMPLED_LINES = 50, 500
"""How much is read to tell oriented boxes from polygons of four corners."""
MAX_FRACTION = 2
"""Coordinate from which a line is not a polygon in fractions: outlines that leave the image have
little more than 1, and keypoints have a 2 where they are visible."""
TOLERANCE = 2e-4
"""Largest difference of two diagonals' middles in an oriented box, as a fraction of a side."""


@dataclass(frozen=True)
class YoloImage(PolygonImage):
    """An image with a text file of YOLO: a line is a class, then x and y as fractions of a side."""

    def parse(self, raw: bytes) -> str:
        """Return the text of a file.

        Args:
            raw: The bytes of the file.
        """
        return decode_text(raw, "its labels")

    def shapes(self, content: str, size: tuple[int, int]) -> list[ShapeObject]:
        """Return the objects of a file; lines that are boxes have an error.

        Args:
            content: The text.
            size: Height and width of the image in pixels.

        Raises:
            MaskLimitError: There are more lines or numbers than are read.
        """
        height, width = size
        found, numbers = [], 0
        for number, line in enumerate(io.StringIO(content), 1):
            words, name = line.split(), f"{self.source}: line {number}"
            if not words:
                continue
            check_masks(len(found) + 1, self.source)
            numbers += len(words)
            check_count(numbers, "numbers", MAX_NUMBERS, self.source)
            found.append(ShapeObject(name))
            try:
                found[-1].category = _class_of(words[0])
                values = [float(word) for word in words[1:]]
            except ValueError:
                found[-1].error = CorruptSampleError(
                    "it is not a class and numbers; write it again"
                )
                continue
            if len(values) in (4, 5):  # the fifth is a confidence
                reason = "it is a box, not a polygon; draw its outline"
                found[-1].error = CorruptSampleError(reason, "box, not a polygon")
            elif any(abs(value) >= MAX_FRACTION for value in values):
                reason = f"it has a coordinate of {MAX_FRACTION} or more; give fractions of a side"
                found[-1].error = CorruptSampleError(reason, "pixels, not fractions")
            else:
                sides = cycle((width, height))
                scaled = [value * side for value, side in zip(values, sides, strict=False)]
                found[-1].rings.append(scaled)
        return found


def _class_of(word: str) -> int:
    """Return the number of a class; raise ValueError if it is none."""
    number = canonical_id(word)
    if not isinstance(number, int) or number < 0:
        raise ValueError(word)
    return number


def check_task(files: Sequence[Path], folder: Path) -> None:
    """Check that files are labels of segmentation, not of oriented boxes or keypoints.

    Args:
        files: Text files of YOLO.
        folder: The folder of labels.

    Raises:
        GigamaskError: They are labels of another task.
    """
    data = find_data(folder)
    if data is not None and data.suffix in YAML and "kpt_shape" in read_yaml(data):
        raise GigamaskError(
            f"{folder}: holds YOLO's keypoints (kpt_shape in {data}), which are no masks; give "
            "labels of segmentation"
        )
    boxes = others = turned = 0
    for path in files[:SAMPLED_FILES]:
        try:
            lines = io.StringIO(decode_text(read_limited(path, MAX_BYTES), str(path)))
            words = [line.split() for line in islice(lines, SAMPLED_LINES)]
            rows = [[float(word) for word in each[1:9]] for each in words if each]
        except (GigamaskError, ValueError):
            continue
        for row, each in zip(rows, filter(None, words), strict=True):
            is_box = len(each) == 9 and all(
                abs(row[i] + row[i + 4] - row[i + 2] - row[(i + 6) % 8]) < TOLERANCE for i in (0, 1)
            )
            boxes += is_box
            others += not is_box
            turned += is_box and min(abs(row[0] - row[2]), abs(row[1] - row[3])) > TOLERANCE
    if turned and boxes >= 9 * others:
        raise GigamaskError(
            f"{folder}: holds oriented boxes (YOLO-OBB: {boxes} of {boxes + others} lines are "
            "rectangles of four corners), which are no masks; give labels of segmentation"
        )


def find_data(folder: Path) -> Path | None:
    """Return the file with the names of the classes: in the folder or up to two folders above.

    Args:
        folder: The folder of labels.
    """

    def rank(path: Path) -> tuple[int, bool, bool]:
        return -len(path.parts), path.name != DATA, path.suffix in YAML

    files = sorted(class_files(folder), key=rank)
    return next((path for path in files if path.is_file() and _has_names(path)), None)


def _has_names(path: Path) -> bool:
    """Return whether a file should name classes: `data.yaml`, YAML with `names`, or lines."""
    if path.name == DATA or path.suffix not in YAML:
        return path.suffix != ".data"
    with suppress(GigamaskError):  # a file of another program
        return "names" in read_yaml(path)
    return False


def class_names(folder: Path) -> Mapping[Id, str]:
    """Return the names of YOLO's classes by number; empty if no file states them.

    Args:
        folder: The folder of labels.

    Raises:
        GigamaskError: The file has no names.
    """
    path = find_data(folder)
    if path is None:
        return {}
    if path.suffix not in YAML:
        lines = read_text(path).splitlines()
        check_count(len(lines), "classes", MAX_MASKS, str(path))
        return {number: line.strip() for number, line in enumerate(lines)}
    names = read_yaml(path).get("names")
    if isinstance(names, list):
        names = dict(enumerate(names))
    if not isinstance(names, dict) or not all(str(key).isdecimal() for key in names):
        raise GigamaskError(
            f"{path}: needs 'names', a list of the classes or their names by number"
        )
    return {int(key): str(name) for key, name in names.items()}
