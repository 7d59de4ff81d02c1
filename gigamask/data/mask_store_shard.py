"""The files of a mask store that hold the masks of one tar: writing, reading and checking them.

A mask shard is three files: `NAME.bits.npy` (a row per mask, a bit per cell of the grid, column by
column, padded to whole 64-bit words), `NAME.rows.npy` (the row where each image's masks begin,
images and masks in the index's order), and `NAME.json`, written last: the tar's description. All
have checksums (`data.checked_files`). It depends on its tar alone, so mask shards may be built in
any order and on any machine.
"""

import hashlib
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
from filelock import FileLock
from jaxtyping import Int64, UInt64

from gigamask import files
from gigamask.data import annotation, storage
from gigamask.data.checked_files import CheckedArray, encode_json, read_json, write_array
from gigamask.data.index import Index
from gigamask.data.index_format import is_index
from gigamask.data.shard_index import read_payloads
from gigamask.data.storage import ByteRange
from gigamask.errors import CorruptSampleError, GigamaskError
from gigamask.masks.resample import offsets_of
from gigamask.masks.rle import RLEMasks
from gigamask.masks.transforms import ImageTransform

SCHEMA = 2
MANIFEST = "manifest.json"
REBUILD = "build it again with 'gigamask masks'"


class MaskStoreManifest(msgspec.Struct, frozen=True):
    """Sizes of a store's mask shards; `mirrored`: whether they hold flipped masks.

    `mask_size` is the side of the grid in cells, `image_size` the side of the model's input square.
    """

    gigamask_masks: int
    mask_size: int = msgspec.field(name="grid")
    image_size: int = msgspec.field(name="side")
    mirrored: bool


class MaskShard(msgspec.Struct, frozen=True):
    """Description of one tar, and the number of its masks."""

    tar: dict[str, str | int]
    rows: int


def build_shard(index_folder: Path, folder: Path, shard: int) -> None:
    """Write the masks of one tar unless they exist; files appear once complete, the json last.

    Args:
        index_folder: Folder of the index.
        folder: Folder of the store.
        shard: Number of the tar in the index.
    """
    index = Index.open(index_folder)
    manifest, tar = read_manifest(folder), describe_tars(index)[shard]
    lock, work = (folder / f".{shard_key(tar)}{end}" for end in (".lock", ""))
    try:
        with FileLock(lock):  # waits while another process writes the same tar's masks
            try:
                if not is_complete(folder, manifest, tar):
                    _write_shard(index, shard, folder, work)
            finally:
                shutil.rmtree(work, ignore_errors=True)
                # Unlinked before the release: a waiting process creates a new file.
                lock.unlink(missing_ok=True)
    except OSError as error:
        raise GigamaskError(
            f"{folder}: the masks cannot be written ({error.strerror}); make room or choose "
            "another folder, then run the command again"
        ) from error


def _write_shard(index: Index, shard: int, folder: Path, work: Path) -> None:
    manifest, tar = read_manifest(folder), describe_tars(index)[shard]
    starts = row_offsets(index, shard, manifest)
    shutil.rmtree(work, ignore_errors=True)  # left by a killed process
    work.mkdir()
    shape = (int(starts[-1]), words_per_mask(manifest.mask_size))
    masks = _packed_masks(index, shard, starts, manifest)
    write_array(work / "bits.npy", "<u8", shape, masks)
    write_array(work / "rows.npy", "<i8", starts.shape, [starts])
    bits_path, rows_path, json_path = shard_files(folder, shard_key(tar))
    (work / "bits.npy").rename(bits_path)
    (work / "rows.npy").rename(rows_path)
    files.write_bytes(json_path, encode_json(MaskShard(tar, int(starts[-1]))))


