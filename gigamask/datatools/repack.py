"""Shards at a smaller size: tars enter, tars of the same names leave whose images have at most `size` pixels on the long side, masks with them.

Smaller images are decoded faster, and that is nine tenths of what a sample costs. Images go through the same `ImageTransform` as in training, masks through
its grid at the new size, in the run domain; those that no pixel of it hits are dropped. Images that are small already are copied byte for byte,
their json too. Each tar is written beside its place, read back, compared, and only then named; beside the tars, `repack/NAME.json` says of each what
it was made of and how, so that the same command does only what is left to do.

Not here: reading tars of unknown soundness (`data.part`).
"""

import contextlib
import glob
import os
import zlib
from collections.abc import Container, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from jaxtyping import Int64

from gigamask.data import annotation, image, storage, tar, worker_pool
from gigamask.data import annotation_json as records
from gigamask.data.index import Paths, as_list, find_tars
from gigamask.data.index_format import is_index, read_manifest
from gigamask.data.shard_index import ShardIndex, index_tar, stat_shard
from gigamask.data.shards import ShardReader
from gigamask.errors import CorruptSampleError, GigamaskError
from gigamask.masks.rle import RLEMasks
from gigamask.masks.transforms import ImageTransform
from gigamask.types import SkippedSample

VERSION = 1
"""Of what a tar's bytes follow from, beside its source and the settings: counted up when the same source would give other pixels or masks."""
LEDGER = "repack"
MIN_SIZE = 32
DECIMALS = 2
HEAD_BYTES, CHUNK_BYTES = 2**16, 2**20


class RepackConfig(msgspec.Struct, frozen=True):
    """What every image is made to be: the long side in pixels and the JPEG's quality."""

    size: int
    quality: int = 90
    version: int = VERSION


class SourceTar(msgspec.Struct, frozen=True):
    """A tar as it was: length, version, and the checksum of its beginning, which tells apart what these do not."""

    bytes: int
    version: str
    head_crc32: int


class RepackedTar(msgspec.Struct, frozen=True):
    """What became of one tar: source and result as they are on disk, and what was counted on the way."""

    settings: RepackConfig
    source: SourceTar
    bytes: int
    mtime_ns: int
    crc32: int
    images: int
    copied: int
    masks: int
    vanished: int
    others: int
    rejected: list[SkippedSample]
    broken: str = ""


@dataclass(frozen=True)
class RepackedImage:
    """One image at its new size, or `copied` as it was; `area` is that of all its masks."""

    stem: str
    jpg: bytes
    json: bytes | None
    copied: bool
    masks: int = 0
    vanished: int = 0
    area: int = 0


@dataclass
class RepackCounts:
    """What is known of a tar while it is written: of each image stem, checksums of jpg and json, and total area of its masks; and counts."""

    written: list[tuple[str, int, int | None, int]] = field(default_factory=list)
    copied: int = 0
    masks: int = 0
    vanished: int = 0
    rejected: list[SkippedSample] = field(default_factory=list)

    def add(self, small: RepackedImage) -> None:
        """Counts one image."""
        self.written.append(
            (
                small.stem,
                zlib.crc32(small.jpg),
                None if small.json is None else zlib.crc32(small.json),
                small.area,
            )
        )
        self.copied += small.copied
        self.masks += small.masks
        self.vanished += small.vanished


class Pixels(msgspec.Struct):
    """The fields of an annotation that are in pixels and do not follow from its mask."""

    point_coords: list[tuple[float, float]] = []
    crop_box: tuple[float, float, float, float] | None = None


def repack(
    paths: Paths,
    out: Path,
    settings: RepackConfig,
    workers: int = 1,
    progress: worker_pool.Progress | None = None,
) -> dict[str, Any]:
    """Writes every tar anew into the folder `out` and returns what was done; a tar that is unusable is named under `failed` and left out.

    Tars that `out` holds already, made of the same source in the same way, are kept as they are. Of a tar that breaks off, and that an index among
    `paths` holds as far as it goes (`--salvage`), as much is taken; it is named under `broken_tars`.
    """
    if settings.size < MIN_SIZE:
        raise GigamaskError(
            f"--size {settings.size}: images are repacked to {MIN_SIZE} pixels on the long side at least; give a larger size"
        )
    if not 1 <= settings.quality <= 100:
        raise GigamaskError(
            f"--quality {settings.quality}: a JPEG's quality is 1 to 100; give such"
        )
    if is_index(out):
        raise GigamaskError(f"--out {out}: is an index; give a folder for the tars")
    found = find_tars(paths)
    _check_names(found, out)
    try:
        (out / LEDGER).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise GigamaskError(
            f"--out {out}: cannot be made ({error.strerror}); give a folder that can"
        ) from error
    manifests = [read_manifest(Path(path)) for path in as_list(paths) if is_index(path)]
    salvaged = {
        part.tar.path for manifest in manifests for part in manifest.parts if part.left_out.broken
    }
    results = worker_pool.parallel_map(
        partial(repack_tar, out=out, settings=settings, salvaged=salvaged), found, workers, progress
    )
    done = [each for each, _ in results if isinstance(each, RepackedTar)]
    return {
        "tars": len(done),
        "kept": sum(kept for _, kept in results),
        **{
            name: sum(getattr(each, name) for each in done)
            for name in ("images", "copied", "masks", "vanished", "others", "bytes")
        },
        "source_bytes": sum(each.source.bytes for each in done),
        "left_out": [
            {"name": rejected.name, "reason": rejected.reason}
            for each in done
            for rejected in each.rejected
        ],
        "broken_tars": [each.broken for each in done if each.broken],
        "failed": [each for each, _ in results if isinstance(each, str)],
    }


