"""Time and memory of automatic masks, compared with Meta's `SamAutomaticMaskGenerator`.

"at full size" is gigamask without the boxes of masks: logits of the whole image, four at a time,
counted by torch, encoded mask by mask. "decoder" is the encoder and decoder alone.
Meta's package is measured if `segment_anything` is on PYTHONPATH. Each runs in a process of its
own: CPU seconds (user and system, so that a busy machine does not count), and the growth of its
resident memory. Both get the same weights, image and thresholds, and the masks are counted. Prints
Markdown.

Run: python -m benchmarks.automatic WEIGHTS|starter [--image FILE] [--size 1500 2250]
    [--points-per-side 32] [--pred-iou-thresh 0.88 0.5 0]
"""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import contextlib
import multiprocessing
import platform
import resource
import time
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import patch

import cv2
import numpy as np
import torch

from gigamask.data import image
from gigamask.inference import automatic_mask_generator
from gigamask.inference.automatic_mask_generator import SamAutomaticMaskGenerator
from gigamask.masks.rle import RLEMasks
from gigamask.masks.transforms import ImageTransform
from gigamask.synthetic.scenes import compose_scene
from gigamask.workflows.evaluate import load_model
from tests import official


@contextlib.contextmanager
def at_full_size() -> Iterator[None]:
    """Makes automatic masks from logits of the whole image."""

    def whole(transform: ImageTransform, low: torch.Tensor, threshold: float) -> Iterator[tuple]:
        height, width = transform.original
        for index in torch.arange(len(low)).split(max(1, 2**26 // (4 * height * width))):
            logits = transform.logits_to_original(low[index][:, None])[:, 0]
            yield index.numpy(), logits, np.zeros((len(index), 2), int)

    def stability(logits: torch.Tensor, offset: float, zero: float) -> torch.Tensor:
        inner, outer = (
            (logits > threshold).sum((1, 2)) for threshold in (zero + offset, zero - offset)
        )
        return inner / outer

    def encode(stacks: list[tuple], size: tuple[int, int]) -> RLEMasks:
        dense = [masks.numpy() for masks, _ in stacks]
        return RLEMasks.from_dense(np.concatenate([np.zeros((0, *size), bool), *dense]))

    with (
        patch.object(automatic_mask_generator, "logit_stacks", whole),
        patch.object(automatic_mask_generator, "calculate_stability_score", stability),
        patch.object(automatic_mask_generator, "encode_boxes", encode),
    ):
        yield


def measure(
    whose: str, weights: str, pixels: np.ndarray, settings: dict, told: multiprocessing.Queue
) -> None:
    """Puts seconds, megabytes and masks into the queue."""
    torch.set_num_threads(1)
    model = load_model(weights, "cpu")
    if whose == "decoder":
        settings |= {"pred_iou_thresh": 1.0}  # which no mask exceeds
    if whose == "Meta's":
        with official.imported() as package:
            generator = package.SamAutomaticMaskGenerator(
                official.with_weights_of(model, package), output_mode="uncompressed_rle", **settings
            )
    else:
        generator = SamAutomaticMaskGenerator(model, output_mode="uncompressed_rle", **settings)
    full = at_full_size() if whose == "at full size" else contextlib.nullcontext()
    before, start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    with full:
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
        ways = ("gigamask", "at full size", "decoder", *(["Meta's"] if official.there() else []))
        for whose in ways:
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
