"""What a process holds, kind by kind and phase by phase, and how long a training takes: what a rehearsed step held enters, numbers leave.

With `fsdp` the matrices of the encoder's blocks, their gradients and what the optimizer keeps of them are split over all processes, with `hsdp` over
those of one machine. A block at a time is gathered to be used, in the precision that it computes in, and its whole gradient stands until it is summed
in float32 and split again; beside each lies the buffer that it is sent in. All else is everywhere, and gradients that are whole are summed from one
flat copy of them, as all are with `ddp`.

Not here: what a step holds beside (`memory.rehearsal`), its products (`memory.flops`), GPUs (`memory.gpus`), which recipe (`planning`).
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gigamask.faults import Fault
from gigamask.memory.gpus import Gpu
from gigamask.parallel.shard import Parallel

STANDING = ("weights", "gradients", "optimizer")
GIB = 2**30
_DEVICES = {"cuda": "GPU", "cpu": "CPU"}
PUBLISHED = {
    "train": {"SAM's own run (68 hours of 256 A100 for 90,000 updates of ViT-H, model card)": 0.0274},
    "pretrain": {"MAE's own run (42 hours of 64 V100 for 800 epochs of ViT-L, PRETRAIN.md)": 0.105},
}
HOPED = {"what .12 s for a step of ViT-H on an H200 would be: aimed at here, not measured": 0.196}
"""Shares of the GPUs' peaks, in FLOPs as they are counted here."""


@dataclass(frozen=True)
class Fleet:
    """Machines with as many GPUs on each, and a process for every GPU."""

    nodes: int
    each: int

    @property
    def size(self) -> int:
        """How many processes there are."""
        return self.nodes * self.each

    @classmethod
    def parse(cls, words: str) -> "Fleet":
        """Reads `32x8`, or `256`, which are all on one machine."""
        found = re.fullmatch(r"(?:([1-9]\d*)x)?([1-9]\d*)", words)
        if found is None:
            raise Fault(f"--world is {words!r}, it must be machines x GPUs on each, such as 32x8, or the number of GPUs of one machine")
        return cls(int(found[1] or 1), int(found[2]))


