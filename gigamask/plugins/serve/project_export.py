"""The accepted objects of a project in the formats of other programs."""

import json
import os
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from gigamask import files
from gigamask.data import image
from gigamask.datatools.export_formats import (
    TABLE,
    ExportedImage,
    ExportOptions,
    remove_export,
    write,
)
from gigamask.datatools.image_files import read_file
from gigamask.errors import GigamaskError, counted
from gigamask.masks.rle import RLEMasks
from gigamask.plugins.serve.lost_images import not_utf8, unused
from gigamask.plugins.serve.photographs import utf8_name
from gigamask.plugins.serve.pictures import version_of
from gigamask.plugins.serve.project import Project, read_usable, replaced
from gigamask.plugins.serve.session import MAX_PIXELS, StoppedError, half_of, is_large
from gigamask.serialization import read_json

DEFAULT_FORMATS = ("shards", "coco")
STATE = ".state"
"""Record of the version of the exported masks, and of the names of the files that have them."""


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

    Those of other formats are removed, unless they state the same masks.

    Args:
        project: The project.
        out: Folder for the files.
        rows: Rows of the images; None means all with accepted objects, or done without any.
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
    with project.exporting:  # while it lists, too: the last files have the last masks
        lines = []
        if rows is None:
            every, lines = project.summary(), unused(project)
            rows = [
                i for i, each in enumerate(every) if each["accepted"] or each["status"] == "done"
            ]
            if rest := sum(
                each["objects"] - each["accepted"] - len(each["open"]) for each in every
            ):
                lines.append(f"{counted(rest, 'object')} left out: not accepted")

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
        if not any(each.objects for each in listed):
            reason = f" ({next(iter(skipped.values()))})" if skipped else ""
            raise GigamaskError(
                f"no object is accepted that can be exported; accept one, or more{reason}"
            )

        def usable() -> list[ExportedImage]:  # what a format cannot read, those after it leave out
            return [each for each in listed if each.name not in skipped]

        written = write(usable, out, options)
        kept = usable()
        stated = [(each.name, each.masks.to_coco(), each.objects) for each in kept]
        older = _remove_older(out, version_of(stated, options.categories), written)
    return {
        "images": len(kept),
        "masks": sum(len(each.masks) for each in kept),
        "written": [str(path) for path in written],
        "skipped": list(dict.fromkeys([*skipped.values(), *options.notes, *older, *lines])),
    }


def _remove_older(out: Path, state: str, written: Sequence[Path]) -> list[str]:
    """Remove the files of earlier exports that state other masks; return a line for each.

    Args:
        out: Folder of the exports.
        state: Version of the masks that were written now.
        written: The files and folders that have them.
    """
    record, names = out / STATE, [path.name for path in written]
    stated, *before = read_json(record, list[str]) if record.exists() else [""]
    if stated == state:
        names += before
    older = [out / name for name in {*before} & {*os.listdir(out)} - {*names}]
    for path in older:
        remove_export(out, path.name) if path.is_dir() else path.unlink()
    files.write_text(record, json.dumps([state, *names]))
    return [f"{path}: had other masks, so it was removed; export it again" for path in older]


def _images(
    project: Project, rows: Sequence[int], only_truth: bool, skipped: dict[str, str]
) -> Iterator[ExportedImage]:
    """Yield the images with accepted objects, and those that are done without any; note others."""
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
        if not chosen and (edits.objects or edits.status != "done"):
            continue
        skipped |= {line: line for line in replaced(project, row, edits)}  # by no image's name
        path = project.path_of(row)
        height, width = full_size(path, edits.size)
        try:
            masks = RLEMasks.from_coco([each.mask for each in chosen.values()], edits.size)
        except GigamaskError as error:
            skipped[name] = f"{name}: {error}"
            continue
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
