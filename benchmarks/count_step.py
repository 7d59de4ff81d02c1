"""Launches, bytes and FLOPs of one training step of SAM, counted without a GPU.

The step is the trainer's own, on fake tensors: ViT-B, L or H in bf16, one image, 64 masks, SAM's
eleven rounds, the recipe's AdamW and clipping. Since autograd of a torch without CUDA rejects fake
CUDA tensors, they are CPU tensors that run the GPU's code (`profiling.dry_run`).

A launch is one aten operator that runs a kernel; views, allocations and scalars read by the CPU are
none. A foreach or fused optimizer operator counts as the launches that torch splits it into. Bytes
are those of the tensors an operator reads and writes. The roofline time of a launch is the longest
of its bytes over the GPU's bandwidth, its FLOPs over the GPU's peak, and 2.5 us; the expected time
is the same at the shares of both that good kernels reach (`REACHED`, assumed).

Branches that drop path skips are left out at their rates, so that the counts are means over draws.
Below, the branches that the slowest of some processes computes, by `--drop-path-mode`, from the
trainer's own draws. Prints Markdown.

With --kernels triton, the rounds use the plugin's kernels, each of which is one launch that reads
its inputs and writes its results once.

Run: python -m benchmarks.count_step --size h [--gpus h100 h200] [--ranks 256] [--json FILE]
    [--kernels triton]
"""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import json
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, cast
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from gigamask import registry
from gigamask.interfaces import Loss, PromptSchedule
from gigamask.profiling import gpus
from gigamask.profiling.dry_run import (
    DEVICE,
    PhaseTask,
    blank_batch,
    fake_tensors,
    tensors_in,
    to_fake,
)
from gigamask.prompts.schedule import InteractiveSchedule
from gigamask.recipes import find
from gigamask.training.sam_config import SamTrainConfig
from gigamask.training.state import TrainState
from gigamask.training.step import step
from gigamask.types import Batch, LossSums, PromptRound, Prompts, Targets

RECIPES = {"b": "sam_vit_b", "l": "sam_vit_l", "h": "sam_vit_h", "tiny": "tiny"}
PHASES = {
    "forward": "encoder forward",
    "rounds": "rounds: decoder",
    "loss": "rounds: loss",
    "click": "rounds: next click",
    "backward": "encoder backward",
    "update": "optimizer",
}
ROUNDS = ("rounds", "loss", "click")
KINDS = ("casts", "accumulations", "matmuls", "attention", "loss and click maps", "other")
BANDWIDTH = {"h200": 4.8e12, "h100": 3.35e12, "a100": 2.04e12, "rtx4090": 1.01e12}
"""Bytes per second of the GPU's memory, from its data sheet."""
QUANTITIES = 3 + 2 * len(BANDWIDTH)
"""Launches, bytes, FLOPs, and two times for each GPU."""
REACHED = {"bandwidth": 0.85, "peak": 0.65}
"""Shares of a GPU's bandwidth and peak that good kernels reach: an assumption."""
LAUNCH_S = 2.5e-6
"""Shortest time of a kernel."""
aten = torch.ops.aten
NO_KERNEL = {
    aten._unsafe_view,
    aten.empty,
    aten.empty_like,
    aten.empty_strided,
    aten.new_empty,
    aten.new_empty_strided,
    aten._local_scalar_dense,
    aten.lift_fresh,
    aten.scalar_tensor,
    aten.set_,
    aten.resize_,
}
READS_OUTPUT_ONLY = {aten.index, aten.index_select, aten.gather, aten.embedding}
"""Operators that read as many elements as they return, however large their input is."""
WRITES_ONLY = {aten.copy_, aten.fill_, aten.zero_, aten._foreach_copy_, aten._foreach_zero_}
"""Operators in place that do not read the tensors they change."""
ATTENTION = {
    aten._scaled_dot_product_flash_attention_for_cpu: 3,
    aten._scaled_dot_product_flash_attention_for_cpu_backward: 4,
}
"""Attention, and the number of its tensors whose shapes give the FLOPs."""
TENSORS_PER_LAUNCH = (110, 64, 48, 36, 30)
"""Largest number of tensors that a foreach kernel takes, by its number of lists."""
BLOCKS_PER_LAUNCH, BLOCK = 320, 65536
"""Largest number of blocks of a foreach kernel, and the elements of a block."""


@dataclass
class Count:
    """Sums over launches; `seconds` and `expected` are times by the name of a GPU."""

    launches: float
    bytes: float
    flops: float
    seconds: dict[str, float]
    expected: dict[str, float]


