"""Reading of label images: PNGs, TIFFs or SBD's .mat files whose values are instance numbers.

A value is a gray level, a palette index, or R + 256 G + 65536 B as in COCO's panoptic images; 0
and less are background, and so is 255 in Pascal VOC's palette. The image has the same name and
subfolder in the folder of images. Instances in a folder SegmentationObject take their classes from
a folder SegmentationClass beside it, as in VOC; `voc_classes` names them.
"""

import io
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cv2
import numpy as np
from jaxtyping import Bool, Int32, Int64

from gigamask.data import image
from gigamask.data.annotation import MAX_MASKS, MAX_SIDE
from gigamask.data.orientation import turn_upright
from gigamask.datatools import smoothed_labels, voc_classes
from gigamask.datatools.formats import ConvertOptions, describe_readers
from gigamask.datatools.image_files import files_of, open_image, read_file
from gigamask.datatools.objects import Objects, SourceImage, SourceListing, match_images
from gigamask.datatools.other_formats import describe
from gigamask.datatools.outlines import MAX_RUNS, check_count
from gigamask.datatools.smoothed_labels import Labels
from gigamask.datatools.sources import FileSource, GivenData, Source
from gigamask.datatools.voc_classes import Classes
from gigamask.errors import CorruptSampleError, GigamaskError, counted
from gigamask.files import expand_home
from gigamask.masks.components import crop_to_box
from gigamask.masks.rle import RLEMasks, from_keys

SUFFIXES = (".png", ".tif", ".tiff", ".mat")
VOC_IMAGES, VOC_OBJECTS, VOC_CLASSES = "JPEGImages", "SegmentationObject", "SegmentationClass"
"""Folders of Pascal VOC's images, and of their instances and classes as label images."""
VOID, VOID_COLOR = 255, [224, 224, 192]
"""Palette index of the pixels around objects of VOC, which belong to none, and its color there."""
VOID_NUMBER = VOID_COLOR[0] + 256 * VOID_COLOR[1] + 65536 * VOID_COLOR[2]
"""Number of that color in images of VOC's layout that are RGB."""
MAX_VALUE = 2**31 - 1
"""Largest value of a label image."""
WHITE = 2**24 - 1
"""Number of white in images that are RGB."""
CLASSLESS = f"masks without a class, because no label image in {VOC_CLASSES} has one for them"
MANY_AREAS = (
    "label images with more separate areas than values, which gigamask convert --split-components "
    "makes masks of their own"
)
MAYBE_VOID = (
    "label images with white (255, or 16777215 of RGB) beside other values, which --ignore leaves "
    "out where it marks no object"
)
BLACK = (
    "label images whose palette shows 0 in a color and a mask in black; save them in gray if black "
    "is the background"
)
THIN = "values without 3 x 3 pixels of their own, which --nearest-value gave to their neighbors"
"""Notes of such masks, label images and values."""
GRAY = ("1", "L", "P", "I", "I;16", "I;16B")
"""Pillow's modes with one number per pixel."""


