"""`convert`, `index` and the scan of a tar against plain loops, in one process with a warm cache.

The plain way to index is tarfile, json and pycocotools' area and box of each mask; it checks sizes
and scores, but no run lengths. The plain way to convert COCO's json decodes each JPEG by OpenCV,
draws each mask by pycocotools and writes both by tarfile. Without arguments photographs are noise:
24 of SA-1B's size with 100 masks each to index, and 2,750 of 480 x 640 with 20,000 polygons to
convert. CPU seconds, medians of alternating rounds.

Run: python -m benchmarks.data_commands [--index TARS ...] [--convert JSON IMAGES] [--rounds 5]
"""

import os

os.environ["OMP_NUM_THREADS"] = "1"

import argparse
import io
import json
import shutil
import statistics
import tarfile
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from itertools import count
from math import isfinite
from pathlib import Path

import cv2
import numpy as np
from pycocotools import mask as coco

from gigamask.data import index as indexes
from gigamask.data import tar
from gigamask.datatools.convert import convert
from gigamask.datatools.formats import ConvertOptions
from gigamask.plugins.memory import large_sample
from gigamask.rng import make_rng

IMAGES, MASKS, SIZE = 24, 100, (1500, 2250)
COCO_ANNOTATIONS, COCO_MASKS, COCO_SIZE, COCO_PHOTOS = 20_000, 7.3, (480, 640), 8


def scan_plainly(path: Path) -> list[tuple[str, int, int]]:
    with tarfile.open(path) as archive:
        return [(member.name, member.offset_data, member.size) for member in archive.getmembers()]


def scan(path: Path) -> list[tuple[str, int, int]]:
    found = tar.scan(path)
    return list(zip(found.names, found.offsets.tolist(), found.sizes.tolist(), strict=True))


def index_plainly(paths: list[Path], out: Path) -> np.ndarray:
    """Save areas and boxes of all masks and the places of all members; return the areas."""
    areas, boxes, places = [], [], []
    for path in paths:
        with tarfile.open(path) as archive:
            for member in archive:
                places.append((member.offset_data, member.size))
                if member.name.endswith(".json"):
                    record = json.loads(archive.extractfile(member).read())
                    size = [record["image"]["height"], record["image"]["width"]]
                    for each in record["annotations"]:
                        scores = each["predicted_iou"], each["stability_score"]
                        if each["segmentation"]["size"] != size or not all(map(isfinite, scores)):
                            raise SystemExit(f"{member.name}: not valid")
                        areas.append(int(coco.area(each["segmentation"])))
                        boxes.append(coco.toBbox(each["segmentation"]))
    np.savez(out, areas=areas, boxes=boxes, places=places)
    return np.array(areas)


def convert_plainly(source: Path, images: Path, out: Path) -> None:
    """Convert COCO's json to a tar as a script would."""
    instances = json.loads(source.read_bytes())
    names = {each["id"]: each["name"] for each in instances["categories"]}
    of_image = defaultdict(list)
    for each in instances["annotations"]:
        of_image[each["image_id"]].append(each)
    with tarfile.open(out / "sa_000000.tar", "w") as archive:
        for image in instances["images"]:
            height, width = image["height"], image["width"]
            jpg = (images / image["file_name"]).read_bytes()
            pixels = cv2.imdecode(np.frombuffer(jpg, np.uint8), cv2.IMREAD_COLOR)
            if pixels is None or pixels.shape[:2] != (height, width):
                raise SystemExit(f"{image['file_name']}: not as stated")
            record = []
            for each in of_image[image["id"]]:
                if each["iscrowd"]:
                    continue
                rle = coco.merge(coco.frPyObjects(each["segmentation"], height, width))
                record.append(
                    {
                        "bbox": coco.toBbox(rle).tolist(),
                        "area": int(coco.area(rle)),
                        "segmentation": {"size": [height, width], "counts": rle["counts"].decode()},
                        "predicted_iou": 1.0,
                        "stability_score": 1.0,
                        "point_coords": [each["segmentation"][0][:2]],
                        "crop_box": [0, 0, width, height],
                        "id": each["id"],
                        "category": names[each["category_id"]],
                    }
                )
            stem = f"sa_{image['id']}"
            about = {"image_id": image["id"], "width": width, "height": height, "file_name": stem}
            text = json.dumps({"image": about, "annotations": record}).encode()
            for name, payload in ((f"{stem}.jpg", jpg), (f"{stem}.json", text)):
                member = tarfile.TarInfo(name)
                member.size = len(payload)
                archive.addfile(member, io.BytesIO(payload))


def write_tar(path: Path) -> None:
    """Write photographs of SA-1B's size with masks."""
    made = [large_sample.make(SIZE, MASKS, number) for number in range(IMAGES)]
    suffixes = (".jpg", ".json")
    tar.write(
        path,
        (
            (f"sa_{number}{suffix}", payload)
            for number, pair in enumerate(made)
            for suffix, payload in zip(suffixes, pair, strict=True)
        ),
    )


