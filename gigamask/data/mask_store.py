"""The mask store: an index's masks, cut to a fixed grid beforehand, bit-packed and memory-mapped, so that training reads no json.

On disk: `manifest.json` (schema, grid, side, whether portraits are kept mirrored, too), and a piece for each tar. Building goes on where it stopped,
several machines may each build some tars into one folder, and a store serves every index whose tars it holds.

When it pays: a mask takes grid * grid / 8 bytes, 8 KB at 256, ten times its text in the json; SA-1B's 1.1 billion masks take 9 TB, as much as its
tars. What is saved is parsing and cutting, two milliseconds a sample beside more than twenty for its JPEG (benchmarks/mask_store.py), and a sample's
masks are five times the bytes to read. So it pays for a subset on a fast local disk that is visited often by few cores, and for json that is slow to
reach; from a spinning disk or over a network it costs more than it saves.

Not here: a piece's files (`data.mask_piece`), the cutting itself (`geometry.frame`), which masks are taken (`data.choose`), the rest of a sample
(`data.dataset`).
"""

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path

import msgspec
import numpy as np
from jaxtyping import Int, Int64

from gigamask.data import mask_store_shard, worker_pool
from gigamask.data.augment import HorizontalFlip, NoAugment
from gigamask.data.dataset import RawSample, build_sample_from
from gigamask.data.index import Index
from gigamask.data.mask_sampling import CandidateMasks
from gigamask.data.mask_store_shard import MANIFEST, SCHEMA, MaskShardJob, MaskStoreManifest
from gigamask.data.sample_config import SampleConfig
from gigamask.data.storage import write
from gigamask.errors import GigamaskError
from gigamask.masks.rle import RLEMasks
from gigamask.masks.transforms import ImageTransform
from gigamask.types import RandomSpec, Sample, SampleRef

OPEN_PIECES = 64
MAX_GRID = 4096


@dataclass(frozen=True, eq=False)
class MaskStore:
    """An opened store that holds every mask of an index; `keys` names the piece of each of its tars."""

    folder: Path
    manifest: MaskStoreManifest
    index: Index
    keys: tuple[str, ...]

    @classmethod
    def open(cls, folder: str | Path, index: Index) -> "MaskStore":
        """Opens a store for an index; raises Fault where it is none, lacks one of the tars, or a piece does not have its size."""
        folder = Path(folder).absolute()
        manifest = mask_store_shard.read_manifest(folder)
        tars = mask_store_shard.describe_tars(index)
        for tar in tars:
            for problem in mask_store_shard.find_faults(folder, manifest, tar, False):
                raise GigamaskError(problem)
        return cls(folder, manifest, index, tuple(map(mask_store_shard.key_of, tars)))

    def runs(self, row: int, numbers: Int64[np.ndarray, "k"], flip: bool = False) -> RLEMasks:
        """Returns masks of the image at `row` of the index, counted within it, on the store's grid; `flip` shows the image mirrored."""
        shard, side, grid = (
            int(self.index.images["shard"][row]),
            self.manifest.side,
            self.manifest.grid,
        )
        bits, rows = self._arrays(shard)
        at = row - int(self._firsts[shard])
        own = flip and mask_store_shard.has_own_mirror(self._size(row), side, grid)
        if own and not self.manifest.mirrored:
            raise GigamaskError(
                f"{self.index.entry_name(row)}: mirrored it lies between the cells of {self.folder}; "
                "build a store with 'gigamask masks --mirrored', or train without flips"
            )
        first = int(rows[at]) + own * (int(rows[at + 1]) - int(rows[at])) // 2
        masks = mask_store_shard.unpack(bits[first + numbers], grid)
        return (
            mask_store_shard.mirror(
                masks, ImageTransform.whole(self._size(row), side).resized[1] * grid // side
            )
            if flip and not own
            else masks
        )

    def check(self, settings: SampleConfig) -> None:
        """Raises Fault where samples of such settings cannot be made from the store."""
        made = self.manifest
        if (settings.mask_size, settings.image_size) != (made.grid, made.side):
            raise GigamaskError(
                f"{self.folder}: holds masks on a grid of {made.grid} for images of {made.side}, wanted are {settings.mask_size} and {settings.image_size}; "
                f"build one with 'gigamask masks --grid {settings.mask_size} --side {settings.image_size}', or leave out --loader.mask-store"
            )
        if (
            isinstance(settings.augment, HorizontalFlip)
            and settings.augment.probability
            and not made.mirrored
        ):
            sizes = np.unique(
                np.stack([self.index.images["height"], self.index.images["width"]]), axis=1
            ).T.tolist()
            if any(
                mask_store_shard.has_own_mirror((height, width), made.side, made.grid)
                for height, width in sizes
            ):
                act = "build a store with 'gigamask masks --mirrored', or train without flips"
                raise GigamaskError(
                    f"{self.folder}: holds no mirrored masks, which some of its images need; {act}"
                )
        elif not isinstance(settings.augment, NoAugment | HorizontalFlip):
            raise GigamaskError(
                f"{self.folder}: a mask store knows whole images only, {type(settings.augment).__name__} crops or scales them; "
                "choose --loader.augment none or flip, or leave out --loader.mask-store"
            )

    @property
    def bytes(self) -> int:
        """What the masks of the index take on disk."""
        return sum(
            mask_store_shard.piece_paths(self.folder, key)[0].stat().st_size
            for key in set(self.keys)
        )

    @cached_property
    def _arrays(self) -> Callable[[int], tuple[np.ndarray, np.ndarray]]:
        """Opens a shard's bits and rows; the most recent ones stay open, for each memory map holds a file."""

        def opened(shard: int) -> tuple[np.ndarray, np.ndarray]:
            bits, rows, _ = mask_store_shard.piece_paths(self.folder, self.keys[shard])
            return np.asarray(np.load(bits, mmap_mode="r")), np.load(rows)

        return lru_cache(OPEN_PIECES)(opened)

    @cached_property
    def _firsts(self) -> Int64[np.ndarray, "t1"]:
        return mask_store_shard.first_rows(self.index)

    def _size(self, row: int) -> tuple[int, int]:
        return int(self.index.images["height"][row]), int(self.index.images["width"][row])