@dataclass(frozen=True)
class LabelImage(SourceImage):
    """One image and its label image."""

    label: Path
    classes: Path | None
    known_classes: Classes
    options: ConvertOptions

    @property
    def files(self) -> tuple[Path, ...]:
        """The image, its label image, and that of its classes."""
        return self.path, self.label, *([self.classes] if self.classes else [])

    def objects(self, stored: bytes) -> Objects:
        """Read one mask per value, or per connected component of a value."""
        found = self.objects_of(
            read_labels(self.label, self.source, brightest=self.options.binary is not None)
        )
        if self.label.suffix != ".mat":
            black = _black_values(read_file(self.label, self.source), self.source)
            if np.isin(black, [each["label"] for each in found.extras]).any():
                found.notes[BLACK] = 1
        return found

    def objects_of(self, labels: Labels) -> Objects:
        """Return one mask per value of a label image, or per connected component of a value.

        Args:
            labels: Value of each pixel; ignored ones are set to 0.
        """
        labels[np.isin(labels, self.options.ignore) | (labels < 0)] = 0
        thin = 0
        if self.classes is not None:
            labels[labels == VOID_NUMBER] = 0
        if self.options.binary is not None:
            labels = (labels >= self.options.binary).astype(np.int32)
        elif self.options.nearest_value:
            labels, thin = smoothed_labels.to_nearest_value(labels)
        else:
            smoothed_labels.check(labels, self.source)
        masks, values = label_masks(labels, self.source)
        notes = {} if self.options.split_components else _notes(labels, values)
        extras: list[dict[str, Any]] = [{"label": value} for value in values.tolist()]
        if self.classes is not None:
            found = self._categories(self.classes, masks) if self.classes.is_file() else {}
            notes = {CLASSLESS: len(values) - len(found)}
            for i, value in found.items():
                known = self.known_classes.get(value)
                number = value % voc_classes.COLOR if known is None else known.number
                extras[i]["category_id"] = number
                if known is not None:
                    extras[i]["category"] = known.name
        if self.options.split_components:
            parts, owners = _components(masks)
            masks, _ = label_masks(parts, self.source)
            extras = [extras[i] for i in owners]
        return Objects(masks, extras, [], notes | ({THIN: thin} if thin else {}))

    def _categories(self, path: Path, masks: RLEMasks) -> dict[int, int]:
        """Return the class that most pixels of a mask have, by the mask's index."""
        name = f"{self.source}: {path.parent.name}"
        class_masks, classes = label_masks(read_labels(path, name), self.source)
        if path.suffix != ".mat":
            with open_image(read_file(path, name), ("PNG", "TIFF"), name) as label:
                classes += voc_classes.COLOR * (label.mode[:3] == "RGB")
        image.check_size(class_masks.size, masks.size, f"{self.source}: its label image of classes")
        if not len(classes):
            return {}
        pixels = masks.intersections(class_masks)
        found = np.flatnonzero(pixels.any(1))
        return dict(zip(found.tolist(), classes[pixels[found].argmax(1)].tolist(), strict=True))


@dataclass(frozen=True)
class LabelImageSource(FileSource):
    """A folder of label images, or one in VOC's layout."""

    @classmethod
    def find(cls, given: GivenData) -> Source | None:
        """Return the label images that a user gave, or those of a folder in VOC's layout.

        Args:
            given: What was given.
        """
        if len(given.paths) == 1 and given.images is None and given.masks is None:
            folder = Path(expand_home(given.paths[0]))
            pair = folder / VOC_OBJECTS, folder / VOC_IMAGES
            return cls(*pair) if all(path.is_dir() for path in pair) else None
        return super().find(given)

    @classmethod
    def is_format(cls, annotations: Path, images: Path) -> bool:
        """Return whether a folder has label images; if it is that of the images, they may be those.

        Args:
            annotations: The file or folder of annotations.
            images: The folder of images, which may lie in it.
        """
        labels, images = annotations.absolute(), images.absolute()
        files = files_of(labels, *SUFFIXES) if labels.is_dir() and labels != images else []
        return not all(path.is_relative_to(images) for path in files)

    def listing(self, options: ConvertOptions, with_annotations: bool = True) -> SourceListing:
        """List the label images with their images.

        Args:
            options: What counts as a mask.
            with_annotations: Whether masks will be read.

        Returns:
            The images, and the label images that were left out with their reasons.

        Raises:
            GigamaskError: The folder holds no label image.
        """
        options.refuse_crowds(self)
        labels, images = self.annotations, self.images
        files = files_of(labels, *SUFFIXES)
        if not files:
            told = next(filter(None, map(describe, files_of(labels)[:9])), "")
            act = f", but {told}" if told else f"; give {describe_readers()}"
            raise GigamaskError(f"{labels}: the folder holds no {', '.join(SUFFIXES)}{act}")

        inside = labels.absolute(), images.absolute()
        known_classes = voc_classes.read([inside[0].parent, *inside, inside[1].parent])
        is_voc = inside[0].name in (VOC_OBJECTS, VOC_CLASSES)

        def make(number: int, name: str, photo: Path, path: Path) -> LabelImage:
            classes = (
                inside[0].with_name(VOC_CLASSES) / path.relative_to(labels) if is_voc else None
            )
            return LabelImage(number, name, photo, path, classes, known_classes, options)

        return match_images(files, labels, images, make)


