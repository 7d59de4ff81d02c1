"""Time and memory of automatic masks, compared with Meta's `SamAutomaticMaskGenerator`.

Meta's package is measured if `segment_anything` is on PYTHONPATH. Each runs in a process of its
own: CPU seconds (user and system, so that a busy machine does not count), and the growth of its
resident memory. Both get the same weights, image and thresholds, and the masks are counted. Prints
Markdown.

Run: python -m benchmarks.automatic WEIGHTS [--image FILE] [--size 1500 2250] [--points-per-side 32]
    [--pred-iou-thresh 0.88 0.5 0]
"""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import multiprocessing
import platform
import resource
import time
from pathlib import Path

import cv2
import numpy as np
import torch

from gigamask.data import image
from gigamask.inference.automatic_mask_generator import SamAutomaticMaskGenerator
from gigamask.synthetic.scenes import compose_scene
from gigamask.training.checkpoint import load_model
from tests import official


def measure(
    whose: str, weights: str, pixels: np.ndarray, settings: dict, told: multiprocessing.Queue
) -> None:
    """Puts seconds, megabytes and masks into the queue."""
    torch.set_num_threads(1)
    model = load_model(weights, "cpu")
    if whose == "Meta's":
        with official.imported() as package:
            generator = package.SamAutomaticMaskGenerator(
                official.with_weights_of(model, package), output_mode="uncompressed_rle", **settings
            )
    else:
        generator = SamAutomaticMaskGenerator(model, output_mode="uncompressed_rle", **settings)
    before, start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    masks = len(generator.generate(pixels))
    told.put(
        (
            time.process_time() - start,
            (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1e3,
            masks,
        )
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("weights")
    parser.add_argument("--image", help="a picture; a synthetic scene where none is given")
    parser.add_argument(
        "--size",
        type=int,
        nargs=2,
        default=(1500, 2250),
        help="height and width that it is brought to",
    )
    parser.add_argument("--points-per-side", type=int, default=32)
    parser.add_argument("--pred-iou-thresh", type=float, nargs="+", default=(0.88,))
    parser.add_argument("--stability-score-thresh", type=float, default=0.95)
    asked = parser.parse_args()
    pixels = (
        image.decode(Path(asked.image).read_bytes(), asked.image)
        if asked.image
        else compose_scene(1, 3).pixels
    )
    pixels = cv2.resize(pixels, tuple(asked.size[::-1]), interpolation=cv2.INTER_CUBIC)
    print(
        f"{asked.size[0]} x {asked.size[1]} px, {asked.points_per_side} points a side, torch "
        f"{torch.__version__}, {platform.machine()}\n"
    )
    print("| pred_iou_thresh | whose | s | MB | masks |\n|---|---|---|---|---|")
    spawn = multiprocessing.get_context("spawn")
    for threshold in asked.pred_iou_thresh:
        settings = {
            "points_per_side": asked.points_per_side,
            "pred_iou_thresh": threshold,
            "stability_score_thresh": asked.stability_score_thresh,
        }
        for whose in ("gigamask", "Meta's") if official.there() else ("gigamask",):
            told = spawn.Queue()
            worker = spawn.Process(
                target=measure, args=(whose, asked.weights, pixels, settings, told)
            )
            worker.start()
            seconds, megabytes, masks = told.get()
            worker.join()
            print(
                f"| {threshold} | {whose} | {seconds:.1f} | {megabytes:,.0f} | {masks} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
