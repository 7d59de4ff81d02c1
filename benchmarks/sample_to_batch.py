"""From a tar to a sample on one core: read, parse, decode, 64 of 100 masks on a 256 grid.

Images are filtered noise of SA-1B's size and bit rate (1500 x 2250, q95, about 1.2 MB), masks
smooth blobs of SA-1B's sizes; or the JPEGs of a tar given as argument. "plain" is Pillow, json,
every mask decoded by pycocotools; "careful" OpenCV, json, only the 64 masks decoded, one at a
time. The second table splits our milliseconds.

With --tars the images and masks are those of a folder of tars: our batches of one, against
webdataset with OpenCV and pycocotools, and against the floor, which only decodes and resizes.

Run: python -m benchmarks.sample_to_batch [TAR | --tars FOLDER]
"""

import os

os.environ |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}

import argparse
import io
import json
import statistics
import tempfile
import time
import warnings
from pathlib import Path

import cv2
import numpy as np
import torch
import webdataset
from PIL import Image
from pycocotools import mask as coco

from gigamask.data import annotation, image, tar
from gigamask.data import index as indexes
from gigamask.data.dataset import Sa1bDataset, build_sample
from gigamask.data.loader import BatchJob, SampleSource, collate
from gigamask.data.sample_config import SampleConfig
from gigamask.masks.transforms import ImageTransform
from gigamask.plugins.memory import large_sample
from gigamask.records import DataCursor, SampleRef
from gigamask.rng import make_rng
from gigamask.types import RandomSpec

SIDE, GRID, MASKS, TAKEN, IMAGES, ROUNDS = 1024, 256, 100, 64, 4, 9
SIZE = (1500, 2250)
warnings.filterwarnings("ignore", message="__array__ implementation")


def blob(generator: np.random.Generator) -> np.ndarray:
    """A smooth mask: a bump with noise, thresholded; its side is a log-normal share of the image's,
    median .061 of the area's root."""
    height, width = SIZE
    side = int(
        np.clip(np.exp(generator.normal(np.log(0.061), 0.6)), 0.01, 0.6)
        * np.sqrt(height * width)
        * 1.6
    )
    ys, xs = np.mgrid[-1 : 1 : side * 1j, -1 : 1 : side * 1j].astype(np.float32)
    rough = cv2.resize(
        generator.standard_normal((9, 9), dtype=np.float32),
        (side, side),
        interpolation=cv2.INTER_CUBIC,
    )
    y0, x0 = (
        int(generator.integers(0, max(1, height - side))),
        int(generator.integers(0, max(1, width - side))),
    )
    mask = np.zeros(SIZE, bool)
    patch = mask[y0 : y0 + side, x0 : x0 + side]
    patch[:] = (0.45 - xs**2 - ys**2 + 0.25 * rough > 0)[: patch.shape[0], : patch.shape[1]]
    return mask


def members(photographs: str | None = None):
    """Yields a tar's photographs, or noise, each with masks."""
    for number in range(IMAGES):
        jpg = (
            large_sample.photograph(SIZE, make_rng(0, "benchmark", number))
            if photographs is None
            else nth(photographs, number)
        )
        masks = large_sample.blobs(
            image.size(jpg, str(number)), MASKS, make_rng(0, "benchmark masks", number)
        )
        yield f"sa_{number}.jpg", jpg
        yield f"sa_{number}.json", large_sample.annotation(number, masks)


def nth(path: str, number: int) -> bytes:
    """Returns a tar's n-th JPEG."""
    found = tar.scan(path)
    jpegs = [i for i, name in enumerate(found.names) if name.endswith(".jpg")]
    chosen = jpegs[number % len(jpegs)]
    return read(path, found.offsets[chosen], found.sizes[chosen])


def read(path: str, offset: int, size: int) -> bytes:
    with open(path, "rb") as file:
        file.seek(offset)
        return file.read(size)


