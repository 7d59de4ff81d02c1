"""COCO's and LVIS's images with their annotations and a detector's boxes, read as they lie.

The annotations are COCO's instances json or LVIS v1's; the boxes are in COCO's results format, as
the detections of ViTDet that SAM, EfficientSAM and EfficientViT-SAM are evaluated with:
`[{"image_id": 139, "category_id": 1, "bbox": [x, y, width, height], "score": 0.9}, ...]`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np
from jaxtyping import Float32, Float64, Int64

from gigamask.data import image
from gigamask.datatools.coco_json import AnnotationRow, canonical_id
from gigamask.datatools.convert_coco import CocoImage, CocoSource
from gigamask.datatools.formats import ConvertOptions
from gigamask.datatools.image_files import fit, read_file, to_member
from gigamask.errors import CorruptSampleError, GigamaskError
from gigamask.evaluation.coco_ap import FREQUENCIES
from gigamask.pixels import RGB, PixelConfig
from gigamask.records import AnnotatedImage, ImageAnnotation, InstanceFields
from gigamask.serialization import check_regular, decode_json

FORMAT = '[{"image_id", "category_id", "bbox": [x, y, width, height], "score"}, ...]'

StoredId = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]
"""An id that fits an array."""


class Detection(msgspec.Struct, gc=False, frozen=True):
    """An entry of COCO's results format."""

    image_id: StoredId
    category_id: StoredId
    bbox: tuple[float, float, float, float]
    score: float


class Category(msgspec.Struct, frozen=True):
    """An entry of `categories`; LVIS states its frequency."""

    id: StoredId
    frequency: str = ""


class ImageLabels(msgspec.Struct, frozen=True):
    """What LVIS states of the classes of an image."""

    id: StoredId
    neg_category_ids: tuple[int, ...] = ()
    not_exhaustive_category_ids: tuple[int, ...] = ()


class Header(msgspec.Struct):
    """The part of an instances json that says what its classes are."""

    categories: list[Category]
    images: list[ImageLabels]


@dataclass(frozen=True, eq=False)
class Boxes:
    """Detected boxes of one image: xyxy in pixels from x, y to x + width, y + height."""

    boxes: Float32[np.ndarray, "n 4"]
    classes: Int64[np.ndarray, "n"]
    scores: Float64[np.ndarray, "n"]

    def __getitem__(self, selection: np.ndarray) -> "Boxes":
        return Boxes(self.boxes[selection], self.classes[selection], self.scores[selection])


@dataclass(frozen=True, eq=False)
class CocoData:
    """Images of an instances json.

    Attributes:
        images: The images.
        categories: The categories.
        labels: What LVIS states of each image, by id.
        detections: Detected boxes by image id.
        skipped: Reasons of the images and annotations that were left out.
        broken: Reasons of the annotations that are left out when their images are read.
        pixels: Channels and window of the model that sees the images.
    """

    images: Sequence[CocoImage]
    categories: Sequence[Category]
    labels: dict[int, ImageLabels]
    detections: dict[int, Boxes]
    skipped: list[str]
    broken: list[str] = field(default_factory=list)
    pixels: PixelConfig = RGB

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, row: int) -> AnnotatedImage:
        """Read one image and its annotation; broken annotations are left out.

        Raises:
            CorruptSampleError: The image cannot be read.
        """
        entry = self.images[row]
        stored = read_file(entry.path, entry.source)
        size = entry.size_of(stored)
        raw = to_member(stored, fit(stored, size, entry.source), entry.source)
        read = entry.read_annotations(size)
        self.broken.extend(sample.reason for sample in read.skipped)
        masks, rows = read.outlines.draw(), list(read.rows.values())
        areas = masks.areas().astype(np.float64)
        boxes = (masks.boxes() + np.array([0, 0, 1, 1])).astype(np.float32)
        for i, annotation in enumerate(rows):
            areas[i] = _stated_area(annotation.area, areas[i])
            boxes[i] = _stated_box(annotation.bbox, boxes[i])
        instances = InstanceFields(
            entry.number,
            np.array([_category(each) for each in rows], np.int64),
            np.array([bool(annotation.iscrowd) for annotation in rows], bool),
            areas,
            boxes,
        )
        none = np.zeros(len(masks), np.float32)
        annotation = ImageAnnotation(entry.source, size, masks, none, none, instances=instances)
        return AnnotatedImage(image.decode(raw, entry.source, pixels=self.pixels), annotation)

    def detected(self, image_id: int) -> Boxes:
        """Return the detected boxes of an image."""
        none = Boxes(np.zeros((0, 4), np.float32), np.zeros(0, np.int64), np.zeros(0))
        return self.detections.get(image_id, none)

    @property
    def left_out(self) -> list[str]:
        """Reasons of the images and annotations that were left out so far."""
        return [*self.skipped, *self.broken]

    @cached_property
    def frequencies(self) -> dict[int, str] | None:
        """Frequency of each category; None unless these are LVIS's annotations."""
        known = {category.id: category.frequency for category in self.categories}
        return known if known and set(known.values()) <= set(FREQUENCIES) else None


