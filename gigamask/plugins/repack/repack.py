"""Repacking of shards with smaller images: the long side has at most `size` pixels.

Smaller images decode faster, and decoding is nine tenths of a sample's cost. Images are resized by
the `ImageTransform` of training, and masks are resampled as run lengths to its grid at the new
size; masks left without a pixel are dropped. Images that are already small enough are copied byte
for byte with their json. Each tar is written, read back and compared before it gets its name;
`repack/NAME.json` records its source and settings, so that a repeated command only writes what is
missing.
"""

import contextlib
import glob
import os
import zlib
from codecs import BOM_UTF8
from collections.abc import Container, Iterator
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import islice
from os.path import splitext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
from jaxtyping import Int64

from gigamask import files
from gigamask.data import annotation, image, storage, tar, worker_pool
from gigamask.data.image import member_suffix
from gigamask.data.image_folder import check_for_tars
from gigamask.data.index import find_tars
from gigamask.data.index_format import is_index, read_manifest
from gigamask.data.shard_index import ShardIndex, index_tar, stat_shard
from gigamask.data.shards import ShardReader
from gigamask.data.storage import Paths, path_list
from gigamask.errors import CorruptSampleError, GigamaskError, check_range
from gigamask.files import lock_folder
from gigamask.masks.rle import RLEMasks
from gigamask.pixels import to_rgb
from gigamask.records import SkippedSample
from gigamask.serialization import read_json

if TYPE_CHECKING:
    from gigamask.masks.transforms import ImageTransform

VERSION = 1
"""Incremented when the same source and settings would give different pixels or masks."""
RECORDS = "repack"
MIN_SIZE = 32
DECIMALS = 2
HEAD_BYTES, CHUNK_BYTES = 2**16, 2**20


class RepackConfig(msgspec.Struct, frozen=True):
    """Long side of the images in pixels, and JPEG quality."""

    size: int
    quality: int = 90
    version: int = VERSION


class SourceTar(msgspec.Struct, frozen=True):
    """Identity of a source tar: length, version, and the checksum of its beginning."""

    bytes: int
    version: str
    head_crc32: int


class RepackedTar(msgspec.Struct, frozen=True):
    """Record of one repacked tar: source and result as on disk, and counts."""

    config: RepackConfig = msgspec.field(name="settings")
    source: SourceTar
    bytes: int
    mtime_ns: int
    crc32: int
    images: int
    copied: int
    masks: int
    dropped_masks: int = msgspec.field(name="vanished")
    other_files: int = msgspec.field(name="others")
    skipped: list[SkippedSample] = msgspec.field(name="rejected")
    broken: str = ""


@dataclass(frozen=True)
class RepackedImage:
    """One image at its new size, or `copied` unchanged; `area` is the sum over its masks."""

    stem: str
    jpg: bytes
    json: bytes | None
    copied: bool
    masks: int = 0
    dropped_masks: int = 0
    area: int = 0

    @property
    def file_name(self) -> str:
        """Name of the image in the tar."""
        return f"{self.stem}{member_suffix(self.jpg)}"


@dataclass
class RepackCounts:
    """Counts of a tar being written; `written` has image, its and its json's CRC-32, and area."""

    written: list[tuple[str, int, int | None, int]] = field(default_factory=list)
    copied: int = 0
    masks: int = 0
    dropped_masks: int = 0
    skipped: list[SkippedSample] = field(default_factory=list)

    def add(self, image: RepackedImage) -> None:
        """Add one image."""
        self.written.append(
            (
                image.file_name,
                zlib.crc32(image.jpg),
                None if image.json is None else zlib.crc32(image.json),
                image.area,
            )
        )
        self.copied += image.copied
        self.masks += image.masks
        self.dropped_masks += image.dropped_masks


class Pixels(msgspec.Struct):
    """The fields of an annotation that are in pixels and do not follow from its mask."""

    point_coords: list[tuple[float, float]] = []
    crop_box: tuple[float, float, float, float] | None = None


