"""Throughput of real loader processes in images/s and CPU seconds, and their memory.

Every variant delivers images resized to 1024 with 64 of their 100 masks on a 256 grid, one image
per batch, from the same tars. "Usual" is Pillow, json, every mask decoded by pycocotools and
OpenCV's resize in a torch DataLoader; "webdataset" its reading with our decoding; "repacked" our
loader on tars from `gigamask repack`. Photographs are noise of SA-1B's size and bit rate, or yours
with --photos. CPU time is that of the loader's processes.

Run: python benchmarks/loader.py [--photos TAR] [--images 12] [--take 40] [--rounds 3]
    [--workers 1 2]
"""

import os

os.environ |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}

import argparse
import io
import json
import multiprocessing
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from itertools import count, islice
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import psutil
import torch
import webdataset
from PIL import Image
from pycocotools import mask as coco
from torch.utils.data import DataLoader, Dataset

from gigamask.data import annotation, image, loader, tar
from gigamask.data import index as indexes
from gigamask.data.dataset import Sa1bDataset, build_sample
from gigamask.data.process_memory import in_bytes
from gigamask.data.sample_config import SampleConfig
from gigamask.plugins.memory import large_sample, loader_memory
from gigamask.records import DataCursor, SampleRef, StepPlan
from gigamask.rng import make_rng
from gigamask.types import RandomSpec

SIDE, GRID, MASKS, TAKEN, TARS = 1024, 256, 100, 64, 4
CHANCE = RandomSpec(seed=0, clicks=12, blocks=12)
SETTINGS = SampleConfig(SIDE, GRID, TAKEN)
STEPS = (
    ("ViT-H, 0.12 s an image on an H200", 0.12),
    ("ViT-B, 0.07 s an image on an H200", 0.07),
)
TARGETS = {"gigamask": 70, "gigamask, half scale": 70, "gigamask, repacked": 150}
MEMORY_MB = {256: 60, 1024: 120}
warnings.filterwarnings("ignore", message="__array__ implementation")


def photographs(path: str | None, images: int) -> Iterator[bytes]:
    """Yields so many JPEGs: a tar's, again and again, or noise."""
    if path is None:
        yield from (
            large_sample.photograph((1500, 2250), make_rng(0, "benchmark", number))
            for number in range(images)
        )
        return
    found, raw = tar.scan(path), Path(path).read_bytes()
    held = [
        raw[at : at + size]
        for name, at, size in zip(found.names, found.offsets, found.sizes, strict=True)
        if name.endswith(".jpg")
    ]
    yield from (held[number % len(held)] for number in range(images))


def write_tars(folder: Path, path: str | None, images: int) -> None:
    """Writes the photographs, each with masks of SA-1B's shape, as tars."""
    members, bits = [], []
    for number, jpg in enumerate(photographs(path, images)):
        size = image.size(jpg, str(number))
        bits.append(8 * len(jpg) / (size[0] * size[1]))
        json = large_sample.annotation(
            number, large_sample.blobs(size, MASKS, make_rng(0, "benchmark masks", number))
        )
        members.append([(f"sa_{number}.jpg", jpg), (f"sa_{number}.json", json)])
    for shard in range(TARS):
        tar.write(
            folder / f"sa_{shard:06d}.tar", [each for pair in members[shard::TARS] for each in pair]
        )
    jpg_mb = np.mean([len(pair[0][1]) for pair in members]) / 1e6
    print(
        f"{images} photographs of {jpg_mb:.2f} MB, {np.mean(bits):.2f} bits a pixel, {MASKS} "
        f"masks each"
    )


def ours(folder: Path, settings: SampleConfig, workers: int) -> Iterator:
    """Yields batches of gigamask's loader."""
    index = indexes.open_or_build([str(folder)], folder.parent / f"{folder.name}-index")
    groups = (
        StepPlan(((SampleRef(0, number, number % len(index)),),), number, number + 1)
        for number in count()
    )
    return loader.batches(loader.SampleSource(str(index.folder), settings, CHANCE), groups, workers)