FILES = {
    "coco": ("instances_val2017.json", "val2017", "https://cocodataset.org/#download"),
    "lvis": ("lvis_v1_val.json", "", "https://www.lvisdataset.org/dataset"),
}
"""File of the annotations, folder of the images, and where the annotations are, by benchmark."""
SUBFOLDERS = ("", "annotations", "source_json_file")
"""Where the files of a benchmark may be, as EfficientViT-SAM's README names the folders."""


def open_folder(benchmark: str, folder: Path, boxes: Path | None = None) -> CocoData:
    """Read the files of COCO's or LVIS's validation set.

    Args:
        benchmark: coco or lvis.
        folder: The folder that holds `val2017`, for LVIS also `train2017`.
        boxes: Boxes in COCO's results format; None: those of ViTDet, if they are in the folder.

    Raises:
        GigamaskError: The annotations are not there, or a file cannot be used.
    """
    name, images, url = FILES[benchmark]
    found = _find(folder, name)
    if found is None or not (folder / images).is_dir():
        raise GigamaskError(
            f"{folder}: must hold {name}, itself or in annotations, and the images in val2017; "
            f"get them from {url}"
        )
    return read(found, folder / images, boxes or _find(folder, f"{benchmark}_vitdet.json"))


def _find(folder: Path, name: str) -> Path | None:
    paths = [folder / subfolder / name for subfolder in SUBFOLDERS]
    return next((path for path in paths if path.is_file()), None)


def read(annotations: Path, images: Path, detections: Path | None) -> CocoData:
    """Read annotations and detected boxes.

    Args:
        annotations: COCO's instances json, or LVIS's.
        images: The folder of images, or for LVIS also the one that holds val2017 and train2017.
        detections: Boxes in COCO's results format; None: there are none.

    Raises:
        GigamaskError: A file cannot be read; or a box is of an image or a category that the
            annotations lack, is not finite, or lies outside of its image.
    """
    options = ConvertOptions(keep_crowds=True)
    listing = CocoSource(annotations, images).listing(options)
    if listing.renumbered:
        raise GigamaskError(
            f"{annotations}: ids of images must be whole numbers, which detections refer to"
        )
    entries, unreadable = [], []
    for entry in listing.images:
        try:
            if isinstance(entry, CocoImage):
                size = entry.size or entry.size_of(read_file(entry.path, entry.source))
                entries.append(replace(entry, size=size))
        except CorruptSampleError as error:
            unreadable.append(str(error))
    header = _decode(annotations, Header, "COCO's instances json with 'categories'")
    boxes = {}
    if detections is not None:
        found = _decode(detections, list[Detection], f"COCO's results format, {FORMAT}")
        if not found:
            raise GigamaskError(
                f"{detections}: holds no detection; it must be a list like {FORMAT}"
            )
        boxes = _group(found, entries, header.categories, detections)
    return CocoData(
        entries,
        header.categories,
        {labels.id: labels for labels in header.images},
        boxes,
        [
            *unreadable,
            *(each.reason for each in (*listing.left_out.images, *listing.left_out.masks)),
        ],
    )