@dataclass(frozen=True)
class Share:
    """How a global batch is split: `images` on each of the first `busy` processes and one less on the others, in `micros` micro-batches of at most
    `micro` images."""

    images: int
    busy: int
    micros: int
    micro: int

    @classmethod
    def of(cls, batch: int, micro: int, processes: int) -> "Share":
        """Splits a batch as `samplers.batch_sampler` does."""
        images = -(-batch // processes)
        return cls(images, batch - (images - 1) * processes, -(-batch // (processes * micro)), min(micro, images))

    def told(self, batch: int, processes: int) -> str:
        """Returns what is said of it."""
        some = "each" if self.busy == processes else f"on {self.busy:,} of them, {self.images - 1:,} on the others"
        return (
            f"batch of {batch:,} images over {_count(processes, 'process', 'processes')}: {self.images:,} {some}, "
            f"in {_count(self.micros, 'micro-batch', 'micro-batches')} of at most {self.micro:,}"
        )


@dataclass(frozen=True)
class Standing:
    """Bytes of weights, gradients and optimizer state, by these names: of what may be shared out of the encoder's blocks, of all else, and of the
    largest block."""

    inside: Mapping[str, float]
    outside: Mapping[str, float]
    largest: Mapping[str, float]


def held(
    standing: Standing, peaks: Mapping[str, int], kept: int, batch: int, parallel: Parallel, fleet: Fleet, gathered: float
) -> dict[str, dict[str, int]]:
    """Returns the bytes of each kind that a process holds when each phase of a step holds most; `gathered` is the width of a block that is put
    together, as a share of the weights' own.

    `activations` are what the encoder keeps for its backward pass; `at work` is all that comes and goes, such as a round with its loss.
    """
    parts = {"ddp": 1, "fsdp": fleet.size, "hsdp": fleet.each}[parallel]
    stand = {kind: round(standing.outside[kind] + standing.inside[kind] / parts) for kind in STANDING}
    blocks = 2 * gathered * standing.largest["weights"] if parts > 1 else 0
    whole = (1 + gathered) * standing.largest["gradients"] if parts > 1 else 0
    summed = standing.outside["gradients"] + (standing.inside["gradients"] if parts == 1 else 0)
    beside = {"forward": blocks, "backward": blocks + whole, "update": summed if fleet.size > 1 else 0}
    found = {}
    for phase, peak in peaks.items():
        activations = 0 if phase == "update" else min(kept, peak)
        moving = {"batch": batch, "activations": activations, "at work": round(peak - activations + beside.get(phase, 0))}
        found[phase] = stand | moving
    return found


def peak_of(phases: Mapping[str, Mapping[str, int]]) -> tuple[str, int]:
    """Returns the phase that holds most, and how much."""
    return max(((phase, sum(kinds.values())) for phase, kinds in phases.items()), key=lambda each: each[1])


def time(flops: float, steps: int, gpu: Gpu, precision: str, fleet: Fleet, efficiencies: Mapping[str, float], price: float | None) -> list[dict]:
    """Returns hours, and dollars where a GPU's hour has a price, at each efficiency, a share of the GPU's peak; `flops` are the busiest process's."""
    found = []
    for source, efficiency in efficiencies.items():
        hours = steps * flops / (gpu.peak(precision) * efficiency) / 3600
        row: dict[str, Any] = {"efficiency": efficiency, "source": source, "hours": hours, "gpu_hours": hours * fleet.size}
        found.append(row if price is None else row | {"dollars": hours * fleet.size * price})
    return found


def table(found: Mapping[str, Any]) -> str:
    """Returns a plan as plain text."""
    return "\n".join([*_heading(found), "", *_memory(found), *_verdict(found), "", *_work(found)])


def _heading(found: Mapping[str, Any]) -> list[str]:
    share, processes = Share(**found["share"]), Fleet(**found["world"]).size
    trained = "" if found["trained"] == found["parameters"] else f", {found['trained'] / 1e6:,.1f} M of them trained"
    lines = [
        f"{found['recipe']}: {found['parameters'] / 1e6:,.1f} M parameters{trained}; {found['precision']} on a {_DEVICES[found['device']]}",
        share.told(found["batch"], processes),
    ]
    if found["masks"]:
        lines.append(f"{found['masks']} masks an image, {found['masks_at_once']} at once, {_count(found['rounds'], 'round', 'rounds')}")
    if not share.images - (share.busy < processes):
        lines.append(f"{processes - share.busy:,} processes have no image in any step: give more --batch, or fewer GPUs")
    return lines


def _memory(found: Mapping[str, Any]) -> list[str]:
    phases = {phase: kinds for phase, kinds in found["phases"].items() if phase != "rounds" or found["rounds"]}
    unit, size = _unit(found["peak_bytes"])
    rows = {kind: [phases[phase][kind] for phase in phases] for kind in next(iter(phases.values()))}
    rows["in all"] = [sum(kinds.values()) for kinds in phases.values()]
    lines = [f"{unit} of one process, when each phase of a step holds most:", f"{'':14}{''.join(f'{phase:>10}' for phase in phases)}"]
    return lines + [f"  {name:12}{''.join(f'{held / size:10,.2f}' for held in row)}" for name, row in rows.items()]


def _verdict(found: Mapping[str, Any]) -> list[str]:
    unit, size = _unit(found["peak_bytes"])
    peak = f"peak {found['peak_bytes'] / size:,.2f} {unit}"
    if found["gpu"] is None:
        return [f"{peak}, in the phase {found['peak_phase']}"]
    gpu, left = found["gpu"], (found["room_bytes"] - found["peak_bytes"]) / GIB
    verdict = f"fits, {left:.1f} GiB left" if found["fits"] else f"DOES NOT FIT, {-left:.1f} GiB too much"
    lines = [f"{peak} of {gpu['gib']:.1f} GiB ({gpu['name']}: {gpu['source']}), of which {found['spare_gib']:g} stay free: {verdict}"]
    for each in found["changes"]:
        more = f", {each['more_flops']:.0%} more FLOPs" if each["more_flops"] else ""
        lines.append(f"  {each['peak_bytes'] / size:8,.2f} {unit}  {'fits' if each['fits'] else '    '}  with {each['flags']}{more}")
    if not found["fits"] and not any(each["fits"] for each in found["changes"]):
        lines.append("  none of these makes it fit: try a smaller --model.input-side, more GPUs with --parallel fsdp, or larger ones")
    return lines


def _work(found: Mapping[str, Any]) -> list[str]:
    parts = {name.replace("_", " "): flops for name, flops in found["flops_an_image"].items() if flops}
    told = f" ({' + '.join(f'{name} {flops / 1e12:.3g}' for name, flops in parts.items())})" if len(parts) > 1 else ""
    lines = [f"{found['steps']:,} steps of {found['flops_a_step'] / 1e12:,.4g} TFLOP, {sum(parts.values()) / 1e12:.4g} an image{told}"]
    if found["gpu"] is None:
        return lines
    lines.append(f"hours at a share of the peak of {found['gpu']['tflops'][found['precision']]:g} TFLOP/s; loading and exchange are not counted:")
    for row in found["time"]:
        dollars = f"  ${row['dollars']:,.0f}" if "dollars" in row else ""
        lines.append(f"{row['hours']:10,.1f} h {row['gpu_hours']:12,.0f} GPU hours{dollars}  at {row['efficiency']:.1%}: {row['source']}")
    return lines


def _unit(most: int) -> tuple[str, int]:
    return ("GiB", GIB) if most >= GIB else ("MiB", 2**20)


def _count(number: int, one: str, many: str) -> str:
    return f"{number:,} {one if number == 1 else many}"
