"""Generate all masks of images, as JSONs in SA-1B's format and as tars.

Each JSON is written atomically as soon as it is made, so that the same command resumes after any
interrupt; one of another image is neither replaced nor taken for this one's. `.segment/made.json`
in the output folder holds the weights' digest and the settings; results of other weights or
settings are refused. Unreadable images are skipped and reported, and tried again by the next
command.
"""

import json
import os
import tempfile
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import cv2
import msgspec
import numpy as np
from jaxtyping import UInt8

from gigamask import files
from gigamask.data import annotation, image, image_folder, tar, worker_pool
from gigamask.data.orientation import as_stored, read_orientation
from gigamask.data.storage import path_list
from gigamask.datatools.export_formats import (
    ExportedImage,
    ExportOptions,
    check_formats,
    check_replaceable,
    write,
)
from gigamask.datatools.image_files import fit, to_member
from gigamask.datatools.objects import image_ids
from gigamask.distributed.precision import computed_dtype
from gigamask.errors import CorruptSampleError, GigamaskError, check_range, counted
from gigamask.files import PARTIAL, find_tars, is_partial, lock_folder, write_bytes
from gigamask.inference.automatic_mask_generator import MaskProposals, SamAutomaticMaskGenerator
from gigamask.inference.classes import class_fields
from gigamask.masks.devices import as_array
from gigamask.masks.rle import RLEMasks
from gigamask.models.embedding_cache import digest_weights
from gigamask.models.promptable import PromptableModel, evaluated
from gigamask.pixels import to_rgb
from gigamask.records import ImageAnnotation, SkippedSample
from gigamask.rng import make_rng
from gigamask.serialization import read_json
from gigamask.workflows.evaluate import load_model
from gigamask.workflows.input_images import InputImage, find_images, outputs_of_images

STATE_FOLDER = ".segment"
SETTINGS = "made.json"
NOT_OURS = (
    "no earlier command into this --out wrote it; choose other folders for --out and --pictures"
)
MOVE = "move it, or choose other folders for --out and --pictures"
"""Why a file that exists is not replaced, and what to do."""
OPACITY = 0.5
"""Opacity of masks on a picture."""


@dataclass(frozen=True)
class Output:
    """Output folders and formats.

    Attributes:
        out: Folder for the JSONs.
        export: Formats besides the JSONs; shards are tars in `out`.
        shard_images: Images per tar.
        pictures: Folder for a picture of each image with its masks.
    """

    out: Path
    export: ExportOptions = field(default_factory=lambda: ExportOptions(()))
    shard_images: int = 500
    pictures: Path | None = None

    @property
    def to_shards(self) -> bool:
        """Whether tars are written."""
        return "shards" in self.export.formats

    @property
    def others(self) -> ExportOptions:
        """What is written besides the JSONs and the tars."""
        formats = tuple(name for name in self.export.formats if name != "shards")
        # Programs for YOLO look for the images beside the masks.
        return replace(self.export, formats=formats, images="yolo" in formats)

    def __post_init__(self) -> None:
        check_formats(self.export.formats)
        check_range("--shard-images", self.shard_images, 1)


@dataclass
class SegmentCounts:
    """Counts of images, masks and tars; `existing` and `existing_tars` count those done before,
    `turned` the image files that EXIF turns, and `kept` those that may have more than 8 bits;
    `notes` are lines about what a format cannot hold."""

    images: int = 0
    masks: int = 0
    existing: int = 0
    tars: list[str] = field(default_factory=list)
    existing_tars: int = 0
    turned: int = 0
    kept: int = 0
    notes: list[str] = field(default_factory=list)
    skipped: list[SkippedSample] = field(default_factory=list)

    def add(self, other: "SegmentCounts") -> None:
        """Add other counts to these."""
        for name, value in vars(other).items():
            setattr(self, name, getattr(self, name) + value)


