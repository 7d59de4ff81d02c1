"""The accepted objects of a project as a COCO json and as shards in SA-1B's format."""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from gigamask import files
from gigamask.data import image
from gigamask.data.annotation import mask_fields
from gigamask.datatools.convert import ConvertOptions, convert
from gigamask.datatools.image_files import read_file
from gigamask.errors import GigamaskError
from gigamask.masks.rle import RLEMasks
from gigamask.serve.lost_images import unused
from gigamask.serve.project import Project, read_usable
from gigamask.serve.session import MAX_PIXELS, half_of, is_large

COCO = "coco.json"
SHARDS = "shards"


def to_coco(project: Project, rows: Sequence[int] | None = None) -> dict[str, Any]:
    """Return accepted objects as COCO instances.

    Args:
        project: The project.
        rows: Rows of the images; None means all with accepted objects.

    Raises:
        GigamaskError: There is no accepted object.
    """
    if rows is None:
        rows = [row for row, each in enumerate(project.summary()) if each["accepted"]]
    categories = {each.name: i + 1 for i, each in enumerate(project.content.categories)}
    images: list[dict[str, Any]] = []
    annotations: list[dict[str, Any]] = []
    for row in rows:
        edits = read_usable(project, row)
        if edits is None:
            continue
        accepted = [each for each in edits.objects.values() if each.accepted]
        name = project.names[row]
        height, width = full_size(Path(project.content.images) / name, edits.size)
        images.append({"id": row, "file_name": name, "height": height, "width": width})
        masks = RLEMasks.from_coco([each.mask for each in accepted], edits.size)
        if (height, width) != edits.size:
            masks = masks.resample(np.arange(height) // 2, np.arange(width) // 2)
        for each, fields in zip(accepted, mask_fields(masks), strict=True):
            known = categories.setdefault(each.category, len(categories) + 1)
            x0, y0, wide, high = fields["bbox"]
            annotations.append(
                {
                    "id": len(annotations) + 1,
                    "image_id": row,
                    "category_id": known,
                    "iscrowd": 0,
                    "name": each.name,
                    **fields,
                    "bbox": [x0, y0, wide + 1, high + 1],  # COCO's boxes have exclusive ends
                }
            )
    if not annotations:
        raise GigamaskError("no object is accepted yet, so there is nothing to export; accept one")
    listed = [{"id": key, "name": name} for name, key in categories.items()]
    return {"images": images, "annotations": annotations, "categories": listed}


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


def export(project: Project, out: Path, rows: Sequence[int] | None = None) -> dict[str, Any]:
    """Write accepted objects as `coco.json`, and with their images as `shards/*.tar`.

    Args:
        project: The project.
        out: Folder for both; an earlier export in it is replaced.
        rows: Rows of the images; None means all with accepted objects.

    Returns:
        Counts of images and masks, and the paths of both.

    Raises:
        GigamaskError: There is no accepted object, or the folder cannot be written.
    """
    content = to_coco(project, rows)
    coco, shards, partial = out / COCO, out / SHARDS, out / f"{SHARDS}.partial"
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        files.write_text(coco, json.dumps(content))
        counts = convert(coco, Path(project.content.images), partial, ConvertOptions())
        shutil.rmtree(shards, ignore_errors=True)
        partial.rename(shards)
    except OSError as error:
        raise GigamaskError(
            f"{out}: cannot be written ({error.strerror}); free space or correct the permissions"
        ) from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    skipped = counts["skipped_images"] + counts["skipped_masks"]
    return {
        "images": counts["images"],
        "masks": counts["masks"],
        "coco": str(coco),
        "shards": str(shards),
        "skipped": [*(each["reason"] for each in skipped), *unused(project)],
    }