def repack_tar(
    path: str, out: Path, settings: RepackConfig, salvaged: Container[str] = ()
) -> tuple[RepackedTar | str, bool]:
    """Repacks one tar and returns what was done, and whether it had been done before; for an unusable tar the reason instead."""
    target, salvage = out / storage.basename(path), path in salvaged
    try:
        source = _source(path)
        before = _read_done(target)
        if (
            before is not None
            and (before.settings, before.source) == (settings, source)
            and (salvage or not before.broken)
            and _is_whole(target, before)
        ):
            return before, True
        part = index_tar(path, salvage)
    except GigamaskError as fault:
        return str(fault), False
    work, tally = out / LEDGER / f".{target.name}", RepackCounts()
    try:
        for left in work.parent.glob(
            f".{glob.escape(work.name)}.*"
        ):  # by a process that was killed
            left.unlink()
        tar.write(work, _members(path, part, settings, tally))
        if len(tally.rejected) > len(tally.written):
            what = f"{len(tally.rejected)} of its {len(part.images['name'])} images are unusable, at most half may be"
            return (
                f"{path}: {what}; fetch it again or leave it out (the first: {tally.rejected[0].reason})",
                False,
            )
        crc32 = _verify(work, tally)
        status = work.stat()
        done = RepackedTar(
            settings,
            source,
            status.st_size,
            status.st_mtime_ns,
            crc32,
            images=len(tally.written),
            copied=tally.copied,
            masks=tally.masks,
            vanished=tally.vanished,
            others=part.left_out.other_files + part.left_out.json_without_jpg,
            rejected=[*part.left_out.rejected, *tally.rejected],
            broken=part.left_out.broken,
        )
        # Said first, done next: whatever lies under the tar's name has its line, so that repack never takes a stranger's tar for its own.
        storage.write(_ledger(target), msgspec.json.encode(done))
        os.replace(work, target)
    except OSError as error:
        raise GigamaskError(
            f"{target}: cannot be written ({error.strerror}); free space on the disk and run the same command again"
        ) from error
    finally:
        work.unlink(missing_ok=True)
    return done, False


def shrink(
    stem: str, jpg: bytes, raw: bytes | None, settings: RepackConfig, name: str
) -> RepackedImage:
    """Returns one image, and its json, at the new size; raises CorruptSampleError for what cannot be used."""
    entry = None if raw is None else annotation.parse(raw, name)
    pixels = image.decode(jpg, name, entry.size if entry is not None else None)
    if max(pixels.shape) <= settings.size:
        masks = 0 if entry is None else len(entry.masks)
        return RepackedImage(
            stem, jpg, raw, True, masks, area=0 if entry is None else int(entry.masks.areas().sum())
        )
    frame = ImageTransform.whole(pixels.shape[:2], settings.size)
    resized = frame.image(pixels).permute(1, 2, 0).numpy()
    jpg = image.encode_jpeg(resized, settings.quality)
    if entry is None or raw is None:
        return RepackedImage(stem, jpg, None, False)
    height, width = frame.resized
    # The grid over the square, as training has it, without the part beside the image.
    masks = frame.masks(entry.masks, frame.image_size).resample(np.arange(height), np.arange(width))
    areas = masks.areas()
    seen = np.flatnonzero(areas)
    told = _told(msgspec.json.decode(raw), masks[seen], seen, frame, name)
    return RepackedImage(
        stem, jpg, records.encode(told), False, len(seen), len(masks) - len(seen), int(areas.sum())
    )