@dataclass
class StepCount:
    """Sums of `QUANTITIES` over the launches of a step, by phase, kind and operator."""

    cells: dict[tuple[str, str, str], np.ndarray] = field(
        default_factory=lambda: defaultdict(lambda: np.zeros(QUANTITIES))
    )

    def plus(self, other: "StepCount", factor: float) -> "StepCount":
        """Returns the sums of this and of `factor` times another."""
        total = StepCount()
        for counts, times in ((self, 1.0), (other, factor)):
            for key, cell in counts.cells.items():
                total.cells[key] += times * cell
        return total

    def count(self, phases: Sequence[str] = (), kinds: Sequence[str] = ()) -> Count:
        """Returns the counts of some phases and kinds, by default of all."""
        found = [
            cell
            for (phase, kind, _), cell in self.cells.items()
            if phase in (phases or PHASES) and kind in (kinds or KINDS)
        ]
        launches, moved, flops, *seconds = np.sum([np.zeros(QUANTITIES), *found], 0).tolist()
        at_most, expected = (
            dict(zip(BANDWIDTH, part, strict=True))
            for part in (seconds[: len(BANDWIDTH)], seconds[len(BANDWIDTH) :])
        )
        return Count(launches, moved, flops, at_most, expected)


class LaunchCounter(TorchDispatchMode):
    """Counts what each operator would launch on a GPU, in the phase that was entered last.

    Args:
        mask_size: Side of the grid of masks, by which loss and click maps are recognized.
    """

    def __init__(self, mask_size: int) -> None:
        super().__init__()
        self.counts, self.phase = StepCount(), "update"
        self._mask_size = mask_size
        peaks = np.array([gpus.find(name).peak("bf16") for name in BANDWIDTH])
        bandwidths = np.array(list(BANDWIDTH.values()))
        self._peaks = np.concatenate([peaks, REACHED["peak"] * peaks])
        self._bandwidths = np.concatenate([bandwidths, REACHED["bandwidth"] * bandwidths])

    def enter(self, phase: str) -> None:
        """Ends the current phase, and begins or continues `phase`."""
        self.phase = phase

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if func is DEVICE or func.is_view or func.overloadpacket in NO_KERNEL:
            return result
        inputs, outputs = list(tensors_in((args, kwargs))), list(tensors_in(result))
        if func.overloadpacket is aten._to_copy and is_same_layout(inputs[0], outputs[0]):
            return result  # a transfer to the device that this is already on
        if inputs or outputs:
            self._count(func, args, kwargs, inputs, result)
        return result

    def _count(
        self,
        func: Any,
        args: tuple,
        kwargs: dict[str, Any],
        inputs: list[Tensor],
        result: Any,
    ) -> None:
        """Adds one operator."""
        outputs = list(tensors_in(result))
        launches, moved = launches_of(func, args), bytes_of(func, args, inputs, outputs)
        flops = flops_of(func, args, kwargs, result)
        kind = self._kind(func, flops, inputs + outputs)
        # The gradients of the loss are computed with those of the decoder.
        is_loss = kind == "loss and click maps" and self.phase == "rounds"
        key = ("loss" if is_loss else self.phase, kind, func._schema.name.removeprefix("aten::"))
        self.counts.cells[key] += self.quantities(launches, moved, flops)

    def quantities(self, launches: int, moved: float, flops: float) -> np.ndarray:
        """Returns `QUANTITIES`: the times of all GPUs at the roofline, then the expected ones."""
        seconds = np.maximum(moved / self._bandwidths, flops / self._peaks)
        return np.array([launches, moved, flops, *np.maximum(seconds, launches * LAUNCH_S)])

    def _kind(self, func: Any, flops: float, tensors: list[Tensor]) -> str:
        """Returns which of `KINDS` an operator is."""
        packet, side = func.overloadpacket, (self._mask_size,) * 2
        if packet in ATTENTION:
            return "attention"
        if flops:
            return "matmuls"
        if any(tensor.ndim > 2 and tensor.shape[-2:] == side for tensor in tensors):
            return "loss and click maps"
        if packet is aten._to_copy:
            return "casts"
        if packet in (aten.add_, aten._foreach_add_, aten._foreach_copy_):
            return "accumulations"
        return "other"


def is_same_layout(one: Tensor, other: Tensor) -> bool:
    """Returns whether two tensors have the same type and strides."""
    return one.dtype == other.dtype and one.stride() == other.stride()


