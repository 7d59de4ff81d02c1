"""Compare one training step of SAM with plain loops over Meta's modules and HF's `SamModel`.

Image, masks, rounds and optimizer are the same in each. A plain loop encodes the image, predicts
all masks in every round, sums the losses of all rounds and back-propagates once: focal 20 : dice 1
: squared error of the predicted IoU, a click on a random wrong pixel, the mask of the highest
predicted IoU fed back, autocast, AdamW. The trainer's step also has boxes, and two rounds without a
click, so that only time and memory are compared. If a loop runs out of memory, the table says so.
`--gather N` decodes N masks at a time in the plain loops, each group with an encoder pass of its
own.

Needs `pip install segment-anything transformers`; a package that is not installed is skipped.
Prints Markdown.

Run: python -m benchmarks.plain_loops --size b [--masks 64] [--rounds 11] [--repeats 5]
    [--levers none compile=1] [--compile]
On a CPU: python -m benchmarks.plain_loops --size tiny --masks 8 --device cpu --repeats 2
"""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import contextlib
import gc
import importlib.util
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.gpu_step import RECIPES, batch_in_memory, chip_of, prepared, timed_step
from benchmarks.levers import pulled
from benchmarks.plan import events_peak
from gigamask.distributed.precision import Precision, autocast, choose_device, choose_precision
from gigamask.interfaces import PIXEL_MEAN, PIXEL_STD
from gigamask.models.configs import SamConfig
from gigamask.models.convert import huggingface_config
from gigamask.models.init import build_model
from gigamask.models.promptable import preprocess
from gigamask.prompts.schedule import InteractiveSchedule
from gigamask.recipes import find
from gigamask.training.sam_config import SamTrainConfig
from gigamask.training.tasks import targets_from_batch
from gigamask.types import Batch
from tests import official


class Official(nn.Module):
    """Meta's modules; what they want of torchvision where that is missing stands in
    (`tests.official`)."""

    def __init__(self, spec: SamConfig) -> None:
        super().__init__()
        with official.imported() as package:
            theirs = official.with_weights_of(build_model(spec, 0), package)
        self.image_encoder, self.prompt_encoder, self.mask_decoder = (
            theirs.image_encoder,
            theirs.prompt_encoder,
            theirs.mask_decoder,
        )

    def encode(self, pixels: Tensor) -> Tensor:
        return self.image_encoder(pixels)

    def decode(
        self, embedding: Tensor, points: Tensor, labels: Tensor, mask: Tensor | None, several: bool
    ) -> tuple[Tensor, Tensor]:
        sparse, dense = self.prompt_encoder(points=(points, labels), boxes=None, masks=mask)
        return self.mask_decoder(
            embedding, self.prompt_encoder.get_dense_pe(), sparse, dense, several
        )


class HuggingFace(nn.Module):
    """Hugging Face's model; a mask prompt belongs to an image there, so each mask is an image of
    its own whose embedding is repeated."""

    def __init__(self, spec: SamConfig) -> None:
        super().__init__()
        from transformers import SamModel

        self.model = SamModel(SamModel.config_class(**huggingface_config(spec)))

    def encode(self, pixels: Tensor) -> Tensor:
        return self.model.vision_encoder(pixels)[0]

    def decode(
        self, embedding: Tensor, points: Tensor, labels: Tensor, mask: Tensor | None, several: bool
    ) -> tuple[Tensor, Tensor]:
        repeated = embedding.expand(len(points), -1, -1, -1)
        given = {
            "input_points": points[:, None],
            "input_labels": labels[:, None],
            "input_masks": mask,
            "multimask_output": several,
        }
        told = self.model(image_embeddings=repeated, **given)
        return told.pred_masks[:, 0], told.iou_scores[:, 0]


Contender = Official | HuggingFace
Begin = Callable[[], Callable[[], float]]
"""Sets something up; returns what makes an update and returns its seconds."""


