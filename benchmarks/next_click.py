"""The next click of evaluation: on a GPU for all masks at once, or on the CPU mask by mask.

Masks of an image of 1500 x 2250 px are ellipses; predictions miss and add smooth parts of them, as
after a first click, or differ by thin bands, as after many. "threads" copies the masks to the CPU
first and uses torch's number of threads. Both give the same clicks, which is checked. Prints
Markdown.

Run: python -m benchmarks.next_click [--masks 64] [--repeats 5]
In small, on a CPU: python -m benchmarks.next_click --device cpu --masks 2 --size 150 225
"""

import argparse
import statistics
import time

import cv2
import numpy as np
import torch
from torch import Tensor

from gigamask.distributed.precision import choose_device
from gigamask.prompts.farthest import center_clicks
from gigamask.prompts.schedule import center_clicks_in_threads
from gigamask.rng import make_rng


def masks_and_predictions(count: int, size: tuple[int, int], band: float) -> tuple[Tensor, Tensor]:
    """Returns ellipses, and the same with an outline that is off by up to `band` of their size."""
    rng = make_rng(0, "benchmark clicks")
    height, width = size
    y, x = np.mgrid[:height, :width]
    masks, predictions = [], []
    for _ in range(count):
        center, radius = rng.uniform(0.2, 0.8, 2) * size, rng.uniform(0.03, 0.4, 2) * height
        distance = np.hypot((y - center[0]) / radius[0], (x - center[1]) / radius[1])
        coarse = rng.standard_normal((9, 9)).astype(np.float32)
        noise = cv2.resize(coarse, (width, height), interpolation=cv2.INTER_CUBIC)
        masks.append(distance < 1)
        predictions.append(distance < 1 + band * noise)
    return torch.from_numpy(np.stack(masks)), torch.from_numpy(np.stack(predictions))


def main() -> None:
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--masks", type=int, default=64)
    options.add_argument("--size", type=int, nargs=2, default=(1500, 2250))
    options.add_argument("--repeats", type=int, default=5)
    options.add_argument("--device", default="auto")
    given = options.parse_args()
    device = choose_device(given.device)
    size = (given.size[0], given.size[1])
    print(f"{given.masks} masks of {size[0]} x {size[1]} px; ms for a click of all masks\n")
    print(f"| predictions | {device.type}, at once | {torch.get_num_threads()} threads |")
    print("|---|---|---|")
    for name, band in (("one click", 0.3), ("many clicks", 0.03)):
        made = masks_and_predictions(given.masks, size, band)
        target, pred_mask = (each.to(device) for each in made)
        valid = torch.ones_like(target)
        clicked = torch.zeros(len(target), 0, 2, dtype=torch.int64, device=device)
        times: dict[str, list[float]] = {}
        for _ in range(given.repeats + 1):  # the first is not counted
            found = []
            for way in (center_clicks, center_clicks_in_threads):
                start_s = time.perf_counter()
                found.append(way(target, pred_mask, valid, clicked).cpu())
                times.setdefault(way.__name__, []).append(time.perf_counter() - start_s)
            assert torch.equal(*found)
        ms = [f"{1e3 * statistics.median(each[1:]):.1f}" for each in times.values()]
        print(f"| after {name} | {' | '.join(ms)} |", flush=True)


if __name__ == "__main__":
    main()