def repack(
    paths: Paths,
    out: Path,
    config: RepackConfig,
    workers: worker_pool.Workers = 1,
    progress: worker_pool.Progress | None = None,
) -> dict[str, Any]:
    """Write tars with smaller images.

    Tars in `out` that were made from the same source are kept, with other settings refused. Of a
    broken tar, the part that an index among `paths` holds (`--salvage`) is repacked.

    Args:
        paths: Tars, folders of tars, globs and indexes.
        out: The folder for the new tars.
        config: Long side and JPEG quality.
        workers: Number of processes, each on one tar at a time; or a part of a command.
        progress: Called as `progress(done, total)` after each tar.

    Returns:
        Counts, the images left out, the broken tars, and under `failed` the reasons of unusable
        tars.

    Raises:
        GigamaskError: The settings are invalid, or `out` cannot be used.
    """
    check_range("--size", config.size, MIN_SIZE)
    if not 1 <= config.quality <= 100:
        raise GigamaskError(
            f"--quality must be a JPEG quality of 1 to 100 (got --quality {config.quality})"
        )
    if is_index(out):
        raise GigamaskError(f"--out {out}: is an index; give a folder for the tars")
    check_for_tars(out)
    tars = find_tars(paths)
    _check_names(tars, out, config)
    manifests = [read_manifest(Path(path)) for path in path_list(paths) if is_index(path)]
    salvaged = {
        part.tar.path for manifest in manifests for part in manifest.parts if part.left_out.broken
    }
    repack_one = partial(repack_tar, out=out, config=config, salvaged=salvaged)
    kind = tuple[RepackedTar | str, bool]
    import torch  # noqa: F401  (workers of a process that has it use one of its threads each)

    with lock_folder(out, RECORDS, worker_pool.is_part(workers)):
        results = worker_pool.parallel_map(repack_one, tars, workers, progress, kind)
    done = [result for result, _ in results if isinstance(result, RepackedTar)]
    return {
        "tars": len(done),
        "existing": sum(existing for _, existing in results),
        **{
            name: sum(getattr(record, name) for record in done)
            for name in ("images", "copied", "masks", "dropped_masks", "other_files", "bytes")
        },
        "source_bytes": sum(record.source.bytes for record in done),
        "skipped": [asdict(sample) for record in done for sample in record.skipped],
        "broken_tars": [record.broken for record in done if record.broken],
        "failed": [reason for reason, _ in results if isinstance(reason, str)],
    }


def repack_tar(
    path: str, out: Path, config: RepackConfig, salvaged: Container[str] = ()
) -> tuple[RepackedTar | str, bool]:
    """Repack one tar.

    Args:
        path: The source.
        out: The folder for the new tar.
        config: Long side and JPEG quality.
        salvaged: Broken tars whose intact beginning is used.

    Returns:
        The record, or the reason why the tar is unusable; and whether the new tar already existed.

    Raises:
        GigamaskError: The new tar cannot be written, or reads back differently.
    """
    target, salvage = out / storage.basename(path), path in salvaged
    try:
        source = _source(path)
        previous = _read_record(target)
        if (
            previous is not None  # of the same settings: `_check_names` refuses others
            and previous.source == source
            and (salvage or not previous.broken)
            and _is_unchanged(target, previous)
        ):
            return previous, True
        part = index_tar(path, salvage)
    except GigamaskError as fault:
        return str(fault), False
    work, counts = out / RECORDS / f".{target.name}", RepackCounts()
    try:
        # A killed process may have left files.
        for stale in work.parent.glob(f".{glob.escape(work.name)}.*"):
            stale.unlink()
        tar.write(work, _members(path, part, config, counts))
        if len(counts.skipped) > len(counts.written):
            reason = (
                f"{path}: {len(counts.skipped)} of its {len(part.images['name'])} images are"
                " unusable, but at most half may be; fetch it again or leave it out"
                f" (the first: {counts.skipped[0].reason})"
            )
            return reason, False
        crc32 = _verify(work, counts)
        status = work.stat()
        done = RepackedTar(
            config,
            source,
            status.st_size,
            status.st_mtime_ns,
            crc32,
            images=len(counts.written),
            copied=counts.copied,
            masks=counts.masks,
            dropped_masks=counts.dropped_masks,
            other_files=part.left_out.other_files + part.left_out.json_without_jpg,
            skipped=[*part.left_out.skipped, *counts.skipped],
            broken=part.left_out.broken,
        )
        # The record is written first: every tar of repack has one, so others are never replaced.
        files.write_bytes(_record_path(target), msgspec.json.encode(done))
        os.replace(work, target)
    except OSError as error:
        raise GigamaskError(
            f"{target}: cannot be written ({error.strerror}); free space on the disk and run the"
            " same command again"
        ) from error
    finally:
        work.unlink(missing_ok=True)
    return done, False


