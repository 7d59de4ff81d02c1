"""Reading of a folder for each image with a file for each object, as in the Data Science Bowl 2018.

The image is ID/images/ID.png, and each file of ID/masks is one object, not 0 where it is.
"""

from dataclasses import dataclass, replace
from pathlib import Path

from gigamask.data.image import check_size
from gigamask.datatools.convert_labels import read_labels
from gigamask.datatools.formats import ConvertOptions
from gigamask.datatools.image_files import SUFFIXES, files_of, fit
from gigamask.datatools.objects import Objects, SourceImage, SourceListing, match_images
from gigamask.datatools.sources import FileSource, GivenData, Source
from gigamask.files import expand_home
from gigamask.masks.rle import RLEMasks


@dataclass(frozen=True)
class ObjectFilesImage(SourceImage):
    """One image, and the folder of the files of its objects."""

    masks: Path

    @property
    def files(self) -> tuple[Path, ...]:
        """The image, and the files of its objects."""
        return self.path, *files_of(self.masks, *SUFFIXES)

    def objects(self, stored: bytes) -> Objects:
        """Read one mask from each file; those without a pixel are left out."""
        size = fit(stored, None, self.source).size
        found, names = [RLEMasks.from_coco([], size)], []
        for path in self.files[1:]:
            names.append(f"{self.source}/{path.name}")
            inside = read_labels(path, names[-1]) > 0
            check_size(inside.shape, size, names[-1])
            found.append(RLEMasks.from_dense(inside[None]))
        return Objects(RLEMasks.concatenate(found), [{}] * len(names), []).without_empty(names)


@dataclass(frozen=True)
class ObjectFiles(FileSource):
    """A folder with a folder for each image."""

    @classmethod
    def find(cls, given: GivenData) -> Source | None:
        """Return the images of a folder that is given alone, or as that of images or masks too.

        Args:
            given: What was given.
        """
        stated = *given.paths, given.images, given.masks
        root, *others = {Path(expand_home(each)) for each in stated if each}
        return cls(root, root) if not others and cls.is_format(root, root) else None

    @classmethod
    def is_format(cls, annotations: Path, images: Path) -> bool:
        """Return whether a folder has one with a folder of masks and an image of its name.

        Args:
            annotations: The folder.
            images: The same.
        """
        return any(
            any(each.parent.glob(f"images/{each.parent.name}.*")) for each in images.glob("*/masks")
        )

    def listing(self, options: ConvertOptions, with_annotations: bool = True) -> SourceListing:
        """List the images, and the folders without one.

        Args:
            options: None of them applies.
            with_annotations: Whether masks will be read.
        """
        options.refuse_crowds(self)
        options.refuse_labels(self)
        folders = sorted(self.images.glob("*/masks"))
        names = [f"{each.parent.name}/images/{each.parent.name}" for each in folders]
        stated = [[name + suffix for suffix in SUFFIXES] for name in names]
        found = match_images(folders, self.images, self.images, ObjectFilesImage, stated)
        return replace(found, unlabeled=0)  # the files of objects are none
