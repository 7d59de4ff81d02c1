"""One training step of SAM: seconds by part, images/s, MFU and peak memory, beside the expected.

The step is the trainer's own, on a batch made in memory: a 3 : 2 image of noise with smooth masks
whose sizes are spread evenly on a log scale, SAM's eleven rounds, the recipe's AdamW and clipping;
drop path skips no branch. What is expected was counted by `count_step`. Each row is a set of
changes, such as activation_checkpointing=1 or compile=1. Prints Markdown.

Run: python -m benchmarks.gpu_step --size h [--masks 64] [--levers none compile=1]
    [--compile [--combine] [--graphs]] [--repeats 10] [--precision bf16] [--profile]
On a CPU: python -m benchmarks.gpu_step --size tiny --device cpu --repeats 1
"""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import math
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from benchmarks.levers import pulled
from gigamask.data.augment import NoAugment
from gigamask.data.loader import collate
from gigamask.distributed.precision import choose_device, choose_precision
from gigamask.interfaces import Task
from gigamask.masks.rle import RLEMasks
from gigamask.models.sam.sam import Sam
from gigamask.prompts.schedule import InteractiveSchedule
from gigamask.recipes import find
from gigamask.records import DataCursor, SampleRef
from gigamask.rng import make_rng
from gigamask.training.sam_config import SamTrainConfig
from gigamask.training.state import TrainState
from gigamask.training.step import step
from gigamask.training.tasks import SamTask
from gigamask.types import Batch, LossSums, RandomInputs, Sample
from gigamask.workflows import plan

RECIPES = {"b": "sam_vit_b", "l": "sam_vit_l", "h": "sam_vit_h", "tiny": "tiny"}
SECONDS = {
    "h": "0.149 (H100), 0.115 (H200)",
    "l": "0.121 (H100), 0.091 (H200)",
    "b": "0.098 (H100), 0.072 (H200)",
}
"""Expected seconds of a step that skips no branch (`python -m benchmarks.count_step`)."""
PEAK_SHARES = {"h": "16 % of an H100's 989 TFLOP/s", "l": "12 %", "b": "9 %"}
GB = {"b": "6.5", "h": "23.6"}
"""Planned memory (docs/measurements/memory.md)."""
PARTS = ("encode forward", "rounds forward + backward", "encoder backward", "optimizer")


@dataclass
class Marks:
    """Moments of one step: on a GPU events in its queue, which nobody waits for until the step is
    over; else the clock."""

    device: torch.device
    moments: list = field(default_factory=list)

    def set(self) -> None:
        if self.device.type != "cuda":
            self.moments.append(time.perf_counter())
            return
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        self.moments.append(event)

    def seconds(self) -> list[float]:
        """Returns the time from each mark to the next."""
        pairs = zip(self.moments[:-1], self.moments[1:], strict=True)
        if self.device.type != "cuda":
            return [after - before for before, after in pairs]
        torch.cuda.synchronize(self.device)
        return [before.elapsed_time(after) / 1e3 for before, after in pairs]


@dataclass(frozen=True)
class Marked(Task):
    """A task that marks when the images are encoded and when the last round is back-propagated."""

    task: SamTask
    marks: Marks

    def compute_losses(
        self, model: Sam, batch: Batch, detach: Callable[[torch.Tensor], torch.Tensor]
    ) -> Iterator[LossSums]:
        def marked(whole: torch.Tensor) -> torch.Tensor:
            self.marks.set()
            return detach(whole)

        yield from self.task.compute_losses(model, batch, marked)
        self.marks.set()


class MarkedBatches(tuple[Batch, ...]):
    """Batches of a step; marks when each is asked for and when its gradients are complete."""

    marks: Marks

    def __iter__(self) -> Iterator[Batch]:
        self.marks.set()
        for batch in super().__iter__():
            yield batch
            self.marks.set()


def smooth_masks(count: int, size: tuple[int, int]) -> torch.Tensor:
    """Returns blobs of 0.1 % to 30 % of the image, each with a wavy outline and in a place of its
    own."""
    rng = make_rng(0, "benchmark masks")
    height, width = size
    y, x = torch.meshgrid(torch.arange(height) + 0.5, torch.arange(width) + 0.5, indexing="ij")
    numbers = torch.from_numpy(rng.random((count, 4)))[..., None, None]
    radius = ((height * width / math.pi) * 0.001 * 300 ** numbers[:, 0]).sqrt()
    down, across = y - numbers[:, 1] * height, x - numbers[:, 2] * width
    wave = (
        1
        + 0.25 * torch.sin(5 * torch.atan2(down, across) + 6.3 * numbers[:, 3])
        + 0.1 * torch.sin(13 * torch.atan2(down, across))
    )
    return down.hypot(across) < radius * wave