def _decode(path: Path, kind: Any, expected: str) -> Any:
    check_regular(path)
    try:
        return decode_json(path.read_bytes(), str(path), kind, strict=False)
    except OSError as error:
        raise GigamaskError(f"{path}: cannot be read ({error.strerror})") from error
    except GigamaskError as error:
        problem = str(error).removeprefix(f"{path}: ")
        raise GigamaskError(f"{path}: is not {expected} ({problem})") from error


def _group(
    found: Sequence[Detection],
    images: Sequence[CocoImage],
    categories: Sequence[Category],
    path: Path,
) -> dict[int, Boxes]:
    """Check the detections, and return them by image id, in their order."""
    ids = np.array([each.image_id for each in found], np.int64)
    classes = np.array([each.category_id for each in found], np.int64)
    xywh = np.array([each.bbox for each in found], np.float64)
    scores = np.array([each.score for each in found], np.float64)
    boxes = np.concatenate([xywh[:, :2], xywh[:, :2] + xywh[:, 2:]], 1)

    known = np.array(sorted((each.number, *(each.size or ())) for each in images), np.int64)
    known = known.reshape(-1, 3)
    at = np.searchsorted(known[:, 0], ids).clip(max=max(len(known) - 1, 0))
    lacks_image = known[at, 0] != ids if len(known) else np.ones(len(ids), bool)
    _refuse(lacks_image, ids, path, "its image_id {} is not in the annotations; give those")
    of_categories = np.array([category.id for category in categories], np.int64)
    _refuse(
        ~np.isin(classes, of_categories),
        classes,
        path,
        "its category_id {} is not in the annotations' categories; give those of the same data set",
    )
    _refuse(~np.isfinite(scores), scores, path, "its score {} must be finite")
    height, width = known[at, 1], known[at, 2]
    inside = (xywh[:, 2:] >= 0).all(1) & (boxes[:, 2:] >= 0).all(1)
    inside &= (boxes[:, 0] <= width) & (boxes[:, 1] <= height)
    problem = "its bbox {} must be x, y, width, height of a box that meets its image"
    _refuse(~inside, xywh, path, problem)

    order = np.argsort(ids, kind="stable")
    every = Boxes(boxes.astype(np.float32), classes, scores)[order]
    numbers, starts = np.unique(ids[order], return_index=True)
    groups = np.split(np.arange(len(order)), starts[1:])
    return {int(number): every[group] for number, group in zip(numbers, groups, strict=True)}


def _refuse(wrong: np.ndarray, values: np.ndarray, path: Path, problem: str) -> None:
    """Raise an error for the first detection that is wrong."""
    if wrong.any():
        number = int(wrong.argmax())
        reason = problem.format(values[number].tolist())
        raise GigamaskError(f"{path}: detection {number} of {len(wrong)}: {reason}")


def _category(row: AnnotationRow) -> int:
    """Return the id of a mask's category; 0 if it has none."""
    category = 0 if row.category_id is None else canonical_id(row.category_id)
    return category if isinstance(category, int) else 0


def _stated_area(area: object, otherwise: float) -> float:
    valid = isinstance(area, int | float) and 0 <= area < np.inf
    return float(area) if valid else otherwise


def _stated_box(
    bbox: Any, otherwise: Float32[np.ndarray, "4"]
) -> Float32[np.ndarray, "4"] | list[float]:
    try:
        x, y, width, height = map(float, bbox)
    except (TypeError, ValueError):
        return otherwise
    box = np.array([x, y, x + width, y + height], np.float32)
    return box if np.isfinite(box).all() else otherwise
