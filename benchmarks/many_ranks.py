"""SAM's own run, ViT-H on 256 GPUs, counted without one: order, exchange, checkpoints and hours.

Order and split are the trainer's own, at SA-1B's number of images: a few steps of every rank are
drawn, before and after a machine is lost and at the end of an epoch, and compared with the order of
the epoch. What is exchanged and saved is counted from the model's parameters. Times of the exchange
are its bytes over the bandwidth of a machine's network, those of a step `count_step`'s, with the
branches that drop path leaves to the slowest rank. Nothing here was timed on GPUs. Prints Markdown.

    python -m benchmarks.many_ranks [--recipe sam_vit_h] [--machines 32] [--images 11185362]
"""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import cast

import numpy as np
from torch import nn

from benchmarks.drop_path import MODES, DropPathCount
from gigamask.distributed import fsdp, gradient_exchange
from gigamask.interfaces import SampleTable
from gigamask.models.sam.sam import Sam
from gigamask.profiling import gpus
from gigamask.profiling.memory_plan import PUBLISHED
from gigamask.recipes import find
from gigamask.samplers.batch_sampler import SampleSequence
from gigamask.training.sam_config import SamTrainConfig
from gigamask.workflows.plan import count_flops
from tests.orders import iter_steps

IMAGES = 11_185_362
"""Images of SA-1B."""
PER_MACHINE = 8
STEPS = 20
"""Steps that are drawn on every rank, before and after the loss of a machine."""
NETWORK = {"a100": 200e9, "h100": 400e9, "h200": 400e9}
"""Bytes per second between machines: eight adapters of 200 or 400 Gbit/s, as in DGX."""
SLOW_NETWORK = 50e9
"""The same for four adapters of 100 Gbit/s, as in many clouds."""


def drawn(
    sequence: SampleSequence, first_step: int, batch: int, ranks: int
) -> tuple[np.ndarray, int, float]:
    """Draws `STEPS` steps on every rank.

    Args:
        sequence: Sequence of samples.
        first_step: Number of the first step.
        batch: Global batch size.
        ranks: Number of processes.

    Returns:
        Rows of the images in order of the global batch, the most images of a rank in a step, and
        milliseconds per step and rank.
    """
    rows, most = np.full((STEPS, batch), -1), 0
    start = time.process_time()
    for rank in range(ranks):
        steps = iter_steps(sequence, first_step * batch, batch, 1, rank, ranks)
        for step, plan in zip(range(STEPS), steps, strict=False):
            refs = [ref for micro_batch in plan.micro_batches for ref in micro_batch]
            most = max(most, len(refs))
            for ref in refs:
                assert rows[step, ref.batch_index] == -1, "a sample is drawn by two ranks"
                rows[step, ref.batch_index] = ref.row
    assert (rows >= 0).all(), "a sample is drawn by no rank"
    return rows.ravel(), most, 1e3 * (time.process_time() - start) / STEPS / ranks


def print_order(run: SamTrainConfig, machines: int, images: int) -> None:
    """Prints how the images of steps are split among ranks, and checks them."""
    ranks, batch = machines * PER_MACHINE, run.batch_size
    start = time.process_time()
    sequence = SampleSequence(run.sampler, SampleTable(images, {}))
    orders = [run.sampler.order(SampleTable(images, {}), epoch, None) for epoch in (0, 1)]
    everything = np.asarray(orders[0][np.arange(images)])
    assert np.array_equal(np.sort(everything), np.arange(images)), "an image is missing"
    seconds = time.process_time() - start
    whole = np.concatenate([everything, orders[1][np.arange(STEPS * batch)]])
    at_end = images // batch - STEPS // 2
    cases = (
        ("the first steps", 0, ranks),
        ("after a machine is lost at step 1,000", 1000, ranks - PER_MACHINE),
        ("across the end of the epoch", at_end, ranks),
    )
    print("| | ranks | images of the busiest rank in a step | ms of CPU a step and rank |")
    print("|---|---|---|---|")
    for name, first_step, count in cases:
        rows, most, milliseconds = drawn(sequence, first_step, batch, count)
        expected = whole[first_step * batch :][: STEPS * batch]
        assert np.array_equal(rows, expected), "the ranks do not draw the epoch's order"
        print(f"| {name} | {count} | {most} | {milliseconds:.2f} |")
    print(
        f"\nEvery image of {images:,} is in the epoch once ({seconds:.1f} s of CPU); in each row, "
        f"the ranks together draw {STEPS} steps in the order of one process.\n"
    )


