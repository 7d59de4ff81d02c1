"""The mask store: an index's masks on a fixed grid, bit-packed and memory-mapped.

Training with a mask store reads no json. On disk it is `manifest.json` (schema, grid, side, whether
flipped masks of portraits are stored too) and the files of each tar (`data.mask_store_shard`).
Building resumes where it stopped, several machines may build different tars into one folder, and a
store serves every index whose tars it holds.

When to use it: a mask takes mask_size**2 / 8 bytes, 8 KB at 256, ten times its size in the json;
SA-1B's 1.1 billion masks take 9 TB, as much as its tars. It saves parsing and resampling, two
milliseconds per sample compared to more than twenty for its JPEG (benchmarks/mask_store.py), but a
sample's masks are five times the bytes to read. It is worthwhile for a subset that few cores read
often from a fast local disk, and for json that is slow to read. From a spinning disk or over a
network, it costs more than it saves.
"""

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from pathlib import Path

import numpy as np
from jaxtyping import Int, Int64

from gigamask.data import mask_store_shard, worker_pool
from gigamask.data.checked_files import CheckedArray, encode_json
from gigamask.data.dataset import RawSample, build_sample_from
from gigamask.data.index import Index
from gigamask.data.mask_sampling import CandidateMasks
from gigamask.data.mask_store_shard import MANIFEST, SCHEMA, MaskStoreManifest
from gigamask.data.sample_config import SampleConfig
from gigamask.errors import GigamaskError, check_range
from gigamask.files import check_out, write_bytes
from gigamask.masks.rle import RLEMasks
from gigamask.masks.transforms import ImageTransform
from gigamask.records import SampleRef
from gigamask.types import RandomSpec, Sample

MAX_OPEN_SHARDS = 64
MAX_MASK_SIZE = 4096