def batch_in_memory(run: SamTrainConfig, masks: int) -> Batch:
    """Returns what the loader would make of one photograph."""
    rng = make_rng(0, "benchmark batch")
    assembly = run.sample_config
    side, grid = assembly.image_size, assembly.mask_size
    transform = NoAugment().get_transform((1000, 1500), side, rng)
    height, width = transform.resized
    drawn = torch.zeros(masks, grid, grid, dtype=torch.bool)
    rows, columns = height * grid // side, width * grid // side
    drawn[:, :rows, :columns] = smooth_masks(masks, (rows, columns))
    runs = RLEMasks.from_dense(drawn.numpy())

    def uniform(*shape: int) -> torch.Tensor:
        return torch.from_numpy(rng.random(shape, dtype="float32"))

    noise = torch.from_numpy(rng.standard_normal((masks, 4), dtype="float32"))
    sample = Sample(
        name="noise",
        ref=SampleRef(0, 0, 0),
        image=torch.from_numpy(rng.integers(0, 256, (3, height, width), dtype="uint8")),
        transform=transform,
        masks=runs,
        boxes_input=(runs.boxes() * (side / grid)).astype("float32"),
        strata=np.ones(masks, np.int64),
        random_inputs=RandomInputs(
            uniform(masks),
            uniform(masks, run.random_spec.clicks + run.random_spec.points, 2),
            noise,
            torch.ones(1, run.model.depth, 2),
            uniform(1, 0),
        ),
    )
    return collate([sample], (), assembly, run.random_spec, 0.5, DataCursor(1))


def matmul_peak(device: torch.device, precision: str) -> tuple[int, float]:
    """Returns the side of a square matrix product and the TFLOP/s it reaches: 8192 in the step's
    precision on a GPU, the median of twenty."""
    side, repeats = (8192, 20) if device.type == "cuda" else (512, 3)
    kind = torch.bfloat16 if precision == "bf16" else torch.float32
    left, right = (torch.randn(side, side, device=device).to(kind) for _ in range(2))
    marks = Marks(device)
    for _ in range(5):
        left @ right
    marks.set()
    for _ in range(repeats):
        left @ right
        marks.set()
    return side, 2 * side**3 / statistics.median(marks.seconds()) / 1e12


def timed_step(
    task: SamTask, state: TrainState, batch: Batch, run: SamTrainConfig
) -> tuple[float, list[float]]:
    """Makes one update; returns its seconds on the wall, the device's queue drained, and the
    seconds of each part."""
    marks = Marks(batch.images.device)
    batches = MarkedBatches([batch])
    batches.marks = marks
    begin = time.perf_counter()
    marks.set()
    done = step(
        Marked(task, marks),
        state,
        batches,
        len(batch.names),
        0.01 * run.optimizer.lr,
        run.optimizer.grad_clip,
    ).result()
    marks.set()
    clear, encode, rounds, encoder, update = marks.seconds()
    seconds = time.perf_counter() - begin
    if done.skipped:
        sys.exit(
            f"the step was skipped, its gradient norm is {done.record['grad_norm']}: these times "
            f"would not be a step's"
        )
    return seconds, [encode, rounds, encoder, clear + update]


def measure(
    task: SamTask, state: TrainState, batch: Batch, run: SamTrainConfig, repeats: int
) -> dict[str, float]:
    """Returns medians of the step's seconds and of its parts', and the peak memory of all repeats
    in GB, 0 where there is no GPU."""
    device = batch.images.device
    for _ in range(3 if device.type == "cuda" else 1):
        timed_step(task, state, batch, run)
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    steps = [timed_step(task, state, batch, run) for _ in range(repeats)]
    found = {"step": statistics.median(whole for whole, _ in steps)}
    found |= {
        part: statistics.median(parts[index] for _, parts in steps)
        for index, part in enumerate(PARTS)
    }
    kinds = {
        "allocated": torch.cuda.max_memory_allocated,
        "reserved": torch.cuda.max_memory_reserved,
    }
    return found | {
        name: kind(device) / 1e9 if device.type == "cuda" else 0.0 for name, kind in kinds.items()
    }


