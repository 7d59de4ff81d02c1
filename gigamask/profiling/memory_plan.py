"""Memory and time of a run: bytes of each process by kind and phase, and hours.

With `fsdp`, the matrices of the encoder's blocks, their gradients and their optimizer state are
sharded over all processes, with `hsdp` over those of one machine. One block at a time is gathered
in the compute precision; its full gradient exists until it has been reduced in float32 and
scattered; weights and gradients each have a communication buffer of their size. Everything else is
replicated, and its gradients are all-reduced from one flat copy. With `ddp`, those of the encoder
are all-reduced where they are.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gigamask.distributed.fsdp import Parallel
from gigamask.errors import counted
from gigamask.profiling.gpus import Cluster, Gpu

STATE_KINDS = ("weights", "gradients", "optimizer")
GIB = 2**30
_DEVICES = {"cuda": "GPU", "cpu": "CPU"}
PUBLISHED = {
    "train": {
        "SAM's own run (68 hours of 256 A100 for 90,000 updates of ViT-H, model card)": 0.0274
    },
    "pretrain": {"MAE's own run (42 hours of 64 V100 for 800 epochs of ViT-L, PRETRAIN.md)": 0.105},
}
EXPECTED = {"a step of ViT-H in 146 ms on an H100, counted, not measured": 0.161}
"""Fractions of the GPUs' peak FLOP/s that are assumed, with `PUBLISHED`, if the user sets none."""
LOADED_PER_S = 25
"""Images per second of one loader process from SA-1B's tars (docs/measurements/loader.md)."""