def _packed_masks(
    index: Index, shard: int, starts: Int64[np.ndarray, "i1"], manifest: MaskStoreManifest
) -> Iterator[UInt64[np.ndarray, "n w"]]:
    """Yield the masks of each image of a tar, then the flipped ones if they are stored too."""
    first, path = int(tar_offsets(index)[shard]), index.manifest.parts[shard].tar.path
    annotated = np.flatnonzero(np.diff(starts))
    offsets, sizes = (
        index.images[key][first + annotated].tolist() for key in ("json_offset", "json_bytes")
    )
    for image, raw in zip(
        annotated.tolist(),
        read_payloads([ByteRange(path, *span) for span in zip(offsets, sizes, strict=True)]),
        strict=True,
    ):
        if isinstance(raw, CorruptSampleError):
            raise raw
        row = first + image
        name, count = index.entry_name(row), int(index.images["masks"][row])
        entry = annotation.parse(raw, name)
        if len(entry.masks) != count:
            raise GigamaskError(
                f"{name}: its json has {len(entry.masks)} masks, but the index says {count}: "
                "the tar has changed; build the index again"
            )
        flips = (False, True) if starts[image + 1] - starts[image] > count else (False,)
        for flip in flips:
            transform = ImageTransform.resize_longest_side(
                entry.size, manifest.image_size, flip=flip
            )
            yield pack(transform.apply_masks(entry.masks, manifest.mask_size))


def verify_shard(index_folder: Path, folder: Path, shard: int) -> list[str]:
    """Read every byte of one mask shard and return its problems.

    Args:
        index_folder: Folder of the index.
        folder: Folder of the store.
        shard: Number of the tar in the index.
    """
    tar = describe_tars(Index.open(index_folder))[shard]
    problems = []
    try:
        arrays = open_shard(folder, read_manifest(folder), tar)
    except GigamaskError as error:
        return [str(error)]
    for array in arrays:
        try:
            array.verify()
        except GigamaskError as error:
            problems.append(str(error))
    return problems


def is_complete(folder: Path, manifest: MaskStoreManifest, tar: dict[str, str | int]) -> bool:
    """Return whether a mask shard can be opened.

    Args:
        folder: Folder of the store.
        manifest: Manifest of the store.
        tar: Description of the tar, from `describe_tars`.
    """
    try:
        open_shard(folder, manifest, tar)
    except GigamaskError:
        return False
    return True


def open_shard(
    folder: Path, manifest: MaskStoreManifest, tar: dict[str, str | int]
) -> tuple[CheckedArray, CheckedArray]:
    """Memory-map the bits and rows of one mask shard.

    Args:
        folder: Folder of the store.
        manifest: Manifest of the store.
        tar: Description of the tar, from `describe_tars`.

    Raises:
        GigamaskError: It is missing or damaged.
    """
    bits_path, rows_path, json_path = shard_files(folder, shard_key(tar))
    if not json_path.exists():
        raise GigamaskError(
            f"{folder}: lacks the masks of {tar['name']} in its current version ({tar['bytes']} "
            "bytes); run 'gigamask masks' for it"
        )
    remedy = f"delete {json_path} and run 'gigamask masks' again"
    shard = read_json(json_path, MaskShard, remedy)
    if shard.tar != tar:
        raise GigamaskError(f"{json_path}: describes another tar than {tar['name']}; {remedy}")
    shape = (shard.rows, words_per_mask(manifest.mask_size))
    return (
        CheckedArray(bits_path, "<u8", shape, remedy),
        CheckedArray(rows_path, "<i8", (int(tar["images"]) + 1,), remedy),
    )


def describe_tars(index: Index) -> list[dict[str, str | int]]:
    """Describe the tars of an index: name, size, version, and number of images and masks.

    Paths are left out, so that a tar is recognized after it is moved.
    """
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


def tar_offsets(index: Index) -> Int64[np.ndarray, "t1"]:
    """Return the first row of each tar's images in the index, then the number of images."""
    return np.cumsum([0, *(part.images for part in index.manifest.parts)])


def shard_key(tar: dict[str, str | int]) -> str:
    """Return the name of a tar's mask shard."""
    digest = hashlib.blake2b(msgspec.json.encode(tar, order="sorted"), digest_size=6).hexdigest()
    return f"{re.sub(r'[^A-Za-z0-9_-]', '_', str(tar['name']).removesuffix('.tar'))}-{digest}"


