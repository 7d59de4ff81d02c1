"""Predicted and measured peak memory of one training step by phase, for a list of changes.

The step is the trainer's second one, when the optimizer state exists, on black images with empty
masks, whose content does not change memory. On a CPU the peak is the largest running sum of
torch's own allocation events (torch.profiler), on a GPU torch.cuda.max_memory_allocated; phases
are measured in the same step. Changes are tried one at a time and compared with the first row of
their size; time on a CPU is the process's own. Prints Markdown.

Run: python -m benchmarks.plan [--sizes tiny b] [--side 512] [--micro-batch-size 2] [--masks 4]
    [--masks-per-chunk 4] [--clicks 1] [--levers none activation_checkpointing=1]
All: python -m benchmarks.plan --sizes b --masks 16 --masks-per-chunk 32 --levers all
Two processes: torchrun --nproc-per-node 2 -m benchmarks.plan --sizes b
    --levers none parallel=fsdp parallel=fsdp,precision=bf16
On a GPU: python -m benchmarks.plan --device cuda --sizes b h --masks 64 --masks-per-chunk 64
    --clicks 8 --levers all
"""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import contextlib
import gc
import platform
import time
from dataclasses import replace

import torch

from benchmarks.levers import EACH, pulled
from gigamask.distributed.precision import choose_device, choose_precision
from gigamask.distributed.world import World, destroy_world, init_world
from gigamask.profiling import memory_plan
from gigamask.profiling.dry_run import (
    AllocationTracker,
    PhaseBatches,
    PhasePeaks,
    PhaseTask,
    blank_batch,
)
from gigamask.profiling.gpus import Cluster
from gigamask.prompts.schedule import InteractiveSchedule
from gigamask.recipes import find
from gigamask.training.optim import AdamW
from gigamask.training.sam_config import SamTrainConfig
from gigamask.training.state import TrainState
from gigamask.training.step import step
from gigamask.workflows import plan

RECIPES = {"b": "sam_vit_b", "l": "sam_vit_l", "h": "sam_vit_h", "tiny": "tiny"}
MIB = 2**20


class CudaCounter:
    """What CUDA's allocator says it holds, with the interface of `AllocationTracker`."""

    @property
    def current(self) -> int:
        return torch.cuda.memory_allocated()

    def take_peak(self) -> int:
        """Return the peak since the last call and reset it."""
        peak = torch.cuda.max_memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        return peak


def measure(run: SamTrainConfig, device: torch.device, world: World) -> dict[str, float]:
    """Makes two updates; returns the peak in bytes of the second, those of its phases, and its
    seconds."""
    gc.collect()
    with contextlib.ExitStack() as looking:
        profile = None
        counter = CudaCounter()
        if device.type == "cpu":
            profile = looking.enter_context(
                torch.profiler.profile(
                    activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
                )
            )
            counter = looking.enter_context(AllocationTracker())
        before = counter.current
        state = TrainState.initialize(run, device)
        state.shard(run, world)
        state.model.train()
        if state.scale:  # none of its first steps is to be left out
            state.scale.value = 1.0
        micro = blank_batch(
            run.sample_config,
            run.random_spec,
            run.micro_batch_size,
            run.micro_batch_size * run.loader.max_masks,
        ).to(device)
        firsts = range(
            world.rank * run.micro_batch_size, run.batch_size, world.size * run.micro_batch_size
        )
        for _ in range(2):
            seen, standing, began = PhasePeaks(counter), counter.current, seconds(device)
            batches = PhaseBatches(
                [replace(micro, batch_index=micro.batch_index + first) for first in firsts]
            )
            batches.enter = seen.enter
            seen.start()
            step(
                PhaseTask(run.task(device), seen.enter),
                state,
                batches,
                run.batch_size,
                0.0,
                run.optimizer.grad_clip,
                world,
            )
            seen.enter("update")
            taken = seconds(device) - began
    phases = {phase: standing + peak - before for phase, peak in seen.peaks.items()}
    return {
        **phases,
        "peak": max(phases.values()) if profile is None else events_peak(profile),
        "seconds": taken,
    }


def seconds(device: torch.device) -> float:
    """Returns the clock on a GPU whose queue is empty, the process's own time on a CPU."""
    if device.type == "cpu":
        return time.process_time()
    torch.cuda.synchronize(device)
    return time.perf_counter()


def events_peak(profile: torch.profiler.profile) -> int:
    """Returns the largest sum of allocations less what was given back, in the order in which they
    happened."""
    result = profile.profiler.kineto_results if profile.profiler else None
    assert result is not None
    now = peak = 0
    for event in sorted(
        (each for each in result.events() if each.name() == "[memory]"),
        key=lambda each: each.start_ns(),
    ):
        now += event.nbytes()
        peak = max(peak, now)
    return peak