def profiled(task: SamTask, state: TrainState, batch: Batch, run: SamTrainConfig) -> str:
    """Returns the fifteen kernels that one step spends most time in."""
    kinds = [torch.profiler.ProfilerActivity.CPU]
    on_gpu = batch.images.is_cuda
    if on_gpu:
        kinds.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=kinds) as profile:
        timed_step(task, state, batch, run)
    return profile.key_averages().table(
        sort_by="self_device_time_total" if on_gpu else "self_cpu_time_total",
        row_limit=15,
        max_name_column_width=70,
    )


def row(found: dict[str, float], levers: str, work: float, peak: float) -> str:
    """Returns one line of the table."""
    rate = work / found["step"]
    cells = [
        levers,
        f"{found['step']:.4f}",
        *(f"{found[part]:.4f}" for part in PARTS),
        f"{1 / found['step']:.2f}",
    ]
    cells += [f"{rate:.3g}", f"{100 * rate / peak:.0f} %", f"{work / peak:.3f}"]
    cells += [
        f"{found[name]:.2f}" if found[name] else "no GPU" for name in ("allocated", "reserved")
    ]
    return f"| {' | '.join(cells)} |"


def chip_of(device: torch.device) -> str:
    return (
        torch.cuda.get_device_name(device)
        if device.type == "cuda"
        else f"{platform.machine()} CPU, {torch.get_num_threads()} thread"
    )


def prepared(
    run: SamTrainConfig, device: torch.device, stack: ExitStack
) -> tuple[SamTask, TrainState]:
    """Returns what a row is measured with, compiled until the stack is closed if the run is."""
    state = TrainState.initialize(run, device)
    state.model.train()
    return stack.enter_context(run.task(device).compiled(state.model)), state


def main() -> None:
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--size", choices=RECIPES, default="h")
    options.add_argument("--masks", type=int, default=64)
    options.add_argument(
        "--levers",
        nargs="+",
        default=[f"masks_per_chunk={count}" for count in (16, 32, 64)],
        help="rows: name=value,name=value, or none",
    )
    options.add_argument("--compile", action="store_true", help="compile=1 in every row")
    options.add_argument(
        "--combine", action="store_true", help="compiled: let small kernels share a launch"
    )
    options.add_argument(
        "--graphs", action="store_true", help="compiled: replay the kernels as CUDA graphs"
    )
    options.add_argument("--repeats", type=int, default=10)
    options.add_argument("--device", default="auto")
    options.add_argument("--precision", choices=("auto", "fp32", "bf16", "fp16"), default="auto")
    options.add_argument("--profile", action="store_true")
    given = options.parse_args()
    if (given.combine or given.graphs) and not given.compile:
        options.error("--combine and --graphs change what --compile does: add --compile")
    torch.set_num_threads(1)
    if given.compile:
        from torch._inductor import config

        config.combo_kernels, config.triton.cudagraphs = given.combine, given.graphs
    device = choose_device(given.device)
    precision = choose_precision(given.precision, device)
    recipe = find(RECIPES[given.size])()
    run = replace(
        recipe,
        prompts=InteractiveSchedule(),
        loader=replace(recipe.loader, max_masks=given.masks),
        precision=precision,
        device=device.type,
        compile=given.compile,
    )
    batch = batch_in_memory(run, given.masks).to(device)
    side, peak = matmul_peak(device, precision)
    work = plan.count_flops(run).total / 1e12

    print(f"`python -m benchmarks.gpu_step {' '.join(sys.argv[1:])}`\n")
    print(
        f"{chip_of(device)}, torch {torch.__version__}, {precision}; recipe "
        f"{RECIPES[given.size]}, 1 image x {given.masks} masks, "
        f"{run.prompts.rounds} rounds, medians of {given.repeats}. Matrix product of {side}^3: "
        f"{peak:.3g} TFLOP/s; a step is {work:.3g} TFLOP, "
        "blocks that are computed again not counted.\n"
    )
    print(
        f"| levers | step s | {' s | '.join(PARTS)} s | images/s | TFLOP/s | of the peak | floor "
        f"s | allocated GB | reserved GB |"
    )
    print(f"|{'---|' * 12}")
    for levers in given.levers:
        changed = pulled(run, levers)
        with ExitStack() as stack:
            task, state = prepared(changed, device, stack)
            found = measure(task, state, batch, changed, given.repeats)
            kernels = profiled(task, state, batch, changed) if given.profile else ""
        print(row(found, levers, work, peak), flush=True)
    seconds, memory = SECONDS.get(given.size, ""), GB.get(given.size, "")
    share = PEAK_SHARES.get(given.size, "")
    print(f"| expected (64 masks, bf16) | {seconds} | | | | | | | {share} | | {memory} | |")
    if given.profile:
        print(f"\n```\n{kernels}\n```")


if __name__ == "__main__":
    main()