@dataclass(frozen=True, eq=False)
class MaskStore:
    """An opened store that holds every mask of an index.

    `shard_keys` are the names of the mask shards of the index's tars.
    """

    folder: Path
    manifest: MaskStoreManifest
    index: Index
    shard_keys: tuple[str, ...]

    @classmethod
    def open(cls, folder: str | Path, index: Index) -> "MaskStore":
        """Open a store for an index.

        Args:
            folder: Folder of the store.
            index: Index whose masks will be read.

        Raises:
            GigamaskError: The folder is not a store, lacks one of the tars, or a file is truncated.
        """
        folder = Path(folder).absolute()
        manifest = mask_store_shard.read_manifest(folder)
        tars = mask_store_shard.describe_tars(index)
        for tar in tars:
            mask_store_shard.open_shard(folder, manifest, tar)
        return cls(folder, manifest, index, tuple(map(mask_store_shard.shard_key, tars)))

    def masks(self, row: int, positions: Int64[np.ndarray, "k"], flip: bool = False) -> RLEMasks:
        """Read masks of one image on the store's grid.

        Args:
            row: Row of the index.
            positions: Positions of the masks in the image's annotation.
            flip: Read the masks of the horizontally flipped image.

        Raises:
            GigamaskError: The store lacks the flipped masks that the image needs.
        """
        shard = int(self.index.images["shard"][row])
        image_size, mask_size = self.manifest.image_size, self.manifest.mask_size
        bits, rows = self._arrays(shard)
        image = row - int(self._tar_offsets[shard])
        mirrored_copy = flip and mask_store_shard.needs_mirrored_copy(
            self._size(row), image_size, mask_size
        )
        if mirrored_copy and not self.manifest.mirrored:
            raise GigamaskError(
                f"{self.index.entry_name(row)}: {self.folder} lacks the mirrored masks that this "
                "image needs; build a store with 'gigamask masks --mirrored', or train without "
                "flips"
            )
        first = int(rows[image]) + mirrored_copy * (int(rows[image + 1]) - int(rows[image])) // 2
        masks = mask_store_shard.unpack(bits[first + positions], mask_size)
        if not flip or mirrored_copy:
            return masks
        width = ImageTransform.resize_longest_side(self._size(row), image_size).resized[1]
        return mask_store_shard.mirror(masks, width * mask_size // image_size)

    def check(self, config: SampleConfig) -> None:
        """Check that samples can be built from the store.

        Args:
            config: Settings of the samples.

        Raises:
            GigamaskError: The store has other sizes, lacks mirrored masks, or the augmentation
                crops or scales images.
        """
        mask_size, image_size = self.manifest.mask_size, self.manifest.image_size
        if (config.mask_size, config.image_size) != (mask_size, image_size):
            raise GigamaskError(
                f"{self.folder}: holds masks on a grid of {mask_size} for images of {image_size}, "
                f"but the training needs {config.mask_size} and {config.image_size}; build one "
                f"with 'gigamask masks --mask-size {config.mask_size} --image-size "
                f"{config.image_size}', or leave out --loader.mask-store"
            )
        if config.stretch:
            raise GigamaskError(
                f"{self.folder}: holds masks of padded images, but --model.stretch is on; leave "
                "out --loader.mask-store"
            )
        if (
            config.augment.whole_images
            and getattr(config.augment, "probability", 0)
            and not self.manifest.mirrored
        ):
            sizes = np.unique(
                np.stack([self.index.images["height"], self.index.images["width"]]), axis=1
            ).T.tolist()
            if any(
                mask_store_shard.needs_mirrored_copy((height, width), image_size, mask_size)
                for height, width in sizes
            ):
                raise GigamaskError(
                    f"{self.folder}: lacks the mirrored masks that some of its images need; build "
                    "a store with 'gigamask masks --mirrored', or train without flips"
                )
        elif not config.augment.whole_images:
            raise GigamaskError(
                f"{self.folder}: a mask store holds the masks of whole images, but "
                f"{type(config.augment).__name__} crops or scales them; choose --loader.augment "
                "none or flip, or leave out --loader.mask-store"
            )

    def sample(
        self, raw: bytes, ref: SampleRef, config: SampleConfig, random_spec: RandomSpec
    ) -> Sample:
        """Build the same sample as `build_sample`, after `check`, without a json.

        Args:
            raw: The image file.
            ref: Position in the sequence of samples.
            config: Image transform, mask filters and sizes.
            random_spec: Seed and counts of the random numbers drawn per sample.

        Raises:
            CorruptSampleError: The image cannot be decoded.
            GigamaskError: The transform crops or scales the image, as a custom one may.
        """
        index, row, name = self.index, ref.row, self.index.entry_name(ref.row)
        mask_rows = index.mask_rows(row)
        area, box, predicted_iou, stability = (
            np.array(index.masks[column][mask_rows])
            for column in ("area", "box", "predicted_iou", "stability_score")
        )
        size, boxes = self._size(row), box.astype(np.int32)

        def read_masks(
            positions: Int64[np.ndarray, "k"], transform: ImageTransform
        ) -> tuple[RLEMasks, Int[np.ndarray, "k 4"]]:
            side, flip = config.image_size, transform.flip
            if transform != ImageTransform.resize_longest_side(size, side, flip):
                raise GigamaskError(
                    f"{name}: {type(config.augment).__name__} crops or scales it, but a mask "
                    "store holds the masks of whole images; choose --loader.augment none or "
                    "flip, or leave out --loader.mask-store"
                )
            return self.masks(row, positions, flip), boxes[positions]

        candidates = CandidateMasks(size, area.astype(np.int64), boxes, predicted_iou, stability)
        return build_sample_from(
            RawSample(name, raw, None), candidates, read_masks, ref, config, random_spec
        )

    @property
    def bytes(self) -> int:
        """Bytes of the index's masks on disk."""
        return sum(
            mask_store_shard.shard_files(self.folder, key)[0].stat().st_size
            for key in set(self.shard_keys)
        )

    @cached_property
    def _arrays(self) -> Callable[[int], tuple[CheckedArray, CheckedArray]]:
        """A function that opens a shard's bits and rows.

        Only the most recent ones stay open, because each memory map holds a file open.
        """

        tars = mask_store_shard.describe_tars(self.index)

        def open_arrays(shard: int) -> tuple[CheckedArray, CheckedArray]:
            return mask_store_shard.open_shard(self.folder, self.manifest, tars[shard])

        return lru_cache(MAX_OPEN_SHARDS)(open_arrays)

    @cached_property
    def _tar_offsets(self) -> Int64[np.ndarray, "t1"]:
        return mask_store_shard.tar_offsets(self.index)

    def _size(self, row: int) -> tuple[int, int]:
        return int(self.index.images["height"][row]), int(self.index.images["width"][row])


def build(
    index: Index,
    folder: str | Path,
    mask_size: int = 256,
    image_size: int = 1024,
    mirrored: bool = False,
    workers: worker_pool.Workers = 1,
    progress: worker_pool.Progress | None = None,
) -> MaskStore:
    """Write every mask of an index to a store; mask shards that exist stay unchanged.

    Args:
        index: The index.
        folder: Folder of the store.
        mask_size: Side of the grid in cells.
        image_size: Side of the model's input square in pixels.
        mirrored: Whether to store the masks of flipped images too if they cannot be derived on the
            grid, as for most portraits.
        workers: Number of worker processes, each on one tar at a time; or a part of a command.
        progress: Called as `progress(done, total)` after each tar.

    Raises:
        GigamaskError: A size is out of range, the folder holds something else, or the disk is full.
    """
    check_range("--mask-size", mask_size, 1, MAX_MASK_SIZE)
    check_range("--image-size", image_size, 1)
    if not index.manifest.masks:
        raise GigamaskError(
            f"{index.shard_paths[0]}: has no masks, so there is nothing to store; give tars with "
            "SA-1B's JSONs (gigamask convert makes them)"
        )
    folder = Path(folder).absolute()
    manifest = MaskStoreManifest(SCHEMA, mask_size, image_size, mirrored)
    if (folder / MANIFEST).exists():
        existing = mask_store_shard.read_manifest(folder)
        if existing != manifest:
            raise GigamaskError(
                f"{folder}: is a mask store built with {_flags(existing)}, not with "
                f"{_flags(manifest)}; choose another folder"
            )
    else:
        check_out(folder, "a mask store")
    tars = mask_store_shard.describe_tars(index)
    distinct = {mask_store_shard.shard_key(tar): shard for shard, tar in enumerate(tars)}
    missing = [
        shard
        for shard in distinct.values()
        if not mask_store_shard.is_complete(folder, manifest, tars[shard])
    ]
    folder.mkdir(parents=True, exist_ok=True)
    rows = sum(int(mask_store_shard.row_offsets(index, shard, manifest)[-1]) for shard in missing)
    needed = rows * mask_store_shard.words_per_mask(mask_size) * 8
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise GigamaskError(
            f"{folder}: the masks take {needed / 1e9:.1f} GB, but {free / 1e9:.1f} GB are free; "
            "choose a folder on a larger disk, or fewer tars"
        )
    write_bytes(folder / MANIFEST, encode_json(manifest))
    # What is missing changes while other parts work, so they share all tars.
    shards = distinct.values() if worker_pool.part_in(workers) else missing
    build_shard = partial(mask_store_shard.build_shard, index.folder, folder)
    worker_pool.parallel_map(build_shard, list(shards), workers, progress)
    return MaskStore.open(folder, index)


def verify(
    index: Index,
    folder: str | Path,
    workers: worker_pool.Workers = 1,
    progress: worker_pool.Progress | None = None,
) -> list[str]:
    """Verify a store by reading every byte that it holds for an index.

    Args:
        index: The index.
        folder: Folder of the store.
        workers: Number of worker processes, each on one tar at a time; or a part of a command.
        progress: Called as `progress(done, total)` after each tar.

    Returns:
        The problems, one line each.

    Raises:
        GigamaskError: The folder is not a mask store.
    """
    folder = Path(folder).absolute()
    mask_store_shard.read_manifest(folder)
    verify_shard = partial(mask_store_shard.verify_shard, index.folder, folder)
    shards = range(len(index.shard_paths))
    problems = worker_pool.parallel_map(verify_shard, shards, workers, progress, list[str])
    return [line for lines in problems for line in lines]


def _flags(manifest: MaskStoreManifest) -> str:
    mirrored = "--mirrored" if manifest.mirrored else "--no-mirrored"
    return f"--mask-size {manifest.mask_size} --image-size {manifest.image_size} {mirrored}"
