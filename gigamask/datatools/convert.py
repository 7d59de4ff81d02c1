"""Conversion of images with annotations in other formats to SA-1B's.

The output bytes depend only on the input, and every record is parsed before it is written.
`predicted_iou` and `stability_score`, which only a model can provide, are 1 unless the source has
them; `point_coords` is one foreground pixel, the middle one of the mask in column order. Each json
also has the image's `source`, and each mask's `category` (its name), `category_id` and COCO `id` as
far as the source has them, or the `label` of a label image.
"""

import shutil
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, count, groupby, islice
from pathlib import Path
from typing import Any

from gigamask import plugin
from gigamask.data import annotation, jpeg_markers, tar, worker_pool
from gigamask.data.image import member_suffix
from gigamask.data.image_folder import check_for_tars
from gigamask.data.orientation import Frame
from gigamask.datatools.find_source import list_source, of_annotations
from gigamask.datatools.formats import ConvertOptions
from gigamask.datatools.image_files import fit, to_member
from gigamask.datatools.left_out import LeftOutEntry, LeftOutRecord
from gigamask.datatools.objects import ImageObjects, Objects, SourceImage
from gigamask.datatools.pairing import MAX_LIST_BYTES, compose
from gigamask.datatools.sources import Source
from gigamask.errors import CorruptSampleError, GigamaskError, check_range, counted
from gigamask.files import find_tars, lock_folder
from gigamask.serialization import read_text

ENDED = "JPEGs without their end marker got it; all of their rows were there"
"""Note of such images."""
NAMELESS = "masks whose class has a number, but no name in the annotations"
"""Note of such masks."""
PARTIAL = ".partial"
"""Subfolder of the output folder for incomplete tars; it is cleared at the start."""


@dataclass(frozen=True)
class ShardJob:
    """One tar to write."""

    path: Path
    images: list[SourceImage]


@dataclass
class ConvertCounts:
    """Numbers of images and masks written, and what was left out."""

    images: int = 0
    without_masks: int = 0
    masks: int = 0
    left_out: LeftOutRecord = field(default_factory=LeftOutRecord)

    def add(self, other: "ConvertCounts") -> None:
        """Add other counts to these."""
        self.images += other.images
        self.without_masks += other.without_masks
        self.masks += other.masks
        self.left_out.add(other.left_out)


def convert(
    source: Path | Source,
    image_folder: Path | None,
    out: Path,
    options: ConvertOptions,
    shard_images: int = 500,
    workers: worker_pool.Workers = 1,
    progress: worker_pool.Progress | None = None,
    select: Callable[[list[str]], Container[str]] = set,
) -> dict[str, Any]:
    """Convert annotations to shards.

    Args:
        source: A file or a folder of annotations in any known format, or what was found there.
        image_folder: The folder that image names are relative to; None if the source has them.
        out: The folder for the shards; it must not hold tars.
        options: What counts as a mask.
        shard_images: Images per shard.
        workers: Number of processes, each on one shard at a time; or a part of a command.
        progress: Called as `progress(done, total)` after each shard.
        select: Returns which images to convert of all by their names in the source.

    Returns:
        Counts and paths of what was written, and names of what was left out with the reasons.

    Raises:
        GigamaskError: More than half of the images or of the masks are unusable, or there is no
            mask; no tar is kept.
    """
    check_range("--shard-images", shard_images, 1)
    if isinstance(source, Path):
        source = of_annotations(str(source), image_folder)
    listing = list_source(source, options)
    chosen = select([each.source for each in listing.images])
    wanted = [each for each in listing.images if each.source in chosen]
    is_all = len(wanted) == len(listing.images)
    listing.left_out.check_half(source, len(listing.images))
    counts = ConvertCounts(left_out=listing.left_out if is_all else LeftOutRecord())
    images: list[SourceImage] = []
    for image in wanted:
        if image.exists():
            images.append(image)
            continue
        reason = f"{image.source}: {image.path} does not exist; put it there, or correct --images"
        counts.left_out.images.append(LeftOutEntry(image.source, reason, "no such file"))
    counts.left_out.check_half(source, len(images))
    if not images and not counts.left_out.images:
        raise GigamaskError(f"{source}: lists no image; give a file or folder with images")
    is_part = worker_pool.is_part(workers)
    check_for_tars(out)
    given = (getattr(source, name, None) for name in ("annotations", "images"))
    if out.resolve() in (path.resolve() for path in given if path):
        raise GigamaskError(
            f"--out {out}: is the folder of images or annotations, which tars would hide; give "
            "another folder"
        )
    with lock_folder(out, PARTIAL, is_part):
        work = _clear_partial(out, keep=worker_pool.part_in(workers) is not None)
        try:
            tars = _write_shards(source, out, work, images, shard_images, workers, progress, counts)
        finally:
            if not is_part:
                shutil.rmtree(work, ignore_errors=True)
    if not is_all:
        counts.left_out.add(listing.left_out)
    return {
        "images": counts.images,
        "masks": counts.masks,
        "tars": [str(path) for path in tars],
        "images_without_masks": counts.without_masks,
        "images_without_label": listing.unlabeled,
        "renumbered": listing.renumbered,
        **counts.left_out.as_counts(),
    }


