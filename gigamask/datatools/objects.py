"""Images and masks of a source that is converted to shards."""

import os
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import compress
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from gigamask.datatools.image_files import SUFFIXES, files_of, read_file
from gigamask.datatools.left_out import LeftOutEntry, LeftOutRecord
from gigamask.datatools.pairing import NO_FILE, pair_names
from gigamask.errors import CorruptSampleError
from gigamask.masks.rle import RLEMasks

EMPTY = (
    "it covers no pixel of the image (coordinates are in pixels of the image); remove it or write"
    " it again"
)
ENDING = re.compile(r"[ _.-](cp_)?(masks?|labels?|seg|segmentation)$", re.IGNORECASE)
"""What many programs add to the name of an image for that of its label image."""
NO_PIXEL = "no pixel in its image"
"""Kind of such masks."""
GROUP_BYTES, IMAGE_BYTES = 2**23, 2**18
"""Bytes at which a group of images ends, and those that each counts in addition to its own: more
than 32 images save no time."""

Item = TypeVar("Item")
Result = TypeVar("Result")


def in_groups(
    items: Iterable[Item], weight: Callable[[Item], float], limit: int
) -> Iterator[list[Item]]:
    """Yield items in groups, for each of which a calculation is done once.

    Args:
        items: The items.
        weight: Returns the weight of one.
        limit: The weight at which a group ends.
    """
    group: list[Item] = []
    total = 0.0
    for item in items:
        group.append(item)
        total += weight(item)
        if total >= limit:
            yield group
            group, total = [], 0.0
    if group:
        yield group


@dataclass(frozen=True)
class Objects:
    """The masks of one image.

    Attributes:
        masks: Its masks.
        extras: Fields of each mask besides SA-1B's, including `id` if known; {} if there are none.
        skipped: Masks that are left out.
        notes: Counts of what was changed to read the others.
        size_is_stated: Whether the source states a size, which decides which way its image is
            meant.
    """

    masks: RLEMasks
    extras: list[dict[str, Any]]
    skipped: list[LeftOutEntry]
    notes: dict[str, int] = field(default_factory=dict)
    size_is_stated: bool = True

    def without_empty(self, names: Sequence[str]) -> "Objects":
        """Return the same without masks that cover no pixel, which are left out.

        Args:
            names: Name of each mask for messages.
        """
        filled = np.diff(self.masks.offsets) > 0
        if filled.all():
            return self
        error = CorruptSampleError(EMPTY, NO_PIXEL)
        empty = [LeftOutEntry.of(name, error, f"{name}: ") for name in compress(names, ~filled)]
        extras, skipped = list(compress(self.extras, filled)), [*self.skipped, *empty]
        return replace(self, masks=self.masks[filled], extras=extras, skipped=skipped)


def attempt(call: Callable[..., Result], *given: Any) -> Result | CorruptSampleError:
    """Return what a function returns of some arguments, or why an image is left out.

    Args:
        call: The function.
        *given: Its arguments; the first of them that is an error is returned.
    """
    try:
        for each in given:
            if isinstance(each, CorruptSampleError):
                return each
        return call(*given)
    except CorruptSampleError as bad:
        return bad


@dataclass(frozen=True)
class SourceImage(ABC):
    """One image to convert.

    Attributes:
        number: Its `image_id`.
        source: Its name in the source, for messages.
        path: The path of its file.
    """

    number: int
    source: str
    path: Path

    def exists(self) -> bool:
        """Return whether there is such a file."""
        return os.path.isfile(self.path)  # unlike Path.is_file, also for names that are too long

    @property
    def files(self) -> tuple[Path, ...]:
        """All files that it is read from, which tell a cache when it is stale."""
        return (self.path,)

    @property
    def block(self) -> Hashable:
        """What is decoded from its start to read this image; None if nothing is."""
        return None

    @classmethod
    def read_all(
        cls, images: Sequence[Any]
    ) -> Iterator[tuple["SourceImage", bytes | CorruptSampleError]]:
        """Yield each image with the bytes of its file, or why they cannot be read.

        Args:
            images: Images of one source, in the order in which they are listed.
        """
        for image in images:
            try:
                yield image, read_file(image.path, image.source)
            except CorruptSampleError as bad:
                yield image, bad

    @classmethod
    def all_objects(
        cls, images: Iterable[tuple[Any, bytes | CorruptSampleError]]
    ) -> Iterator[list["ImageObjects"]]:
        """Yield groups of images with their masks, or why they are left out.

        Args:
            images: What `read_all` yields.
        """
        for image, stored in images:
            yield [(image, stored, attempt(image.objects, stored))]

    @abstractmethod
    def objects(self, stored: bytes) -> Objects:
        """Read the masks.

        Args:
            stored: The bytes of the image file.

        Raises:
            CorruptSampleError: The image must be left out.
        """