def read_labels(path: Path, name: str, void: int = 0, brightest: bool = False) -> Labels:
    """Return the value of each pixel of a label image.

    Args:
        path: A PNG, a TIFF, or a .mat file of SBD's instances.
        name: The image's name in error messages.
        void: Value returned for pixels that VOC's palette marks as belonging to no object.
        brightest: Whether the value of a color is its brightest channel.

    Raises:
        CorruptSampleError: It cannot be read, or is no label image.
        GigamaskError: A .mat file is read without scipy.
    """
    if path.suffix == ".mat":
        return _read_mat(path, name)
    return decode_labels(read_file(path, name), name, void, brightest)


def decode_labels(raw: bytes, name: str, void: int = 0, brightest: bool = False) -> Labels:
    """Return the value of each pixel of a label image.

    Args:
        raw: The bytes of a PNG or a TIFF.
        name: The image's name in error messages.
        void: As for `read_labels`.
        brightest: As for `read_labels`.

    Raises:
        CorruptSampleError: It cannot be decoded, or is no label image.
    """
    try:
        with open_image(raw, ("PNG", "TIFF"), name) as label:
            if max(label.size) > MAX_SIDE:
                raise CorruptSampleError(
                    f"{name}: the label image has {label.height} x {label.width} pixels, sides may"
                    f" be {MAX_SIDE} at most; leave it out"
                )
            pages, bits = getattr(label, "n_frames", 1), image.bits_of(label, raw)
            if label.mode in ("LA", "RGBA") and label.getextrema()[-1] == (255, 255):
                label = label.convert(label.mode[:-1])  # opaque
            if pages > 1 or label.mode not in (GRAY if bits > 8 else (*GRAY, "RGB")):
                raise CorruptSampleError(
                    f"{name}: the label image is {counted(pages, 'page')} of {bits}-bit "
                    f"{label.mode} pixels, it must be one, gray, palette or 8-bit RGB; save it so, "
                    "or as COCO's JSON"
                )
            pixels = turn_upright(image.as_stated(np.array(label), label), raw)
            if label.mode == "1" and image.is_inverted(label):
                pixels = ~pixels
            if pixels.dtype == np.uint8 and label.mode == "L":
                if image.is_inverted(label):  # values are meant, not their looks
                    pixels = 255 - pixels
                # Pillow spreads gray of 2 and 4 bits to 0..255
                pixels //= 255 // (2 ** min(bits, 8) - 1)
            if pixels.max(initial=0) > MAX_VALUE:
                raise CorruptSampleError(
                    f"{name}: its label image has a value of {pixels.max()}, the largest is "
                    f"{MAX_VALUE}; number the objects from 1"
                )
            palette = label.getpalette()
            if palette and palette[3 * VOID :][:3] == VOID_COLOR:
                pixels[pixels == VOID] = void
    except CorruptSampleError:
        raise
    except (OSError, SyntaxError, ValueError) as error:
        raise CorruptSampleError(
            f"{name}: its label image cannot be decoded ({error}); save it again or leave it out"
        ) from error
    if pixels.ndim == 3 and brightest:
        pixels = pixels.max(2)
    elif pixels.ndim == 3:  # red + 256 green + 65536 blue
        return np.pad(pixels, [(0, 0), (0, 0), (0, 1)]).view("<i4")[..., 0]
    return pixels.astype(np.int32)


