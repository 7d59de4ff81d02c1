"""Reading of COCO's instances and panoptic json; masks are decoded when their image is converted.

Annotations are decoded image by image, so even a file of several gigabytes takes little more memory
than its own size. `file_name` is looked for below the folder of images as `names_within` says.
"""

import os
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import compress
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from gigamask.data.annotation import RleSegmentation
from gigamask.datatools import coco_json
from gigamask.datatools.coco_json import AnnotationRow, Id, ImageRow, canonical_id, extra_fields
from gigamask.datatools.convert_labels import LabelImageSource
from gigamask.datatools.convert_panoptic import CocoEntry, PanopticImage, label_folder
from gigamask.datatools.formats import ConvertOptions
from gigamask.datatools.image_files import files_of, fit
from gigamask.datatools.left_out import CROWD, LeftOutEntry, LeftOutRecord
from gigamask.datatools.objects import (
    GROUP_BYTES,
    IMAGE_BYTES,
    ImageObjects,
    Objects,
    SourceListing,
    attempt,
    image_ids,
    in_groups,
)
from gigamask.datatools.outlines import (
    MAX_NUMBERS,
    MaskLimitError,
    Outlines,
    check_count,
    check_masks,
    draw_rings,
)
from gigamask.datatools.pairing import NO_FILE, names_within, pair_names
from gigamask.datatools.sources import FileSource
from gigamask.errors import CorruptSampleError, GigamaskError
from gigamask.serialization import JSON_ERRORS, decode_text

TWICE = "id of several images"
BEGINNING = re.compile(rb'\s*{\s*"(info|licenses|images|annotations|categories)"\s*:')
"""How COCO's files begin."""
MAX_BEGINNING_BYTES = 1 << 10
NOTES = "notes.json"
"""Label Studio's list of categories beside labels of YOLO, which begins alike."""


class Annotations(NamedTuple):
    """The masks of an image to draw, their rows by name, what is left out, and how many numbers."""

    outlines: Outlines
    rows: dict[str, AnnotationRow]
    skipped: list[LeftOutEntry]
    numbers: int


@dataclass(frozen=True)
class CocoImage(CocoEntry):
    """An image whose annotations are outlines or run lengths."""

    @classmethod
    def all_objects(
        cls, images: Iterable[tuple["CocoImage", bytes | CorruptSampleError]]
    ) -> Iterator[list[ImageObjects]]:
        """Yield what `objects` returns of groups of images, whose polygons are drawn at once."""
        read = (
            (image, stored, attempt(image.read_annotations, attempt(image.size_of, stored)))
            for image, stored in images
        )
        for group in in_groups(read, _bytes, GROUP_BYTES):
            draw_rings([found.outlines for *_, found in group if isinstance(found, tuple)])
            yield [
                (image, stored, attempt(image.objects_of, found)) for image, stored, found in group
            ]

    def objects(self, stored: bytes) -> Objects:
        """Decode the masks; broken annotations are left out and listed with their reasons."""
        return self.objects_of(self.read_annotations(self.size_of(stored)))

    def objects_of(self, read: Annotations) -> Objects:
        """Draw the masks; those that are empty are left out.

        Args:
            read: The annotations.
        """
        outlines, rows, skipped, _ = read
        extras = [extra_fields(row, self.names) for row in rows.values()]
        is_stated = self.stated_size is not None
        found = Objects(outlines.draw(), extras, skipped, outlines.notes, is_stated)
        return found.without_empty(list(rows))

    @property
    def stated_size(self) -> tuple[int, int] | None:
        """(H, W) that the entry of the image states, or else its first run lengths, if any."""
        for raw in () if self.size else self.annotations:
            with suppress(*JSON_ERRORS, GigamaskError):
                segmentation = coco_json.ANNOTATION.decode(raw).segmentation
                if isinstance(segmentation, RleSegmentation):
                    return segmentation.size
        return self.size

    def size_of(self, stored: bytes) -> tuple[int, int]:
        """Return height and width of the pixels that the masks refer to.

        Args:
            stored: The bytes of the image file.
        """
        return self.size or fit(stored, self.stated_size, self.source).size

    def read_annotations(self, size: tuple[int, int]) -> Annotations:
        """Decode the annotations; broken ones are left out and listed with their reasons.

        Args:
            size: Height and width of the image in pixels.

        Raises:
            MaskLimitError: There are more masks or corners than are read.
        """
        check_masks(len(self.annotations), self.source)
        numbers = sum(bytes(raw).count(b",") for raw in self.annotations)
        check_count(numbers, "numbers", MAX_NUMBERS, self.source)
        outlines = Outlines(size, self.source)
        rows: dict[str, AnnotationRow] = {}
        skipped: list[LeftOutEntry] = []
        for i, raw in enumerate(self.annotations):
            name = f"{self.source}: its annotation {i}"
            try:
                row = coco_json.ANNOTATION.decode(raw)
                name += f" (id {row.id})"
                if row.iscrowd and not self.keep_crowds:
                    raise CorruptSampleError("is marked iscrowd; --keep-crowds keeps it", CROWD)
                outlines.add(row.segmentation)
                rows[name] = row
            except MaskLimitError:
                raise
            except (*JSON_ERRORS, GigamaskError) as error:
                skipped.append(LeftOutEntry.of(name, error, f"{name}: "))
        return Annotations(outlines, rows, skipped, numbers)