def predict(run: SamTrainConfig, world: World) -> dict[str, float]:
    """Returns what `gigamask plan` says, by the same names."""
    began = time.process_time()
    hardware = plan.Hardware(cluster=Cluster(world.nodes, world.size // world.nodes))
    held = plan.bytes_by_phase(
        run,
        hardware,
        plan.dry_run(run, plan.device_of(run), run.micro_batch_size, hardware.cluster.size),
    )
    phases = {phase: sum(kinds.values()) for phase, kinds in held.items()}
    return {
        **phases,
        "peak": memory_plan.peak_phase(held)[1],
        "seconds": time.process_time() - began,
    }


def base(
    size: str, given: argparse.Namespace, device: torch.device, world: World
) -> SamTrainConfig:
    """Returns the run of this size in which levers are pulled."""
    run = find(RECIPES[size])()
    assert isinstance(run, SamTrainConfig)
    side = (
        run.model.image_size
        if size == "tiny"
        else given.side or (512 if device.type == "cpu" else run.model.image_size)
    )
    return replace(
        run,
        model=replace(run.model, image_size=side),
        batch_size=given.micro_batch_size * world.size,
        micro_batch_size=given.micro_batch_size,
        masks_per_chunk=given.masks_per_chunk,
        activation_checkpointing=0,
        prompts=InteractiveSchedule(clicks=given.clicks),
        loader=replace(run.loader, max_masks=given.masks),
        optimizer=AdamW(),
        precision=choose_precision("auto", device),
        device=device.type,
    )


def row(
    size: str, levers: str, run: SamTrainConfig, device: torch.device, world: World
) -> dict[str, float]:
    """Prints a row of the table, from its third cell on but for the last two; returns what was
    measured."""
    predicted, measured = predict(run, world), measure(run, device, world)
    names = ["peak"] if world.size > 1 else ["forward", "rounds", "backward", "update", "peak"]
    cells = [f"{predicted[name] / MIB:,.1f} / {measured[name] / MIB:,.1f}" for name in names]
    cells = [
        *["–"] * (5 - len(cells)),
        *cells,
        f"{predicted['peak'] / measured['peak']:.4f}",
        f"{measured['seconds']:.1f}",
    ]
    print(f"| {size} {run.model.image_size} | {levers} | {' | '.join(cells)}", end="", flush=True)
    return measured


def main() -> None:
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--sizes", choices=RECIPES, nargs="+", default=["tiny", "b"])
    options.add_argument(
        "--side",
        type=int,
        help="input side in pixels; by default 512 on a CPU for all but tiny, else the recipe's",
    )
    options.add_argument("--micro-batch-size", type=int, default=2)
    options.add_argument("--masks", type=int, default=4, help="of an image")
    options.add_argument("--masks-per-chunk", type=int, default=4)
    options.add_argument(
        "--clicks",
        type=int,
        default=1,
        help="rounds with a click, after the first and before the two without",
    )
    options.add_argument(
        "--levers",
        nargs="+",
        default=["none", "activation_checkpointing=1"],
        help="rows: none, or leaves of the run as name=value,name=value; all",
    )
    options.add_argument("--device", default="auto")
    given = options.parse_args()
    torch.set_num_threads(1)
    device = choose_device(given.device)
    world = init_world(os.environ, device)
    chip = (
        torch.cuda.get_device_name(device) if device.type == "cuda" else f"{platform.machine()} CPU"
    )
    with contextlib.nullcontext() if world.is_main else contextlib.redirect_stdout(None):
        print(
            f"{chip}, torch {torch.__version__}, {world.size} process(es), "
            f"{given.micro_batch_size} images each, {given.masks} masks an image,"
        )
        print(
            f"{given.masks_per_chunk} at once, {given.clicks + 3} rounds; predicted / measured "
            f"MiB\n"
        )
        print(
            "| size | lever | forward | rounds | backward | update | peak | ratio | step s | "
            "saved | longer |\n|" + 11 * "---|"
        )
        for size in given.sizes:
            first = None
            for levers in EACH if given.levers == ["all"] else given.levers:
                measured = row(
                    size, levers, pulled(base(size, given, device, world), levers), device, world
                )
                first = first or measured
                saved, longer = (
                    1 - measured["peak"] / first["peak"],
                    measured["seconds"] / first["seconds"] - 1,
                )
                print(f" | {saved:.0%} | {longer:+.0%} |", flush=True)
    destroy_world(world)


if __name__ == "__main__":
    main()
