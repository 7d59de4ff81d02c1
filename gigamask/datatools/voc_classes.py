"""Names of the classes of label images in Pascal VOC's layout, by value or by color."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from gigamask.data.annotation import MAX_MASKS
from gigamask.datatools.outlines import check_count
from gigamask.errors import GigamaskError
from gigamask.serialization import read_text

NAMES = (
    *("aeroplane", "bicycle", "bird", "boat", "bottle", "bus", "car", "cat", "chair", "cow"),
    *("diningtable", "dog", "horse", "motorbike", "person", "pottedplant", "sheep", "sofa"),
    *("train", "tvmonitor"),
)
"""VOC's own classes, from 1."""
LISTED, COLORED = "class_names.txt", "labelmap.txt"
"""Files with other classes: LabelMe's has a name in each line, CVAT's `name:r,g,b::` in each."""
BACKGROUND = ("_background_", "background")
IGNORED = "__ignore__"
"""First line of LabelMe's lists, for the value -1."""


class VocClass(NamedTuple):
    """Number and name of a class."""

    number: int
    name: str


Classes = Mapping[int, VocClass]
"""Classes by the value of their pixels: their number, or `COLOR` + R + 256 G + 65536 B."""
COLOR = 2**24
"""Added to the number of a color, so that it is none of a class."""


def read(folders: Sequence[Path]) -> Classes:
    """Return the classes that a file in one of some folders states, or else VOC's.

    Args:
        folders: Folders that may hold the file, in this order.

    Raises:
        GigamaskError: A color in the file is not one.
    """
    for folder in folders:
        for name in (LISTED, COLORED):
            if (path := folder / name).is_file():
                lines = [line.strip() for line in read_text(path).splitlines()]
                lines = [line for line in lines if line[:1] not in ("", "#") and line != IGNORED]
                check_count(len(lines), "classes", MAX_MASKS, str(path))
                first = lines[0].partition(":")[0].lower() if lines else ""
                numbered = enumerate(lines, 1 - (first in BACKGROUND))
                if name == COLORED:
                    return _colored(numbered, path)
                return {number: VocClass(number, each) for number, each in numbered if number}
    return {number: VocClass(number, name) for number, name in enumerate(NAMES, 1)}


def _colored(numbered: Iterable[tuple[int, str]], path: Path) -> Classes:
    classes: dict[int, VocClass] = {}
    for number, line in numbered:
        name, _, rest = line.partition(":")
        color = rest.partition(":")[0].split(",")
        try:
            red, green, blue = (int(value) for value in color) if color != [""] else (0, 0, 0)
        except ValueError:
            raise GigamaskError(
                f"{path}: {line[:80]!r} must be a name and a color, such as car:128,0,0::"
            ) from None
        for key in {number, COLOR + red + 256 * green + 65536 * blue} - {0, COLOR}:
            classes[key] = VocClass(number, name)
    return classes