class Plain(Dataset):
    """The usual way: everything is decoded."""

    def __init__(self, folder: Path) -> None:
        self.index = indexes.open_or_build([str(folder)], folder.parent / f"{folder.name}-index")
        self.dataset = Sa1bDataset(self.index)

    def __len__(self) -> int:
        return 2**30

    def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
        _, jpg, raw = self.dataset.read(number % len(self.index))
        picture = Image.open(io.BytesIO(jpg)).convert("RGB")
        width, height = picture.size
        scale = SIDE / max(width, height)
        pixels = np.asarray(
            picture.resize((round(width * scale), round(height * scale)), Image.Resampling.BILINEAR)
        )
        padded = torch.zeros((3, SIDE, SIDE), dtype=torch.uint8)
        padded[:, : pixels.shape[0], : pixels.shape[1]] = torch.from_numpy(pixels.copy()).permute(
            2, 0, 1
        )
        masks = [coco.decode(each["segmentation"]) for each in json.loads(raw)["annotations"]]
        small = round(GRID * width / max(width, height)), round(GRID * height / max(width, height))
        chosen = np.random.default_rng(number).choice(
            len(masks), min(TAKEN, len(masks)), replace=False
        )
        return {
            "image": padded,
            "masks": torch.from_numpy(
                np.stack(
                    [cv2.resize(masks[i], small, interpolation=cv2.INTER_NEAREST) for i in chosen]
                )
            ),
        }


def plain(folder: Path, workers: int) -> Iterator:
    return iter(
        DataLoader(
            Plain(folder), batch_size=None, num_workers=workers, prefetch_factor=loader.PREFETCH
        )
    )


def our_decoding(member: dict) -> object:
    """Makes a batch of one webdataset sample."""
    sample = build_sample(
        member["jpg"],
        annotation.parse(member["json"], member["__key__"]),
        SampleRef(0, 0, 0),
        SETTINGS,
        CHANCE,
    )
    return loader.collate([sample], (), SETTINGS, CHANCE, 0.5, DataCursor(1))


def as_it_is(made: object) -> object:
    return made


def from_webdataset(folder: Path, workers: int) -> Iterator:
    paths = sorted(map(str, folder.glob("*.tar")))
    dataset = webdataset.WebDataset(paths, shardshuffle=False, resampled=True).map(our_decoding)
    return iter(
        DataLoader(
            dataset,
            batch_size=None,
            num_workers=workers,
            collate_fn=as_it_is,
            prefetch_factor=loader.PREFETCH,
        )
    )


class Way:
    """One way with its processes, which stay alive between turns and fill their queues
    meanwhile."""

    def __init__(self, begin: Callable[[], Iterator], take: int, workers: int) -> None:
        before = set(psutil.Process().children())
        self.batches, self.take, self.full = begin(), take, workers * (loader.PREFETCH + 1)
        next(self.batches)
        self.processes = [child for child in psutil.Process().children() if child not in before]
        self.wall_s, self.cpu_s, self.main_s = [], [], []

    def used_s(self) -> float:
        return sum(
            times.user + times.system
            for times in (process.cpu_times() for process in self.processes)
        )

    def turn(self) -> None:
        """Takes what was made while others had their turn, then measures."""
        for _ in islice(self.batches, self.full):
            pass
        before = time.perf_counter(), self.used_s(), time.process_time()
        for _ in islice(self.batches, self.take):
            pass
        after = time.perf_counter(), self.used_s(), time.process_time()
        for held, start, end in zip(
            (self.wall_s, self.cpu_s, self.main_s), before, after, strict=True
        ):
            held.append((end - start) / self.take)


