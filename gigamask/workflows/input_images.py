"""The images that a command segments: files, folders, tars, globs or an index."""

import glob
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from jaxtyping import UInt8

from gigamask.data import image, image_folder, storage
from gigamask.data import index as indexes
from gigamask.data.index import Index
from gigamask.data.index_format import is_index
from gigamask.data.orientation import decode_upright
from gigamask.errors import CorruptSampleError, GigamaskError
from gigamask.pixels import PixelConfig
from gigamask.records import SkippedSample
from gigamask.serialization import read_limited

if TYPE_CHECKING:
    from gigamask.data.dataset import Sa1bDataset


@dataclass(frozen=True)
class InputImage:
    """One image to segment.

    Attributes:
        name: Name in errors.
        file_name: File name in its JSON.
        path: Path of its JSON in the output folder, without `.json`.
        read: Returns the bytes of the image file.
        is_file: Whether it is an image file, which is taken upright; images of tars are as stored.
        file: Its path, if it is an image file that was found.
    """

    name: str
    file_name: str
    path: str
    read: Callable[[], bytes]
    is_file: bool = True
    file: Path | None = None

    @property
    def utf8_path(self) -> str:
        """Path of the image in the output folder; bytes that are not UTF-8 are replaced."""
        path = Path(self.path).with_name(self.file_name).as_posix()
        return path.encode("utf-8", "replace").decode()

    def decode(self, raw: bytes, pixels: PixelConfig) -> UInt8[np.ndarray, "H W C"]:
        """Return the pixels of the image file as a model sees them.

        Args:
            raw: The bytes of the image file.
            pixels: Channels and window of the model.
        """
        decode = decode_upright if self.is_file else image.decode
        return decode(raw, self.name, pixels=pixels)


def outputs_of_images(
    out: str | Path, formats: Iterable[str], pictures: str | Path | None
) -> list[str]:
    """Return the folders in which segmenting writes files that are images.

    Args:
        out: The output folder.
        formats: Formats that are written in it besides JSONs.
        pictures: Folder of the images with their masks; None for none.
    """
    has_images = bool(set(formats) - {"coco"})
    return [str(folder) for folder in (has_images and out, pictures) if folder]


def find_images(
    paths: Sequence[str], scratch: str, written: Sequence[str] = ()
) -> tuple[list[InputImage], list[SkippedSample]]:
    """Find the images at the given paths.

    Args:
        paths: Images, folders of images or of tars, tars, globs of either, or an index.
        scratch: Folder for the indexes of tars that have none.
        written: Folders in which images will be written.

    Returns:
        The images in order, and the samples of tars that are known to be unusable.

    Raises:
        GigamaskError: There are no images, two would have the same JSON, or what is written would
            be among them.
    """
    for folder, path in product(written, paths):
        if os.path.isdir(path) and Path(folder).resolve().is_relative_to(Path(path).resolve()):
            raise GigamaskError(
                f"{folder}: is in {path}, so that the same command again would also segment the "
                "images that are written there; give a folder outside of it"
            )
    images: list[InputImage] = []
    skipped: list[SkippedSample] = []
    for path in paths:
        files, others = _split(path)
        for file in files:
            read = partial(_read_file, file)
            images.append(InputImage(file, Path(file).name, Path(file).stem, read, file=Path(file)))
        if others:
            index = indexes.open_or_build(others, scratch)
            for part in index.manifest.parts:
                skipped += part.left_out.skipped
            images += _indexed_images(index, path)
    if not images and not skipped:
        raise GigamaskError("IMAGE is required: images, folders of images, tars, globs or an index")
    names: dict[str, str] = {}
    for source in images:
        if source.path in names:
            raise GigamaskError(
                f"{names[source.path]} and {source.name} would both be written to "
                f"{source.path}.json; name them apart, or segment each folder into another --out"
            )
        names[source.path] = source.name
    return images, skipped


def _split(path: str) -> tuple[list[str], list[str]]:
    """Return the image files of a path, and its other files."""
    text = storage.normalize(path)
    matches = [text]
    if not storage.is_remote(text) and not os.path.exists(text) and glob.has_magic(text):
        matches = sorted(filter(os.path.isfile, glob.glob(text, recursive=True)))
        if any(map(image_folder.is_image, matches)):  # other files are left out, as in folders
            matches = [
                each
                for each in matches
                if image_folder.is_image(each)
                or each.endswith(".tar")
                or image_folder.why_unread(each)
            ]
    files, others = [], []
    for each in matches:
        is_local = not storage.is_remote(each) and os.path.isfile(each)
        (files if is_local and image_folder.is_image(each) else others).append(each)
    return files, others or ([] if files else [path])


def _read_file(path: str) -> bytes:
    try:
        return read_limited(path, image.MAX_BYTES)
    except GigamaskError as error:
        raise CorruptSampleError(str(error)) from None


def _indexed_images(index: Index, path: str) -> Iterator[InputImage]:
    """Yield the images of an index.

    JSONs of a folder of images keep their paths relative to `path`; those of tars are in a folder
    named after the tar.
    """
    from gigamask.data.dataset import Sa1bDataset

    dataset, root = Sa1bDataset(index), storage.normalize(path)
    is_root = os.path.isdir(root) and not is_index(root)
    for row in range(len(index)):
        shard = index.shard_paths[index.images["shard"][row]]
        stem = os.fsdecode(index.images["name"][row])
        if is_file := image_folder.is_folder(shard):
            parent = os.path.relpath(shard, root) if is_root else os.path.basename(shard)
            name, file_name = os.path.normpath(os.path.join(parent, Path(stem).stem)), stem
        else:
            name, file_name = f"{Path(storage.basename(shard)).stem}/{stem}", f"{stem}.jpg"
        read = partial(_read_image, dataset, row)
        file = Path(shard, stem) if is_file else None
        yield InputImage(index.entry_name(row), file_name, name, read, is_file, file)


def _read_image(dataset: "Sa1bDataset", row: int) -> bytes:
    return dataset.read(row, with_json=False).jpg
