"""What a format of annotations is to a conversion: how it recognises its files and reads them."""

import os
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from gigamask.datatools.formats import ConvertOptions
from gigamask.datatools.objects import SourceListing

CLASS_FILES = (
    *("*.yaml", "*.yml", "*.names", "*.data", "classes.txt", "class_names.txt", "labelmap.txt"),
    *("label_names.txt", "labels.txt", "predefined_classes.txt"),
)
"""Files with names of classes, in the folders of annotations or images, or up to two above."""


def class_files(folder: Path) -> Iterator[Path]:
    """Yield the files that may name classes: in a folder, then in each of the two above it.

    Args:
        folder: The folder of annotations or images.
    """
    folder = folder.absolute()
    for parent in (folder, *folder.parents[:2]):
        for name in CLASS_FILES:
            yield from sorted(parent.glob(name))


class GivenData(NamedTuple):
    """What a user gave for data.

    Attributes:
        paths: Files, folders, globs or URLs.
        images: What was given for images, such as a folder or the name of a column.
        masks: What was given for masks.
        pair: The file or folder of annotations and the folder of their images; None if there are
            no such files.
    """

    paths: Sequence[str]
    images: str | None = None
    masks: str | None = None
    pair: tuple[Path, Path] | None = None


class Source(ABC):
    """Annotations of one format, whose images and masks are read."""

    @classmethod
    @abstractmethod
    def find(cls, given: GivenData) -> "Source | None":
        """Return the annotations that a user gave; None if they are in another format.

        Args:
            given: What was given.

        Raises:
            GigamaskError: They are in this format, but cannot be read.
        """

    @abstractmethod
    def __str__(self) -> str:
        """Return the path or URL that errors name, and beside which a cache lies."""

    @abstractmethod
    def listing(self, options: ConvertOptions, with_annotations: bool = True) -> SourceListing:
        """List the images, which read their masks later.

        Args:
            options: What counts as a mask.
            with_annotations: Whether masks will be read; otherwise what only serves them may be
                left out.

        Raises:
            GigamaskError: They cannot be read, or an option does not apply to them.
        """

    @abstractmethod
    def cache_lines(self, listing: SourceListing) -> list[str]:
        """Return lines that differ if a file differs that a conversion reads, such as `file_line`.

        Args:
            listing: The images.
        """


@dataclass(frozen=True)
class FileSource(Source):
    """A file or a folder of annotations, and the folder of their images."""

    annotations: Path
    images: Path

    @classmethod
    def find(cls, given: GivenData) -> Source | None:
        """Return the annotations that a user gave; None if they are in another format.

        Args:
            given: What was given.
        """
        pair = given.pair
        return cls(*pair) if pair and pair[1].is_dir() and cls.is_format(*pair) else None

    @classmethod
    @abstractmethod
    def is_format(cls, annotations: Path, images: Path) -> bool:
        """Return whether annotations are in this format.

        Args:
            annotations: The file or folder of annotations.
            images: The folder of images, which may be the same.
        """

    def __str__(self) -> str:
        return str(self.annotations)

    def shared_files(self, listing: SourceListing) -> Iterable[Path]:
        """Return files of all images besides the annotations: those that may name classes.

        Args:
            listing: The images.
        """
        if not self.annotations.is_dir():
            return []
        return {path for root in (self.annotations, self.images) for path in class_files(root)}

    def cache_lines(self, listing: SourceListing) -> list[str]:
        """Return a line for every file, and for every image that was left out.

        Args:
            listing: The images.
        """
        is_folder = self.annotations.is_dir()
        root = self.annotations if is_folder else self.annotations.parent
        files = [] if is_folder else [self.annotations]
        files += sorted(self.shared_files(listing))
        files += [path for image in listing.images for path in image.files]
        left_out = [f"{each.name} {each.kind}" for each in listing.left_out.images]
        return [*(file_line(path, root) for path in files), *left_out]


def file_line(path: Path, root: Path) -> str:
    """Return what identifies the content of a file without reading it.

    Args:
        path: The file, which may be missing.
        root: The folder below which its path counts.
    """
    name = os.path.relpath(path, root)
    try:
        found = os.stat(path)
    except (OSError, ValueError):
        return f"{name} is missing"
    return f"{name} {found.st_size} {found.st_mtime_ns} {found.st_ctime_ns}"
