"""Compare `gigamask evaluate` with a loop over `SamPredictor`: one mask and one prompt at a time.

The loop encodes each image once, then evaluates each mask alone: clicks chosen by the distance
transform of the whole padded image (RITM's `Clicker`), IoU counted by numpy. Both get the same
weights, images and masks, and alternate in one process. Prints medians of wall and CPU time, and
the difference of the scores: the predictor resizes pixels with Pillow's filter and scales points
as the reference code does, evaluation does both as in training.

Run: python -m benchmarks.evaluate [--weights RUN | --size tiny] [--data TARS] [--images 8]
    [--min-predicted-iou 0.75] [--batch-size 4] [--repeats 3] [--device cuda] [--precision bf16]
"""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable

import cv2
import numpy as np
import torch

from benchmarks.gpu_step import RECIPES
from gigamask.data import index as indexes
from gigamask.data.dataset import Sa1bDataset
from gigamask.data.index import Index
from gigamask.data.mask_sampling import MaskFilters
from gigamask.distributed.precision import autocast, choose_device
from gigamask.evaluation.clicks import ClickProtocol, evaluate_clicks
from gigamask.evaluation.embedded_images import scored_masks
from gigamask.inference.predictor import SamPredictor
from gigamask.models.init import build_model
from gigamask.models.sam.sam import Sam
from gigamask.recipes import find
from gigamask.synthetic import scenes
from gigamask.training.checkpoint import load_model

CLICKS = ClickProtocol().clicks
COLUMNS = (*map(str, CLICKS), "oracle", "box")
Scores = dict[str, float]


def plainly(
    predictor: SamPredictor, index: Index, filters: MaskFilters, rows: range
) -> list[Scores]:
    """Returns each mask's IoU by clicks, of the best of three masks, and for the box."""
    dataset, found = Sa1bDataset(index), []
    for row in rows:
        numbers = scored_masks(index, row, filters)
        if not len(numbers):
            continue
        pixels, entry = dataset[row]
        predictor.set_image(pixels)
        boxes = entry.masks[numbers].boxes()
        found += [
            play(predictor, entry.masks[[number]].to_dense()[0], box)
            for number, box in zip(numbers, boxes, strict=True)
        ]
    return found


def play(predictor: SamPredictor, truth: np.ndarray, box: np.ndarray) -> Scores:
    """Asks about one mask, one prompt at a time."""
    scores: Scores = {}
    guess, low = np.zeros_like(truth), None
    points, labels = np.zeros((0, 2)), np.zeros(0, int)
    for click in range(1, max(CLICKS) + 1):
        x, y, label = next_click(truth, guess, points)
        points, labels = np.concatenate([points, [[x, y]]]), np.append(labels, label)
        masks, iou, lows = predictor.predict(
            points, labels, mask_input=low, multimask_output=click == 1
        )
        best = int(iou.argmax())
        guess, low = masks[best], lows[best : best + 1]
        if click in CLICKS:
            scores[str(click)] = overlap(guess, truth)
        if click == 1:
            scores["oracle"] = max(overlap(mask, truth) for mask in masks)
    masks, iou, _ = predictor.predict(box=box)
    return scores | {"box": overlap(masks[int(iou.argmax())], truth)}


def next_click(truth: np.ndarray, guess: np.ndarray, points: np.ndarray) -> tuple[int, int, int]:
    """Returns x, y and label of the deepest pixel of what is wrong, of the whole mask or background
    where nothing is."""
    clicked = points.astype(int)
    for inside, outside in ((truth & ~guess, ~truth & guess), (truth, ~truth)):
        depths = [
            cv2.distanceTransform(np.pad(region, 1).astype(np.uint8), cv2.DIST_L2, 0)[1:-1, 1:-1]
            for region in (inside, outside)
        ]
        for depth in depths:
            depth[clicked[:, 1], clicked[:, 0]] = 0
        if max(depths[0].max(), depths[1].max()) > 0:
            break
    positive = bool(depths[0].max() > depths[1].max())
    depth = depths[not positive]
    y, x = np.unravel_index(depth.argmax(), depth.shape)
    return int(x), int(y), int(positive)


