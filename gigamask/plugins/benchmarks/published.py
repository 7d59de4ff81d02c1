"""Benchmarks of interactive segmentation, read as their archives unpack.

The pixels that each benchmark leaves out of scores are the annotation's `ignore`: gray 128 around
GrabCut's and Berkeley's objects, 255 around Pascal VOC's.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np
from jaxtyping import UInt8

from gigamask.data.index import Index
from gigamask.datatools import convert_labels
from gigamask.datatools.image_files import (
    PIL_FORMATS,
    SUFFIXES,
    files_of,
    open_image,
    read_file,
    read_pixels,
)
from gigamask.datatools.pairing import MAX_LIST_BYTES, compose
from gigamask.errors import CorruptSampleError, GigamaskError, counted
from gigamask.masks.rle import RLEMasks
from gigamask.records import AnnotatedImage, ImageAnnotation
from gigamask.serialization import read_text

UNSURE = 128
"""Gray level of the pixels that GrabCut and Berkeley leave out of scores."""
MASK_FORMATS = (".png", ".bmp", ".mat")
PixelReader = Callable[[tuple[int, int]], UInt8[np.ndarray, "H W 3"]]
"""Reads an image of a height and width."""


@dataclass(frozen=True)
class Archive:
    """What the archive of a benchmark holds, and where to get it."""

    title: str
    url: str
    images: str
    """folder of images"""
    masks: str
    """folder of masks, whose files are named like the images"""
    kind: Literal["gray", "any", "labels"]
    """a gray level above 128 is the object; any color but black; or a value for each instance"""
    num_masks: int
    listing: str | None = None
    """text file with the names of the images; None: all images"""
    inside: tuple[str, ...] = ()
    """folders that the archive may unpack into"""

    @property
    def layout(self) -> str:
        """Names of the files, for people."""
        folders = f"{self.images}/NAME.jpg and {self.masks}/NAME.*"
        return folders + (f", and {self.listing}" if self.listing else "")


RELEASES = "https://github.com/saic-vul/fbrs_interactive_segmentation/releases/download/v1.0"
ARCHIVES = {
    "grabcut": Archive("GrabCut", f"{RELEASES}/GrabCut.zip", "data_GT", "boundary_GT", "gray", 50),
    "berkeley": Archive("Berkeley", f"{RELEASES}/Berkeley.zip", "images", "masks", "gray", 100),
    "davis": Archive("DAVIS", f"{RELEASES}/DAVIS.zip", "img", "gt", "any", 345),
    "coco_mval": Archive("COCO_MVal", f"{RELEASES}/COCO_MVal.zip", "img", "gt", "any", 800),
    "sbd": Archive(
        "SBD",
        "http://home.bharathh.info/pubs/codes/SBD/download.html",
        "img",
        "inst",
        "labels",
        6671,
        "val.txt",
        ("dataset", "benchmark_RELEASE/dataset"),
    ),
    "pascalvoc": Archive(
        "Pascal VOC 2012 val",
        "http://host.robots.ox.ac.uk/pascal/VOC/voc2012/",
        "JPEGImages",
        "SegmentationObject",
        "labels",
        3417,
        "ImageSets/Segmentation/val.txt",
        ("VOC2012", "VOCdevkit/VOC2012"),
    ),
}
"""Archives by the name of the benchmark: those that RITM's README links to, with its counts."""


@dataclass(frozen=True)
class PublishedImage:
    """One image of a benchmark: its name, its file of masks, and how to read it."""

    name: str
    masks: Path
    pixels: PixelReader


class PublishedImages:
    """Images of a benchmark with their masks: `images[row]`.

    Args:
        archive: What the files of masks mean.
        images: The images.
        missing: Names without an image or without masks.
    """

    def __init__(
        self, archive: Archive, images: Sequence[PublishedImage], missing: Sequence[str] = ()
    ) -> None:
        self.archive, self.images, self.missing = archive, images, missing

    @property
    def left_out(self) -> list[str]:
        """Reasons of the images that were left out."""
        return [f"{name}: has no image or no masks" for name in self.missing]

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, row: int) -> AnnotatedImage:
        """Read an image and its masks.

        Raises:
            CorruptSampleError: A file cannot be read, they differ in size, or the mask is empty.
        """
        image = self.images[row]
        masks, ignore = _read_masks(image.masks, self.archive.kind, image.name)
        if not masks.areas().any():
            raise CorruptSampleError(
                f"{image.name}: its mask has no object, no pixel that counts as foreground"
            )
        ones = np.ones(len(masks), np.float32)
        annotation = ImageAnnotation(image.name, masks.size, masks, ones, ones, ignore=ignore)
        return AnnotatedImage(image.pixels(masks.size), annotation)


