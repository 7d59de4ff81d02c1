"""Which format the annotations are in that a user names: each format is asked in turn."""

from collections.abc import Sequence
from contextlib import suppress
from itertools import chain
from pathlib import Path
from types import NoneType

import msgspec

from gigamask import plugin
from gigamask.data.image_folder import pack_command
from gigamask.datatools.formats import READERS, ConvertOptions, absent, describe_readers
from gigamask.datatools.image_files import files_of
from gigamask.datatools.objects import SourceListing
from gigamask.datatools.sources import FileSource, GivenData, Source
from gigamask.errors import GigamaskError, abridged
from gigamask.files import expand_home, find_tars, relative_to
from gigamask.serialization import read_json


class Sa1bJson(msgspec.Struct):
    """What the JSON of an image of SA-1B has, and no other format's."""

    image: dict[str, msgspec.Raw]
    annotations: list[msgspec.Raw]


def find(paths: Sequence[str], images: str | None, masks: str | None) -> Source | None:
    """Return the annotations that `--data`, `--images` and `--masks` name; None for tars.

    Args:
        paths: As `data` of a training.
        images: As in a training.
        masks: As in a training.

    Raises:
        GigamaskError: There are several paths, both `images` and `masks`, or no such file.
    """
    pair = problem = None
    try:
        pair = annotations_and_images(paths, images, masks)
    except GigamaskError as error:
        problem = error  # unless they are names of columns
    found = _recognise(GivenData(paths, images, masks, pair))
    if found is None and problem is not None:
        raise problem
    return found or (pair and _likeliest(*pair))


def annotations_and_images(
    data: Sequence[str], images: str | None, masks: str | None
) -> tuple[Path, Path] | None:
    """Return the annotations and the folder of their images; None for tars.

    Args:
        data: As of a training.
        images: As in a training.
        masks: As in a training.

    Raises:
        GigamaskError: There are several paths, both `images` and `masks`, or no such file.
    """
    if images is None and masks is None:
        return None
    if len(data) != 1 or (images is not None and masks is not None):
        raise GigamaskError(
            "what --images or --masks belong to is one path: coco.json --images PHOTOS, or "
            f"PHOTOS --masks MASKS (got {abridged(data)})"
        )
    pair = (data[0], str(images)) if masks is None else (masks, data[0])
    source, folder = (Path(expand_home(path)) for path in pair)
    for path in (source, folder):
        if not path.exists():
            raise GigamaskError(
                f"{path}: no such file or folder{relative_to(path)}; check --data, "
                "--images, --masks"
            )
    return source, folder


def of_annotations(annotations: str, images: Path | None, masks: str | None = None) -> Source:
    """Return annotations as the format has them that recognises them.

    Args:
        annotations: A file, a folder, a glob or a URL.
        images: The folder of images, or what the annotations call them.
        masks: What the annotations call the masks.

    Raises:
        GigamaskError: There is no such folder of images.
    """
    pair = None if images is None or masks is not None else (Path(annotations), images)
    named = None if images is None else str(images)
    found = _recognise(GivenData([annotations], named, masks, pair))
    if found is None and masks is not None:
        raise GigamaskError(f"--masks {masks}: names a column of parquet files; drop it")
    return found or _likeliest(Path(annotations), images)


def _recognise(given: GivenData) -> Source | None:
    """Return annotations as the first format has them that recognises them; None if none does.

    Raises:
        GigamaskError: It takes a plugin that is not installed to read them.
    """
    # What a plugin adds is imported only if the core's formats are not these.
    for kind in chain(map(plugin.load, READERS.values()), plugin.load_all("readers", READERS)):
        found = kind.find(given)
        where = f"{plugin.reference(kind)}.find"
        if plugin.expect(found, (Source, NoneType), where) is not None:
            return found
    for path in given.paths:
        if path.endswith(tuple(f".{name.lower()}" for name in absent())):
            raise GigamaskError(f"{path}: is in no known format; give {describe_readers()}")
    return None


def _likeliest(annotations: Path, images: Path | None) -> Source:
    """Return annotations in the likeliest format, which says what is wrong with them."""
    if images is None:
        _check_not_sa1b(annotations)
        raise GigamaskError("--images FOLDER: give the folder of the images")
    if not images.is_dir():
        raise GigamaskError(
            f"--images {images}: is not a folder; give the one that image names are relative to"
        )
    return plugin.load(READERS["label images" if annotations.is_dir() else "COCO"])(
        annotations, images
    )


def list_source(
    source: Source, options: ConvertOptions, with_annotations: bool = True
) -> SourceListing:
    """List the images of annotations.

    Args:
        source: The annotations.
        options: What counts as a mask.
        with_annotations: Whether masks will be read.

    Raises:
        GigamaskError: They cannot be read, are SA-1B's, or an option does not apply to them.
    """
    if isinstance(source, FileSource):  # others may lie beside tars
        _check_not_sa1b(source.annotations)
    found = source.listing(options, with_annotations)
    name = plugin.reference(type(source))
    return plugin.expect(found, SourceListing, f"{name}.listing")


def _check_not_sa1b(source: Path) -> None:
    act = None
    if source.suffix == ".tar" or find_tars(source):
        act = f"give it to other commands as it is, such as gigamask stats {source}"
    jsons = files_of(source, ".json") if source.is_dir() else [source]
    if not act and jsons and (path := jsons[0]).suffix == ".json":
        with suppress(GigamaskError):
            read_json(path, Sa1bJson)
            act = f"pack it into a tar, which all commands read: {pack_command(path.parent)}"
    if act:
        raise GigamaskError(f"{source}: is in SA-1B's format already; {act}")