def segment(
    weights: str | Path | PromptableModel,
    images: str | Path | Sequence[str | Path],
    out: str | Path,
    *,
    to: str | Sequence[str] | ExportOptions = (),
    shard_images: int = 500,
    pictures: str | Path | None = None,
    device: str = "auto",
    trust: bool = False,
    **generator: Any,
) -> dict[str, Any]:
    """Generate all masks of images and write them as SA-1B annotations; resumable.

    Args:
        weights: A run folder, a checkpoint, an official .pth, a .safetensors, a Hugging Face
            folder or id, "starter", or a model.
        images: Images, folders of images, globs, tars, or an index.
        out: Folder for one JSON per image, and for the tars.
        to: Formats to write too, such as coco, labels, or shards (tars of images and JSONs); or
            options with polygons for coco, or a table of all masks.
        shard_images: Images per tar.
        pictures: Folder for a picture of each image with its masks.
        device: cpu, cuda, cuda:N, or auto for cuda if available.
        trust: Whether to run code that a run folder names and that is not built in.
        **generator: Arguments of `SamAutomaticMaskGenerator`, such as `pred_iou_thresh=0.8`.

    Returns:
        Counts of images and masks, what was written, and the skipped images, as in `gigamask
        segment --json`.

    Raises:
        GigamaskError: No image can be used, or the folder has results of other settings.
    """
    paths = path_list(images)
    folder = None if pictures is None else Path(pictures)
    to = to if isinstance(to, ExportOptions) else ExportOptions(check_formats(to))
    output = Output(Path(out), to, shard_images, folder)
    masks = SamAutomaticMaskGenerator(load_model(weights, device, trust), **generator)
    with tempfile.TemporaryDirectory() as scratch, evaluated(masks.model):
        written = outputs_of_images(out, to.formats, pictures)
        inputs, skipped = find_images(paths, scratch, written)
        return segment_all(inputs, masks, output, skipped)