def build_stored_sample(
    raw: bytes, store: MaskStore, visit: SampleRef, settings: SampleConfig, chance: RandomSpec
) -> Sample:
    """Returns the sample that `build_sample` returns for a visit of the store's index, its masks read from the store instead of a json.

    The store must have passed `check`; raises Fault where the frame does not show the whole image at its usual size, as a user's own may not.
    """
    index, row, name = store.index, visit.row, store.index.entry_name(visit.row)
    held = index.mask_rows(row)
    area, box, predicted_iou, stability = (
        np.array(index.masks[column][held])
        for column in ("area", "box", "predicted_iou", "stability_score")
    )
    size, boxes = (
        (int(index.images["height"][row]), int(index.images["width"][row])),
        box.astype(np.int32),
    )

    def cut(
        chosen: Int64[np.ndarray, "k"], frame: ImageTransform
    ) -> tuple[RLEMasks, Int[np.ndarray, "k 4"]]:
        if frame != ImageTransform.whole(size, settings.image_size, frame.flip):
            raise GigamaskError(
                f"{name}: {type(settings.augment).__name__} crops or scales it, a mask store knows whole images only; "
                "choose --loader.augment none or flip, or leave out --loader.mask-store"
            )
        return store.runs(row, chosen, frame.flip), boxes[chosen]

    candidates = CandidateMasks(size, area.astype(np.int64), boxes, predicted_iou, stability)
    return build_sample_from(RawSample(name, raw, None), candidates, cut, visit, settings, chance)


def build(
    index: Index,
    folder: str | Path,
    grid: int = 256,
    side: int = 1024,
    mirrored: bool = False,
    workers: int = 1,
    progress: worker_pool.Progress | None = None,
) -> MaskStore:
    """Cuts every mask of an index into the store at `folder`; pieces that are there already stay as they are.

    `mirrored` keeps a second row for each mask of an image whose mirror image lies between the cells, as most portraits' does.
    `progress(done, total)` is called after each tar.
    """
    if not (0 < grid <= MAX_GRID and side >= 1):
        raise GigamaskError(
            f"--grid {grid} and --side {side}: the grid has 1 to {MAX_GRID} cells a side, the input 1 pixel or more; give such"
        )
    folder = Path(folder).absolute()
    wanted = MaskStoreManifest(SCHEMA, grid, side, mirrored)
    if (folder / MANIFEST).exists():
        found = mask_store_shard.read_manifest(folder)
        if found != wanted:
            raise GigamaskError(
                f"{folder}: is a mask store of {_words(found)}, asked for is {_words(wanted)}; give another folder"
            )
    elif folder.exists() and any(folder.iterdir()):
        raise GigamaskError(
            f"{folder}: exists and is no mask store, so nothing is written into it; give another folder"
        )
    tars = mask_store_shard.describe_tars(index)
    once = {mask_store_shard.key_of(tar): shard for shard, tar in enumerate(tars)}
    missing = [
        shard
        for shard in once.values()
        if list(mask_store_shard.find_faults(folder, wanted, tars[shard], False))
    ]
    folder.mkdir(parents=True, exist_ok=True)
    rows = sum(int(mask_store_shard.row_starts(index, shard, wanted)[-1]) for shard in missing)
    needed, free = rows * mask_store_shard.words_of(grid) * 8, shutil.disk_usage(folder).free
    if needed > free:
        raise GigamaskError(
            f"{folder}: the masks take {needed / 1e9:.1f} GB, {free / 1e9:.1f} GB are free; give a folder on a larger disk, or fewer tars"
        )
    write(folder / MANIFEST, msgspec.json.encode(wanted))
    worker_pool.parallel_map(
        mask_store_shard.build_piece,
        [MaskShardJob(str(index.folder), shard, str(folder)) for shard in missing],
        workers,
        progress,
    )
    return MaskStore.open(folder, index)


def verify(
    index: Index, folder: str | Path, workers: int = 1, progress: worker_pool.Progress | None = None
) -> list[str]:
    """Reads every byte that the store holds for an index and returns what is wrong, a line each; raises Fault where there is no store."""
    mask_store_shard.read_manifest(Path(folder).absolute())
    jobs = [
        MaskShardJob(str(index.folder), shard, str(Path(folder).absolute()))
        for shard in range(len(index.shard_paths))
    ]
    return [
        line
        for lines in worker_pool.parallel_map(
            mask_store_shard.verify_piece, jobs, workers, progress
        )
        for line in lines
    ]


def _words(manifest: MaskStoreManifest) -> str:
    return f"--grid {manifest.grid} --side {manifest.side} --{'' if manifest.mirrored else 'no-'}mirrored"
