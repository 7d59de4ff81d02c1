"""Convert mutated files of people's formats: each must give masks or one line, in bounded memory.

python benchmarks/format_faults.py coco 2000    # one format, as a JSON line
python benchmarks/format_faults.py value 200    # peak memory at one value of 200 MB in parquet
"""

import base64
import io
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
from PIL import Image

from gigamask.datatools.convert import ConvertOptions, convert
from gigamask.errors import GigamaskError

HEIGHT, WIDTH = 60, 80
RING = [10.0, 10.0, 50.0, 12.0, 40.5, 40.0, 12.0, 44.0]
HOSTILE = (
    *(b"NaN", b"-Infinity", b"1e400", b"-1", b"99999999999999999999", b"131071", b"null", b"[]"),
    *(b'"\\ud800"', b"\xef\xbb\xbf", b"\xff\xfe", b"\0", b"{", b"]", b",", b'"', b"0.5 " * 300),
    *(b"[" * 3000, b"\\u0000", b"../../", b"1 " * 5000, b"\n" * 5000),
)
"""What is put into files beside random bytes."""
Make = Callable[[Path], tuple[Path, Path]]
"""Writes the files of a format to a folder; returns the one to mutate, and what is converted."""


def _png(pixels: np.ndarray) -> bytes:
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def _labels() -> np.ndarray:
    labels = np.zeros((HEIGHT, WIDTH), np.uint8)
    labels[10:40, 10:30], labels[20:50, 40:70] = 1, 2
    return labels


def _write(path: Path, content: bytes) -> tuple[Path, Path]:
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(content)
    return path, path.parent


def _coco(folder: Path) -> tuple[Path, Path]:
    image = {"id": 1, "file_name": "a.jpg", "width": WIDTH, "height": HEIGHT}
    runs = {"size": [HEIGHT, WIDTH], "counts": [100, 50, HEIGHT * WIDTH - 150]}
    content = {
        "images": [image],
        "annotations": [
            {"id": i, "image_id": 1, "category_id": 3, "segmentation": segmentation}
            for i, segmentation in enumerate(([RING], [RING, RING], runs))
        ],
        "categories": [{"id": 3, "name": "cat"}],
    }
    return (_write(folder / "coco" / "coco.json", json.dumps(content).encode())[0],) * 2


def _panoptic(folder: Path) -> tuple[Path, Path]:
    _write(folder / "panoptic" / "a.png", _png(np.stack([_labels()] * 3, -1)))
    annotation = {
        "image_id": 1,
        "file_name": "a.png",
        "segments_info": [{"id": 65793, "category_id": 1}, {"id": 131586, "category_id": 1}],
    }
    content = {
        "images": [{"id": 1, "file_name": "a.jpg", "width": WIDTH, "height": HEIGHT}],
        "annotations": [annotation],
        "categories": [{"id": 1, "name": "cat"}],
    }
    (folder / "panoptic.json").write_text(json.dumps(content))
    return (folder / "panoptic.json",) * 2


def _labelme(folder: Path) -> tuple[Path, Path]:
    points = np.reshape(RING, (-1, 2)).tolist()
    mask = base64.b64encode(_png(np.full((6, 8), 255, np.uint8))).decode()
    shapes = [
        {"label": "cat", "points": points, "shape_type": "polygon", "group_id": None},
        {"label": "cat", "points": points, "shape_type": "polygon", "group_id": 1},
        {"label": "dog", "points": [[5, 5], [12, 10]], "shape_type": "mask", "mask": mask},
    ]
    content = {"shapes": shapes, "imagePath": "a.jpg", "imageHeight": HEIGHT, "imageWidth": WIDTH}
    return _write(folder / "labelme" / "a.json", json.dumps(content).encode())


def _yolo(folder: Path) -> tuple[Path, Path]:
    line = " ".join(
        str(value / side) for value, side in zip(RING, [WIDTH, HEIGHT] * 4, strict=True)
    )
    (folder / "classes.txt").write_text("cat\ndog\n")
    return _write(folder / "yolo" / "a.txt", f"0 {line}\n1 {line} 0.2 0.3\n".encode())


def _label_images(folder: Path) -> tuple[Path, Path]:
    return _write(folder / "labels" / "a.png", _png(_labels()))


def _voc(folder: Path) -> tuple[Path, Path]:
    for name in ("SegmentationClass", "SegmentationObject"):
        _write(folder / name / "a.png", _png(_labels()))
    path = folder / "labelmap.txt"
    path.write_text("background:0,0,0::\ncat:128,0,0::\ndog:0,128,0::\n")
    return path, folder / "SegmentationObject"


