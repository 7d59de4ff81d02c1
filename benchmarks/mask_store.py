"""Compare the mask store with RLE from the json: bytes per mask, and milliseconds to load.

Images and masks are those of benchmarks/sample_to_batch.py: 1500 x 2250, 100 smooth masks of
SA-1B's sizes, 64 of them on a 256 grid. One core and everything in the page cache, so the times do
not include the disk reads of the larger store.

Run: python benchmarks/mask_store.py [--rounds 15]
"""

import os

os.environ |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from sample_to_batch import GRID, IMAGES, SIDE, SIZE, TAKEN, members

from gigamask.data import index as indexes
from gigamask.data import mask_store, tar
from gigamask.data.dataset import Sa1bDataset, build_sample
from gigamask.data.sample_config import SampleConfig
from gigamask.data.shards import ShardReader
from gigamask.masks.transforms import ImageTransform
from gigamask.records import SampleRef
from gigamask.rng import make_rng
from gigamask.types import RandomSpec

MASKS_OF_SA1B = 1.1e9


def print_bytes(entries: list, store: mask_store.MaskStore) -> None:
    """Prints the mean bytes a mask takes in each form."""
    transform, masks = (
        ImageTransform.resize_longest_side(SIZE, SIDE),
        sum(len(entry.masks) for entry, _ in entries),
    )
    runs = sum(
        transform.apply_masks(entry.masks, GRID).bounds.nbytes + 8 * len(entry.masks)
        for entry, _ in entries
    )
    text = sum(sum(map(len, entry.masks.to_coco())) for entry, _ in entries)
    rows = {
        "dense uint8 at 1024": 1024 * 1024,
        "dense uint8 at 256": 256 * 256,
        "bits at 256 (the store)": store.bytes / masks,
        "COCO text": text / masks,
        "all of its json": sum(len(raw) for _, raw in entries) / masks,
        "runs of the 256 grid, int32": runs / masks,
    }
    print(f"{'bytes a mask':34}{'bytes':>12}{'of SA-1B, TB':>14}{'of the store':>14}")
    for name, size in rows.items():
        print(
            f"{name:34}{size:12.0f}{size * MASKS_OF_SA1B / 1e12:14.2f}"
            f"{size / rows['bits at 256 (the store)']:13.2f}x"
        )


def compare(
    title: str, plain: Callable[[int], object], stored: Callable[[int], object], rounds: int
) -> None:
    """Prints the medians of alternating runs, in milliseconds an image."""
    cpu: dict[str, list[float]] = {"plain": [], "stored": []}
    wall: dict[str, list[float]] = {"plain": [], "stored": []}
    for turn in range(rounds + 1):
        for name, way in (("plain", plain), ("stored", stored)):
            tick, start = time.perf_counter(), time.process_time()
            for number in range(IMAGES):
                way(number)
            if turn:  # the first round warms up
                cpu[name].append((time.process_time() - start) * 1e3 / IMAGES)
                wall[name].append((time.perf_counter() - tick) * 1e3 / IMAGES)
    a, b, c, d = (
        statistics.median(times)
        for times in (cpu["plain"], cpu["stored"], wall["plain"], wall["stored"])
    )
    print(f"{title:34}{a:10.2f}{b:10.2f}{a / b:9.1f}x{c:10.2f}{d:10.2f}{c / d:9.1f}x")


def main() -> None:
    """Prints both tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        tar.write(Path(folder) / "sa_000000.tar", members())
        index = indexes.build([Path(folder) / "sa_000000.tar"], Path(folder) / "index")
        start = time.process_time()
        store = mask_store.build(index, Path(folder) / "store", GRID, SIDE)
        built_ms = (time.process_time() - start) * 1e3
        shards, dataset = ShardReader(index.shard_paths), Sa1bDataset(index)
        raws = [dataset.read(row) for row in range(IMAGES)]
        entries = [(raw.annotation(), raw.json) for raw in raws]
        print_bytes(entries, store)
        assembly, chance, transform = (
            SampleConfig(SIDE, GRID, TAKEN),
            RandomSpec(seed=0, clicks=12, blocks=12),
            ImageTransform.resize_longest_side(SIZE, SIDE),
        )
        chosen = [
            np.sort(make_rng(0, "benchmark", row).choice(len(entry.masks), TAKEN, False))
            for row, (entry, _) in enumerate(entries)
        ]

        def place(row: int) -> tuple[int, int, int]:
            return tuple(
                int(index.images[name][row]) for name in ("shard", "jpg_offset", "jpg_bytes")
            )

        def from_json(row: int) -> object:
            raw = dataset.read(row)
            return build_sample(raw.jpg, raw.annotation(), SampleRef(0, row, 0), assembly, chance)

        print(
            f"\n{'milliseconds an image':34}{'json cpu':>10}{'store cpu':>10}{'ratio':>10}"
            f"{'json':>10}{'store':>10}{'ratio':>10}"
        )
        compare(
            f"{TAKEN} masks as runs of the grid",
            lambda row: transform.apply_masks(raws[row].annotation().masks[chosen[row]], GRID),
            lambda row: store.masks(row, chosen[row]),
            rounds,
        )
        compare(
            "the whole sample, with its JPEG",
            from_json,
            lambda row: store.sample(
                shards.read(*place(row)), SampleRef(0, row, row), assembly, chance
            ),
            rounds,
        )
        read_kb = TAKEN * GRID * GRID / 8e3, np.mean([len(raw) for _, raw in entries]) / 1e3
        print(
            f"read for the masks of a sample: {read_kb[0]:.0f} KB from the store, "
            f"{read_kb[1]:.0f} KB of json"
        )
        mask_ms = built_ms / index.manifest.masks
        print(
            f"building: {mask_ms:.3f} ms a mask, {mask_ms * MASKS_OF_SA1B / 3.6e6:.0f} core hours "
            f"for SA-1B"
        )


if __name__ == "__main__":
    main()