def write_coco(folder: Path, annotations: int) -> tuple[Path, Path]:
    """Write COCO's json of polygons like COCO's, and the photographs, some of them linked often."""
    (height, width), random = COCO_SIZE, make_rng(0, "coco")
    images, rows = [], []
    photos = folder / "images"
    photos.mkdir()
    for number in range(round(annotations / COCO_MASKS)):
        path = photos / f"{number:012d}.jpg"
        if number < COCO_PHOTOS:
            path.write_bytes(large_sample.photograph(COCO_SIZE, make_rng(0, "photo", number)))
        else:
            path.hardlink_to(photos / f"{number % COCO_PHOTOS:012d}.jpg")
        images.append({"id": number, "file_name": path.name, "height": height, "width": width})
    for number in range(annotations):
        corners = int(random.integers(8, 42))
        angles = 2 * np.pi * np.arange(corners) / corners
        radius = np.exp(random.normal(3.7, 0.8)) * random.uniform(0.6, 1.4, corners)
        x = np.clip(random.uniform(0, width) + radius * np.cos(angles), 0, width)
        y = np.clip(random.uniform(0, height) + radius * np.sin(angles), 0, height)
        ring = np.stack([x, y], 1).ravel().round(2).tolist()
        rows.append(
            {
                "id": number,
                "image_id": number % len(images),
                "category_id": 1 + number % 80,
                "iscrowd": 0,
                "area": 1.0,
                "bbox": [0.0, 0.0, 1.0, 1.0],
                "segmentation": [ring],
            }
        )
    categories = [{"id": 1 + i, "name": f"kind {i}"} for i in range(80)]
    source = folder / "instances.json"
    source.write_text(json.dumps({"images": images, "annotations": rows, "categories": categories}))
    return source, photos


def compare(
    title: str, plain: Callable[[], object], ours: Callable[[], object], rounds: int
) -> None:
    """Print the medians of alternating rounds of both in CPU seconds, and their ratio."""
    spent: dict[Callable, list[float]] = {plain: [], ours: []}
    for turn in range(rounds + 1):
        for work, times in spent.items():
            start = time.process_time()
            work()
            if turn:  # the first round warms up
                times.append(time.process_time() - start)
    plain_s, ours_s = (statistics.median(times) for times in spent.values())
    print(f"| {title} | {plain_s:.3f} | {ours_s:.3f} | {plain_s / ours_s:.2f} |", flush=True)


def compare_index(paths: list[Path], work: Path, rounds: int) -> None:
    """Compare scanning the first tar, and indexing all."""
    if scan(paths[0]) != scan_plainly(paths[0]):
        raise SystemExit(f"{paths[0]}: the scan and tarfile disagree")
    title, numbers = paths[0].parent.name, count()

    def ours() -> indexes.Index:
        return indexes.build([str(path) for path in paths], work / f"index{next(numbers)}")

    built, areas = ours(), index_plainly(paths, work / "plain.npz")
    if sorted(built.masks["area"].tolist()) != sorted(areas.tolist()):
        raise SystemExit(f"{title}: areas disagree")
    images, masks = len(built), built.manifest.masks
    compare(f"scan {paths[0].name}", lambda: scan_plainly(paths[0]), lambda: scan(paths[0]), rounds)
    compare(
        f"index {title}: {images:,} images, {masks:,} masks",
        lambda: index_plainly(paths, work / "plain.npz"),
        ours,
        rounds,
    )


def compare_convert(source: Path, images: Path, work: Path, rounds: int) -> None:
    """Compare converting COCO's json."""
    outs = [work / "plain", work / "ours"]

    def emptied(out: Path) -> Path:
        shutil.rmtree(out, ignore_errors=True)
        out.mkdir()
        return out

    def ours() -> int:
        return convert(source, images, emptied(outs[1]), ConvertOptions())["masks"]

    masks = ours()
    compare(
        f"convert {source.parent.name}/{source.name}: {masks:,} masks",
        lambda: convert_plainly(source, images, emptied(outs[0])),
        ours,
        rounds,
    )


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--index", type=Path, nargs="+", default=[], help="folders of tars")
    parser.add_argument("--convert", type=Path, nargs=2, metavar=("JSON", "IMAGES"))
    parser.add_argument("--annotations", type=int, default=COCO_ANNOTATIONS)
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    cv2.setNumThreads(1)
    print("| | plain CPU s | gigamask CPU s | times as fast |\n|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        for each in given.index:
            compare_index(sorted(each.glob("*.tar")), work, given.rounds)
        if given.convert:
            compare_convert(*given.convert, work, given.rounds)
        if not given.index and not given.convert:
            write_tar(work / "synthetic" / "sa_000000.tar")
            compare_index([work / "synthetic" / "sa_000000.tar"], work, given.rounds)
            compare_convert(*write_coco(work, given.annotations), work, max(1, given.rounds // 2))


if __name__ == "__main__":
    main()
