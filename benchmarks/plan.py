"""Predicted against measured peak memory of one training step, phase by phase: `gigamask plan` beside the step itself.

The step is the trainer's second one, when the optimizer holds what it keeps, from a batch of black images with empty masks, of which memory knows
nothing. On a CPU the peak is the largest running sum of torch's own allocation events (torch.profiler), on a GPU torch.cuda.max_memory_allocated;
phases are looked at in the same step. Prints Markdown.

Run: python benchmarks/plan.py [--sizes tiny b] [--side 512] [--micro 2] [--masks 4] [--masks-at-once 4] [--clicks 1] [--recompute 0 1]
On a GPU: python benchmarks/plan.py --device cuda --sizes b h --masks 64 --masks-at-once 64 --clicks 8 --recompute 0 1
"""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import contextlib
import platform
import time
from dataclasses import replace

import torch

from gigamask import planning
from gigamask.memory import planner
from gigamask.memory.allocations import Allocations
from gigamask.memory.rehearsal import Rehearsal, Watched, WatchedBatches, blank_batch
from gigamask.parallel.precision import choose_device, choose_precision
from gigamask.prompts.policy import InteractiveSchedule
from gigamask.recipes import find
from gigamask.train.segmentation import Segmentation
from gigamask.train.state import TrainState
from gigamask.train.step import step

RECIPES = {"b": "sam_vit_b", "l": "sam_vit_l", "h": "sam_vit_h", "tiny": "tiny"}
MIB = 2**20


class CudaBook:
    """What CUDA's allocator says it holds, in the words of `Allocations`."""

    @property
    def now(self) -> int:
        return torch.cuda.memory_allocated()

    def since(self) -> int:
        """Returns the most that was held since this was last asked, and begins anew."""
        peak = torch.cuda.max_memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        return peak


def measure(run: Segmentation, device: torch.device) -> dict[str, float]:
    """Makes two updates; returns the peak in bytes of the second, those of its phases, and its seconds."""
    with contextlib.ExitStack() as looking:
        profile = None
        book = CudaBook()
        if device.type == "cpu":
            profile = looking.enter_context(torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True))
            book = looking.enter_context(Allocations())
        before = book.now
        state = TrainState.begin(run, device)
        state.model.train()
        batch = blank_batch(run.assembly, run.chance, run.micro, run.micro * run.loading.max_masks).to(device)
        for _ in range(2):
            seen, standing, began = Rehearsal(book), book.now, seconds(device)
            batches = WatchedBatches([batch])
            batches.mark = seen.mark
            seen.begin()
            step(Watched(run.task(device), seen.mark), state, batches, run.micro, 0.0, run.optimizer.clip_norm)
            seen.mark("update")
            taken = seconds(device) - began
    phases = {phase: standing + peak - before for phase, peak in seen.peaks.items()}
    return {**phases, "peak": max(phases.values()) if profile is None else events_peak(profile), "seconds": taken}


def seconds(device: torch.device) -> float:
    """Returns the clock on a GPU whose queue is empty, the process's own time on a CPU."""
    if device.type == "cpu":
        return time.process_time()
    torch.cuda.synchronize(device)
    return time.perf_counter()


def events_peak(profile: torch.profiler.profile) -> int:
    """Returns the largest sum of allocations less what was given back, in the order in which they happened."""
    result = profile.profiler.kineto_results if profile.profiler else None
    assert result is not None
    now = peak = 0
    for event in sorted((each for each in result.events() if each.name() == "[memory]"), key=lambda each: each.start_ns()):
        now += event.nbytes()
        peak = max(peak, now)
    return peak


def predict(run: Segmentation) -> dict[str, float]:
    """Returns what `gigamask plan` says, by the same names."""
    began = time.process_time()
    asked = planning.Ask()
    held = planning.planned(run, asked, planning.rehearse(run, planning.device_of(run), run.micro))
    phases = {phase: sum(kinds.values()) for phase, kinds in held.items()}
    return {**phases, "peak": planner.peak_of(held)[1], "seconds": time.process_time() - began}


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--sizes", choices=RECIPES, nargs="+", default=["tiny", "b"])
    options.add_argument("--side", type=int, help="input side in pixels; by default 512 on a CPU for all but tiny, else the recipe's")
    options.add_argument("--micro", type=int, default=2)
    options.add_argument("--masks", type=int, default=4, help="of an image")
    options.add_argument("--masks-at-once", type=int, default=4)
    options.add_argument("--clicks", type=int, default=1, help="rounds with a click, after the first and before the two without")
    options.add_argument("--recompute", type=int, nargs="+", default=[0])
    options.add_argument("--device", default="auto")
    options.add_argument("--precision", choices=("auto", "fp32", "bf16"), default="auto")
    given = options.parse_args()
    torch.set_num_threads(1)
    device = choose_device(given.device)
    chip = torch.cuda.get_device_name(device) if device.type == "cuda" else f"{platform.machine()} CPU"
    print(f"{chip}, torch {torch.__version__}, {given.masks} masks an image, {given.masks_at_once} at once; predicted / measured MiB\n")
    heads = "forward | rounds | backward | update | peak | ratio | TFLOP predicted | step s | rehearsal s"
    print(f"| size | side | micro | recompute | {heads} |\n|{13 * '---|'}")
    for size in given.sizes:
        base = find(RECIPES[size])()
        assert isinstance(base, Segmentation)
        side = given.side or (512 if device.type == "cpu" and size != "tiny" else base.model.input_side)
        for recompute in given.recompute:
            run = replace(
                base,
                model=replace(base.model, input_side=side if size != "tiny" else base.model.input_side),
                batch=given.micro,
                micro=given.micro,
                masks_at_once=given.masks_at_once,
                recompute=recompute,
                policy=InteractiveSchedule(clicks=given.clicks),
                loading=replace(base.loading, max_masks=given.masks),
                precision=choose_precision(given.precision, device),
                device=device.type,
            )
            predicted, measured, products = predict(run), measure(run, device), planning.multiplied(run)
            names = ("forward", "rounds", "backward", "update", "peak")
            cells = [f"{predicted[name] / MIB:,.1f} / {measured[name] / MIB:,.1f}" for name in names]
            cells += [f"{predicted['peak'] / measured['peak']:.4f}", f"{given.micro * (products.total + products.again(recompute)) / 1e12:.3g}"]
            cells += [f"{measured['seconds']:.1f}", f"{predicted['seconds']:.1f}"]
            print(f"| {size} | {run.model.input_side} | {given.micro} | {recompute} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