@dataclass(frozen=True)
class CocoSource(FileSource):
    """COCO's instances or panoptic JSON."""

    @classmethod
    def is_format(cls, annotations: Path, images: Path) -> bool:
        """Return whether it is a JSON file that begins as COCO's; another may still be COCO's.

        Args:
            annotations: The file or folder of annotations.
            images: The folder of images.

        Raises:
            GigamaskError: It is a folder without label images whose JSON files are all COCO's.
        """
        is_folder = annotations.is_dir() and not LabelImageSource.is_format(annotations, images)
        jsons = files_of(annotations, ".json") if is_folder else []
        jsons = [each for each in jsons if each.name != NOTES]
        if jsons and all(cls.is_format(each, images) for each in jsons):
            raise GigamaskError(f"{annotations}: holds COCO's JSON; give the file {jsons[0]}")
        if annotations.suffix != ".json" or not annotations.is_file():
            return False
        with suppress(OSError), open(annotations, "rb") as file:
            return BEGINNING.match(file.read(MAX_BEGINNING_BYTES)) is not None
        return False

    def listing(self, options: ConvertOptions, with_annotations: bool = True) -> SourceListing:
        """List the images.

        Args:
            options: Whether crowds are kept.
            with_annotations: Whether to assign the annotations to their images, which takes most
                of the time.

        Returns:
            The images, and the entries that were left out with their reasons.

        Raises:
            GigamaskError: The file cannot be read, or is of another kind.
        """
        options.refuse_labels(self)
        instances, is_panoptic = coco_json.read_json(self.annotations)
        left_out = LeftOutRecord()
        rows, left_out.images = _image_rows(instances.images or [], self.images)
        image_annotations: dict[str, list[msgspec.Raw]] = defaultdict(list)
        for i, raw in enumerate((with_annotations and instances.annotations) or []):
            name = f"annotation {i} of {self.annotations.name}"
            try:
                image_id = str(canonical_id(coco_json.ANNOTATION_IMAGE.decode(raw).image_id))
                if image_id not in rows:
                    raise CorruptSampleError(
                        f"its image_id {image_id} belongs to no image, or to one that was left out;"
                        " add the image, or remove the annotation",
                        "image_id of no image",
                    )
                image_annotations[image_id].append(raw)
            except (*JSON_ERRORS, CorruptSampleError) as error:
                left_out.masks.append(LeftOutEntry.of(name, error, f"{name}: "))
        names = _category_names(instances.categories or [], self.annotations)
        ids, renumbered = image_ids(list(rows))
        make = CocoImage
        if is_panoptic:
            make = partial(PanopticImage, folder=label_folder(self.annotations))
        images = [
            make(
                number,
                row.name,
                file,
                row.size,
                image_annotations[key],
                options.keep_crowds,
                names,
            )
            for number, (key, (row, file)) in zip(ids, rows.items(), strict=True)
        ]
        return SourceListing(images, left_out, renumbered)

    def shared_files(self, listing: SourceListing) -> Iterable[Path]:
        """Return the PNGs of a panoptic JSON.

        Args:
            listing: The images.
        """
        folders = {each.folder for each in listing.images if isinstance(each, PanopticImage)}
        return {path for folder in folders for path in files_of(folder)}