def plain(jpg: bytes, raw: bytes) -> tuple:
    picture = Image.open(io.BytesIO(jpg)).convert("RGB")
    width, height = small(picture.size)
    scale = SIDE / max(picture.size)
    pixels = np.asarray(
        picture.resize(
            (round(picture.width * scale), round(picture.height * scale)), Image.Resampling.BILINEAR
        )
    )
    masks = [coco.decode(each["segmentation"]) for each in json.loads(raw)["annotations"]]
    chosen = np.random.default_rng(0).choice(len(masks), TAKEN, replace=False)
    return pixels, np.stack(
        [cv2.resize(masks[i], (width, height), interpolation=cv2.INTER_NEAREST) for i in chosen]
    )


def careful(jpg: bytes, raw: bytes) -> tuple:
    pixels = cv2.cvtColor(
        cv2.imdecode(np.frombuffer(jpg, np.uint8), cv2.IMREAD_COLOR), cv2.COLOR_BGR2RGB
    )
    size = pixels.shape[1::-1]
    width, height = small(size)
    scale = SIDE / max(size)
    pixels = cv2.resize(
        pixels, (round(size[0] * scale), round(size[1] * scale)), interpolation=cv2.INTER_AREA
    )
    annotations = json.loads(raw)["annotations"]
    taken = min(TAKEN, len(annotations))
    masks = np.zeros((taken, height, width), np.uint8)
    for k, i in enumerate(np.random.default_rng(0).choice(len(annotations), taken, replace=False)):
        masks[k] = cv2.resize(
            coco.decode(annotations[i]["segmentation"]),
            (width, height),
            interpolation=cv2.INTER_NEAREST,
        )
    return pixels, masks


def small(size: tuple[int, int]) -> tuple[int, int]:
    """Returns width and height on the grid."""
    return round(GRID * size[0] / max(size)), round(GRID * size[1] / max(size))


def stages(index: indexes.Index, chance: RandomSpec) -> dict[str, float]:
    """Returns the middle of each stage's processor milliseconds; stages that are set in belong to
    the one above them."""
    dataset, settings, times = Sa1bDataset(index), SampleConfig(SIDE, GRID, TAKEN), {}

    def timed(name, call, *given):
        start = time.process_time()
        made = call(*given)
        times.setdefault(name, []).append((time.process_time() - start) * 1e3)
        return made

    for turn in range(ROUNDS * IMAGES):
        row = turn % IMAGES
        _, jpg, raw = timed("read", dataset.read, row)
        record = timed("json", annotation.read, raw, "x")
        entry = timed("counts to runs, checked", annotation.check, record, "x")
        sample = timed(
            "build_sample", build_sample, jpg, entry, SampleRef(0, turn, row), settings, chance
        )
        transform, taken = ImageTransform.resize_longest_side(entry.size, SIDE), entry.masks[:TAKEN]
        pixels = timed("  JPEG", image.decode, jpg, "x", entry.size)
        timed("  resize", transform.apply_image, pixels)
        timed("  runs to the grid", transform.apply_masks, taken, GRID)
        timed("collate", collate, [sample], (), settings, chance, 0.5, DataCursor(1))
    return {name: statistics.median(held) for name, held in times.items()}


