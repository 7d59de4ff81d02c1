"""Finding of files of polygons, one for each image: LabelMe's JSON, or YOLO's segmentation text.

A file belongs to the image that it names, or else to that of its own name and subfolder.
"""

from dataclasses import dataclass
from functools import partial
from pathlib import Path

from gigamask.datatools.formats import ConvertOptions
from gigamask.datatools.image_files import SUFFIXES as IMAGE_SUFFIXES
from gigamask.datatools.image_files import files_of
from gigamask.datatools.objects import SourceListing, match_images, stems_of_images
from gigamask.datatools.pairing import compose
from gigamask.datatools.sources import FileSource
from gigamask.errors import GigamaskError
from gigamask.plugins.formats import labelme, yolo

SUFFIXES = (".json", ".txt")
"""Suffixes of LabelMe's and of YOLO's files."""


@dataclass(frozen=True)
class PolygonSource(FileSource):
    """A folder of files of polygons."""

    @classmethod
    def is_format(cls, annotations: Path, images: Path) -> bool:
        """Return whether a folder has files of polygons.

        Args:
            annotations: The file or folder of annotations.
            images: The folder of images.
        """
        return annotations.is_dir() and bool(find(annotations, images))

    def listing(self, options: ConvertOptions, with_annotations: bool = True) -> SourceListing:
        """List the files with their images.

        Args:
            options: Those of crowds and label images do not apply.
            with_annotations: Whether masks will be read.

        Raises:
            GigamaskError: They are labels of another task than segmentation.
        """
        options.refuse_crowds(self)
        options.refuse_labels(self)
        files, folder, images = find(self.annotations, self.images), self.annotations, self.images
        if files[0].suffix.lower() == ".json":
            stated = [labelme.image_names(path, folder, images) for path in files]
            return match_images(files, folder, images, labelme.LabelMeImage, stated)
        yolo.check_task(files, folder)
        make = partial(yolo.YoloImage, names=yolo.class_names(folder))
        listing = match_images(files, folder, images, make)
        if names := yolo.find_data(folder):
            listing.left_out.note(f"images whose classes {names} names", len(listing.images))
        return listing


def find(folder: Path, image_folder: Path) -> list[Path]:
    """Return the files of polygons of a folder and its subfolders.

    Left out are lists of classes and the like, and, where both formats are, files of the one that
    belong to no image.

    Args:
        folder: The folder.
        image_folder: The folder of images.

    Raises:
        GigamaskError: It holds files of both formats.
    """
    found, inside = files_of(folder, *SUFFIXES), image_folder.absolute()
    if folder.absolute() != inside:  # which may lie in it
        found = [path for path in found if not path.absolute().is_relative_to(inside)]
    if not found:
        return []
    images = files_of(image_folder, *IMAGE_SUFFIXES)
    stems = {_stem(path, image_folder) for path in images}

    def has_image(path: Path) -> bool:
        return any(each in stems for each in stems_of_images(_stem(path, folder)))

    found = [
        path
        for path in found
        if path.suffix.lower() == ".json"
        or not yolo.OTHER_FILES.fullmatch(path.stem)
        or has_image(path)
    ]
    if len({path.suffix.lower() for path in found}) > 1:
        found = [path for path in found if has_image(path)]
    if len({path.suffix.lower() for path in found}) > 1:
        raise GigamaskError(
            f"{folder}: holds files of LabelMe (.json) and of YOLO (.txt); give a folder of one"
        )
    return found


def _stem(path: Path, folder: Path) -> str:
    return compose(path.relative_to(folder).with_suffix("").as_posix())