def _bytes(read: tuple[CocoImage, Any, Annotations | CorruptSampleError]) -> int:
    """Return about how many bytes an image takes with its annotations and its masks."""
    _, stored, found = read
    if isinstance(found, CorruptSampleError):
        return IMAGE_BYTES
    return IMAGE_BYTES + len(stored) + 8 * (found.numbers + found.outlines.length)


def find_images(names: Sequence[str], folder: Path) -> list[Path | str]:
    """Return the file of each image below a folder, or why two names mean the same one.

    Args:
        names: Names as a file of annotations states them, for each of which there is a candidate.
        folder: The folder of images.
    """
    wanted = [names_within(name, folder) for name in names]
    written = [each[0] for each in wanted]
    is_there = [os.path.isfile(folder / name) for name in written]
    if all(is_there):
        return [folder / name for name in written]
    listed = [path.relative_to(folder).as_posix() for path in files_of(folder)]
    listed = list(dict.fromkeys([*listed, *compress(written, is_there)]))
    found = pair_names(wanted, listed, can_repeat=True)
    return [
        folder / listed[each]
        if isinstance(each, int)
        else folder / name
        if each == NO_FILE
        else each
        for name, each in zip(written, found, strict=True)
    ]


def _category_names(entries: Sequence[msgspec.Raw], source: Path) -> dict[Id, str]:
    """Return the names of categories by id; those without a name keep their id alone.

    Raises:
        GigamaskError: An id has two names, or a name is not UTF-8 text.
    """
    names: dict[Id, str] = {}
    for raw in entries:
        with suppress(*JSON_ERRORS):
            row = coco_json.CATEGORY.decode(decode_text(bytes(raw), f"{source}, in a category"))
            if (name := names.setdefault(canonical_id(row.id), str(row.name))) != str(row.name):
                raise GigamaskError(
                    f"{source}: its category {row.id} is both {name!r} and {row.name!r}; give each "
                    "category an id of its own"
                )
    return names


def _image_rows(
    entries: Sequence[msgspec.Raw], folder: Path
) -> tuple[dict[str, tuple[ImageRow, Path]], list[LeftOutEntry]]:
    """Return images with their files by id, and those left out.

    Left out are broken ones, those whose id is not unique, and those whose file is not clear.
    """
    rows: dict[str, ImageRow] = {}
    clashing: set[str] = set()
    skipped = []
    for i, raw in enumerate(entries):
        name = f"image {i}"
        try:
            row = coco_json.IMAGE.decode(raw)
            key, name = str(canonical_id(row.id)), f"{row.name} (id {row.id})"
            if not names_within(row.name, folder):
                raise CorruptSampleError("it needs file_name, or LVIS's coco_url")
            _ = row.size
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
        name = f"{rows.pop(key).name} (id {key})"
        skipped.append(
            LeftOutEntry(
                name,
                f"{name}: another image has the same id, so its masks are ambiguous; give each"
                " image its own id",
                TWICE,
            )
        )
    found: dict[str, tuple[ImageRow, Path]] = {}
    files = find_images([row.name for row in rows.values()], folder)
    for (key, row), file in zip(rows.items(), files, strict=True):
        if isinstance(file, Path):
            found[key] = row, file
        else:
            reason = f"{row.name} (id {key}): {file} in {folder}; give each image its own file"
            skipped.append(LeftOutEntry(row.name, reason, "several images of its name"))
    return found, skipped