def repack_image(
    stem: str, jpg: bytes, raw: bytes | None, config: RepackConfig, name: str
) -> RepackedImage:
    """Resize one image and its json.

    Args:
        stem: Its file name without suffix.
        jpg: The bytes of the JPEG.
        raw: The bytes of the json, if there is one.
        config: Long side and JPEG quality.
        name: The image's name in error messages.

    Raises:
        CorruptSampleError: The jpg or the json is unusable.
    """
    from gigamask.masks.transforms import ImageTransform  # imports torch

    entry = None if raw is None else annotation.parse(raw, name)
    pixels = image.read_stored(jpg, name, entry.size if entry is not None else None)
    if max(pixels.shape[:2]) <= config.size or image.keeps_its_bytes(jpg):
        areas = [] if entry is None else entry.masks.areas().tolist()
        return RepackedImage(stem, jpg, raw, True, len(areas), area=sum(areas))
    transform = ImageTransform.resize_longest_side(pixels.shape[:2], config.size)
    resized = transform.apply_image(pixels).permute(1, 2, 0).numpy()
    jpg = image.encode_jpeg(to_rgb(resized), config.quality)
    if entry is None or raw is None:
        return RepackedImage(stem, jpg, None, False)
    height, width = transform.resized
    # The mask grid of training over the padded square, without the padding.
    masks = transform.apply_masks(entry.masks, transform.image_size).resample(
        np.arange(height), np.arange(width)
    )
    areas = masks.areas()
    visible = np.flatnonzero(areas)
    try:
        record = msgspec.json.decode(raw.removeprefix(BOM_UTF8))
        json = annotation.encode(_resize_record(record, masks[visible], visible, transform, name))
    except RecursionError as error:
        raise CorruptSampleError(f"{name}: its json is nested too deeply; leave it out") from error
    kept, area = len(visible), int(areas.sum())
    return RepackedImage(stem, jpg, json, False, kept, len(masks) - kept, area)


def _resize_record(
    record: dict[str, Any],
    masks: RLEMasks,
    visible: Int64[np.ndarray, "n"],
    transform: "ImageTransform",
    name: str,
) -> dict[str, Any]:
    """Return a json with the visible masks and all pixel fields resized; others are kept."""
    height, width = transform.resized
    entries = [record["annotations"][i] for i in visible]
    try:
        pixels = [msgspec.convert(entry, Pixels) for entry in entries]
    except msgspec.ValidationError as error:
        raise CorruptSampleError(
            f"{name}: its json's prompts are not in SA-1B's format ({error}); leave it out or"
            " correct it"
        ) from error
    points = np.array(
        [point for entry in pixels for point in entry.point_coords], np.float64
    ).reshape(-1, 2)
    points = iter(
        transform.points_to_input(points).clip(0, (width - 1, height - 1)).round(DECIMALS).tolist()
    )
    scale = np.array([width / transform.original[1], height / transform.original[0]] * 2)
    annotations = []
    for old, shape, coords in zip(entries, annotation.mask_fields([masks]), pixels, strict=True):
        new = old | shape
        if "point_coords" in old:
            new["point_coords"] = list(islice(points, len(coords.point_coords)))
        if coords.crop_box is not None:
            new["crop_box"] = (scale * coords.crop_box).round(DECIMALS).tolist()
        annotations.append(new)
    return record | {
        "image": record["image"] | {"width": width, "height": height},
        "annotations": annotations,
    }


