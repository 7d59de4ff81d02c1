"""Cost and gain of repacking at 1024 px: bytes, images/s and core, samples/s and core.

Images are those of `sample_to_batch.py` (1500 x 2250, about 1.2 MB, 100 masks), or those of a tar
given as argument, with the same masks.

Run: python benchmarks/repack.py [TAR]
"""

import os

os.environ |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}

import statistics
import sys
import tempfile
import time
from pathlib import Path

import cv2
import numpy as np
import simplejpeg
import torch
from sample_to_batch import blob, members

from gigamask.data import annotation, image, tar
from gigamask.data import index as indexes
from gigamask.data.dataset import Sa1bDataset
from gigamask.data.loader import SampleSource
from gigamask.data.sample_config import SampleConfig
from gigamask.data.shards import ShardReader
from gigamask.masks.rle import RLEMasks
from gigamask.masks.transforms import ImageTransform
from gigamask.plugins.repack.repack import RepackConfig, repack
from gigamask.records import SampleRef
from gigamask.rng import make_rng
from gigamask.types import RandomSpec

SIZE, ROUNDS, MASKS = 1024, 9, 100
CODECS = ((95, "444"), (95, "420"), (90, "420"), (85, "420"))


def from_tar(path: str):
    """The photographs of a tar, each with blobs at its own size."""
    found = tar.scan(path)
    for number, (name, offset, size) in enumerate(
        zip(found.names, found.offsets, found.sizes, strict=True)
    ):
        if name.endswith(".jpg"):
            jpg = ShardReader([path]).read(0, int(offset), int(size))
            height, width = image.size(jpg, name)
            masks = RLEMasks.concatenate(
                [
                    RLEMasks.from_dense(blob(make_rng(0, "benchmark", number, i))[None])
                    for i in range(MASKS)
                ]
            )
            masks = masks.resample(
                np.arange(height) * masks.size[0] // height,
                np.arange(width) * masks.size[1] // width,
            )
            masks = masks[masks.areas() > 0]
            ones = np.ones(len(masks))
            told = annotation.image_record(
                number,
                masks,
                range(len(masks)),
                masks.sample_points(ones[:, None] / 2)[:, 0],
                ones,
                ones,
            )
            yield f"sa_{number}.jpg", jpg
            yield f"sa_{number}.json", annotation.encode(told)


def codecs(index: indexes.Index) -> None:
    """Prints what each JPEG setting does to the resized photographs."""
    dataset = Sa1bDataset(index)
    pixels = [dataset.read(row).pixels() for row in range(len(index))]
    resized = [
        ImageTransform.resize_longest_side(each.shape[:2], SIZE)
        .apply_image(each)
        .permute(1, 2, 0)
        .contiguous()
        .numpy()
        for each in pixels
    ]
    print(f"{'JPEG at ' + str(SIZE):20}{'KB':>8}{'dB':>8}{'decode ms':>11}")
    for quality, chroma in CODECS:
        coded = [simplejpeg.encode_jpeg(each, quality, "RGB", chroma) for each in resized]
        start = time.process_time()
        back = [simplejpeg.decode_jpeg(each) for _ in range(3) for each in coded]
        spent = (time.process_time() - start) / len(back) * 1e3
        errors = [
            np.mean((a.astype(np.float32) - b) ** 2) for a, b in zip(back, resized, strict=False)
        ]
        decibel = np.mean(10 * np.log10(255**2 / np.array(errors)))
        print(
            f"q{quality} {chroma:16}{np.mean([len(each) for each in coded]) / 1e3:8.0f}"
            f"{decibel:8.1f}{spent:11.1f}"
        )


def main() -> None:
    torch.set_num_threads(1)
    cv2.setNumThreads(1)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "before" / "sa_000000.tar"
        tar.write(path, from_tar(sys.argv[1]) if len(sys.argv) > 1 else members())
        start, tick = time.process_time(), time.perf_counter()
        done = repack(path, Path(folder) / "after", RepackConfig(SIZE))
        cpu, wall = time.process_time() - start, time.perf_counter() - tick
        before, after = (
            indexes.build(Path(folder) / name, Path(folder) / f"{name}.index")
            for name in ("before", "after")
        )
        print(
            f"repack: {done['images']} images, {done['images'] / cpu:.1f} a second of CPU, "
            f"{done['images'] / wall:.1f} a second"
        )
        for column in ("jpg_bytes", "json_bytes"):
            one, other = (float(np.mean(index.images[column])) / 1e3 for index in (before, after))
            print(f"{column:10} {one:8.0f} KB became {other:6.0f} KB, {one / other:.1f} times less")
        codecs(before)
        times = {}
        for side in (256, 1024):
            assembly = SampleConfig(side, 256, 64)
            sources = {
                name: SampleSource(str(index.folder), assembly, RandomSpec(0, 12, 12))
                for name, index in (("before", before), ("after", after))
            }
            for turn in range(ROUNDS * len(before) + 1):
                for name, source in sources.items():
                    start = time.process_time()
                    source.sample(SampleRef(0, turn, turn % len(before)))
                    times.setdefault((side, name), []).append((time.process_time() - start) * 1e3)
            one, other = (statistics.median(times[side, name][1:]) for name in ("before", "after"))
            brought = (
                f"{1e3 / other:.0f} samples/s/core (target 150), {one / other:.1f} times as many"
            )
            print(f"sample at {side:4}: {one:.1f} ms, repacked {other:.1f} ms: {brought}")


if __name__ == "__main__":
    main()
