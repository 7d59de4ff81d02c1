"""One tar's piece of a mask store: an index and a tar's number enter, the files of its masks leave; and what is wrong with such files.

A piece is `NAME.bits.npy` (a row for each mask, one bit for each cell of the grid, column by column, padded to whole 64-bit words), `NAME.rows.npy`
(the row where each image's masks begin, images and masks in the index's order), and `NAME.json`, written last: the tar as it was, and a crc32 of
every `BLOCK_BYTES` of the other two. It depends on its tar alone, so pieces may be made in any order, anywhere, and kept.

Not here: reading masks for training, all pieces together (`data.mask_store`).
"""

import hashlib
import re
import shutil
import zlib
from collections.abc import Iterator
from itertools import zip_longest
from pathlib import Path
from tokenize import TokenError
from typing import NamedTuple

import msgspec
import numpy as np
from filelock import FileLock
from jaxtyping import Int64, UInt64

from gigamask.data import annotation, storage
from gigamask.data.index import Index
from gigamask.data.shard_index import read_payloads
from gigamask.data.storage import ByteRange
from gigamask.errors import CorruptSampleError, GigamaskError
from gigamask.masks.resample import offsets_of
from gigamask.masks.rle import RLEMasks
from gigamask.masks.transforms import ImageTransform

SCHEMA = 1
MANIFEST = "manifest.json"
BLOCK_BYTES = 2**25


class MaskStoreManifest(msgspec.Struct, frozen=True):
    """What all pieces of a store have in common."""

    gigamask_masks: int
    grid: int
    side: int
    mirrored: bool


class MaskShard(msgspec.Struct, frozen=True):
    """The masks of one tar: the tar as it was, and the checksums of the two arrays' files."""

    tar: dict[str, str | int]
    rows: int
    bits_crc32: list[int]
    rows_crc32: list[int]


class MaskShardJob(NamedTuple):
    """One tar of an index, and the store its masks belong to; may be sent to another process."""

    index: str
    shard: int
    folder: str


def build_piece(job: MaskShardJob) -> None:
    """Cuts the masks of one tar, unless that is done already; its files appear when they are complete, the json last."""
    index, folder = Index.open(job.index), Path(job.folder)
    manifest, tar = read_manifest(folder), describe_tars(index)[job.shard]
    lock = folder / f".{key_of(tar)}.lock"
    try:
        with FileLock(lock):  # waits while another process is at the same tar
            if list(find_faults(folder, manifest, tar, False)):
                _cut(index, job.shard, folder, manifest, tar)
            lock.unlink(
                missing_ok=True
            )  # before the release: a process that waits makes a new file
    except OSError as error:
        raise GigamaskError(
            f"{folder}: the masks cannot be written ({error.strerror}); make room or give another folder, then run it again"
        ) from error


def _cut(
    index: Index, shard: int, folder: Path, manifest: MaskStoreManifest, tar: dict[str, str | int]
) -> None:
    """Writes one tar's piece."""
    starts, first = row_starts(index, shard, manifest), int(first_rows(index)[shard])
    work = folder / f".{key_of(tar)}"
    shutil.rmtree(work, ignore_errors=True)  # of a process that was killed
    work.mkdir()
    with open(
        work / "bits.npy", "wb"
    ) as file:  # into a mapped file a full disk would end the process without a word
        shape = (int(starts[-1]), words_of(manifest.grid))
        np.lib.format.write_array_header_1_0(
            file, {"descr": "<u8", "fortran_order": False, "shape": shape}
        )
        annotated, path = np.flatnonzero(np.diff(starts)), index.manifest.parts[shard].tar.path
        offsets, sizes = (
            index.images[key][first + annotated].tolist() for key in ("json_offset", "json_bytes")
        )
        for at, raw in zip(
            annotated.tolist(),
            read_payloads([ByteRange(path, *place) for place in zip(offsets, sizes, strict=True)]),
            strict=True,
        ):
            if isinstance(raw, CorruptSampleError):
                raise raw
            name, count = index.entry_name(first + at), int(index.images["masks"][first + at])
            entry = annotation.parse(raw, name)
            if len(entry.masks) != count:
                raise GigamaskError(
                    f"{name}: holds {len(entry.masks)} masks, its index says {count}; the tar has changed, build the index again"
                )
            frames = [ImageTransform.whole(entry.size, manifest.side)]
            if starts[at + 1] - starts[at] > count:
                frames.append(ImageTransform.whole(entry.size, manifest.side, flip=True))
            for frame in frames:
                file.write(pack(frame.masks(entry.masks, manifest.grid)).astype("<u8").tobytes())
    np.save(work / "rows.npy", starts)
    bits_path, rows_path, json_path = piece_paths(folder, key_of(tar))
    (work / "bits.npy").rename(bits_path)
    (work / "rows.npy").rename(rows_path)
    storage.write(
        json_path,
        msgspec.json.encode(
            MaskShard(tar, int(starts[-1]), checksums(bits_path), checksums(rows_path))
        ),
    )
    work.rmdir()