def print_exchange(model: Sam, backward_s: dict[str, float], machines: int) -> None:
    """Prints the bytes that a step exchanges, and their time beside the encoder's backward pass."""
    encoder = list(model.image_encoder.parameters())
    buckets = gradient_exchange.bucket_groups(encoder[::-1])
    sharded = sum(
        weight.nbytes
        for block in model.encoder_blocks
        for weight in fsdp.shardable_parameters(block)
    )
    whole, ranks = size(model.parameters()), machines * PER_MACHINE
    part, within = (ranks - 1) / ranks, (PER_MACHINE - 1) / PER_MACHINE
    between = (machines - 1) / machines
    # Sent and received by one process: an all-reduce moves a tensor twice, a gather or a scatter
    # once. Sharded weights are gathered in bf16 for both passes.
    moved = {
        "ddp": (2 * part * whole, 2 * between * whole),
        "fsdp": (
            part * (2 * sharded / 2 + sharded) + 2 * part * (whole - sharded),
            between * (2 * sharded / 2 + sharded) + 2 * between * (whole - sharded),
        ),
        "hsdp": (
            within * (2 * sharded / 2 + sharded)
            + 2 * between * sharded / PER_MACHINE
            + 2 * part * (whole - sharded),
            2 * between * sharded + 2 * between * (whole - sharded),
        ),
    }
    print(
        f"The encoder's gradients, {size(encoder) / 1e9:.2f} GB, are exchanged in {len(buckets)} "
        f"buckets of at most {max(map(size, buckets)) / 1e6:.0f} MB with ddp; "
        f"{(whole - size(encoder)) / 1e6:.0f} MB follow.\n"
    )
    names = [*NETWORK, "a100, slow network"]
    print(f"| | GB of a process | GB of a machine's network | {' | '.join(names)} |")
    print(f"|---|---|---|{'---|' * len(names)}")
    for name, (process, machine) in moved.items():
        speeds = [*NETWORK.values(), SLOW_NETWORK]
        times = " | ".join(f"{1e3 * machine / speed:.0f} ms" for speed in speeds)
        print(f"| `{name}` | {process / 1e9:.2f} | {machine / 1e9:.2f} | {times} |")
    times = " | ".join(f"{1e3 * backward_s[name.split(',')[0]]:.0f} ms" for name in names)
    print(f"| the encoder's backward pass, roofline | | | {times} |\n")


def print_checkpoints(run: SamTrainConfig, model: Sam, machines: int) -> None:
    """Prints the bytes of a checkpoint, and those written and read."""
    weights, ranks = size(model.parameters()), machines * PER_MACHINE
    saved = 3 * weights  # AdamW has two more numbers per parameter
    saves = run.steps // run.save_every
    rows = (
        ("one checkpoint: weights, AdamW's state", saved),
        (f"written in {run.steps:,} steps, one of {run.save_every:,}", saves * saved),
        ("kept, at most: the best and the newest", (run.keep + 1) * saved),
        ("read on a resume, checksums and content, by the main process", 2 * saved),
        ("the same if every process read it", 2 * saved * ranks),
        ("sent to each other machine", saved),
    )
    print("| checkpoints | GB |\n|---|---|")
    for name, size_bytes in rows:
        print(f"| {name} | {size_bytes / 1e9:,.1f} |")
    print(
        f"\nThe loss of a machine costs {run.save_every // 2} steps on average, {run.save_every} "
        "at most.\n"
    )


def print_hours(run: SamTrainConfig, counts: DropPathCount, ranks: int, gradients: float) -> None:
    """Prints the hours of all steps, as expected and at the published run's speed."""
    [published] = PUBLISHED["train"].values()
    slowest = {mode: counts.slowest(run, mode, ranks).count() for mode in MODES}
    print(
        f"| {run.steps:,} steps | roofline | expected | hours | exchange not hidden | `balanced` "
        "| `batch` | at 2.7 % of peak |"
    )
    print(f"|{'---|' * 8}")
    for name in NETWORK:
        steps_s = {mode: count.expected[name] for mode, count in slowest.items()}
        exchange_s = 2 * gradients / NETWORK[name]
        published_s = count_flops(run).total / (gpus.find(name).peak("bf16") * published)
        seconds = (
            steps_s["sample"],
            steps_s["sample"] + exchange_s,
            *[steps_s[each] for each in MODES[1:]],
            published_s,
        )
        hours = " | ".join(f"{run.steps * each / 3600:.2f}" for each in seconds)
        print(
            f"| {name} | {1e3 * slowest['sample'].seconds[name]:.0f} ms "
            f"| {1e3 * steps_s['sample']:.0f} ms | {hours} |"
        )


def size(parameters: Sequence[nn.Parameter]) -> int:
    """Returns the bytes of parameters."""
    return sum(parameter.nbytes for parameter in parameters)


def main() -> None:
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--recipe", default="sam_vit_h")
    options.add_argument("--machines", type=int, default=32)
    options.add_argument("--images", type=int, default=IMAGES)
    given = options.parse_args()
    run = replace(cast(SamTrainConfig, find(given.recipe)()), precision="bf16")
    model = run.build("meta")
    masks = run.loader.max_masks
    counts = DropPathCount.of(run, masks)
    ranks = given.machines * PER_MACHINE
    print(f"{given.recipe} on {given.machines} machines with {PER_MACHINE} GPUs: {ranks} ranks\n")
    print_order(run, given.machines, given.images)
    print_exchange(model, counts.mean.count(["backward"]).seconds, given.machines)
    print_checkpoints(run, model, given.machines)
    print_hours(run, counts, ranks, size(model.parameters()))


if __name__ == "__main__":
    main()