def compare(originals: Path, small: Path, workers: int, take: int, rounds: int) -> dict[str, float]:
    """Print a row for each way, all with `workers` processes, and return the CPU seconds per
    image of each."""
    few = max(take // 8, 4)
    ways = {
        "gigamask": Way(lambda: ours(originals, SETTINGS, workers), take, workers),
        "gigamask, half scale": Way(
            lambda: ours(originals, SampleConfig(SIDE, GRID, TAKEN, half_scale=True), workers),
            take,
            workers,
        ),
        "gigamask, repacked": Way(lambda: ours(small, SETTINGS, workers), take, workers),
        "webdataset, our decoding": Way(lambda: from_webdataset(originals, workers), take, workers),
        "usual (Pillow, pycocotools)": Way(lambda: plain(originals, workers), few, workers),
    }
    for _ in range(rounds):
        for way in ways.values():
            way.turn()
    print(
        f"\n{f'{workers} processes':32}{'images/s':>10}{'cpu ms':>9}{'images/s/core':>15}"
        f"{'target':>8}{'x usual':>9}{'own cpu ms':>12}"
    )
    middle = {name: statistics.median(way.cpu_s) for name, way in ways.items()}
    for name, way in ways.items():
        rate, main_ms = 1 / statistics.median(way.wall_s), 1e3 * statistics.median(way.main_s)
        ratio = middle["usual (Pillow, pycocotools)"] / middle[name]
        print(
            f"{name:32}{rate:10.1f}{1e3 * middle[name]:9.1f}{1 / middle[name]:15.1f}"
            f"{TARGETS.get(name, ''):>8}{ratio:9.1f}{main_ms:12.2f}"
        )
    return middle


def memory(folder: Path, grid: int, workers: int) -> dict[str, Any]:
    """Measures the loader's processes; to be called in a process that holds nothing else, since
    they begin with what that has."""
    multiprocessing.set_start_method(
        "fork", force=True
    )  # as in training; a spawned process would hand its own way on
    return loader_memory.measure(
        ours(folder, SampleConfig(SIDE, grid, TAKEN), workers), 80, loader.PREFETCH, lambda *_: None
    )


def main() -> None:
    """Prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--photos", help="a tar of JPEGs, such as one of SA-1B's")
    parser.add_argument("--images", type=int, default=12)
    parser.add_argument("--take", type=int, default=40, help="images a turn")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2])
    given = parser.parse_args()
    from gigamask.plugins.repack import repack

    torch.set_num_threads(1)
    cv2.setNumThreads(1)
    with tempfile.TemporaryDirectory() as folder:
        originals, small = Path(folder) / "originals", Path(folder) / "repacked"
        originals.mkdir()
        write_tars(originals, given.photos, given.images)
        repack.repack([str(originals)], small, repack.RepackConfig(SIDE))
        for workers in given.workers:
            seconds = compare(originals, small, workers, given.take, given.rounds)
        print(
            "\ncores that feed one H200"
            + "".join(f"{name:>24}" for name in TARGETS)
            + f"{'usual':>10}"
        )
        for name, step_s in STEPS:
            cells = "".join(f"{seconds[way] / step_s:24.2f}" for way in TARGETS)
            print(
                f"{name:42}"[:42]
                + cells[18:]
                + f"{seconds['usual (Pillow, pycocotools)'] / step_s:10.1f}"
            )
        print()
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as fresh:
            for grid, limit in MEMORY_MB.items():
                found = fresh.submit(memory, originals, grid, max(given.workers)).result()
                most = max(each["above_imports_bytes"] for each in found["workers"])
                print(
                    f"grid {grid:4}: {in_bytes(most)} above imports in the largest process "
                    f"(target {limit} MB);",
                    end=" ",
                )
                print(
                    f"a batch of {in_bytes(found['batch_bytes'])}, masks "
                    f"{in_bytes(found['mask_bytes_per_sample'])} a sample (target 64 KB)"
                )


if __name__ == "__main__":
    main()