def lines(result: Mapping[str, Any], listed_in: str = "") -> Iterator[str]:
    """Yield what was left out and changed by a conversion, as lines to print.

    Args:
        result: What `convert` returned.
        listed_in: Where all reasons are.
    """
    for kind in ("images_without_masks", "images_without_label"):
        if result[kind]:
            yield f"  {kind.replace('_', ' ')}: {result[kind]:,}"
    yield from LeftOutRecord.from_counts(result).lines(listed_in)


def listed(path: Path | None) -> Callable[[list[str]], Container[str]]:
    """Return the `select` of `convert` that chooses the images that a text file names.

    Args:
        path: Text file with a name on each line, without suffix; None chooses all.

    Raises:
        GigamaskError: The file cannot be read, or names an image that the source does not have.
    """
    if path is None:
        return set
    lines = map(str.strip, read_text(path, MAX_LIST_BYTES).splitlines())
    wanted = {compose(name) for name in filter(None, lines)}

    def select(names: list[str]) -> Container[str]:
        stems = {name: compose(str(Path(name).with_suffix(""))) for name in names}
        unknown = sorted(wanted - {*stems.values()})
        if unknown or not wanted:
            raise GigamaskError(
                f"--list {path}: it must name images of the source, without suffix (got "
                f"{counted(len(wanted), 'name')}, {len(unknown)} of them unknown"
                + (f", such as {unknown[0]})" if unknown else ")")
            )
        return {name for name, stem in stems.items() if stem in wanted}

    return select


def _write_shards(
    source: object,
    out: Path,
    work: Path,
    images: list[SourceImage],
    shard_images: int,
    workers: worker_pool.Workers,
    progress: worker_pool.Progress | None,
    total: ConvertCounts,
) -> list[Path]:
    """Write all tars, rename them and return their final paths; add to `total`."""
    starts = range(0, len(images), shard_images)
    shards = [
        ShardJob(work / f"{number:06d}.tar", images[start : start + shard_images])
        for number, start in enumerate(starts)
    ]
    finished = count(1)

    def report() -> None:
        """Report another tar, if this process writes all of them."""
        if progress is not None:
            progress(next(finished), len(shards))

    runs, in_process = runs_of(shards, workers), workers == 1
    write = partial(write_shards, report=report) if in_process else write_shards
    counts_of_runs = worker_pool.parallel_map(
        write, runs, workers, None if in_process else progress, list[ConvertCounts]
    )
    shard_counts = list(chain.from_iterable(counts_of_runs))
    for counts in shard_counts:
        total.add(counts)
    total.left_out.check_half(source, total.images, total.masks)
    total.left_out.check_masks(source, total.images, total.masks)
    filled = [job.path for job, counts in zip(shards, shard_counts, strict=True) if counts.images]
    tars = [out / f"sa_{number:06d}.tar" for number in range(len(filled))]
    for before, after in zip(filled, tars, strict=True):
        before.rename(after)
    return tars


