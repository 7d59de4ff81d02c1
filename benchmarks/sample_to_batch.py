"""From a tar to a sample: reading, parsing, decoding an SA-1B photograph, 64 of its 100 masks on a 256 grid; one core, against plain ways.

Photographs are filtered noise at SA-1B's size and rate (1500 x 2250, q95, about 1.2 MB), masks smooth blobs of SA-1B's sizes.
Plain: Pillow, json, every mask decoded by pycocotools. Careful: OpenCV, json, only the 64 masks decoded, one at a time.
"""

import os

os.environ |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}

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
from PIL import Image
from pycocotools import mask as coco

from gigamask.contracts import Chance
from gigamask.data import index as indexes
from gigamask.data import tar
from gigamask.data.loader import Source
from gigamask.data.settings import Assembly
from gigamask.draws import draw
from gigamask.geometry.runs import Runs
from gigamask.samplers.split import Visit

SIDE, GRID, MASKS, TAKEN, IMAGES, ROUNDS = 1024, 256, 100, 64, 4, 9
SIZE = (1500, 2250)
warnings.filterwarnings("ignore", message="__array__ implementation")


def photograph(generator: np.random.Generator) -> bytes:
    """Noise in octaves with a camera's grain, tuned to the rate of SA-1B's JPEGs."""
    height, width = SIZE
    picture = np.full((height, width, 3), 120, np.float32)
    for cells, strength in ((6, 60), (24, 30), (96, 18), (400, 10)):
        coarse = generator.standard_normal((cells, cells * 3 // 2, 3), dtype=np.float32)
        picture += cv2.resize(coarse, (width, height), interpolation=cv2.INTER_CUBIC) * strength
    picture += cv2.GaussianBlur(generator.standard_normal((height, width), dtype=np.float32), (0, 0), 0.7)[:, :, None] * 6.5
    return cv2.imencode(".jpg", np.clip(picture, 0, 255).astype(np.uint8), [cv2.IMWRITE_JPEG_QUALITY, 95])[1].tobytes()


def blob(generator: np.random.Generator) -> np.ndarray:
    """A smooth mask: a bump with noise, thresholded; its side is a log-normal share of the image's, median .061 of the area's root."""
    height, width = SIZE
    side = int(np.clip(np.exp(generator.normal(np.log(0.061), 0.6)), 0.01, 0.6) * np.sqrt(height * width) * 1.6)
    ys, xs = np.mgrid[-1 : 1 : side * 1j, -1 : 1 : side * 1j].astype(np.float32)
    rough = cv2.resize(generator.standard_normal((9, 9), dtype=np.float32), (side, side), interpolation=cv2.INTER_CUBIC)
    y0, x0 = int(generator.integers(0, max(1, height - side))), int(generator.integers(0, max(1, width - side)))
    mask = np.zeros(SIZE, bool)
    patch = mask[y0 : y0 + side, x0 : x0 + side]
    patch[:] = (0.45 - xs**2 - ys**2 + 0.25 * rough > 0)[: patch.shape[0], : patch.shape[1]]
    return mask


def members():
    for number in range(IMAGES):
        generator = draw(0, "benchmark", number)
        masks = Runs.concatenate([Runs.from_dense(blob(generator)[None]) for _ in range(MASKS)])
        masks = masks[masks.areas() > 0]
        annotations = [
            {"segmentation": {"size": list(SIZE), "counts": counts.decode()}, "predicted_iou": 0.95, "stability_score": 0.97, "area": 1, "id": i}
            for i, counts in enumerate(masks.to_coco())
        ]
        about = {"image_id": number, "width": SIZE[1], "height": SIZE[0], "file_name": f"sa_{number}.jpg"}
        yield f"sa_{number}.jpg", photograph(generator)
        yield f"sa_{number}.json", json.dumps({"image": about, "annotations": annotations}).encode()


def read(path: str, offset: int, size: int) -> bytes:
    with open(path, "rb") as file:
        file.seek(offset)
        return file.read(size)


def plain(jpg: bytes, raw: bytes) -> tuple:
    image = Image.open(io.BytesIO(jpg)).convert("RGB")
    scale = SIDE / max(image.size)
    image = np.asarray(image.resize((round(image.width * scale), round(image.height * scale)), Image.Resampling.BILINEAR))
    masks = [coco.decode(each["segmentation"]) for each in json.loads(raw)["annotations"]]
    width, height = round(GRID * SIZE[1] / max(SIZE)), round(GRID * SIZE[0] / max(SIZE))
    chosen = np.random.default_rng(0).choice(len(masks), TAKEN, replace=False)
    return image, np.stack([cv2.resize(masks[i], (width, height), interpolation=cv2.INTER_NEAREST) for i in chosen])


def careful(jpg: bytes, raw: bytes) -> tuple:
    image = cv2.cvtColor(cv2.imdecode(np.frombuffer(jpg, np.uint8), cv2.IMREAD_COLOR), cv2.COLOR_BGR2RGB)
    scale = SIDE / max(SIZE)
    image = cv2.resize(image, (round(SIZE[1] * scale), round(SIZE[0] * scale)), interpolation=cv2.INTER_AREA)
    annotations = json.loads(raw)["annotations"]
    width, height = round(GRID * SIZE[1] / max(SIZE)), round(GRID * SIZE[0] / max(SIZE))
    masks = np.zeros((TAKEN, height, width), np.uint8)
    for k, i in enumerate(np.random.default_rng(0).choice(len(annotations), TAKEN, replace=False)):
        masks[k] = cv2.resize(coco.decode(annotations[i]["segmentation"]), (width, height), interpolation=cv2.INTER_NEAREST)
    return image, masks


def main() -> None:
    torch.set_num_threads(1)
    cv2.setNumThreads(1)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "sa_000000.tar"
        tar.write(path, members())
        index = indexes.build([path], Path(folder) / "index")
        chance = Chance(seed=0, clicks=12, blocks=12)
        sources = {half: Source(str(index.folder), Assembly(SIDE, GRID, TAKEN, half_scale=half), chance) for half in (False, True)}
        places = [[int(index.images[name][row]) for name in ("jpg_offset", "jpg_bytes", "json_offset", "json_bytes")] for row in range(IMAGES)]

        def by_hand(way):
            return lambda i: way(read(str(path), *places[i][:2]), read(str(path), *places[i][2:]))

        ways = {
            "gigamask": lambda i: sources[False].sample(Visit(0, i, i)),
            "gigamask, half scale": lambda i: sources[True].sample(Visit(0, i, i)),
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
        sample = sources[False].sample(Visit(0, 0, 0))
        jpg_mb, json_kb = np.mean([place[1] for place in places]) / 1e6, np.mean([place[3] for place in places]) / 1e3
        print(f"{IMAGES} photographs of {jpg_mb:.2f} MB, json {json_kb:.0f} KB")
        print(f"mask runs of one sample: {sample.masks.bounds.nbytes / 1e3:.1f} KB (target <= 64)")
        print(f"{'':32}{'cpu ms':>9}{'wall ms':>9}{'samples/s':>11}{'x plain':>9}{'x careful':>11}")
        middle = {name: statistics.median(times) for name, times in cpu.items()}
        for name in ways:
            against = [middle[other] / middle[name] for other in ("plain (Pillow, 100 decoded)", "careful (OpenCV, 64 decoded)")]
            print(f"{name:32}{middle[name]:9.1f}{statistics.median(wall[name]):9.1f}{1e3 / middle[name]:11.1f}{against[0]:9.1f}{against[1]:11.1f}")
        print(f"{'target (cpu)':32}{'':18}{70:11}{20:9}{12:11}")


if __name__ == "__main__":
    main()
