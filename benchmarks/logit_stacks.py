"""Time from low-resolution logits to encoded masks: boxes one by one, in stacks, and whole images.

Logits are smooth random blobs; a GPU resizes boxes of similar size together, a CPU one by one.

Run: python -m benchmarks.logit_stacks [--device cuda] [--masks 192] [--size 1500 2250]
"""

import argparse
import statistics
import time
from collections.abc import Callable, Iterator

import numpy as np
import torch

from gigamask.inference.automatic_mask_generator import calculate_stability_score
from gigamask.masks.devices import encode_boxes
from gigamask.masks.transforms import (
    ImageTransform,
    LogitStack,
    above,
    logit_boxes,
    logit_stacks,
    whole_image,
)


def blobs(count: int, side: int = 256) -> torch.Tensor:
    """Return logits of ellipses of a twentieth to all of the image."""
    draw = torch.Generator().manual_seed(0)
    centers = torch.rand(count, 2, 1, 1, generator=draw)
    radii = 0.05 + 0.45 * torch.rand(count, 2, 1, 1, generator=draw) ** 3
    at = torch.linspace(0, 1, side)
    return 10 - 10 * (
        ((at[:, None] - centers[:, 0]) / radii[:, 0]) ** 2
        + ((at - centers[:, 1]) / radii[:, 1]) ** 2
    )


def one_by_one(transform: ImageTransform, low: torch.Tensor) -> Iterator[LogitStack]:
    """Yield each mask's logits in its box."""
    for index, (box, corner) in enumerate(logit_boxes(transform, low, -1.0)):
        yield np.array([index]), box[None], np.array([corner])


def in_stacks(transform: ImageTransform, low: torch.Tensor) -> Iterator[LogitStack]:
    """Yield logits as the mask generator has them."""
    yield from logit_stacks(transform, low, -1.0)


def whole(transform: ImageTransform, low: torch.Tensor) -> Iterator[LogitStack]:
    """Yield logits of the whole image, in parts of a GiB."""
    step = max(1, 2**28 // int(np.prod(transform.original)))
    for index in torch.arange(len(low)).split(step):
        logits = transform.logits_to_original(low[index.to(low.device)][:, None])[:, 0]
        yield index.numpy(), logits, np.zeros((len(index), 2), np.int64)


def encode(
    way: Callable[[ImageTransform, torch.Tensor], Iterator[LogitStack]],
    transform: ImageTransform,
    low: torch.Tensor,
) -> float:
    """Return the milliseconds of a mask, with its stability, until it is encoded."""
    start = time.perf_counter()
    for _, logits, corners in way(transform, low):
        calculate_stability_score(logits, 1.0).cpu()
        encode_boxes([(above(logits, 0.0), corners)], transform.original)
    return 1e3 * (time.perf_counter() - start) / len(low)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--masks", type=int, default=192)
    parser.add_argument("--size", type=int, nargs=2, default=(1500, 2250))
    parser.add_argument("--repeats", type=int, default=5)
    asked = parser.parse_args()
    low = blobs(asked.masks).to(asked.device)
    transform = whole_image(tuple(asked.size), 1024)
    print(f"{asked.masks} masks, {asked.size[0]} x {asked.size[1]} px, {asked.device}")
    print("| way | ms a mask |\n|---|---|")
    for way in (whole, one_by_one, in_stacks):
        encode(way, transform, low[:8])
        taken = statistics.median(encode(way, transform, low) for _ in range(asked.repeats))
        print(f"| {way.__name__.replace('_', ' ')} | {taken:.3g} |")


if __name__ == "__main__":
    main()
