"""Data of one's own becomes shards: COCO's json or label images enter with their pictures, tars in SA-1B's format leave.

What is written depends on what is read alone, byte for byte, and all of it passes our own reader first. Scores that only a model can give,
`predicted_iou` and `stability_score`, are 1; `point_coords` is one foreground pixel, the middle one of the mask's run lengths. Each json also says
where an image comes from (`source`), and of a mask its `category_id` and COCO `id`, or its `label`; readers of SA-1B pass over these.

Not here: what the sources say (`prepare.coco`, `prepare.label_images`), which pictures will do (`prepare.pictures`).
"""

import os
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from gigamask.data import annotation, tar, worker_pool
from gigamask.data import annotation_json as records
from gigamask.datatools import convert_coco, convert_labels
from gigamask.datatools.objects import Annotated, Objects, SourceListing
from gigamask.datatools.partial_download import lock_folder
from gigamask.datatools.pictures import as_jpeg
from gigamask.errors import CorruptSampleError, GigamaskError
from gigamask.types import SkippedSample

PARTIAL = ".partial"
"""Where tars lie in the output folder until all are complete; it is cleared at the start."""


@dataclass(frozen=True)
class ConvertOptions:
    """How the sources are read: what is a mask and what is not."""

    keep_crowds: bool = False
    split_components: bool = False
    ignore: tuple[int, ...] = ()


@dataclass(frozen=True)
class ShardJob:
    """One tar to be written."""

    path: Path
    images: list[Annotated]


@dataclass
class ConvertCounts:
    """What became of the images so far."""

    images: int = 0
    without_masks: int = 0
    masks: int = 0
    crowds: int = 0
    rejected: list[SkippedSample] = field(default_factory=list)
    rejected_masks: list[SkippedSample] = field(default_factory=list)

    def add(self, other: "ConvertCounts") -> None:
        """Adds another tally to this one."""
        for name, value in vars(other).items():
            setattr(self, name, getattr(self, name) + value)


def convert(
    source: Path,
    pictures: Path,
    out: Path,
    options: ConvertOptions,
    shard_images: int = 500,
    workers: int = 1,
    progress: worker_pool.Progress | None = None,
) -> dict[str, Any]:
    """Writes the shards of `source`, a COCO json or a folder of label images, and returns what was written and what was left out.

    Raises Fault when more than half of the images or of the masks are unusable; nothing is left behind then. `progress` counts shards.
    """
    if shard_images < 1:
        raise GigamaskError(
            f"{shard_images} images a shard: at least one has to be; give a number from 1 on"
        )
    if not pictures.is_dir():
        raise GigamaskError(
            f"--images {pictures}: no such folder; give the one that the pictures' names start from"
        )
    listing = _listing(source, pictures, options)
    there = [image.picture.is_file() for image in listing.images]
    images = [image for image, exists in zip(listing.images, there, strict=True) if exists]
    missing = [image for image, exists in zip(listing.images, there, strict=True) if not exists]
    tally = ConvertCounts(rejected=listing.rejected, rejected_masks=listing.strays)
    tally.rejected += [
        SkippedSample(
            image.source,
            f"{image.source}: there is no {image.picture}; put it there, or mend --images",
        )
        for image in missing
    ]
    _check(source, "images", tally.rejected, len(images))
    with lock_folder(out, PARTIAL):
        work = _cleared(out)
        try:
            tars = _write_shards(source, out, work, images, shard_images, workers, progress, tally)
        finally:
            shutil.rmtree(work, ignore_errors=True)
    return {
        "images": tally.images,
        "masks": tally.masks,
        "tars": [str(path) for path in tars],
        "images_without_masks": tally.without_masks,
        "crowds_left_out": tally.crowds,
        "pictures_without_label": listing.unlabelled,
        "renumbered": listing.renumbered,
        "images_left_out": [{"name": each.name, "reason": each.reason} for each in tally.rejected],
        "masks_left_out": [
            {"name": each.name, "reason": each.reason} for each in tally.rejected_masks
        ],
    }


