"""Build an index of SA-1B's shape on disk; measure opening, gathering, filtering and ordering.

11.2 million images with 1.1 billion masks in 1,000 tars, times --scale; every byte of every column
is written (24 GB at scale 1). Each measurement runs in its own process. The folder is deleted
unless --folder names it.

With --tars, time `index`, `verify`, `repack` and `convert` on that many tars of four small images
with three masks each: CPU seconds and the largest memory of each in a process of its own.

Run: python -m benchmarks.index_scale [--scale 0.01] [--folder FOLDER] [--merge]
     python -m benchmarks.index_scale --tars 10 100 1000
"""

import os

os.environ["OMP_NUM_THREADS"] = "1"

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from gigamask.data import index as indexes
from gigamask.data import index_format, tar
from gigamask.data.index import Index
from gigamask.data.index_format import MANIFEST
from gigamask.data.mask_sampling import MaskFilters
from gigamask.data.sample_table import open_sample_table
from gigamask.data.shard_index import IMAGE_COLUMNS, MASK_COLUMNS, LeftOut, ShardSummary, TarFile
from gigamask.datatools.convert import convert
from gigamask.datatools.formats import ConvertOptions
from gigamask.datatools.verify import verify
from gigamask.plugins.memory import large_sample
from gigamask.rng import make_rng
from gigamask.samplers.batch_sampler import SampleSequence
from gigamask.samplers.random import Random
from tests.orders import iter_steps

IMAGES, MASKS_AN_IMAGE, TARS = 11_186_078, 98.3, 1000
JPG_BYTES, JSON_BYTES = 1_000_000, 86_000
AT_ONCE = 2**20
GATHERED = 1_000_000
BATCH, MICRO = 256, 4
SMALL, IMAGES_A_TAR, MASKS_A_SMALL_IMAGE = (96, 128), 4, 3


def masks_of(first: int, images: int) -> np.ndarray:
    """How many masks each image has: on average SA-1B's, from none to some hundreds, by the image's
    number alone."""
    return make_rng(0, "masks", first).gamma(2.2, MASKS_AN_IMAGE / 2.2, images).astype("<i4")


def image_pieces(name: str, images: int, per_tar: int) -> Iterator[np.ndarray]:
    """Yields one image column tar by tar."""
    for first in range(0, images, per_tar):
        count = min(per_tar, images - first)
        place = np.arange(count, dtype="<i8") * (JPG_BYTES + JSON_BYTES + 2048)
        made = {
            "jpg_offset": lambda place=place: place + 512,
            "json_offset": lambda place=place: place + JPG_BYTES + 1024,
            "image_id": lambda first=first, count=count: np.arange(first, first + count),
            "name": lambda first=first, count=count: np.array(
                [b"sa_%d" % number for number in range(first, first + count)]
            ),
            "masks": lambda first=first, count=count: masks_of(first, count),
        }
        constant = {"jpg_bytes": JPG_BYTES, "json_bytes": JSON_BYTES, "width": 2250, "height": 1500}
        yield made[name]() if name in made else np.full(count, constant.get(name, 0))


def mask_pieces(name: str, masks: int) -> Iterator[np.ndarray]:
    """Yields one mask column in large pieces of random rows."""
    for first in range(0, masks, AT_ONCE):
        count, random = min(AT_ONCE, masks - first), make_rng(0, name, first)
        if name == "area":
            yield random.integers(100, 3_000_000, count, dtype=np.int32)
        elif name == "box":
            yield random.integers(0, 1500, (count, 4), dtype=np.uint16)
        else:
            yield 0.88 + 0.12 * random.random(count, dtype=np.float32)