def verify_piece(job: MaskShardJob) -> list[str]:
    """Returns what is wrong with one tar's piece, every byte of it read."""
    tar = describe_tars(Index.open(job.index))[job.shard]
    return list(find_faults(Path(job.folder), read_manifest(Path(job.folder)), tar, True))


def find_faults(
    folder: Path, manifest: MaskStoreManifest, tar: dict[str, str | int], thorough: bool
) -> Iterator[str]:
    """Yields what is wrong with the piece of one tar, missing included; `thorough` reads every byte of it."""
    bits_path, rows_path, json_path = piece_paths(folder, key_of(tar))
    again = f"delete {json_path} and run 'gigamask masks' again"
    try:
        piece = msgspec.json.decode(json_path.read_bytes(), type=MaskShard)
        if thorough:
            damage = [*_damage(bits_path, piece.bits_crc32), *_damage(rows_path, piece.rows_crc32)]
            yield from (f"{each}; {again}" for each in damage)
            if damage:
                return
        bits, rows = np.load(bits_path, mmap_mode="r"), np.load(rows_path, mmap_mode="r")
    except FileNotFoundError:
        yield f"{folder}: lacks the masks of {tar['name']} as it is now ({tar['bytes']} bytes); run 'gigamask masks' for it"
    except (OSError, ValueError, EOFError, SyntaxError, TokenError) as error:
        yield f"{json_path.with_suffix('')}: a file of this piece is cut short or not what it was ({error}); {again}"
    else:
        shape = (piece.rows, words_of(manifest.grid))
        if piece.tar != tar:
            yield f"{json_path}: describes another tar than {tar['name']}; {again}"
        elif (bits.dtype, bits.shape) != (np.dtype("<u8"), shape):
            yield f"{bits_path}: holds {bits.shape} words of {bits.dtype}, wanted are {shape} of uint64; {again}"
        elif (rows.dtype, rows.shape) != (np.dtype("<i8"), (int(tar["images"]) + 1,)) or rows[
            -1
        ] != piece.rows:
            yield f"{rows_path}: does not hold the rows of {tar['images']} images with {piece.rows} masks; {again}"


def _damage(path: Path, noted: list[int]) -> Iterator[str]:
    """Yields which blocks of a file are not as they were written."""
    for block, (now, then) in enumerate(zip_longest(checksums(path), noted)):
        if now != then:
            yield f"{path}: bytes {block * BLOCK_BYTES} to {(block + 1) * BLOCK_BYTES} are not those written (crc32)"


def describe_tars(index: Index) -> list[dict[str, str | int]]:
    """Returns by what a tar is known again wherever it lies: name, size and version as the index has them, and how much it holds."""
    return [
        {
            "name": storage.basename(part.tar.path),
            "bytes": part.tar.bytes,
            "version": part.tar.version,
            "images": part.images,
            "masks": part.masks,
        }
        for part in index.manifest.parts
    ]


def first_rows(index: Index) -> Int64[np.ndarray, "t1"]:
    """Returns the row of the index where each tar's images begin, and the number of images."""
    return np.cumsum([0, *(part.images for part in index.manifest.parts)])


def key_of(tar: dict[str, str | int]) -> str:
    """Returns the name of a tar's piece."""
    digest = hashlib.blake2b(msgspec.json.encode(tar, order="sorted"), digest_size=6).hexdigest()
    return f"{re.sub(r'[^A-Za-z0-9_-]', '_', str(tar['name']).removesuffix('.tar'))}-{digest}"


