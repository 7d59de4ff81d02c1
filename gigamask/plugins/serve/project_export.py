"""The accepted objects of a project in the formats of other programs."""

from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from gigamask.data import image
from gigamask.datatools.export_formats import (
    COCO,
    SHARDS,
    TABLE,
    ExportedImage,
    ExportOptions,
    write,
)
from gigamask.datatools.image_files import read_file
from gigamask.errors import GigamaskError
from gigamask.masks.rle import RLEMasks
from gigamask.plugins.serve.lost_images import not_utf8, unused
from gigamask.plugins.serve.photographs import utf8_name
from gigamask.plugins.serve.project import Project, read_usable, replaced
from gigamask.plugins.serve.session import MAX_PIXELS, StoppedError, half_of, is_large

DEFAULT_FORMATS = ("coco", "shards")


def export(
    project: Project,
    out: Path,
    rows: Sequence[int] | None = None,
    formats: Sequence[str] = DEFAULT_FORMATS,
    *,
    polygons: bool = False,
    table: bool = False,
    images: bool = False,
    only_truth: bool = False,
) -> dict[str, Any]:
    """Write accepted objects; files of an earlier export are replaced once all are written.

    Args:
        project: The project.
        out: Folder for the files.
        rows: Rows of the images; None means all with accepted objects.
        formats: Names of formats (`datatools.export_formats`).
        polygons: Whether COCO gets polygons of masks without holes.
        table: Whether to write a table of all masks, too.
        images: Whether to write a folder of the images, upright, which agree with the masks also
            in programs that ignore EXIF.
        only_truth: Whether to leave out masks that a model answered and nobody changed.

    Returns:
        Counts of images and masks, the paths, and what was left out or is doubtful, and why.

    Raises:
        GigamaskError: There is no accepted object, or the folder cannot be written.
    """
    if rows is None:
        rows = [row for row, each in enumerate(project.summary()) if each["accepted"]]

    def check() -> None:
        if project.stopping.is_set():
            raise StoppedError("the export was stopped; the files of the last one are kept")

    skipped: dict[str, str] = {}
    options = ExportOptions(
        tuple(formats),
        polygons,
        out / TABLE if table else None,
        images,
        tuple(each.name for each in project.content.categories),
        owned=True,
        check=check,
        skipped=skipped,
    )
    listed = list(_images(project, rows, only_truth, skipped))
    if not listed:
        reason = f" ({next(iter(skipped.values()))})" if skipped else ""
        raise GigamaskError(
            f"no object is accepted that can be exported; accept one, or more{reason}"
        )
    written = write(lambda: listed, out, options)
    usable = [each for each in listed if each.name not in skipped]
    return {
        "images": len(usable),
        "masks": sum(len(each.masks) for each in usable),
        "coco": str(out / COCO),
        "shards": str(out / SHARDS),
        "written": [str(path) for path in written],
        "skipped": list(dict.fromkeys([*skipped.values(), *unused(project)])),
    }


def _images(
    project: Project, rows: Sequence[int], only_truth: bool, skipped: dict[str, str]
) -> Iterator[ExportedImage]:
    """Yield the images with accepted objects; note those that cannot be exported, and why."""
    for row in rows:
        name, edits = project.names[row], read_usable(project, row)
        if edits is None:
            continue
        if name != utf8_name(name):
            skipped[name] = not_utf8(name)
            continue
        chosen = {
            key: each
            for key, each in edits.objects.items()
            if each.accepted and (each.is_truth or not only_truth)
        }
        if not chosen:
            continue
        skipped |= {line: line for line in replaced(project, row, edits)}  # by no image's name
        path = project.path_of(row)
        height, width = full_size(path, edits.size)
        masks = RLEMasks.from_coco([each.mask for each in chosen.values()], edits.size)
        if (height, width) != edits.size:
            masks = masks.resample(np.arange(height) // 2, np.arange(width) // 2)
        objects = [
            {
                "id": key,
                "category": each.category,
                "score": each.predicted_iou,
                "name": each.name,
                "origin": each.came,
                "model": None if each.model is None else each.model + 1,
            }
            for key, each in chosen.items()
        ]
        read = partial(read_file, path, name)
        yield ExportedImage(Path(name).as_posix(), masks, objects, read, path)


def full_size(path: Path, annotated: tuple[int, int]) -> tuple[int, int]:
    """Return (H, W) of an image, which the page may have opened at half its size.

    Args:
        path: The image file.
        annotated: (H, W) that it was annotated with.
    """
    if 4 * annotated[0] * annotated[1] <= MAX_PIXELS:  # not half of a large image
        return annotated
    try:
        stored = image.size(read_file(path, path.name), path.name)
    except GigamaskError:  # the conversion says so, and leaves it out
        return annotated
    for size in (stored, stored[::-1]):
        if is_large(size) and half_of(size) == annotated:
            return size
    return annotated