def write(folder: Path, scale: float) -> None:
    """Writes an index whose tars are sparse files of the right length."""
    images = round(IMAGES * scale)
    per_tar = -(-images // max(1, round(TARS * scale)))
    (folder / "tars").mkdir(parents=True)
    parts = []
    for number, first in enumerate(range(0, images, per_tar)):
        count, path = min(per_tar, images - first), folder / "tars" / f"sa_{number:06d}.tar"
        with open(path, "wb") as file:
            file.truncate(count * (JPG_BYTES + JSON_BYTES + 2048) + 10240)
        stored = TarFile(str(path), path.stat().st_size, str(path.stat().st_mtime_ns))
        parts.append(
            ShardSummary(
                stored,
                LeftOut([], 0, 0),
                count,
                int(masks_of(first, count).sum()),
                len(f"sa_{first + count - 1}"),
            )
        )
    masks = sum(part.masks for part in parts)
    columns = {f"images_{name}": image_pieces(name, images, per_tar) for name in IMAGE_COLUMNS}
    columns["images_name"] = image_pieces("name", images, per_tar)
    columns |= {f"masks_{name}": mask_pieces(name, masks) for name in MASK_COLUMNS}
    index_format.write(folder / "index", parts, columns)


def forget_pages(folder: Path) -> None:
    """Asks the kernel to drop the files from its cache, once they are on disk."""
    for path in folder.iterdir():
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def gather(index: Index, in_order: bool = False) -> float:
    """Returns the seconds that a million random mask rows of all columns take, sorted first when
    `in_order`."""
    rows = make_rng(1, "gather").integers(0, index.manifest.masks, GATHERED)
    start = time.perf_counter()
    rows = np.sort(rows) if in_order else rows
    for column in index.masks.values():
        column[rows]
    return time.perf_counter() - start


def measure_open(folder: Path) -> dict[str, float]:
    before, start = memory(), time.perf_counter()
    index = Index.open(folder)
    return {
        "open": time.perf_counter() - start,
        "open: MB added": memory() - before + 0 * len(index),
    }


def measure_warm_gather(folder: Path) -> dict[str, float]:
    index = Index.open(folder)
    gather(index)
    return {"gather 1e6 mask rows, warm": gather(index)}


def measure_cold_gather(folder: Path) -> dict[str, float]:
    forget_pages(folder)
    return {"gather 1e6 mask rows, cold": gather(Index.open(folder))}


def measure_sorted_gather(folder: Path) -> dict[str, float]:
    forget_pages(folder)
    cold = gather(Index.open(folder), True)
    return {
        "gather 1e6, sorted first, cold": cold,
        "gather 1e6, sorted first, warm": gather(Index.open(folder), True),
    }


def measure_items(folder: Path) -> dict[str, float]:
    return timed_items(folder, "items, SA's own filter", MaskFilters())


def measure_filtered_items(folder: Path) -> dict[str, float]:
    return timed_items(folder, "items, predicted_iou >= 0.95", MaskFilters(min_predicted_iou=0.95))


def measure_rare_items(folder: Path) -> dict[str, float]:
    return timed_items(
        folder, "items, predicted_iou >= 0.999", MaskFilters(min_predicted_iou=0.999)
    )


def timed_items(folder: Path, name: str, filters: MaskFilters) -> dict[str, float]:
    index, before, start = Index.open(folder), memory(), time.perf_counter()
    found = open_sample_table(index, filters)
    return {
        name: time.perf_counter() - start,
        f"{name}: MB kept": memory() - before + 0 * found.items.count,
    }


def measure_epoch(folder: Path) -> dict[str, float]:
    index = Index.open(folder)
    found = open_sample_table(index, MaskFilters())
    before, start = memory(), time.perf_counter()
    sequence = SampleSequence(Random(), found.items, locate=found.locate)
    ordered = time.perf_counter() - start
    steps = iter_steps(sequence, 0, BATCH, MICRO)
    next(steps)
    first = time.perf_counter() - start
    start = time.perf_counter()
    for _ in range(found.items.count // BATCH - 1):
        next(steps)
    whole = time.perf_counter() - start
    seen = {
        "order of an epoch": ordered,
        "order and first step": first,
        f"an epoch of steps of {BATCH}": whole,
        "its MB": memory() - before,
    }
    return seen | {"microseconds a visit": 1e6 * whole / found.items.count}


def measure_merge(folder: Path) -> dict[str, float]:
    rows, start = index_format.rows_of_index(folder), time.perf_counter()
    with tempfile.TemporaryDirectory(dir=folder.parent) as out:
        index_format.merge(rows, Path(out) / "joined")
        return {f"merge of {len(rows)} tars": time.perf_counter() - start}


def write_small(folder: Path, tars: int) -> None:
    """Writes one tar under many names, and COCO's json of as many images and masks."""
    made = [large_sample.make(SMALL, MASKS_A_SMALL_IMAGE, i) for i in range(IMAGES_A_TAR)]
    names = [f"sa_{i}{suffix}" for i in range(IMAGES_A_TAR) for suffix in (".jpg", ".json")]
    first = folder / "tars" / "sa_000000.tar"
    tar.write(first, zip(names, (part for pair in made for part in pair), strict=True))
    for number in range(1, tars):
        (first.parent / f"sa_{number:06d}.tar").hardlink_to(first)
    (folder / "images").mkdir()
    images, rows = [], []
    for number in range(tars * IMAGES_A_TAR):
        path = folder / "images" / f"{number}.jpg"
        if number < IMAGES_A_TAR:
            path.write_bytes(made[number][0])
        else:
            path.hardlink_to(folder / "images" / f"{number % IMAGES_A_TAR}.jpg")
        images.append({"id": number, "file_name": path.name, "height": SMALL[0], "width": SMALL[1]})
        for each in range(MASKS_A_SMALL_IMAGE):
            ring = [10 + each, 10, 80, 12 + each, 60, 70 + each, 20, 50]
            rows.append({"id": len(rows), "image_id": number, "segmentation": [ring]})
    (folder / "coco.json").write_text(json.dumps({"images": images, "annotations": rows}))


def repack(folder: Path) -> None:
    """Repacks tars, with the plugin of that name."""
    from gigamask.plugins.repack import repack

    repack.repack([str(folder / "tars")], folder / "small", repack.RepackConfig(64))


COMMANDS: dict[str, Callable[[Path], object]] = {
    "index": lambda folder: indexes.build([folder / "tars"], folder / "index"),
    "verify": lambda folder: verify([str(folder / "tars")]),
    "repack": repack,
    "convert": lambda folder: convert(
        folder / "coco.json", folder / "images", folder / "made", ConvertOptions(), IMAGES_A_TAR
    ),
}


def measured(*arguments: str) -> dict[str, float]:
    """Returns what this module prints in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.index_scale", *arguments]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def report_commands(counts: list[int]) -> None:
    """Prints CPU seconds and peak memory of each command at each number of tars."""
    print("| tars | " + " | ".join(f"{name}, CPU s / MB" for name in COMMANDS) + " |")
    print("|---" * (len(COMMANDS) + 1) + "|")
    for count in counts:
        with tempfile.TemporaryDirectory() as folder:
            write_small(Path(folder), count)
            found = [measured("--measure", name, "--folder", folder) for name in COMMANDS]
        cells = [f"{each['cpu_s']:.2f} / {each['peak']:.0f}" for each in found]
        print(f"| {count:,} | " + " | ".join(cells) + " |", flush=True)


def measure_command(name: str, folder: Path) -> dict[str, float]:
    start = time.process_time()
    COMMANDS[name](folder)
    return {"cpu_s": time.process_time() - start}


MEASURES: dict[str, Callable[[Path], dict[str, float]]] = {
    name.removeprefix("measure_"): made
    for name, made in list(globals().items())
    if name.startswith("measure_")
}
TARGETS = {"open": 1.0, "gather 1e6 mask rows, warm": 0.5, "order and first step": 0.5}


def memory() -> float:
    """Returns the process's own memory in MB, mapped files not counted."""
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(fields["RssAnon"].split()[0]) / 1024


def report(folder: Path, scale: float, merge: bool) -> None:
    index = Index.open(folder / "index")
    images, masks = len(index), index.manifest.masks
    sizes = {path.name: path.stat().st_size for path in (folder / "index").glob("*.npy")}
    of = {
        kind: sum(size for name, size in sizes.items() if name.startswith(kind))
        for kind in ("images", "masks")
    }
    print(
        f"scale {scale}: {images:,} images, {masks:,} masks, {len(index.shard_paths)} tars; "
        f"{sum(of.values()) / 1e9:.2f} GB"
    )
    print(f"{of['images'] / images:.1f} bytes an image, {of['masks'] / masks:.1f} bytes a mask")
    print(f"{'':34}{'measured':>10}{'target':>9}{'peak MB':>9}")
    for name in MEASURES:
        if name == "merge" and not merge:
            continue
        found = measured("--measure", name, "--folder", str(folder / "index"))
        peak = found.pop("peak")
        for what, value in found.items():
            unit = "" if "MB" in what or "microseconds" in what else " s"
            target = f"< {TARGETS[what]:g}" if what in TARGETS else ""
            print(f"{what:34}{value:10.3f}{unit:2}{target:>7}{peak:9.0f}")


def main() -> None:
    words = argparse.ArgumentParser(description=__doc__)
    words.add_argument("--scale", type=float, default=0.01)
    words.add_argument("--folder", type=Path)
    words.add_argument(
        "--merge",
        action="store_true",
        help="also join all tars' rows into a second index, beside the first",
    )
    words.add_argument("--tars", type=int, nargs="+", help="numbers of tars to time commands on")
    words.add_argument("--measure", choices=[*MEASURES, *COMMANDS])
    asked = words.parse_args()
    if asked.tars:
        report_commands(asked.tars)
        return
    if asked.measure:
        name, folder = asked.measure, asked.folder
        found = MEASURES[name](folder) if name in MEASURES else measure_command(name, folder)
        print(
            json.dumps(found | {"peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024})
        )
        return
    with tempfile.TemporaryDirectory() as temporary:
        folder = asked.folder or Path(temporary)
        if not (folder / "index" / MANIFEST).exists():
            start = time.perf_counter()
            write(folder, asked.scale)
            print(f"written in {time.perf_counter() - start:.0f} s")
        report(folder, asked.scale, asked.merge)


if __name__ == "__main__":
    main()