def loss_of(low: Tensor, predicted: Tensor, truth: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the sum of all masks' losses, of the best answer each, and the answers of the highest
    predicted IoU, (m, G, G)."""
    target = truth[:, None].expand_as(low)
    chance = low.sigmoid()
    cross = functional.binary_cross_entropy_with_logits(low, target, reduction="none")
    sure = chance * target + (1 - chance) * (1 - target)
    focal = ((0.25 * target + 0.75 * (1 - target)) * (1 - sure).square() * cross).mean((2, 3))
    dice = 1 - (2 * (chance * target).sum((2, 3)) + 1) / (
        chance.sum((2, 3)) + target.sum((2, 3)) + 1
    )
    answered = low > 0
    iou = (answered & (target > 0.5)).sum((2, 3)) / (answered | (target > 0.5)).sum((2, 3)).clamp(
        min=1
    )
    each = 20 * focal + dice + (predicted - iou).square()
    chosen = low[torch.arange(len(low)), predicted.argmax(1)]
    return each.min(1).values.sum(), chosen.detach()


def click(wrong: Tensor, truth: Tensor, cell: float) -> tuple[Tensor, Tensor]:
    """Returns a random pixel of what is wrong in input coordinates, (m, 1, 2), and whether it
    belongs to the mask."""
    grid = wrong.shape[-1]
    weights = wrong.flatten(1).float() + 1e-6
    place = torch.multinomial(weights, 1)
    points = torch.stack([place % grid, place // grid], -1) * cell
    return points.float(), truth.flatten(1).gather(1, place).round().int()


def plain_step(
    model: Official | HuggingFace,
    optimizer: torch.optim.Optimizer,
    batch: Batch,
    rounds: int,
    precision: Precision,
    gather: int,
) -> float:
    """Makes an update in the plain way; returns its seconds, the device's queue drained."""
    began = now(batch.images.device)
    mean, std = (
        torch.tensor(each, device=batch.images.device).view(3, 1, 1)
        for each in (PIXEL_MEAN, PIXEL_STD)
    )
    truth = targets_from_batch(
        batch, slice(0, len(batch.mask_image)), batch.mask_size
    ).masks.float()
    cell = batch.images.shape[-1] / truth.shape[-1]
    optimizer.zero_grad(set_to_none=True)
    for start in range(0, len(truth), gather):
        part = truth[start : start + gather]
        with autocast(precision, batch.images.device):
            embedding = model.encode(preprocess(batch.images, batch.input_sizes, mean, std))
            points, labels = click(part > 0.5, part, cell)
            total, mask = torch.zeros((), device=part.device), None
            for index in range(rounds):
                low, predicted = model.decode(embedding, points, labels, mask, index == 0)
                lost, chosen = loss_of(low.float(), predicted.float(), part)
                total, mask = total + lost, chosen[:, None]
                more, signs = click((chosen > 0) != (part > 0.5), part, cell)
                points, labels = torch.cat([points, more], 1), torch.cat([labels, signs], 1)
        (total / (rounds * len(truth))).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return now(batch.images.device) - began


def now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def our_step(run: SamTrainConfig, device: torch.device, batch: Batch) -> Callable[[], float]:
    """Returns what makes an update here and returns its seconds."""
    stack = contextlib.ExitStack()
    task, state = prepared(run, device, stack)
    # The stack lives as long as the function, and the compiled model with it.
    return lambda _=stack: timed_step(task, state, batch, run)[0]


def their_step(
    kind: type[Contender], run: SamTrainConfig, batch: Batch, given: argparse.Namespace
) -> Callable[[], float]:
    """Returns what makes an update in a plain loop and returns its seconds."""
    model = kind(run.model).to(batch.images.device).train()
    if given.compile:
        model.encode = torch.compile(model.encode)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, weight_decay=0.1)
    return lambda: plain_step(
        model, optimizer, batch, given.rounds, run.precision, given.gather or given.masks
    )


def contenders(
    run: SamTrainConfig, device: torch.device, batch: Batch, given: argparse.Namespace
) -> Iterator[tuple[str, Callable[[], Callable[[], float]]]]:
    """Yields what is timed, each with what sets it up."""
    for levers in given.levers:
        yield (
            f"gigamask, {levers}",
            partial(our_step, pulled(run, levers), device, batch),
        )
    for name, kind, package in (
        ("Meta's modules", Official, "segment_anything"),
        ("Hugging Face", HuggingFace, "transformers"),
    ):
        if importlib.util.find_spec(package) is not None:
            yield f"{name}, plain loop", partial(their_step, kind, run, batch, given)


def measured(device: torch.device, begin: Begin, repeats: int) -> tuple[float, float] | None:
    """Returns the median of a step's seconds, and the peak memory in GiB; None where memory does
    not suffice."""
    gc.collect()
    looking = (
        contextlib.nullcontext()
        if device.type == "cuda"
        else torch.profiler.profile(profile_memory=True)
    )
    try:
        with looking as profile:
            step = begin()
            for _ in range(2):
                step()
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        seconds = statistics.median(step() for _ in range(repeats))
    except torch.cuda.OutOfMemoryError:
        return None
    return seconds, (
        events_peak(profile) if profile else torch.cuda.max_memory_allocated(device)
    ) / 2**30


def main() -> None:
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--size", choices=RECIPES, default="b")
    options.add_argument("--masks", type=int, default=64)
    options.add_argument("--rounds", type=int, default=11)
    options.add_argument(
        "--gather", type=int, help="masks at once in the plain loops; by default all"
    )
    options.add_argument("--repeats", type=int, default=5)
    options.add_argument("--device", default="auto")
    options.add_argument(
        "--levers",
        nargs="+",
        default=["none"],
        help="rows of gigamask: none, or leaves of the run as name=value,name=value",
    )
    options.add_argument(
        "--compile", action="store_true", help="compile the encoders of the plain loops"
    )
    given = options.parse_args()
    torch.set_num_threads(1)
    device = choose_device(given.device)
    run = replace(
        find(RECIPES[given.size])(),
        prompts=InteractiveSchedule(clicks=given.rounds - 3),
        masks_per_chunk=given.masks,
        activation_checkpointing=0,
        batch_size=1,
        micro_batch_size=1,
        precision=choose_precision("auto", device),
        device=device.type,
    )
    batch = batch_in_memory(run, given.masks).to(device)
    print(f"`python -m benchmarks.plain_loops {' '.join(sys.argv[1:])}`\n")
    print(
        f"{chip_of(device)}, torch {torch.__version__}, {run.precision}; {given.size}, "
        f"{given.masks} masks, {given.rounds} rounds\n"
    )
    print("| what | step s | images/s | times the first | peak GiB |\n|---|---|---|---|---|")
    first = None
    for name, begin in contenders(run, device, batch, given):
        found = measured(device, begin, given.repeats)
        if found is None:
            print(f"| {name} | out of memory | | | |", flush=True)
            continue
        first = first or found[0]
        print(
            f"| {name} | {found[0]:.4f} | {1 / found[0]:.2f} | {found[0] / first:.2f} | "
            f"{found[1]:.3f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
