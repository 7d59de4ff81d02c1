"""Masks from COCO counts to the training grid: on run lengths, and by decoding.

One image of 1500 x 2250 with 100 masks, 64 of them used. The usual way decodes every mask with
pycocotools and resizes those used with cv2 (nearest).

Run: python benchmarks/run_lengths.py [--rounds 5]
"""

import argparse
import time
from collections.abc import Callable
from statistics import median

import cv2
import numpy as np
import torch
from pycocotools import mask as coco

from gigamask.masks.devices import decode_rle
from gigamask.masks.rle import RLEMasks
from gigamask.masks.transforms import ImageTransform
from gigamask.rng import make_rng

torch.set_num_threads(1)
cv2.setNumThreads(1)

SIZE = (1500, 2250)
SIDE = 1024
WANTED = 64


def make_masks(count: int, size: tuple[int, int]) -> list[bytes]:
    """Returns the counts of smooth blobs whose relative side is log-normal with a median of 0.061,
    as measured on SA-1B."""
    random = make_rng(0, "benchmark masks")
    height, width = size
    counts = []
    for relative in np.clip(0.061 * np.exp(random.normal(0, 1.1, count)), 0.004, 0.8):
        side = max(int(2 * relative * (height * width) ** 0.5), 12)
        noise = cv2.GaussianBlur(random.normal(size=(64, 64)).astype(np.float32), (0, 0), 5)
        y, x = np.mgrid[-1:1:64j, -1:1:64j]
        logits = (0.35 - x**2 - y**2 + 4 * noise).astype(np.float32)
        blob = cv2.resize(logits, (side, side), interpolation=cv2.INTER_LINEAR) > 0
        canvas = np.zeros((height + 2 * side, width + 2 * side), np.uint8)
        top, left = (
            int(random.integers(side // 2, height + side // 2)),
            int(random.integers(side // 2, width + side // 2)),
        )
        canvas[top : top + side, left : left + side] = blob
        counts.append(
            coco.encode(np.asfortranarray(canvas[side : side + height, side : side + width]))[
                "counts"
            ]
        )
    return [text for text in counts if coco.area({"size": size, "counts": text}) > 0]


def compare(title: str, target: float, plain: Callable, ours: Callable, rounds: int) -> None:
    """Prints the medians of alternating runs of both, and how many times quicker ours is."""
    times: dict[Callable, list[tuple[float, float]]] = {plain: [], ours: []}
    for function in (plain, ours):
        function()
    for _ in range(rounds):
        for function, repeats in ((plain, 1), (ours, 20)):
            wall, cpu = time.perf_counter(), time.process_time()
            for _ in range(repeats):
                function()
            times[function].append(
                (
                    (time.perf_counter() - wall) * 1e3 / repeats,
                    (time.process_time() - cpu) * 1e3 / repeats,
                )
            )
    (plain_wall, plain_cpu), (our_wall, our_cpu) = (
        [median(column) for column in zip(*times[f], strict=True)] for f in (plain, ours)
    )
    goal = f">= {target:g}x" if target else "none"
    row = (
        f"{plain_cpu:9.2f} {our_cpu:9.3f} {plain_cpu / our_cpu:8.0f}x {goal:>9} {plain_wall:9.2f} "
        f"{our_wall:9.3f} {plain_wall / our_wall:8.0f}x"
    )
    print(f"{title:34} {row}")


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    counts = make_masks(100, SIZE)
    wanted = counts[:WANTED]
    records = [{"size": SIZE, "counts": text} for text in counts]
    transform = ImageTransform.resize_longest_side(SIZE, SIDE)
    mirrored = ImageTransform.resize_longest_side(SIZE, SIDE, flip=True)
    uniforms = make_rng(0, "benchmark points").random((WANTED, 16))
    height, width = transform.resized

    def decode_and_resize(grid: int) -> list[np.ndarray]:
        small, resized = (grid * width // SIDE, round(grid * height / SIDE)), []
        for index, record in enumerate(records):
            mask = coco.decode(record)
            if index < WANTED:
                resized.append(cv2.resize(mask, small, interpolation=cv2.INTER_NEAREST))
        return resized

    def decode_and_draw() -> list[np.ndarray]:
        places = (np.flatnonzero(coco.decode(record)) for record in records[:WANTED])
        return [
            place[(u * len(place)).astype(int)] for place, u in zip(places, uniforms, strict=True)
        ]

    def to_dense(grid: int) -> torch.Tensor:
        runs = transform.apply_masks(RLEMasks.from_coco(wanted, SIZE), grid)
        return decode_rle(torch.from_numpy(runs.bounds), torch.from_numpy(runs.offsets), runs.size)

    runs = RLEMasks.from_coco(counts, SIZE)
    lengths = np.diff(runs.offsets) + 1
    print(
        f"{len(runs)} masks, {np.median(lengths):.0f} runs (median), {lengths.sum()} in all; "
        f"milliseconds, one thread"
    )
    print(
        f"{'':34} {'plain cpu':>9} {'ours cpu':>9} {'ratio':>9} {'target':>9} {'plain':>9} "
        f"{'ours':>9} {'ratio':>9}"
    )
    chosen = runs[:WANTED]
    compare(
        "to 256",
        200,
        lambda: decode_and_resize(256),
        lambda: transform.apply_masks(RLEMasks.from_coco(wanted, SIZE), 256),
        rounds,
    )
    compare(
        "to 256, mirrored",
        200,
        lambda: decode_and_resize(256),
        lambda: mirrored.apply_masks(RLEMasks.from_coco(wanted, SIZE), 256),
        rounds,
    )
    compare(
        "to 256, all 100 read",
        0,
        lambda: decode_and_resize(256),
        lambda: transform.apply_masks(RLEMasks.from_coco(counts, SIZE)[:WANTED], 256),
        rounds,
    )
    compare(
        "to 256, then dense by torch",
        0,
        lambda: decode_and_resize(256),
        lambda: to_dense(256),
        rounds,
    )
    compare(
        "to 1024",
        100,
        lambda: decode_and_resize(1024),
        lambda: transform.apply_masks(RLEMasks.from_coco(wanted, SIZE), 1024),
        rounds,
    )
    compare(
        "16 points a mask", 1000, decode_and_draw, lambda: chosen.sample_points(uniforms), rounds
    )


if __name__ == "__main__":
    main()