def shard_files(folder: Path, key: str) -> tuple[Path, Path, Path]:
    """Return the paths of a mask shard's bits, rows and description.

    Args:
        folder: Folder of the store.
        key: Name of the mask shard, from `shard_key`.
    """
    return folder / f"{key}.bits.npy", folder / f"{key}.rows.npy", folder / f"{key}.json"


def row_offsets(index: Index, shard: int, manifest: MaskStoreManifest) -> Int64[np.ndarray, "i1"]:
    """Return the first row of each image's masks in the mask shard, then the number of rows.

    Args:
        index: The index.
        shard: Number of the tar in the index.
        manifest: Manifest of the store.
    """
    first, last = tar_offsets(index)[shard : shard + 2]
    sizes = zip(
        index.images["height"][first:last].tolist(),
        index.images["width"][first:last].tolist(),
        strict=True,
    )
    copies = [
        1
        + (manifest.mirrored and needs_mirrored_copy(size, manifest.image_size, manifest.mask_size))
        for size in sizes
    ]
    return offsets_of(index.images["masks"][first:last] * np.array(copies, "<i8"))


def needs_mirrored_copy(size: tuple[int, int], image_size: int, mask_size: int) -> bool:
    """Return whether the flipped masks of an image differ from its masks flipped on the grid.

    They do if the right edge of the resized image lies within a column of cells.

    Args:
        size: Size (H, W) of the image.
        image_size: Side of the input square in pixels.
        mask_size: Side of the grid in cells.
    """
    return (
        ImageTransform.resize_longest_side(size, image_size).resized[1] * mask_size % image_size
        != 0
    )


def mirror(masks: RLEMasks, columns: int) -> RLEMasks:
    """Flip the columns that the image covers; the others are padding, which is background.

    Args:
        masks: Masks on a square grid.
        columns: Number of columns that the image covers.
    """
    mask_size = masks.size[0]
    return masks.resample(
        np.arange(mask_size),
        np.concatenate([np.full(mask_size - columns, -1), np.arange(columns)]),
        flip=True,
    )


def pack(masks: RLEMasks) -> UInt64[np.ndarray, "n w"]:
    """Pack masks to one bit per cell, column by column, the lowest bit of a word first."""
    cells, words = masks.size[0] * masks.size[1], words_per_mask(masks.size[0])
    packed = np.zeros((len(masks), 8 * words), np.uint8)
    packed[:, : -(-cells // 8)] = np.packbits(
        masks.to_dense().transpose(0, 2, 1).reshape(len(masks), cells), axis=1, bitorder="little"
    )
    return packed.view("<u8").astype(np.uint64)


def unpack(words: UInt64[np.ndarray, "n w"], mask_size: int) -> RLEMasks:
    """Convert packed masks to run lengths; only the few words that hold a change are unpacked.

    Args:
        words: Packed masks, 64 cells per word.
        mask_size: Side of the grid in cells.
    """
    changes = words ^ (words << 1)
    changes[:, 1:] ^= words[:, :-1] >> 63
    mask, word = np.nonzero(changes)
    changed, bit = np.nonzero(
        np.unpackbits(
            changes[mask, word].astype("<u8").view(np.uint8).reshape(-1, 8),
            axis=1,
            bitorder="little",
        )
    )
    bounds = word[changed] * 64 + bit
    # The padding after the last cell is background.
    inside = bounds < mask_size * mask_size
    counts = np.bincount(mask[changed][inside], minlength=len(words))
    return RLEMasks((mask_size, mask_size), bounds[inside].astype(np.int32), offsets_of(counts))


def words_per_mask(mask_size: int) -> int:
    """Return the number of 64-bit words of a mask."""
    return -(-mask_size * mask_size // 64)


def read_manifest(folder: Path) -> MaskStoreManifest:
    """Read a store's manifest.

    Raises:
        GigamaskError: The folder has no valid manifest of this schema.
    """
    path = folder / MANIFEST
    if is_index(folder) or not path.exists():
        raise GigamaskError(
            f"{folder}: is not a mask store (no {MANIFEST} of one); 'gigamask masks' builds one, "
            "in a folder of its own"
        )
    return read_json(path, MaskStoreManifest, REBUILD, SCHEMA)