def overlap(guess: np.ndarray, truth: np.ndarray) -> float:
    union = (guess | truth).sum()
    return float((guess & truth).sum() / union) if union else 1.0


def together(
    model: Sam, index: Index, filters: MaskFilters, rows: range, at_once: int
) -> list[Scores]:
    """Returns the same scores as `gigamask evaluate` takes them."""
    found = evaluate_clicks(model, index, filters, ClickProtocol(), rows, at_once).scores
    return [
        dict(zip(COLUMNS, (*score.clicks.values(), score.oracle, score.box), strict=True))
        for score in found
    ]


def timed(
    act: Callable[[], list[Scores]], device: torch.device
) -> tuple[float, float, list[Scores]]:
    """Returns wall and CPU seconds, and what was found."""
    begin = time.perf_counter(), time.process_time()
    found = act()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - begin[0], time.process_time() - begin[1], found


def compare(
    model: Sam, index: Index, filters: MaskFilters, rows: range, at_once: int, repeats: int
) -> None:
    """Prints what both took and found."""
    device = model.pixel_mean.device
    ways = {
        "plain": lambda: plainly(SamPredictor(model), index, filters, rows),
        "gigamask": lambda: together(model, index, filters, rows, at_once),
    }
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    found: dict[str, list[Scores]] = {}
    for _ in range(repeats):
        for name, act in ways.items():
            wall, cpu, found[name] = timed(act, device)
            times[name].append((wall, cpu))
    masks = len(found["plain"])
    wall, cpu = (
        {name: statistics.median(pair[part] for pair in pairs) for name, pairs in times.items()}
        for part in (0, 1)
    )
    print(
        f"{masks} masks of {len(rows)} images, {max(CLICKS)} clicks and a box each, {at_once} "
        f"images at once, {device.type}"
    )
    print("| way | wall s | CPU s | ms a mask |\n|---|---|---|---|")
    for name in ways:
        print(f"| {name} | {wall[name]:.2f} | {cpu[name]:.2f} | {1e3 * wall[name] / masks:.1f} |")
    print(
        f"ratio: wall {wall['plain'] / wall['gigamask']:.2f}, CPU "
        f"{cpu['plain'] / cpu['gigamask']:.2f}"
    )
    print("| mIoU | " + " | ".join(COLUMNS) + " |\n" + "|---" * (1 + len(COLUMNS)) + "|")
    for name, scores in found.items():
        print(
            f"| {name} | "
            + " | ".join(
                f"{np.mean([score[column] for score in scores]):.4f}" for column in COLUMNS
            )
            + " |"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--weights", help="a run, a checkpoint, or any weights; else untrained ones of --size"
    )
    parser.add_argument("--size", choices=list(RECIPES), default="tiny")
    parser.add_argument(
        "--data", nargs="+", help="tars or an index; synthetic scenes where none are given"
    )
    parser.add_argument("--images", type=int, default=8)
    parser.add_argument("--min-predicted-iou", type=float)
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--precision", choices=["fp32", "bf16", "fp16"], default="fp32")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    cv2.setNumThreads(1)
    device = choose_device(asked.device)
    model = (
        load_model(asked.weights, asked.device)
        if asked.weights
        else build_model(find(RECIPES[asked.size])().model, 0, device).eval()
    )
    with tempfile.TemporaryDirectory() as folder:
        if not asked.data:
            scenes.write(f"{folder}/scenes", asked.images, seed=1)
        index = indexes.open_or_build(asked.data or [f"{folder}/scenes"], f"{folder}/index")
        filters = MaskFilters(max_area=None, min_predicted_iou=asked.min_predicted_iou)
        rows = range(min(asked.images, len(index)))
        with autocast(asked.precision, device):
            compare(model, index, filters, rows, asked.batch_size, asked.repeats)


if __name__ == "__main__":
    main()