def _parquet(folder: Path) -> tuple[Path, Path]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    columns = {"image": [(folder / "photos" / "a.jpg").read_bytes()], "label": [_png(_labels())]}
    pq.write_table(pa.table(columns), folder / "a.parquet")
    return (folder / "a.parquet",) * 2


FORMATS: dict[str, Make] = {
    "coco": _coco,
    "panoptic": _panoptic,
    "labelme": _labelme,
    "yolo": _yolo,
    "labels": _label_images,
    "voc": _voc,
    "parquet": _parquet,
}


def mutate(content: bytes, generator: np.random.Generator) -> bytes:
    """Return content with one to four changes.

    Args:
        content: The content of a file.
        generator: Its random numbers decide.
    """
    for _ in range(generator.integers(1, 5)):
        at, end = sorted(generator.integers(0, len(content) + 1, 2).tolist())
        end = min(end, at + int(generator.integers(0, 40)))
        new = HOSTILE[generator.integers(len(HOSTILE))]
        if generator.random() < 0.4:
            new = generator.bytes(int(generator.integers(1, 9)))
        kinds = [
            content[:at] + new + content[end:],
            content[:at] + new + content[at:],
            content[:at] + content[end:],
            content[:end] + content[at:end] * 20 + content[end:],
        ]
        content = kinds[generator.integers(len(kinds))]
        if generator.random() < 0.05:
            content = content[:at]
    return content


def attack(name: str, mutations: int) -> dict[str, float]:
    """Convert mutations of one format.

    Args:
        name: One of `FORMATS`.
        mutations: How many.

    Returns:
        Number tried and survived, peak memory and time of the slowest input.
    """
    survived, slowest = 0, 0.0
    with tempfile.TemporaryDirectory() as root:
        folder = Path(root)
        (folder / "photos").mkdir()
        Image.new("RGB", (WIDTH, HEIGHT), (90, 80, 70)).save(folder / "photos" / "a.jpg")
        path, source = FORMATS[name](folder)
        images = None if name == "parquet" else folder / "photos"
        sound = path.read_bytes()
        convert(source, images, folder / "out", ConvertOptions())
        start_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        generator = np.random.default_rng(0)
        for number in range(mutations):
            path.write_bytes(mutate(sound, generator))
            shutil.rmtree(folder / "out", ignore_errors=True)
            start = time.process_time()
            try:
                convert(source, images, folder / "out", ConvertOptions())
                survived += 1
            except GigamaskError:
                survived += 1
            except Exception as error:
                print(f"{name}, mutation {number}: {type(error).__name__}: {error}", flush=True)
            slowest = max(slowest, time.process_time() - start)
    peak_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return {
        "tried": mutations,
        "survived": survived,
        "peak_mb": round(peak_mb),
        "over_start_mb": round(peak_mb - start_mb),
        "slowest_s": round(slowest, 2),
    }


def convert_value(value_mb: int) -> dict[str, float]:
    """Convert a parquet file in which the annotations of one of eight images are far too large.

    Args:
        value_mb: Size of the value in MB.

    Returns:
        Images converted, and peak memory before and after.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    with tempfile.TemporaryDirectory() as root:
        path = Path(root) / "a.parquet"
        if not os.fork():  # memory that writing takes does not count
            value = np.random.default_rng(0).bytes(value_mb * 500_000).hex()
            photo, ring = io.BytesIO(), json.dumps([{"segmentation": [RING]}])
            Image.new("RGB", (WIDTH, HEIGHT)).save(photo, "JPEG")
            columns = {"image": [photo.getvalue()] * 8, "annotations": [value, *[ring] * 7]}
            pq.write_table(pa.table(columns), path)
            os._exit(0)
        os.wait()
        start_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        counts = convert(path, None, Path(root) / "out", ConvertOptions())
    peak_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return {
        "images": counts["images"],
        "start_mb": round(start_mb),
        "peak_mb": round(peak_mb),
    }


def run(name: str, mutations: int) -> dict[str, float]:
    """Return what `attack` returns, measured in a process of its own.

    Args:
        name: One of `FORMATS`.
        mutations: How many.
    """
    command = [sys.executable, __file__, name, str(mutations)]
    done = subprocess.run(command, capture_output=True, text=True)
    *lines, last = done.stdout.splitlines() or [""]
    if lines:
        print("\n".join(lines))
    if done.returncode:
        sys.exit(f"{name}: the process ended with {done.returncode}\n{done.stderr[-2000:]}")
    return json.loads(last)


if __name__ == "__main__":
    act = convert_value if sys.argv[1] == "value" else partial(attack, sys.argv[1])
    print(json.dumps(act(int(sys.argv[2]))))