def runs_of(shards: Sequence[ShardJob], workers: worker_pool.Workers) -> list[list[ShardJob]]:
    """Divide the tars into runs, each of which one process writes in one pass over its images.

    Args:
        shards: The tars.
        workers: Number of processes, or a part of a command.

    Returns:
        The runs: tars that start in the same block form one, or one for each process, which reads
        the block from its start.
    """
    is_part = isinstance(workers, worker_pool.Part)
    processes = workers.count * workers.workers if is_part else workers
    runs: list[list[ShardJob]] = []
    for _, same in groupby(enumerate(shards), lambda item: item[1].images[0].block or item[0]):
        together = [shard for _, shard in same]
        size = -(-len(together) // max(1, processes))
        runs += [together[start : start + size] for start in range(0, len(together), size)]
    return runs


def write_shards(
    shards: Sequence[ShardJob], report: Callable[[], object] | None = None
) -> list[ConvertCounts]:
    """Write tars, reading their images in one pass.

    Args:
        shards: The tars, with images in the order of the source.
        report: Called after each tar.

    Returns:
        The counts of the contents of each.
    """
    images = [image for shard in shards for image in shard.images]
    kind, written = type(images[0]), []
    stored = kind.read_all(images)
    for shard in shards:
        counts = ConvertCounts()
        try:
            read = kind.all_objects(islice(stored, len(shard.images)))
            tar.write(shard.path, _members(read, counts))
        except OSError as error:
            raise GigamaskError(
                f"{shard.path}: cannot be written ({error.strerror}); free space on the disk and"
                " run the same command again"
            ) from error
        written.append(counts)
        if report is not None:
            report()
    return written


def _members(
    groups: Iterable[list[ImageObjects]], counts: ConvertCounts
) -> Iterator[tuple[str, bytes]]:
    """Yield a tar's members, one group of images at a time, and add to the counts."""
    for group in groups:
        raws = iter(_records([each for each in group if not isinstance(each[2], Exception)]))
        for image, stored, objects in group:
            try:
                if isinstance(objects, CorruptSampleError):
                    raise objects
                raw = next(raws)
                frame = fit(stored, objects.masks.size, image.source)
                member = to_member(stored, frame, image.source)
                annotation.check(annotation.read(raw, image.source), image.source, objects.masks)
            except CorruptSampleError as bad:
                counts.left_out.images.append(LeftOutEntry.of(image.source, bad))
                continue
            masks = len(objects.masks)
            left_out = LeftOutRecord(masks=objects.skipped, notes=objects.notes)
            left_out.note(
                NAMELESS,
                sum("category_id" in each and "category" not in each for each in objects.extras),
            )
            left_out.note(ENDED, jpeg_markers.with_end(stored) != stored)
            if frame.orientation != 1:
                left_out.note(_orientation_note(frame, objects.size_is_stated))
            counts.add(ConvertCounts(1, int(masks == 0), masks, left_out))
            yield f"sa_{image.number}{member_suffix(member)}", member
            yield f"sa_{image.number}.json", raw


def _orientation_note(frame: Frame, size_is_stated: bool) -> str:
    """Return which way an image with an EXIF orientation was taken, and why."""
    if frame.is_assumed or not size_is_stated:
        return (
            "images taken upright, as EXIF and annotation tools show them, because the size of "
            "their masks does not decide it"
        )
    what = "upright, as EXIF says" if frame.is_upright else "as stored, against EXIF"
    return f"images taken {what}, by the size of their masks"


def _records(images: Sequence[tuple[SourceImage, object, Objects]]) -> Iterator[bytes]:
    """Yield the json of each image of a group."""
    entries = []
    for image, _, objects in images:
        plugin.expect(objects, Objects, f"{plugin.reference(type(image))}.objects")
        first = image.number * annotation.MAX_MASKS
        ids = [extra.get("id", i) for i, extra in enumerate(objects.extras, first)]
        entries.append((image.number, objects.masks, ids))
    records = annotation.image_records(entries)
    for record, (image, _, objects) in zip(records, images, strict=True):
        record["image"]["source"] = image.source
        for entry, extra in zip(record["annotations"], objects.extras, strict=True):
            entry |= extra
        yield annotation.encode(record)


def _clear_partial(out: Path, keep: bool) -> Path:
    """Return the folder for incomplete tars, emptied unless the tars of parts are to be kept."""
    if existing := find_tars(out):
        raise GigamaskError(
            f"--out {out}: holds {counted(len(existing), 'tar')} such as {existing[0].name}, which"
            " new ones would mix with; give another folder"
        )
    for path in [] if keep else (out / PARTIAL).glob("*.tar*"):
        path.unlink()
    return out / PARTIAL