def _black_values(raw: bytes, name: str) -> Int64[np.ndarray, "n"]:
    """Return the values that a palette shows in black; all are 0 if it shows 0 so."""
    with open_image(raw, ("PNG", "TIFF"), name) as label:
        # Pillow decodes the pixels for it.
        colors = np.reshape((label.mode == "P" and label.getpalette()) or [0] * 3, (-1, 3))
    return np.flatnonzero(~colors.any(1)) * colors[0].any()


def _read_mat(path: Path, name: str) -> Labels:
    """Return the instance of each pixel from a file of SBD's folder inst."""
    try:
        from scipy.io import loadmat
    except ImportError:
        raise GigamaskError(
            f"{path}: MATLAB's files need scipy, which is not installed; run pip install "
            "'gigamask[benchmarks]'"
        ) from None
    raw = read_file(path, name)
    try:
        labels = loadmat(io.BytesIO(raw), variable_names=["GTinst"])["GTinst"][0, 0]["Segmentation"]
        if labels.ndim != 2 or labels.dtype.kind not in "iu" or max(labels.shape) > MAX_SIDE:
            raise ValueError(f"its segmentation is {labels.dtype} of {labels.shape}")
        return labels.astype(np.int32)
    except Exception as error:  # scipy's reader raises many kinds for a broken file
        raise CorruptSampleError(
            f"{name}: {path} holds no GTinst.Segmentation, as SBD's instances do "
            f"({type(error).__name__}: {error}); download it again or leave it out"
        ) from error


def label_masks(labels: Labels, name: str) -> tuple[RLEMasks, Int32[np.ndarray, "n"]]:
    """Return one mask for each value except 0, and the values in ascending order.

    Args:
        labels: Value of each pixel.
        name: The image's name in error messages.

    Raises:
        CorruptSampleError: There are more values than an image has masks.
    """
    flat = labels.T.ravel()
    pixels = len(flat)
    changes: Bool[np.ndarray, "p"] = flat[1:] != flat[:-1]
    check_count(int(np.count_nonzero(changes)), "runs of masks", MAX_RUNS, name)
    edges = np.concatenate([[0], np.flatnonzero(changes) + 1, [pixels]])
    runs = flat[edges[:-1]]
    filled = runs != 0
    values, rank = np.unique(runs[filled], return_inverse=True)
    check_count(len(values), "values in its label image", MAX_MASKS, name)
    keys = np.concatenate(
        [rank * (pixels + 1) + edges[:-1][filled], rank * (pixels + 1) + edges[1:][filled]]
    )
    return from_keys(labels.shape, len(values), np.sort(keys), pixels + 1), values


def _notes(labels: Labels, values: Int32[np.ndarray, "n"]) -> dict[str, int]:
    """Return notes of values that may be several objects, or none.

    Args:
        labels: Value of each pixel; 0 is background.
        values: The values in ascending order.
    """
    areas, _ = cv2.connectedComponents((labels != 0).astype(np.uint8), connectivity=8)
    *_, other, last = 0, 0, *values.tolist()
    is_void = last in (VOID, WHITE) and 0 < other < last - 1
    return {MANY_AREAS: int(areas - 1 > len(values)), MAYBE_VOID: int(is_void)}


def _components(masks: RLEMasks) -> tuple[Labels, list[int]]:
    """Number the connected components (by edge or corner) from 1; also return their masks."""
    parts, owners = np.zeros(masks.size, np.int32), list[int]()
    for i in range(len(masks)):
        box, inside = crop_to_box(masks[i : i + 1])
        count, numbered = cv2.connectedComponents(inside.astype(np.uint8), connectivity=8)
        parts[box][inside] = numbered[inside] + len(owners)
        owners += [i] * (count - 1)
    return parts, owners