def _members(
    path: str, part: ShardIndex, config: RepackConfig, counts: RepackCounts
) -> Iterator[tuple[str, bytes]]:
    """Yield the new tar's members, one image at a time, and add to the counts."""
    shards, columns, tar_name = ShardReader([path]), part.images, storage.basename(path)
    for row in range(len(columns["name"])):
        stem = os.fsdecode(columns["name"][row])
        name = f"{tar_name}:{stem}"
        jpg_at, jpg_bytes, json_at, json_bytes = (
            int(columns[key][row])
            for key in ("jpg_offset", "jpg_bytes", "json_offset", "json_bytes")
        )
        try:
            jpg = shards.read(0, jpg_at, jpg_bytes)
            repacked = repack_image(
                stem,
                jpg,
                None if json_at < 0 else shards.read(0, json_at, json_bytes),
                config,
                name,
            )
        except CorruptSampleError as bad:
            counts.skipped.append(SkippedSample(name, str(bad)))
            continue
        counts.add(repacked)
        yield repacked.file_name, repacked.jpg
        if repacked.json is not None:
            yield f"{stem}.json", repacked.json


def _verify(path: Path, counts: RepackCounts) -> int:
    """Read a tar back, compare it with what was written, and return its CRC-32."""
    try:
        problem = "" if _is_as_written(path, counts) else "other bytes"
    except GigamaskError as fault:
        problem = str(fault)
    if problem:
        raise GigamaskError(
            f"{path}: reads back differently than it was written; check disk and memory, and run"
            f" the same command again ({problem})"
        )
    return files.crc32(path)


def _is_as_written(path: Path, counts: RepackCounts) -> bool:
    """Return whether names, bytes and areas are as written; raise if a member is undecodable."""
    members, shards = tar.scan(path), ShardReader([str(path)])
    payloads = (
        shards.read(0, int(offset), int(size))
        for offset, size in zip(members.offsets, members.sizes, strict=True)
    )
    sound = members.names == [
        name
        for file_name, _, json, _ in counts.written
        for name in (file_name, f"{splitext(file_name)[0]}.json")[: 1 if json is None else 2]
    ]
    for file_name, jpg_crc32, json_crc32, area in counts.written if sound else ():
        jpg, size = next(payloads), None
        if json_crc32 is not None:
            raw = next(payloads)
            entry = annotation.parse(raw, file_name)
            size = entry.size
            sound &= zlib.crc32(raw) == json_crc32 and int(entry.masks.areas().sum()) == area
        image.read_stored(jpg, file_name, size, is_check=True)
        sound &= zlib.crc32(jpg) == jpg_crc32
    return sound


def _check_names(tars: list[str], out: Path, config: RepackConfig) -> None:
    """Check that no new tar would replace a source, another new tar, one of other settings, or a
    file not from repack."""
    targets: dict[str, str] = {}
    for path in tars:
        name = storage.basename(path)
        if name in targets:
            raise GigamaskError(
                f"{path}: {targets[name]} has the same name, but --out can hold one of them; repack"
                " them into separate folders"
            )
        targets[name] = path
        if not storage.is_remote(path) and Path(path).parent.resolve() == out.resolve():
            raise GigamaskError(
                f"--out {out}: holds the source {name}, which would be replaced; give another"
                " folder"
            )
        target = out / name
        previous = _read_record(target)
        is_other = previous.config != config if previous else not _record_path(target).exists()
        if is_other and target.exists():
            raise GigamaskError(
                f"{target}: exists and was not written by repack with this --size and --quality; "
                "give another --out or move it away"
            )


def _source(path: str) -> SourceTar:
    stored = stat_shard(path)
    head = ShardReader([path]).read(0, 0, min(stored.bytes, HEAD_BYTES))
    return SourceTar(stored.bytes, stored.version, zlib.crc32(head))


def _is_unchanged(target: Path, done: RepackedTar) -> bool:
    """Return whether a tar is as written; it is read if its time differs, as after a copy."""
    with contextlib.suppress(FileNotFoundError):
        status = target.stat()
        return status.st_size == done.bytes and (
            status.st_mtime_ns == done.mtime_ns or files.crc32(target) == done.crc32
        )
    return False


def _record_path(target: Path) -> Path:
    return target.parent / RECORDS / f"{target.name}.json"


def _read_record(target: Path) -> RepackedTar | None:
    # A tar without a readable record is repacked again.
    with contextlib.suppress(GigamaskError):
        return read_json(_record_path(target), RepackedTar)
    return None