def piece_paths(folder: Path, key: str) -> tuple[Path, Path, Path]:
    """Returns where a piece's bits, rows and description lie."""
    return folder / f"{key}.bits.npy", folder / f"{key}.rows.npy", folder / f"{key}.json"


def row_starts(index: Index, shard: int, manifest: MaskStoreManifest) -> Int64[np.ndarray, "i1"]:
    """Returns the row of the piece where the masks of each of a tar's images begin, and the number of rows."""
    first, last = first_rows(index)[shard : shard + 2]
    sizes = zip(
        index.images["height"][first:last].tolist(),
        index.images["width"][first:last].tolist(),
        strict=True,
    )
    copies = [
        1 + (manifest.mirrored and has_own_mirror(size, manifest.side, manifest.grid))
        for size in sizes
    ]
    return np.concatenate(
        [np.zeros(1, "<i8"), np.cumsum(index.images["masks"][first:last] * np.array(copies, "<i8"))]
    )


def has_own_mirror(size: tuple[int, int], side: int, grid: int) -> bool:
    """Says whether an image's mirror image, which ends where the image ends, lies between the cells of the grid: then its masks are others."""
    return ImageTransform.whole(size, side).resized[1] * grid % side != 0


def mirror(masks: RLEMasks, columns: int) -> RLEMasks:
    """Returns masks whose first `columns` columns are mirrored; the others, beside the image, are background."""
    grid = masks.size[0]
    return masks.resample(
        np.arange(grid),
        np.concatenate([np.full(grid - columns, -1), np.arange(columns)]),
        flip=True,
    )


def pack(masks: RLEMasks) -> UInt64[np.ndarray, "n w"]:
    """Returns a bit for each cell, column by column, the lowest bit of a word first."""
    cells, words = masks.size[0] * masks.size[1], words_of(masks.size[0])
    packed = np.zeros((len(masks), 8 * words), np.uint8)
    packed[:, : -(-cells // 8)] = np.packbits(
        masks.to_dense().transpose(0, 2, 1).reshape(len(masks), cells), axis=1, bitorder="little"
    )
    return packed.view("<u8").astype(np.uint64)


def unpack(words: UInt64[np.ndarray, "n w"], grid: int) -> RLEMasks:
    """Returns packed masks as runs: where neighbouring bits differ, found by words, of which few hold such a place."""
    changes = words ^ (words << 1)
    changes[:, 1:] ^= words[:, :-1] >> 63
    mask, word = np.nonzero(changes)
    place, bit = np.nonzero(
        np.unpackbits(
            changes[mask, word].astype("<u8").view(np.uint8).reshape(-1, 8),
            axis=1,
            bitorder="little",
        )
    )
    bounds = word[place] * 64 + bit
    # Behind the last cell the padding begins, which is background.
    real = bounds < grid * grid
    counts = np.bincount(mask[place][real], minlength=len(words))
    return RLEMasks((grid, grid), bounds[real].astype(np.int32), offsets_of(counts))


def words_of(grid: int) -> int:
    """Returns how many 64-bit words a mask takes."""
    return -(-grid * grid // 64)


def checksums(path: Path) -> list[int]:
    """Returns the crc32 of each block of a file."""
    with open(path, "rb") as file:
        return [zlib.crc32(block) for block in iter(lambda: file.read(BLOCK_BYTES), b"")]


def read_manifest(folder: Path) -> MaskStoreManifest:
    """Returns a store's manifest; raises Fault where there is none of this schema."""
    try:
        manifest = msgspec.json.decode((folder / MANIFEST).read_bytes(), type=MaskStoreManifest)
    except (OSError, msgspec.DecodeError) as error:
        raise GigamaskError(
            f"{folder}: is no mask store ({error}); build one with 'gigamask masks'"
        ) from error
    if manifest.gigamask_masks != SCHEMA:
        raise GigamaskError(
            f"{folder}: the mask store has schema {manifest.gigamask_masks}, this version reads {SCHEMA}; build it again with 'gigamask masks'"
        )
    return manifest
