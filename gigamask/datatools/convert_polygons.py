"""Finding of files of polygons, one for each image: LabelMe's JSON, or YOLO's segmentation text.

A file belongs to the image that it names, or else to that of its own name and subfolder.
"""

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from gigamask.datatools import convert_labels, labelme, yolo
from gigamask.datatools.image_files import SUFFIXES as IMAGE_SUFFIXES
from gigamask.datatools.image_files import files_of
from gigamask.datatools.objects import SourceListing, match_images
from gigamask.datatools.pairing import compose
from gigamask.errors import GigamaskError

SUFFIXES = (".json", ".txt")
"""Suffixes of LabelMe's and of YOLO's files."""


def find(folder: Path, image_folder: Path) -> list[Path]:
    """Return the files of polygons of a folder and its subfolders; none if it has label images.

    Left out are lists of classes and the like, and, where both formats are, files of the one that
    belong to no image.

    Args:
        folder: The folder.
        image_folder: The folder of images; if it is the same, its PNGs are images.

    Raises:
        GigamaskError: It holds files of both formats.
    """
    listed = files_of(folder, *SUFFIXES, *convert_labels.SUFFIXES)
    if folder != image_folder:  # which may lie in it
        listed = [path for path in listed if not path.is_relative_to(image_folder)]
    found = [path for path in listed if path.suffix.lower() in SUFFIXES]
    others = len(found) < len(listed)
    if not found:
        return []
    images = files_of(image_folder, *IMAGE_SUFFIXES)
    stems = {_stem(path, image_folder) for path in images}

    def has_image(path: Path) -> bool:
        return _stem(path, folder) in stems

    found = [
        path
        for path in found
        if path.suffix.lower() == ".json"
        or not yolo.OTHER_FILES.fullmatch(path.stem)
        or has_image(path)
    ]
    if len({path.suffix.lower() for path in found}) > 1:
        found = [path for path in found if has_image(path)]
    if folder != image_folder and others and found:
        return []
    if len({path.suffix.lower() for path in found}) > 1:
        raise GigamaskError(
            f"{folder}: holds files of LabelMe (.json) and of YOLO (.txt); give a folder of one"
        )
    return found


def _stem(path: Path, folder: Path) -> str:
    return compose(path.relative_to(folder).with_suffix("").as_posix())


def read(files: Sequence[Path], folder: Path, image_folder: Path) -> SourceListing:
    """List files of polygons with their images.

    Args:
        files: The result of `find`, not empty.
        folder: Their folder.
        image_folder: The folder of images, which may be the same.

    Raises:
        GigamaskError: They are labels of another task than segmentation.
    """
    if files[0].suffix.lower() == ".json":
        stated = labelme.image_names(files, folder, image_folder)
        return match_images(files, folder, image_folder, labelme.LabelMeImage, stated)
    yolo.check_task(files, folder)
    make = partial(yolo.YoloImage, names=yolo.class_names(folder))
    return match_images(files, folder, image_folder, make)