@dataclass(frozen=True)
class BatchSplit:
    """How a global batch is split over processes.

    The first `busiest` processes have `images` images each, the others one less; every process
    makes `micro_batches` micro-batches of at most `micro_batch_size` images.
    """

    images: int
    busiest: int
    micro_batches: int
    micro_batch_size: int

    @classmethod
    def from_batch_size(cls, batch: int, micro: int | None, processes: int) -> "BatchSplit":
        """Split a global batch as `samplers.batch_sampler` does.

        Args:
            batch: Images of the global batch.
            micro: Largest micro-batch of a process; None means 1.
            processes: Number of processes.
        """
        images, micro = -(-batch // processes), micro or 1
        micro_batches = -(-batch // (processes * micro))
        return cls(images, batch - (images - 1) * processes, micro_batches, min(micro, images))

    def describe(self, batch: int, processes: int) -> str:
        """Return the split in words.

        Args:
            batch: Images of the global batch.
            processes: Number of processes.
        """
        others = f"on {self.busiest:,} of them, {self.images - 1:,} on the others"
        return (
            f"batch of {batch:,} images over {counted(processes, 'process', 'processes')}: "
            f"{self.images:,} {'each' if self.busiest == processes else others}, in "
            f"{counted(self.micro_batches, 'micro-batch', 'micro-batches')} "
            f"of at most {self.micro_batch_size:,}"
        )


@dataclass(frozen=True)
class StateBytes:
    """Bytes by `STATE_KINDS` of the shardable state, of the rest, and of the largest block."""

    sharded: Mapping[str, float]
    replicated: Mapping[str, float]
    largest_block: Mapping[str, float]


def bytes_by_phase(
    state: StateBytes,
    peaks: Mapping[str, int],
    activation_bytes: int,
    batch_bytes: int,
    parallel: Parallel,
    cluster: Cluster,
    gathered: float,
    cleared_bytes: int = 0,
) -> dict[str, dict[str, int]]:
    """Return the bytes of each kind at the peak of each phase, for the busiest process.

    Args:
        state: Bytes of weights, gradients and optimizer state of the whole model.
        peaks: Peak bytes of each phase above the state, from a dry run.
        activation_bytes: Bytes that the encoder keeps for its backward pass.
        batch_bytes: Bytes of the batches of one step.
        parallel: `ddp`, `fsdp` or `hsdp`.
        cluster: The machines that the state is sharded over.
        gathered: Bytes of a gathered weight divided by those of the sharded one (0.5 in bf16).
        cleared_bytes: Bytes of the gradients that the dry run cleared, by which its peaks and
            activations are too few.

    Returns:
        Bytes by phase and kind. `activations` are kept for the backward pass; `temporary` is
        short-lived memory, such as a round with its loss. Gradients that do not exist yet are not
        counted.
    """
    shards = {"ddp": 1, "fsdp": cluster.size, "hsdp": cluster.gpus_per_node}[parallel]
    held = {
        kind: round(state.replicated[kind] + state.sharded[kind] / shards) for kind in STATE_KINDS
    }
    weights = 2 * gathered * state.largest_block["weights"] if shards > 1 else 0
    gradients = (1 + gathered) * state.largest_block["gradients"] if shards > 1 else 0
    extra = {
        "forward": weights,
        "backward": weights + gradients,
        "update": state.replicated["gradients"] if cluster.size > 1 else 0,
    }
    found = {}
    for phase, peak in peaks.items():
        activations = 0 if phase == "update" else cleared_bytes + min(activation_bytes, peak)
        temporary = round(peak - activations + extra.get(phase, 0))
        found[phase] = held | {
            "gradients": held["gradients"] + min(temporary, 0),
            "batch": batch_bytes,
            "activations": activations,
            "temporary": max(temporary, 0),
        }
    return found


def peak_phase(phases: Mapping[str, Mapping[str, int]]) -> tuple[str, int]:
    """Return the phase with the most bytes, and its bytes."""
    totals = ((phase, sum(kinds.values())) for phase, kinds in phases.items())
    return max(totals, key=lambda each: each[1])


def training_hours(
    flops: float,
    steps: int,
    gpu: Gpu,
    precision: str,
    cluster: Cluster,
    efficiencies: Mapping[str, float],
    price: float | None,
) -> list[dict[str, Any]]:
    """Return hours, GPU hours and dollars at each efficiency.

    Args:
        flops: FLOPs of one step on the busiest process.
        steps: Number of steps.
        gpu: The GPU whose peak FLOP/s is used.
        precision: `bf16`, `fp16` or `fp32`.
        cluster: The machines, for the number of GPUs.
        efficiencies: Fraction of the peak that is reached, by source.
        price: Dollars per GPU hour, or None.

    Returns:
        One row for each efficiency.
    """
    rows = []
    for source, efficiency in efficiencies.items():
        hours = steps * flops / (gpu.peak(precision) * efficiency) / 3600
        gpu_hours = hours * cluster.size
        row: dict[str, Any] = {"efficiency": efficiency, "source": source}
        row |= {"hours": hours, "gpu_hours": gpu_hours}
        rows.append(row if price is None else row | {"dollars": gpu_hours * price})
    return rows


def loading(rows: Sequence[Mapping[str, Any]], steps: int, images: int) -> dict[str, float]:
    """Return what the loader of the busiest process must deliver at the highest efficiency.

    Args:
        rows: Result of `training_hours`.
        steps: Number of steps.
        images: Images of a step on that process.

    Returns:
        Images per second, and the number of loader processes that deliver them.
    """
    images_per_s = steps * images / (3600 * min(row["hours"] for row in rows))
    processes = math.ceil(images_per_s / LOADED_PER_S)
    return {"images_per_s": images_per_s, "loader_processes": processes}


def table(plan: Mapping[str, Any]) -> str:
    """Format a plan as plain text."""
    lines = [*_heading(plan), "", *_memory(plan), *_verdict(plan), "", *_work(plan)]
    if assumed := plan.get("assumed"):
        lines += ["", "training would refuse, unless it is mended by then:"]
        lines += [f"  {line}" for line in assumed]
    return "\n".join(lines)


def _heading(plan: Mapping[str, Any]) -> list[str]:
    split, processes = BatchSplit(**plan["batch_split"]), Cluster(**plan["world"]).size
    parameters, trained = plan["parameters"], plan["trained"]
    frozen = "" if trained == parameters else f", {trained / 1e6:,.1f} M of them trained"
    lines = [
        f"{plan['recipe']}: {parameters / 1e6:,.1f} M parameters{frozen};"
        f" {plan['precision']} on a {_DEVICES[plan['device']]}",
        split.describe(plan["batch"], processes),
    ]
    if plan["masks"]:
        rounds = counted(plan["rounds"], "round")
        lines.append(
            f"{plan['masks']} masks per image, {plan['masks_per_chunk']} at once, {rounds}"
        )
    idle = processes - split.busiest
    if idle and split.images == 1:
        lines.append(
            f"{idle:,} processes have no image in any step:"
            " use a larger --batch-size, or fewer GPUs"
        )
    return lines


def _memory(plan: Mapping[str, Any]) -> list[str]:
    phases = {
        phase: kinds
        for phase, kinds in plan["phases"].items()
        if phase != "rounds" or plan["rounds"]
    }
    unit, size = _unit(plan["peak_bytes"])
    kinds = next(iter(phases.values()))
    rows = {kind: [phases[phase][kind] for phase in phases] for kind in kinds}
    rows["total"] = [sum(kinds.values()) for kinds in phases.values()]
    lines = [
        f"{unit} of one process at the peak of each phase of a step:",
        f"{'':14}{''.join(f'{phase:>10}' for phase in phases)}",
    ]
    for name, row in rows.items():
        lines.append(f"  {name:12}{''.join(f'{held / size:10,.2f}' for held in row)}")
    return lines


def _verdict(plan: Mapping[str, Any]) -> list[str]:
    unit, size = _unit(plan["peak_bytes"])
    peak = f"peak {plan['peak_bytes'] / size:,.2f} {unit}"
    if plan["gpu"] is None:
        return [f"{peak}, in the phase {plan['peak_phase']}"]
    gpu, left = plan["gpu"], (plan["available_bytes"] - plan["peak_bytes"]) / GIB
    fits = f"fits, {left:.1f} GiB left" if plan["fits"] else f"DOES NOT FIT, {-left:.1f} GiB over"
    lines = [
        f"{peak} of {gpu['gib']:.1f} GiB ({gpu['name']}: {gpu['source']}),"
        f" {plan['spare_gib']:g} kept free: {fits}"
    ]
    for change in plan["changes"]:
        more = f", {change['more_flops']:.0%} more FLOPs" if change["more_flops"] else ""
        mark = "fits" if change["fits"] else "    "
        held = f"{change['peak_bytes'] / size:8,.2f} {unit}"
        lines.append(f"  {held}  {mark}  with {change['flags']}{more}")
    if not plan["fits"] and not any(change["fits"] for change in plan["changes"]):
        lines.append(
            "  none of these is enough: try a smaller --model.image-size, more GPUs with --parallel"
            " fsdp, or larger GPUs"
        )
    return lines


def _work(plan: Mapping[str, Any]) -> list[str]:
    parts = {
        name.replace("_", " "): flops for name, flops in plan["flops_per_image"].items() if flops
    }
    shares = " + ".join(f"{name} {flops / 1e12:.3g}" for name, flops in parts.items())
    lines = [
        f"{plan['steps']:,} steps of {plan['flops_per_step'] / 1e12:,.4g} TFLOP, "
        f"{sum(parts.values()) / 1e12:.4g} per image{f' ({shares})' if len(parts) > 1 else ''}"
    ]
    if plan["gpu"] is None:
        return lines
    peak = plan["gpu"]["tflops"][plan["precision"]]
    lines.append(
        f"hours at a share of the peak of {peak:g} TFLOP/s, without loading and communication:"
    )
    for row in plan["time"]:
        dollars = f"  ${row['dollars']:,.0f}" if "dollars" in row else ""
        of_one, of_all = _hours(row["hours"], 1), _hours(row["gpu_hours"], 0)
        hours = f"{of_one:>10} h {of_all:>12} GPU hours{dollars}"
        lines.append(f"{hours}  at {row['efficiency']:.1%}: {row['source']}")
    needed, processes = plan["loading"]["images_per_s"], plan["loading"]["loader_processes"]
    lines.append(
        f"the fastest needs {needed:,.1f} images/s for each GPU, about"
        f" {counted(processes, 'loader process', 'loader processes')} at {LOADED_PER_S} images/s"
        " from SA-1B's tars"
    )
    return lines


def _unit(most: int) -> tuple[str, int]:
    return ("GiB", GIB) if most >= GIB else ("MiB", 2**20)


def _hours(hours: float, digits: int) -> str:
    least = 10.0**-digits
    return f"<{least:g}" if hours < least else f"{hours:,.{digits}f}"