def segment_all(
    images: Sequence[InputImage],
    generator: SamAutomaticMaskGenerator,
    output: Output,
    skipped: Sequence[SkippedSample] = (),
    progress: worker_pool.Progress | None = None,
    part: worker_pool.Part | None = None,
) -> dict[str, Any]:
    """Segment images, except those that already have a JSON.

    Args:
        images: The images.
        generator: Generates the masks.
        output: Output folders and formats.
        skipped: Images that were skipped before.
        progress: Called as `progress(done, total)` after each image, and for each tile of one.
        part: A part of the command, or the one that joins the parts.

    Returns:
        Counts of images and masks, the tars, what else was written, and the skipped images.

    Raises:
        GigamaskError: No image can be used, or the folder has results of other settings.
    """
    ids, _ = image_ids([Path(source.path).name.removeprefix("sa_") for source in images])
    numbered = list(zip(images, ids, strict=True))
    # A group is what a tar holds, so that each part writes its own tars.
    size = output.shard_images if output.to_shards or part is None else 1
    groups = [
        (start // size, numbered[start : start + size]) for start in range(0, len(images), size)
    ]
    done = 0

    def report(fraction: float) -> None:
        """Report that a part of an image is done; all of it if the fraction is 1."""
        nonlocal done
        if fraction == 1:
            done += 1
        if progress is not None and fraction:
            progress(done + fraction % 1, len(images))

    run = partial(_segment_group, generator=generator, output=output, report=report)
    is_part = worker_pool.is_part(part or 1)
    if output.to_shards:
        image_folder.check_for_tars(output.out)
    with lock_folder(output.out, STATE_FOLDER, is_part):
        _prepare_folder(output, generator, is_part, images)
        results = worker_pool.parallel_map(run, groups, part or 1, None, SegmentCounts)
        if output.to_shards and not is_part:
            _remove_tars(output.out, len(groups))
    counts = SegmentCounts(skipped=list(skipped))
    for result in results:
        counts.add(result)
    if not counts.images:
        raise GigamaskError(
            f"none of {len(counts.skipped)} images can be used, the first: "
            f"{counts.skipped[0].reason}"
        )
    names = generator.model.config.class_names
    written = [] if is_part else _export(images, output, counts, names)
    return asdict(counts) | {"written": written}


def _export(
    images: Sequence[InputImage], output: Output, counts: SegmentCounts, classes: tuple[str, ...]
) -> list[str]:
    """Write the masks in other formats; note the images that have none of these."""
    left_out = {sample.name: sample.reason for sample in counts.skipped}
    options = replace(
        output.others,
        categories=classes,
        skipped={each.utf8_path: left_out[each.name] for each in images if each.name in left_out},
        notes=counts.notes,
    )
    if not options.formats and options.table is None:
        return []
    known = set(options.skipped)
    usable = [source for source in images if source.name not in left_out]
    exported = lambda: (_exported(source, output.out) for source in usable)  # noqa: E731
    written = write(exported, output.out, options)
    counts.skipped += [
        SkippedSample(name, why) for name, why in options.skipped.items() if name not in known
    ]
    return [str(path) for path in written]


def _exported(source: InputImage, out: Path) -> ExportedImage:
    """Return an image with the masks of its JSON."""
    raw = (out / f"{source.path}.json").read_bytes()
    entry, record = annotation.parse(raw, source.name), msgspec.json.decode(raw)
    name = record["image"].get("source", source.utf8_path)  # with the suffix of what it is
    return replace(exported_image(name, entry, record, source.read), file=source.file)


def exported_image(
    name: str, entry: ImageAnnotation, record: Mapping[str, Any], read: Callable[[], bytes]
) -> ExportedImage:
    """Return an image with its masks.

    Args:
        name: Its path among the images.
        entry: Its annotation.
        record: The same as plain data.
        read: Returns the bytes of the image file.
    """
    categories = entry.categories or [""] * len(entry.masks)
    objects = [
        {
            "id": i,
            "category": categories[i - 1],
            "score": each.get("class_score", each["predicted_iou"]),
            "predicted_iou": each["predicted_iou"],
            "stability_score": each["stability_score"],
            "iscrowd": each.get("iscrowd"),
        }
        for i, each in enumerate(record["annotations"], 1)
    ]
    return ExportedImage(name, entry.masks, objects, read)


def _segment_group(
    group: tuple[int, Sequence[tuple[InputImage, int]]],
    generator: SamAutomaticMaskGenerator,
    output: Output,
    report: Callable[[float], object],
) -> SegmentCounts:
    """Segment the images of one tar, and write it if wanted; report what is done of each image."""
    counts, usable, has_new = SegmentCounts(), [], False
    shard, images = group
    for source, number in images:
        try:
            is_new = _segment_one(source, number, generator, output, counts, report)
        except CorruptSampleError as error:
            counts.skipped.append(SkippedSample(source.name, str(error)))
        else:
            usable.append((source, number))
            has_new |= is_new
        report(1.0)
    if output.to_shards and usable:
        _write_shard(output.out, shard, usable, has_new, counts)
    return counts


def _prepare_folder(
    output: Output,
    generator: SamAutomaticMaskGenerator,
    is_part: bool,
    images: Sequence[InputImage],
) -> None:
    """Record the settings and remove unfinished tars; raise if the folders hold other files."""
    out = output.out
    # Left by a killed process, unless this is one of several parts.
    for unfinished in [] if is_part else out.glob(f".sa_*{PARTIAL}"):
        if is_partial(unfinished.name, r"sa_\d+\.tar"):
            unfinished.unlink()
    weights = digest_weights(generator.model.state_dict(), str(generator.model.config))
    with generator.predictor.autocast():
        dtype = computed_dtype(generator.predictor.device)
    values = {"weights": weights, "computed": dtype, **vars(generator.config)}
    if generator.points_per_side is None and generator.point_grids is not None:
        values["point_grids"] = [as_array(grid).tolist() for grid in generator.point_grids]
    if threshold := generator.predictor.model.mask_threshold:
        values["mask_threshold"] = threshold
    settings = json.dumps(values, indent=1, default=lambda number: number.item()).encode()
    path, folder = out / STATE_FOLDER / SETTINGS, output.pictures
    if output.to_shards:
        _check_tars(output, images)
    written = output.others.names
    for source in images:
        top, below, _ = source.path.partition("/")
        if below and top in written:
            raise GigamaskError(
                f"{source.name}: its JSON would lie in {out / top}, where --to writes; segment "
                "that subfolder itself, into another folder"
            )
    check_replaceable(out, written)
    pictures = [folder / f"{source.path}.png" for source in images] if folder else []
    sources = {os.path.realpath(source.file) for source in images if source.file}
    files.check_absent((path for path in pictures if os.path.realpath(path) in sources), NOT_OURS)
    if path.exists():
        if path.read_bytes() != settings:
            raise GigamaskError(
                f"--out {out}: holds results of other weights or settings ({path}); "
                "use the same ones, or another folder"
            )
        return
    if tars := find_tars(out):
        raise GigamaskError(
            f"--out {out}: holds {len(tars)} other tars, such as {tars[0].name}; "
            "choose another folder"
        )
    files.check_absent([*(out / f"{source.path}.json" for source in images), *pictures], NOT_OURS)
    write_bytes(path, settings)


def _segment_one(
    source: InputImage,
    number: int,
    generator: SamAutomaticMaskGenerator,
    output: Output,
    counts: SegmentCounts,
    report: Callable[[float], object],
) -> bool:
    """Write an image's JSON and picture unless they exist; return whether the JSON is new."""
    path, stored = output.out / f"{source.path}.json", source.read()
    decode = partial(source.decode, stored, generator.model.config.pixels)
    entry = _read_done(path, source.name, zlib.crc32(stored))
    is_new = entry is None
    picture = output.pictures / f"{source.path}.png" if output.pictures else None
    if is_new and picture and picture.exists():
        raise CorruptSampleError(f"{source.name}: {picture} would be replaced; {MOVE}")
    if entry is None:
        if image.keeps_its_bytes(stored) and source.file_name.endswith(".jpg"):  # of a tar
            file_name = source.file_name.removesuffix(".jpg") + image.member_suffix(stored)
            source = replace(source, file_name=file_name)
        proposals = generator.generate_proposals(decode(), report)
        record = make_record(proposals, number, source, generator.model.config.class_names)
        record["image"]["source_crc32"] = zlib.crc32(stored)
        raw = annotation.encode(record)
        entry = annotation.parse(raw, source.name)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_bytes(path, raw)
    if picture and not picture.exists():
        picture.parent.mkdir(parents=True, exist_ok=True)
        image.write_png(picture, draw_masks(to_rgb(decode()), entry.masks, entry.categories))
    counts.images += 1
    counts.masks += len(entry.masks)
    counts.existing += not is_new
    counts.kept += image.keeps_its_bytes(stored)
    counts.turned += source.is_file and read_orientation(stored) != 1
    return is_new


def _read_done(path: Path, name: str, crc32: int) -> ImageAnnotation | None:
    """Return the annotation written by an earlier command; None if it is missing or damaged.

    Raises:
        CorruptSampleError: It is of another image, or no such command wrote it.
    """
    if not path.exists():
        return None
    raw = path.read_bytes()
    try:
        record = annotation.read(raw, name)
        found = annotation.check(record, name)
    except CorruptSampleError:
        try:
            msgspec.json.decode(raw)
        except msgspec.DecodeError:
            return None
        raise CorruptSampleError(f"{name}: {path} would be replaced; {MOVE}") from None
    if record.image.source_crc32 != crc32:
        raise CorruptSampleError(
            f"{name}: {path} has the masks of another image, or of this one before it was changed; "
            "remove that file, or choose another --out"
        )
    return found


def make_record(
    proposals: MaskProposals, number: int, source: InputImage, class_names: Sequence[str] = ()
) -> dict[str, Any]:
    """Return the masks of an image in SA-1B's format, with their classes if there are any.

    Empty masks, masks with non-finite scores, and all but the best `MAX_MASKS` are left out, since
    readers reject them.

    Args:
        proposals: The masks.
        number: Image id.
        source: The image.
        class_names: Names of the classes.
    """
    finite = np.isfinite(proposals.predicted_iou) & np.isfinite(proposals.stability_score)
    usable = np.flatnonzero((proposals.masks.areas() > 0) & finite)
    proposals = proposals[usable[: annotation.MAX_MASKS]]
    record = annotation.image_record(
        number,
        proposals.masks,
        [number * annotation.MAX_MASKS + i for i in range(len(proposals))],
        proposals.points_xy,
        proposals.predicted_iou.astype(np.float64),
        proposals.stability_score.astype(np.float64),
        proposals.crops,
    )
    classes = class_fields(proposals.class_scores, class_names) or []
    for entry, extra in zip(record["annotations"], classes, strict=False):
        entry |= extra
    shown = source.utf8_path
    record["image"] |= {"file_name": shown.rpartition("/")[2], "source": shown}
    return record


def draw_masks(
    pixels: UInt8[np.ndarray, "H W 3"], masks: RLEMasks, names: Sequence[str] = ()
) -> UInt8[np.ndarray, "H W 3"]:
    """Draw masks on an image in different colors with white outlines, small masks on top.

    Args:
        pixels: The image, RGB.
        masks: The masks.
        names: Name of each mask's class, to be written on it.

    Returns:
        The picture, RGB.
    """
    canvas, areas = pixels.copy(), masks.areas()
    for i in np.argsort(-areas, kind="stable"):
        dense = masks[i : i + 1].to_dense()[0]
        color = make_rng(0, "mask colour", int(i)).integers(40, 256, 3)
        canvas[dense] = ((1 - OPACITY) * pixels[dense] + OPACITY * color).astype(np.uint8)
        outline, _ = cv2.findContours(dense.astype(np.uint8), cv2.RETR_LIST, cv2.CHAIN_APPROX_NONE)
        cv2.drawContours(canvas, outline, -1, (255, 255, 255), 1)
    middles = masks.sample_points(np.full((len(masks), 1), 0.5))[:, 0].tolist()
    scale = max(0.4, max(masks.size) / 1600)
    for name, place in zip(names, middles, strict=False):
        text = name.encode("ascii", "replace").decode()
        for color, width in (((0, 0, 0), 3), ((255, 255, 255), 1)):
            cv2.putText(
                canvas, text, place, cv2.FONT_HERSHEY_SIMPLEX, scale, color, width, cv2.LINE_AA
            )
    return canvas


def _write_shard(
    out: Path,
    shard: int,
    images: Sequence[tuple[InputImage, int]],
    has_new: bool,
    counts: SegmentCounts,
) -> None:
    """Write a tar of images and JSONs, unless it exists with the same ones and none is new."""
    path = out / f"sa_{shard:06d}.tar"
    counts.tars.append(str(path))
    content = [
        [source.path, number, files.crc32(out / f"{source.path}.json")] for source, number in images
    ]
    record = _record_of(out, shard)
    is_done = not has_new and path.exists() and record.exists()
    if is_done and read_json(record, list) == content:
        counts.existing_tars += 1
        return
    try:
        if not record.exists():  # so that a process that is killed leaves no tar without one
            write_bytes(record, b"[]")
        tar.write(path, _members(out, images))
        write_bytes(record, json.dumps(content).encode())
    except OSError as error:
        raise GigamaskError(
            f"{path}: cannot be written ({error.strerror}); free disk space and run the same "
            "command again"
        ) from error


def _record_of(out: Path, shard: int) -> Path:
    """Return the file that states the images of a tar, their numbers and crc32s of their JSONs."""
    return out / STATE_FOLDER / f"sa_{shard:06d}.members"


def _check_tars(output: Output, images: Sequence[InputImage]) -> None:
    """Raise `GigamaskError` if a tar holds an image that is not given, which would be lost, or is
    none of ours."""
    out, tars = output.out, range(-(-len(images) // output.shard_images))
    others = (out / f"sa_{i:06d}.tar" for i in tars if not _record_of(out, i).exists())
    files.check_absent(others, NOT_OURS)
    records = (out / STATE_FOLDER).glob("sa_*.members")
    held = {path for record in records for path, *_ in read_json(record, list)}
    if lost := held - {source.path for source in images}:
        raise GigamaskError(
            f"--out {out}: its tars hold {counted(len(lost), 'other image')} such as {min(lost)}; "
            "segment all together, or choose another folder"
        )


def _remove_tars(out: Path, first: int) -> None:
    """Remove the tars from a number on, of an earlier command with fewer images in each."""
    while (record := _record_of(out, first)).exists():
        (out / f"sa_{first:06d}.tar").unlink(missing_ok=True)
        record.unlink()
        first += 1


def _members(out: Path, images: Sequence[tuple[InputImage, int]]) -> Iterator[tuple[str, bytes]]:
    """Yield a tar's members: each image, mostly as JPEG, and its JSON with its id in the tar."""
    for source, number in images:
        record = msgspec.json.decode((out / f"{source.path}.json").read_bytes())
        size, stored = (record["image"]["height"], record["image"]["width"]), source.read()
        frame = fit(stored, size, source.name) if source.is_file else as_stored(stored, size)
        member = to_member(stored, frame, source.name)
        file_name = f"sa_{number}{image.member_suffix(member)}"
        record["image"] |= {"image_id": number, "file_name": file_name}
        for i, mask in enumerate(record["annotations"]):
            mask["id"] = number * annotation.MAX_MASKS + i
        yield file_name, member
        yield f"sa_{number}.json", annotation.encode(record)