def compare_with_floor(tars: Path) -> None:
    """Prints what a batch of one of the images of a folder of tars takes, and its floor."""
    with tempfile.TemporaryDirectory() as folder:
        index = indexes.build([tars], Path(folder) / "index")
        chance, config = RandomSpec(seed=0, clicks=12, blocks=12), SampleConfig(SIDE, GRID, TAKEN)
        source, dataset = SampleSource(str(index.folder), config, chance), Sa1bDataset(index)
        stream = iter(webdataset.WebDataset(index.shard_paths, shardshuffle=False, resampled=True))

        def ours(i: int) -> object:
            return source.batch(BatchJob((SampleRef(0, i, i % len(index)),), i, i + 1))

        def floor(i: int) -> object:
            pixels = dataset.read(i % len(index), with_json=False).pixels()
            return ImageTransform.resize_longest_side(pixels.shape[:2], SIDE).apply_image(pixels)

        def from_webdataset(i: int) -> object:
            member = next(stream)
            pixels, masks = careful(member["jpg"], member["json"])
            padded = torch.zeros((1, 3, SIDE, SIDE), dtype=torch.uint8)
            padded[0, :, : pixels.shape[0], : pixels.shape[1]] = torch.from_numpy(pixels).permute(
                2, 0, 1
            )
            return padded, torch.from_numpy(masks)

        ways = {
            "floor": floor,
            "gigamask": ours,
            "webdataset, OpenCV, pycocotools": from_webdataset,
        }
        times = {name: [] for name in ways}
        for i in range(min(len(index), 64) * ROUNDS):
            for name, way in ways.items():
                start = time.process_time()
                way(i)
                times[name].append((time.process_time() - start) * 1e3)
        images = len(index)
        print(f"{tars.name}: {images} images, {index.manifest.masks / images:.1f} masks an image")
        print("| | CPU ms, mean | x floor |\n|---|---|---|")
        # Photographs differ in size, so a mean over all; its first round warms up.
        means = {
            name: statistics.fmean(held[len(held) // ROUNDS :]) for name, held in times.items()
        }
        for name, mean in means.items():
            print(f"| {name} | {mean:.2f} | {mean / means['floor']:.2f} |")


def main() -> None:
    torch.set_num_threads(1)
    cv2.setNumThreads(1)
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("tar", nargs="?", help="a tar of JPEGs")
    parser.add_argument("--tars", type=Path, help="a folder of tars with annotations")
    given = parser.parse_args()
    if given.tars:
        compare_with_floor(given.tars)
        return
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "sa_000000.tar"
        tar.write(path, members(given.tar))
        index = indexes.build([path], Path(folder) / "index")
        chance = RandomSpec(seed=0, clicks=12, blocks=12)
        sources = {
            half: SampleSource(
                str(index.folder), SampleConfig(SIDE, GRID, TAKEN, half_scale=half), chance
            )
            for half in (False, True)
        }
        places = [
            [
                int(index.images[name][row])
                for name in ("jpg_offset", "jpg_bytes", "json_offset", "json_bytes")
            ]
            for row in range(IMAGES)
        ]

        def by_hand(way):
            return lambda i: way(read(str(path), *places[i][:2]), read(str(path), *places[i][2:]))

        ways = {
            "gigamask": lambda i: sources[False].sample(SampleRef(0, i, i)),
            "gigamask, half scale": lambda i: sources[True].sample(SampleRef(0, i, i)),
            "careful (OpenCV, 64 decoded)": by_hand(careful),
            "plain (Pillow, 100 decoded)": by_hand(plain),
        }
        cpu, wall = {name: [] for name in ways}, {name: [] for name in ways}
        for turn in range(ROUNDS + 1):
            for name, way in ways.items():
                start, tick = time.process_time(), time.perf_counter()
                way(turn % IMAGES)
                if turn:  # the first round warms up
                    cpu[name].append((time.process_time() - start) * 1e3)
                    wall[name].append((time.perf_counter() - tick) * 1e3)
        sample = sources[False].sample(SampleRef(0, 0, 0))
        jpg_mb, json_kb = (
            np.mean([place[1] for place in places]) / 1e6,
            np.mean([place[3] for place in places]) / 1e3,
        )
        print(f"{IMAGES} photographs of {jpg_mb:.2f} MB, json {json_kb:.0f} KB")
        print(f"mask runs of one sample: {sample.masks.bounds.nbytes / 1e3:.1f} KB (target <= 64)")
        print(f"{'':32}{'cpu ms':>9}{'wall ms':>9}{'samples/s':>11}{'x plain':>9}{'x careful':>11}")
        middle = {name: statistics.median(times) for name, times in cpu.items()}
        for name in ways:
            against = [
                middle[other] / middle[name]
                for other in ("plain (Pillow, 100 decoded)", "careful (OpenCV, 64 decoded)")
            ]
            print(
                f"{name:32}{middle[name]:9.1f}{statistics.median(wall[name]):9.1f}"
                f"{1e3 / middle[name]:11.1f}{against[0]:9.1f}{against[1]:11.1f}"
            )
        print(f"{'target (cpu)':32}{'':18}{70:11}{20:9}{12:11}")
        print(f"\n{'where the milliseconds go':32}{'cpu ms':>9}")
        for name, middle_ms in stages(index, chance).items():
            print(f"{name:32}{middle_ms:9.2f}")


if __name__ == "__main__":
    main()