def open_archive(name: str, folder: Path) -> PublishedImages:
    """List the images of an archive that has been unpacked.

    Args:
        name: One of `ARCHIVES`.
        folder: The folder of the archive, or the one it was unpacked in.

    Raises:
        GigamaskError: The folder lies in another layout, or no image of it has masks.
    """
    archive = ARCHIVES[name]
    roots = [folder / inside for inside in (".", archive.title, *archive.inside)]
    found = [root for root in roots if (root / archive.images).is_dir()]
    root = next((root for root in found if (root / archive.masks).is_dir()), None)
    if root is None:
        raise _other_layout(name, folder)
    files = {compose(path.stem): path for path in files_of(root / archive.images, *SUFFIXES)}
    readers = {stem: partial(read_pixels, path, name=path.stem) for stem, path in files.items()}
    names = sorted(files)
    if archive.listing:
        listing = root / archive.listing
        if not listing.is_file():
            raise _other_layout(name, folder, f"; there is no {listing}")
        names = compose(read_text(listing, MAX_LIST_BYTES)).split()
    return _pair(name, names, readers, root / archive.masks)


def open_masks(name: str, folder: Path, photographs: Index) -> PublishedImages:
    """List the masks of a benchmark whose images lie elsewhere.

    Args:
        name: One of `ARCHIVES`.
        folder: The folder of masks.
        photographs: Index of the images, which have the names of the masks, or `sa_` before them.

    Raises:
        GigamaskError: No mask has an image, or two masks have the same name.
    """
    from gigamask.data.dataset import Sa1bDataset  # imports torch

    dataset = Sa1bDataset(photographs)

    def read(row: int, size: tuple[int, int]) -> UInt8[np.ndarray, "H W 3"]:
        return dataset.read(row, with_json=False).pixels(size)

    by_stem: dict[str, Path] = {}
    for path in files_of(folder, *MASK_FORMATS):
        if (other := by_stem.setdefault(compose(path.stem), path)) != path:
            raise GigamaskError(
                f"--data {folder}: {other.relative_to(folder)} and {path.relative_to(folder)} have "
                "the same name; give the folder that holds the masks alone"
            )
    rows: dict[str, int] = {}
    for row in range(len(photographs)):
        entry = photographs.entry_name(row)
        stem = compose(Path(entry.rpartition(":")[2]).stem.removeprefix("sa_"))
        if (first := rows.setdefault(stem, row)) != row and stem in by_stem:
            raise GigamaskError(
                f"--images: {photographs.entry_name(first)} and {entry} have the same name; give "
                "those that belong to the masks alone"
            )
    readers = {stem: partial(read, row) for stem, row in rows.items()}
    return _pair(name, list(by_stem), readers, folder)


def _pair(
    name: str, names: Sequence[str], readers: Mapping[str, PixelReader], masks: Path
) -> PublishedImages:
    """Match images and masks by name."""
    by_stem = {compose(path.stem): path for path in files_of(masks, *MASK_FORMATS)}
    images = [
        PublishedImage(stem, by_stem[stem], readers[stem])
        for stem in names
        if stem in by_stem and stem in readers
    ]
    paired = {image.name for image in images}
    missing = [stem for stem in names if stem not in paired]
    if not images:
        raise GigamaskError(
            f"{masks}: no file has the name of an image ({counted(len(readers), 'image')}, "
            f"{counted(len(by_stem), 'file')} of masks); benchmark {name} reads "
            f"{ARCHIVES[name].layout}, from {ARCHIVES[name].url}"
        )
    return PublishedImages(ARCHIVES[name], images, missing)


def _other_layout(name: str, folder: Path, detail: str = "") -> GigamaskError:
    archive = ARCHIVES[name]
    state = f"holds no {archive.title} as it unpacks" if folder.is_dir() else "no such folder"
    return GigamaskError(
        f"--data {folder}: {state}{detail}; {name} needs {archive.layout}, from {archive.url}"
    )


def _read_masks(path: Path, kind: str, name: str) -> tuple[RLEMasks, RLEMasks | None]:
    """Return the masks of a file, and the pixels to ignore if there are any."""
    if kind == "labels":
        labels = convert_labels.read_labels(path, name, void=convert_labels.VOID)
        void = (
            labels == convert_labels.VOID if path.suffix != ".mat" else np.zeros_like(labels, bool)
        )
        masks, _ = convert_labels.label_masks(np.where(void, 0, labels), name)
        return masks, _single(void)
    try:
        with open_image(read_file(path, name), PIL_FORMATS, name) as image:
            level = np.array(image.convert("RGB")).max(2)
    except (OSError, SyntaxError, ValueError) as error:
        if isinstance(error, CorruptSampleError):
            raise
        raise CorruptSampleError(
            f"{name}: the mask {path} cannot be decoded ({error}); download it again"
        ) from error
    if kind == "any":
        return RLEMasks.from_dense(level[None] > 0), None
    return RLEMasks.from_dense(level[None] > UNSURE), _single(level == UNSURE)


def _single(pixels: np.ndarray) -> RLEMasks | None:
    return RLEMasks.from_dense(pixels[None]) if pixels.any() else None
