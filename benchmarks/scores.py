"""Scores compared with the tools that they must equal: time, difference and memory.

Average precision and AR@1000 against pycocotools on images of 20 objects and 900 scored masks;
boundary F against DAVIS's form with distance transforms, and Boundary IoU against
faster-coco-eval's bands, on masks of three sizes in an image of 1500 x 2250.

Run: python -m benchmarks.scores [--images 15] [--rounds 3]
"""

import argparse
import contextlib
import io
import time
import tracemalloc
import warnings
from collections.abc import Callable

import cv2
import numpy as np
from faster_coco_eval.core import mask as faster
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval

from gigamask.evaluation.boundary import boundary_f, boundary_iou
from gigamask.evaluation.coco_ap import PROPOSALS, CocoProtocol, ImageDetections, coco_metrics
from gigamask.masks.boundary import outline
from gigamask.masks.rle import RLEMasks
from gigamask.rng import make_rng

cv2.setNumThreads(1)
SIZE = (480, 640)
LARGE = (1500, 2250)


def scene(number: int) -> ImageDetections:
    """Twenty ellipses of all sizes, and 900 masks that are the same ones moved and swollen, of
    random scores."""
    random = make_rng(0, "benchmark scores", number)
    centres, axes = random.uniform(0, SIZE[::-1], (20, 2)), np.exp(random.uniform(1.5, 5, (20, 2)))
    chosen = random.integers(0, 20, 900)
    moved, swollen = (
        centres[chosen] + random.normal(0, 4, (900, 2)),
        axes[chosen] * random.uniform(0.8, 1.25, (900, 2)),
    )
    truth, found = (
        np.array([ellipse(*each) for each in zip(*both, strict=True)])
        for both in ((centres, axes), (moved, swollen))
    )
    return ImageDetections(
        RLEMasks.from_dense(truth), RLEMasks.from_dense(found), random.random(900).round(3)
    )


def ellipse(centre: np.ndarray, axes: np.ndarray) -> np.ndarray:
    canvas = np.zeros(SIZE, np.uint8)
    cv2.ellipse(canvas, tuple(map(int, centre)), tuple(map(int, axes)), 0, 0, 360, 1, -1)
    return canvas > 0


def by_pycocotools(images: list[ImageDetections], protocol: CocoProtocol) -> float:
    """AR at the protocol's last count, after making the data sets, which is timed with it here as
    in ours."""
    sets = []
    for found in (False, True):
        annotations = []
        for number, image in enumerate(images):
            masks = image.detections if found else image.truth
            for i, (text, area) in enumerate(
                zip(masks.to_coco(), masks.areas().tolist(), strict=True)
            ):
                code = {"size": list(masks.size), "counts": text}
                marks = {"score": float(image.scores[i])} if found else {}
                place = {"id": len(annotations) + 1, "image_id": number, "category_id": 1}
                annotations.append(
                    {**place, "segmentation": code, "area": area, "iscrowd": 0, **marks}
                )
        data = COCO()
        sizes = [
            {"id": number, "height": SIZE[0], "width": SIZE[1]} for number in range(len(images))
        ]
        data.dataset = {"images": sizes, "annotations": annotations, "categories": [{"id": 1}]}
        data.createIndex()
        sets.append(data)
    judge = COCOeval(*sets, "segm")
    judge.params.maxDets = list(protocol.max_found)
    judge.evaluate()
    judge.accumulate()
    return float(judge.eval["recall"][:, 0, 0, -1].mean())


def best(function: Callable, rounds: int) -> tuple[float, object]:
    """Returns the least seconds of some runs, and the answer."""
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        answer = function()
        times.append(time.perf_counter() - start)
    return min(times), answer


def f_by_transform(guess: np.ndarray, truth: np.ndarray) -> float:
    found, wanted = outline(guess), outline(truth)
    limit = np.ceil(0.008 * np.linalg.norm(guess.shape))
    near = [
        cv2.distanceTransform((~lines).astype(np.uint8), cv2.DIST_L2, cv2.DIST_MASK_PRECISE)
        <= limit
        for lines in (found, wanted)
    ]
    precision, recall = (
        (found & near[1]).sum() / found.sum(),
        (wanted & near[0]).sum() / wanted.sum(),
    )
    return float(2 * precision * recall / (precision + recall))


def iou_by_bands(guess: np.ndarray, truth: np.ndarray) -> float:
    codes = [
        {"size": list(mask.shape), "counts": RLEMasks.from_dense(mask[None]).to_coco()[0]}
        for mask in (guess, truth)
    ]
    one, other = (faster.decode(faster.rleToBoundary(code, 0.02)).astype(bool) for code in codes)
    return float((one & other).sum() / (one | other).sum())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--images", type=int, default=15)
    parser.add_argument("--rounds", type=int, default=3)
    told = parser.parse_args()
    images = [scene(number) for number in range(told.images)]
    print(f"{'':40}{'theirs':>10}{'ours':>10}{'ratio':>8}{'difference':>12}")
    for name, protocol in (
        ("COCO's twelve, pycocotools", CocoProtocol()),
        ("AR@1000, pycocotools", PROPOSALS),
    ):
        with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            theirs, expected = best(
                lambda protocol=protocol: by_pycocotools(images, protocol), told.rounds
            )
        ours, answer = best(
            lambda protocol=protocol: coco_metrics(images, protocol)[
                f"AR@{protocol.max_found[-1]}"
            ],
            told.rounds,
        )
        print(
            f"{name:40}{theirs:9.2f}s{ours:9.2f}s{theirs / ours:7.1f}x"
            f"{abs(expected - answer):12.1e}"
        )
    tracemalloc.start()
    coco_metrics(images, PROPOSALS)
    masks = sum(len(image.truth) + len(image.detections) for image in images)
    print(
        f"memory of AR@1000: {tracemalloc.get_traced_memory()[1] / masks:.0f} bytes of Python "
        f"objects a mask, {masks:,} masks"
    )
    tracemalloc.stop()
    y, x = np.mgrid[: LARGE[0], : LARGE[1]]
    for radius in (60, 300, 700):
        truth = (y - 750) ** 2 + (x - 1100) ** 2 < radius**2
        guess = np.roll(truth, (5, 3), (0, 1))
        for name, other, own in (
            ("F, transforms", f_by_transform, boundary_f),
            ("Boundary IoU, rleToBoundary", iou_by_bands, boundary_iou),
        ):
            theirs, expected = best(
                lambda other=other, guess=guess, truth=truth: other(guess, truth), told.rounds
            )
            ours, answer = best(
                lambda own=own, guess=guess, truth=truth: own(guess[None], truth[None]).item(),
                told.rounds,
            )
            head = f"disc of radius {radius}: {name}"
            print(
                f"{head:45}{1e3 * theirs:5.0f}ms{1e3 * ours:7.1f}ms{theirs / ours:8.1f}x"
                f"{abs(expected - answer):12.1e}"
            )


if __name__ == "__main__":
    main()