ImageObjects = tuple[SourceImage, Any, Any]
"""An image, the bytes of its file, and its `Objects` or the error for which it is left out."""


@dataclass(frozen=True)
class SourceListing:
    """The images of a source, and what was left out before any was read.

    A format with a file for each image is listed by `match_images`; one with a file for many makes
    a `SourceImage` for each, numbered by `image_ids`.

    Attributes:
        images: The images, whose masks are read later.
        left_out: Images and masks that are left out, with their reasons.
        renumbered: Whether the images' names cannot serve as ids.
        unlabeled: Number of images without a file of masks.
    """

    images: Sequence[SourceImage]
    left_out: LeftOutRecord
    renumbered: bool
    unlabeled: int = 0


def image_ids(names: Sequence[str]) -> tuple[list[int], bool]:
    """Return an id for each image, and whether the ids are new.

    If all names are distinct whole numbers, of at most 14 digits so that ids of masks fit in 64
    bits, they become the ids; otherwise images are numbered from 0.
    """
    ids = [
        int(name) if name.isascii() and name.isdigit() and len(name) <= 14 else -1 for name in names
    ]
    if -1 not in ids and len(set(ids)) == len(ids):
        return ids, False
    return list(range(len(names))), True


def stems_of_images(stem: str) -> list[str]:
    """Return stems that the image of a file may have, the likeliest first: its own; that in the
    folder `images` beside its folder `labels`, as in YOLO's layout; that without `labels`; and that
    without an ending such as `_mask`."""
    before, labels, name = f"/{stem}".rpartition("/labels/")
    others = [f"{before}/images/{name}", f"{before}/{name}"] if labels else []
    return [stem, *(each.removeprefix("/") for each in others), ENDING.sub("", stem)]


def match_images(
    files: Sequence[Path],
    folder: Path,
    image_folder: Path,
    make: Callable[[int, str, Path, Path], SourceImage],
    stated: Sequence[Sequence[str]] = (),
) -> SourceListing:
    """List files of masks with the images that they name, or that have their names and subfolders.

    Args:
        files: One file for each image.
        folder: The folder of these files.
        image_folder: The folder of images.
        make: Makes an image of its number, its name in the source, its path, and its file of masks.
        stated: Paths below the folder of images that each file names, the likeliest first.

    Returns:
        The images, and the files that were left out with their reasons.
    """
    of_masks = {path.absolute() for path in files}
    photos = [path for path in files_of(image_folder, *SUFFIXES) if path.absolute() not in of_masks]
    names = [path.relative_to(image_folder) for path in photos]
    stems = [path.relative_to(folder).with_suffix("").as_posix() for path in files]
    found = pair_names(
        stated or [[]] * len(files), [name.as_posix() for name in names], [p.stem for p in files]
    )
    left = sorted(set(range(len(photos))).difference(found))
    unnamed = [i for i, each in enumerate(found) if each == NO_FILE]
    by_stem = pair_names(
        [stems_of_images(stems[i]) for i in unnamed],
        [names[i].with_suffix("").as_posix() for i in left],
    )
    for i, each in zip(unnamed, by_stem, strict=True):
        found[i] = left[each] if isinstance(each, int) else each
    ids, renumbered = image_ids([path.stem for path in files])
    images, left_out = [], LeftOutRecord()
    for number, path, each in zip(ids, files, found, strict=True):
        # A file name may hold bytes that are not valid text.
        name = str(path.relative_to(folder)).encode("utf-8", "replace").decode()
        if isinstance(each, int):
            images.append(make(number, name, photos[each], path))
            continue
        is_none = each == NO_FILE
        problem = (
            f"there is no image {Path(name).stem} with {', '.join(SUFFIXES)}" if is_none else each
        )
        parent, act = (image_folder / name).parent, "put one image of this name there"
        if path == image_folder / name:
            act = (
                "this file is read as annotations; give photographs another folder than masks, "
                f"such as {image_folder / 'images'} and {image_folder / 'masks'}"
            )
        reason = f"{name}: {problem} in {parent}; {act}"
        kind = "no image of its name" if is_none else "several images of its name"
        left_out.images.append(LeftOutEntry(name, reason, kind))
    return SourceListing(images, left_out, renumbered, len(photos) - len(images))