def _write_shards(
    source: Path,
    out: Path,
    work: Path,
    images: list[Annotated],
    shard_images: int,
    workers: int,
    progress: worker_pool.Progress | None,
    tally: ConvertCounts,
) -> list[Path]:
    """Writes all tars and only then gives them their names, which are returned; counts into `tally`."""
    starts = range(0, len(images), shard_images)
    shards = [
        ShardJob(work / f"{number:06d}.tar", images[start : start + shard_images])
        for number, start in enumerate(starts)
    ]
    tallies = worker_pool.parallel_map(write_shard, shards, workers, progress)
    for each in tallies:
        tally.add(each)
    _check(source, "images", tally.rejected, tally.images)
    _check(source, "masks", tally.rejected_masks, tally.masks)
    filled = [shard.path for shard, each in zip(shards, tallies, strict=True) if each.images]
    tars = [out / f"sa_{number:06d}.tar" for number in range(len(filled))]
    for before, after in zip(filled, tars, strict=True):
        before.rename(after)
    return tars


def write_shard(shard: ShardJob) -> ConvertCounts:
    """Writes one tar and returns what is in it."""
    tally = ConvertCounts()
    try:
        tar.write(shard.path, _members(shard.images, tally))
    except OSError as error:
        raise GigamaskError(
            f"{shard.path}: cannot be written ({error.strerror}); free space on the disk and run the same command again"
        ) from error
    return tally


def _listing(source: Path, pictures: Path, options: ConvertOptions) -> SourceListing:
    """Lists the images of either kind of source."""
    if source.is_dir():
        if options.keep_crowds:
            raise GigamaskError(
                f"{source}: is a folder of label images, which have no crowds; leave --keep-crowds out"
            )
        return convert_labels.read(source, pictures, options.split_components, options.ignore)
    if options.split_components or options.ignore:
        raise GigamaskError(
            f"{source}: is no folder of label images, which --split-components and --ignore are for; leave them out"
        )
    return convert_coco.read(source, pictures, options.keep_crowds)


def _members(images: Sequence[Annotated], tally: ConvertCounts) -> Iterator[tuple[str, bytes]]:
    """Yields what a tar holds, one image at a time."""
    for image in images:
        try:
            objects = image.objects()
            jpg = as_jpeg(image.picture, objects.masks.size, image.source)
            raw = _record(image, objects)
            annotation.parse(raw, image.source)
        except CorruptSampleError as bad:
            tally.rejected.append(SkippedSample(image.source, str(bad)))
            continue
        count = len(objects.masks)
        tally.add(
            ConvertCounts(
                1, int(count == 0), count, objects.crowds, rejected_masks=objects.rejected
            )
        )
        yield f"sa_{image.number}.jpg", jpg
        yield f"sa_{image.number}.json", raw


def _record(image: Annotated, objects: Objects) -> bytes:
    """Returns the json of one image."""
    masks, ones = objects.masks, np.ones(len(objects.masks))
    ids = [
        extra.get("id", image.number * annotation.MAX_MASKS + i)
        for i, extra in enumerate(objects.extras)
    ]
    middles = masks.points(np.full((len(masks), 1), 0.5))[:, 0]
    told = records.image_record(image.number, masks, ids, middles, ones, ones)
    told["image"]["source"] = image.source
    for each, extra in zip(told["annotations"], objects.extras, strict=True):
        each |= extra
    return records.encode(told)


def _check(source: Path, what: str, rejected: list[SkippedSample], usable: int) -> None:
    total = len(rejected) + usable
    if 2 * len(rejected) > total:
        first = f"the first: {rejected[0].reason}"
        raise GigamaskError(
            f"{source}: {len(rejected)} of its {total} {what} are unusable, at most half may be; mend them first ({first})"
        )
    if not total and what == "images":
        raise GigamaskError(f"{source}: lists no image; give a file or a folder that does")


def _cleared(out: Path) -> Path:
    """Returns the folder in the output folder where tars lie until they are complete, cleared of what a process left that was killed."""
    held = [name for name in os.listdir(out) if name.endswith(".tar")]
    if held:
        raise GigamaskError(
            f"--out {out}: holds {len(held)} tars such as {held[0]}, which new ones would mix with; give another folder"
        )
    for left in (out / PARTIAL).glob("*.tar*"):
        left.unlink()
    return out / PARTIAL
