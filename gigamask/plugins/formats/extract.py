"""`gigamask extract`: write the images and masks of tars in formats of other programs."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import compress, count
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from gigamask.datatools import formats
from gigamask.parser import Positional

OF_MASKS = (".txt", ".json", ".mat")
"""Suffixes of files of masks, by whose names images are converted."""

if TYPE_CHECKING:
    from gigamask.data.index import Index
    from gigamask.datatools.export_formats import ExportedImage, ExportOptions

    Format = str
else:
    Format = Literal[tuple(name for name in formats.writers() if name != "shards")]


@dataclass(frozen=True)
class ExtractCommand:
    """write the images and masks of tars as COCO's instances, label images, YOLO or LabelMe"""

    needs_flags: ClassVar = {"polygons": "to coco"}

    data: Annotated[tuple[str, ...], Positional("DATA ...")]
    """tars, folders of tars, globs, or an index"""
    out: str
    """output folder: the images in its folder 'images', the masks beside it"""
    to: tuple[Format, ...] = ("coco",)
    """formats of the masks"""
    polygons: bool = False
    """write polygons in place of run lengths with --to coco, but for masks with holes"""
    strict: bool = False
    """end with exit code 2 if an image could not be read; the others are written all the same"""
    json: str | None = None
    """write the results to this JSON file, with everything that was skipped"""

    def run(self) -> dict[str, Any]:
        """Write the images and masks, and return the counts."""
        from gigamask.cli.commands.output import print_skipped
        from gigamask.errors import counted
        from gigamask.progress import progress_bar

        with progress_bar("extract") as progress:
            result = extract(self.data, self.out, self.to, self.polygons, progress)
        images, masks = counted(result["images"], "image"), counted(result["masks"], "mask")
        print(f"{self.out}: {images} with {masks}")
        print_skipped("images", list(result["skipped"].values()))
        for line in (*result["notes"], *result["written"]):
            print(f"  {line}")
        if self.strict and result["skipped"]:
            result["fault"] = f"--strict: {len(result['skipped'])} images were left out, see above"
        return result


def extract(
    data: str | Path | Sequence[str | Path],
    out: str | Path,
    to: str | Sequence[str] = ("coco",),
    polygons: bool = False,
    progress: Any = None,
) -> dict[str, Any]:
    """Write the images and masks of tars in formats of other programs.

    Args:
        data: Tars, folders of tars, globs, or an index.
        out: Folder for the files: the images are in its folder `images`.
        to: Formats of the masks, such as coco or labels.
        polygons: Whether COCO gets polygons of masks without holes.
        progress: Called as `progress(done, total)` after each image in each format.

    Returns:
        Counts of images and masks, the files and folders, the skipped images with reasons, and
        lines about what a format cannot hold.

    Raises:
        GigamaskError: The data cannot be read, or the folder not be written.
    """
    from gigamask.data import index as indexes
    from gigamask.data.storage import path_list
    from gigamask.datatools.export_formats import ExportOptions, check_formats, write

    options = ExportOptions(check_formats(to), polygons, images=True)
    with tempfile.TemporaryDirectory() as scratch:
        paths = path_list(data)
        indexes.find_tars(paths)
        index = indexes.open_or_build(paths, scratch)
        for part in index.manifest.parts:
            options.skipped.update((each.name, each.reason) for each in part.left_out.skipped)
        counts: dict[str, int] = {}
        done, total = count(1), len(index) * (1 + len(options.formats))

        def images() -> Iterator[ExportedImage]:
            for each in _images(index, options):
                counts[each.name] = len(each.masks)
                yield each
                if progress is not None:
                    progress(next(done), total)

        written = write(images, Path(out), options)
    written_masks = [masks for name, masks in counts.items() if name not in options.skipped]
    return {
        "images": len(written_masks),
        "masks": sum(written_masks),
        "written": [str(path) for path in written],
        "skipped": options.skipped,
        "notes": options.notes,
    }


def _images(index: Index, options: ExportOptions) -> Iterator[ExportedImage]:
    """Yield the images of an index, but for those that cannot be read, and note these, and the ids
    of the categories, if each has one.

    An image has the name that `gigamask convert` found it by, or, if it has none or another image
    has the same, TAR/IMAGE, and TAR_2/IMAGE if another has that, too. Masks keep the values that
    they had in label images.
    """
    from gigamask.data import image, image_folder
    from gigamask.data.dataset import Sa1bDataset
    from gigamask.data.orientation import as_stored
    from gigamask.datatools.export_formats import MAX_LABEL
    from gigamask.datatools.image_files import to_member
    from gigamask.errors import CorruptSampleError, counted
    from gigamask.serialization import decode_json
    from gigamask.workflows.segment import exported_image

    dataset, names, skipped = Sa1bDataset(index), set[str](), options.skipped
    notes, empty = set[str](), 0
    pairs: set[tuple[str, Any]] = set()
    for row in range(len(index)):
        entry = index.entry_name(row)
        try:
            sample = dataset.read(row)
            annotation, record = sample.annotation(), decode_json(sample.json or b"", entry)
        except CorruptSampleError as error:
            skipped[entry] = str(error)
            continue
        suffix, source = image.member_suffix(sample.jpg), Path(annotation.source)
        if source.suffix.lower() in (image_folder.JPEG if suffix == ".jpg" else (suffix,)):
            suffix = source.suffix
        is_name = source.suffix in OF_MASKS or image_folder.is_image(source.name)
        name = source.with_suffix(suffix).as_posix() if is_name else ""
        if not name or name in names or source.is_absolute() or ".." in source.parts:
            tar, _, stem = entry.rpartition(":")
            name, copies = f"{Path(tar).stem}/{stem}{suffix}", count(2)
            while name in names:
                name = f"{Path(tar).stem}_{next(copies)}/{stem}{suffix}"
        names.add(name)
        frame = as_stored(sample.jpg, annotation.size)
        read = partial(to_member, sample.jpg, frame, name)
        found = exported_image(name, annotation, record, read)
        objects = found.objects
        pairs |= {
            (told["category"], each.get("category_id"))
            for told, each in zip(objects, record["annotations"], strict=True)
        }
        values = [each.get("label") for each in record["annotations"]]
        numbers = {value for value in values if isinstance(value, int)}
        if max(numbers, default=0) > MAX_LABEL:
            notes.add(f"values of label images above {MAX_LABEL:,} are numbered anew")
        elif len(numbers) == len(values) and min(numbers, default=1) > 0:
            objects = [{**told, "id": key} for told, key in zip(objects, values, strict=True)]
        has_pixels = found.masks.areas() > 0
        objects = [*compress(objects, has_pixels)]
        empty += len(has_pixels) - len(objects)
        if name not in skipped:
            yield replace(found, masks=found.masks[has_pixels], objects=objects)
    ids = dict(pairs)
    if len(pairs) == len(ids) == len({key for key in ids.values() if isinstance(key, int)}):
        options.category_ids.update(ids)
    elif any(key is not None for _, key in pairs):
        notes.add("categories are numbered anew: some have no id, or share one or a name")
    if empty:
        notes.add(f"{counted(empty, 'mask')} without a pixel left out")
    options.notes.extend(sorted(notes - set(options.notes)))