def _told(
    told: dict[str, Any],
    masks: RLEMasks,
    seen: Int64[np.ndarray, "n"],
    frame: ImageTransform,
    name: str,
) -> dict[str, Any]:
    """Returns a json with the masks that are left, and everything in pixels, at the new size; what is not known stays as it is."""
    height, width = frame.resized
    kept = [told["annotations"][i] for i in seen]
    try:
        pixels = [msgspec.convert(each, Pixels) for each in kept]
    except msgspec.ValidationError as error:
        raise CorruptSampleError(
            f"{name}: its json's prompts are not as SA-1B's ({error}); leave it out or mend it"
        ) from error
    points = np.array(
        [point for each in pixels for point in each.point_coords], np.float64
    ).reshape(-1, 2)
    points = iter(
        frame.points_to_input(points).clip(0, (width - 1, height - 1)).round(DECIMALS).tolist()
    )
    scale = np.array([width / frame.original[1], height / frame.original[0]] * 2)
    annotations = []
    for old, shape, each in zip(kept, records.mask_fields(masks), pixels, strict=True):
        new = old | shape
        if "point_coords" in old:
            new["point_coords"] = list(islice(points, len(each.point_coords)))
        if each.crop_box is not None:
            new["crop_box"] = (scale * each.crop_box).round(DECIMALS).tolist()
        annotations.append(new)
    return told | {
        "image": told["image"] | {"width": width, "height": height},
        "annotations": annotations,
    }


def _members(
    path: str, part: ShardIndex, settings: RepackConfig, tally: RepackCounts
) -> Iterator[tuple[str, bytes]]:
    """Yields what the new tar holds, one image at a time."""
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
            small = shrink(
                stem,
                jpg,
                None if json_at < 0 else shards.read(0, json_at, json_bytes),
                settings,
                name,
            )
        except CorruptSampleError as bad:
            tally.rejected.append(SkippedSample(name, str(bad)))
            continue
        tally.add(small)
        yield f"{stem}.jpg", small.jpg
        if small.json is not None:
            yield f"{stem}.json", small.json


def _verify(path: Path, tally: RepackCounts) -> int:
    """Reads a tar back, member by member, against what was written, and returns its checksum."""
    try:
        what = "" if _is_sound(path, tally) else "other bytes"
    except GigamaskError as fault:
        what = str(fault)
    if what:
        raise GigamaskError(
            f"{path}: reads back differently than it was written; check disk and memory, and run the same command again ({what})"
        )
    return _crc32(path)


def _is_sound(path: Path, tally: RepackCounts) -> bool:
    """Says whether names, bytes and areas are those that were written; raises Fault for a member that cannot be decoded."""
    members, shards = tar.scan(path), ShardReader([str(path)])
    payloads = (
        shards.read(0, int(offset), int(size))
        for offset, size in zip(members.offsets, members.sizes, strict=True)
    )
    sound = members.names == [
        f"{stem}.{end}"
        for stem, _, json, _ in tally.written
        for end in ("jpg", "json")[: 1 if json is None else 2]
    ]
    for stem, jpg_crc32, json_crc32, area in tally.written if sound else ():
        jpg, size = next(payloads), None
        if json_crc32 is not None:
            raw = next(payloads)
            entry = annotation.parse(raw, stem)
            size = entry.size
            sound &= zlib.crc32(raw) == json_crc32 and int(entry.masks.areas().sum()) == area
        image.decode(jpg, stem, size)
        sound &= zlib.crc32(jpg) == jpg_crc32
    return sound


def _check_names(found: list[str], out: Path) -> None:
    """Raises Fault where a tar would be written over a source, over another, or over what repack did not write."""
    targets: dict[str, str] = {}
    for path in found:
        name = storage.basename(path)
        if name in targets:
            raise GigamaskError(
                f"{path}: {targets[name]} has the same name, and --out holds one of each; repack them into folders of their own"
            )
        targets[name] = path
        if not storage.is_remote(path) and Path(path).parent.resolve() == out.resolve():
            raise GigamaskError(
                f"--out {out}: is where {name} itself lies, which would be replaced; give another folder"
            )
        if (out / name).exists() and not _ledger(out / name).exists():
            raise GigamaskError(
                f"{out / name}: is there, and repack did not write it; give another --out or move it away"
            )


def _source(path: str) -> SourceTar:
    stored = stat_shard(path)
    head = ShardReader([path]).read(0, 0, min(stored.bytes, HEAD_BYTES))
    return SourceTar(stored.bytes, stored.version, zlib.crc32(head))


def _is_whole(target: Path, done: RepackedTar) -> bool:
    """Says whether a tar is still what was written; one that was copied or moved has another time, then its bytes are read."""
    with contextlib.suppress(FileNotFoundError):
        status = target.stat()
        return status.st_size == done.bytes and (
            status.st_mtime_ns == done.mtime_ns or _crc32(target) == done.crc32
        )
    return False


def _crc32(path: Path) -> int:
    crc32 = 0
    with open(path, "rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            crc32 = zlib.crc32(chunk, crc32)
    return crc32


def _ledger(target: Path) -> Path:
    return target.parent / LEDGER / f"{target.name}.json"


def _read_done(target: Path) -> RepackedTar | None:
    with contextlib.suppress(
        FileNotFoundError, msgspec.DecodeError, UnicodeDecodeError
    ):  # what cannot be read is done anew
        return msgspec.json.decode(_ledger(target).read_bytes(), type=RepackedTar)
    return None