def launches_of(func: Any, args: tuple) -> int:
    """Returns the number of kernels of an operator: 1, or those of a foreach or fused one."""
    name = func._schema.name
    if not name.startswith(("aten::_foreach", "aten::_fused")):
        return 1
    lists = [each for each in args if isinstance(each, list | tuple) and len(each)]
    tensors = lists[0]
    most = TENSORS_PER_LAUNCH[min(len(lists), len(TENSORS_PER_LAUNCH)) - 1]
    blocks = sum(-(-each.numel() // BLOCK) for each in tensors)
    return max(-(-len(tensors) // most), -(-blocks // BLOCKS_PER_LAUNCH))


def bytes_of(func: Any, args: tuple, inputs: list[Tensor], outputs: list[Tensor]) -> float:
    """Returns the bytes that an operator reads and writes."""
    packet = func.overloadpacket
    if packet in READS_OUTPUT_ONLY:
        return sum(map(held, inputs[1:])) + 2 * sum(map(held, outputs))
    if packet in WRITES_ONLY:
        return sum(map(held, inputs))
    changed = [
        tensor
        for value, argument in zip(args, func._schema.arguments, strict=False)
        if argument.alias_info is not None and argument.alias_info.is_write
        for tensor in tensors_in(value)
    ]
    written = changed if changed else outputs
    return sum(map(held, inputs)) + sum(map(held, written))


def held(tensor: Tensor) -> float:
    """Returns the bytes of a tensor's elements; those of an expanded one count once."""
    sizes = zip(tensor.shape, tensor.stride(), strict=True)
    return math.prod(size for size, stride in sizes if stride) * tensor.itemsize


def flops_of(func: Any, args: tuple, kwargs: dict[str, Any], result: Any) -> float:
    """Returns the FLOPs of matrix products, convolutions and attention; 0 of other operators."""
    packet = func.overloadpacket
    if packet in ATTENTION:
        shapes = [each.shape for each in args[: ATTENTION[packet]]]
        return (sdpa_flop_count if len(shapes) == 3 else sdpa_backward_flop_count)(*shapes)
    if packet not in flop_registry:
        return 0.0
    return flop_registry[packet](*args, **kwargs, out_val=result)


class PhaseStart(tuple[Batch, ...]):
    """Batches of a step that report when one is begun and when all are done."""

    counter: LaunchCounter

    def __iter__(self) -> Iterator[Batch]:
        for batch in super().__iter__():
            self.counter.enter("forward")
            yield batch
        self.counter.enter("update")


@dataclass(frozen=True)
class PhaseSchedule(PromptSchedule):
    """Rounds that report when a click is computed."""

    schedule: PromptSchedule
    enter: Callable[[str], None]

    def next(self, *given: Any) -> Prompts | None:
        self.enter("click")
        prompts = self.schedule.next(*given)
        self.enter("rounds")
        return prompts


@dataclass(frozen=True)
class PhaseLoss(Loss):
    """A loss that reports when it is computed."""

    loss: Loss
    enter: Callable[[str], None]

    def __call__(self, prompt_round: PromptRound, targets: Targets) -> LossSums:
        self.enter("loss")
        sums = self.loss(prompt_round, targets)
        self.enter("rounds")
        return sums


def count_step(
    run: SamTrainConfig, masks: int, counter: LaunchCounter, skipped: tuple[int, int] | None = None
) -> StepCount:
    """Returns the counts of one step of a run.

    Args:
        run: The configuration; one image is one micro-batch.
        masks: Number of masks of the image.
        counter: Counts the step.
        skipped: Block and branch, 0 or 1, that the image skips; None skips nothing.
    """
    model = run.build("meta")
    drop_path = torch.ones(1, run.random_spec.blocks, 2)  # real, or all its numbers would be 1
    if skipped:
        drop_path[(0, *skipped)] = 0
    with fake_tensors("cuda"):
        state = TrainState.from_model(to_fake(model, "cuda"), run)
        state.model.train()
        for each in state.optimizers:  # creates the optimizer state
            each.step()
        batch = blank_batch(run.sample_config, run.random_spec, 1, masks)
        batch = replace(batch, random_inputs=replace(batch.random_inputs, drop_path=drop_path))
        batches = PhaseStart([batch])
        batches.counter = counter
        with (
            run.task(torch.device("cpu")).compiled(state.model) as steps,
            foreach_kernels(),
            counter,
        ):
            if not run.compile:
                loss, schedule = cast(Any, steps).loss, cast(Any, steps).schedule
                phases = {
                    "loss": PhaseLoss(loss, counter.enter),
                    "schedule": PhaseSchedule(schedule, counter.enter),
                }
                steps = replace(cast(Any, steps), **phases)
            task = PhaseTask(steps, counter.enter)
            step(task, state, batches, 1, 0.0, run.optimizer.grad_clip)
    return counter.counts


def foreach_kernels() -> AbstractContextManager:
    """Returns a context in which torch's foreach kernels take fake tensors."""
    kinds = [Tensor, nn.Parameter, FakeTensor]
    return patch("torch.utils._foreach_utils._foreach_supported_types", kinds)


def configured(size: str, masks: int, kernels: str = "torch") -> SamTrainConfig:
    """Returns the recipe of a size with bf16, SAM's rounds and all masks in one chunk."""
    recipe = cast(SamTrainConfig, find(RECIPES[size])())
    return replace(
        recipe,
        prompts=InteractiveSchedule(),
        loader=replace(recipe.loader, max_masks=masks),
        masks_per_chunk=masks,
        activation_checkpointing=0,
        precision="bf16",
        kernels=registry.make_component("kernels", kernels),
    )


def time_titles(chosen: Sequence[str]) -> str:
    """Returns the headings of the times of some GPUs."""
    return " | ".join(f"{name} ms, {kind}" for name in chosen for kind in ("roofline", "expected"))


def time_cells(count: Count, chosen: Sequence[str]) -> str:
    """Returns the cells of the times of some GPUs."""
    times = [times[name] for name in chosen for times in (count.seconds, count.expected)]
    return " | ".join(f"{1e3 * seconds:.0f}" for seconds in times)


def row(name: str, count: Count, chosen: Sequence[str]) -> str:
    """Returns one line of the table of phases."""
    return (
        f"| {name} | {count.launches:,.0f} | {count.bytes / 1e9:.1f} | {count.flops / 1e12:.2f} "
        f"| {time_cells(count, chosen)} |"
    )


def print_phases(counts: StepCount, chosen: Sequence[str]) -> None:
    """Prints the counts of each phase, and what the step would be without its small kernels."""
    print(f"| phase | launches | GB | TFLOP | {time_titles(chosen)} |")
    print(f"|{'---|' * (4 + 2 * len(chosen))}")
    for phase, name in PHASES.items():
        print(row(name, counts.count([phase]), chosen))
    print(row("all", counts.count(), chosen))
    products = counts.count(kinds=("matmuls", "attention"))
    print(row("of which matrix products and attention", products, chosen))


def main() -> None:
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--size", choices=RECIPES, default="h")
    options.add_argument("--masks", type=int, default=64)
    options.add_argument("--gpus", nargs="+", choices=BANDWIDTH, default=["h100", "h200"])
    options.add_argument("--ranks", type=int, default=256, help="processes with one image each")
    options.add_argument("--kernels", choices=registry.names("kernels"), default="torch")
    options.add_argument("--json", type=Path, help="file for the counts by phase")
    options.add_argument("--operators", action="store_true", help="also list the operators")
    given = options.parse_args()
    from benchmarks.drop_path import DropPathCount, print_drop_path  # which imports this module

    run = configured(given.size, given.masks, given.kernels)
    found = DropPathCount.of(run, given.masks)
    counts, rounds = found.mean, run.prompts.rounds
    print(f"{RECIPES[given.size]}, bf16, 1 image x {given.masks} masks, {rounds} rounds\n")
    print_phases(counts, given.gpus)
    if run.model.drop_path_rate:
        print_drop_path(run, found, given.ranks, given.gpus)
    print("\n| launches of a round | |\n|---|---|")
    for kind in KINDS:
        print(f"| {kind} | {counts.count(ROUNDS, [kind]).launches / rounds:.0f} |")
    print(f"| all | {counts.count(ROUNDS).launches / rounds:.0f} |")
    if given.operators:
        print("\n| phase | kind | operator | launches |\n|---|---|---|---|")
        cells = sorted(counts.cells.items(), key=lambda cell: -cell[1][0])
        for (phase, kind, name), (launches, *_) in cells:
            print(f"| {PHASES[phase]} | {kind} | {name} | {launches:,.0f} |")
    if given.json:
        phases = {name: asdict(counts.count([phase])) for phase, name in PHASES.items()}
        content = {"phases": phases, "total": asdict(counts.count())}
        given.json.write_text(json.dumps(content, indent=2) + "\n")


if __name__ == "__main__":
    main()
