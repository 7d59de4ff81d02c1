"""What a run will take, before it begins: a run and a fleet of GPUs enter, bytes, FLOPs, hours and what to change leave, as data.

Joins the trainer, whose own step is rehearsed without numbers, and the arithmetic about it.

Not here: the rehearsal and the arithmetic (`memory`), the words on the command line (`verbs.plan`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from torch import nn

from gigamask.faults import Fault
from gigamask.memory import planner
from gigamask.memory.flops import Meter, Products
from gigamask.memory.gpus import Gpu
from gigamask.memory.planner import Fleet, Share, Standing
from gigamask.memory.pretence import Device, Pretence, embody, gather, stage
from gigamask.memory.rehearsal import Abridged, Rehearsal, Watched, WatchedBatches, blank_batch
from gigamask.memory.sample import held_bytes
from gigamask.model.sam import Sam
from gigamask.parallel import shard
from gigamask.parallel.precision import HALVES, choose_precision
from gigamask.seams import Policy
from gigamask.train.optim import AdamW, AdamW8bit
from gigamask.train.run import ImageRun
from gigamask.train.state import TrainState, freeze
from gigamask.train.step import Totals, accumulate, step


@dataclass(frozen=True)
class Ask:
    """What a run is planned for: `spare_gib` of the GPU stay free, an hour of one GPU costs `price` dollars, `efficiency` is a share of its peak."""

    gpu: Gpu | None = None
    fleet: Fleet = field(default_factory=lambda: Fleet(1, 1))
    efficiency: float | None = None
    price: float | None = None
    spare_gib: float = 1.5

    @property
    def room(self) -> float:
        """The bytes that a training finds, endless where no GPU is named."""
        return math.inf if self.gpu is None else (self.gpu.gib - self.spare_gib) * planner.GIB


def plan(run: ImageRun, ask: Ask) -> dict[str, Any]:
    """Returns what a run takes on such GPUs, and, where that does not fit, what would; raises `Fault` for numbers that cannot be trained with."""
    run = settled(run, ask)
    share, products = Share.of(run.batch, run.micro, ask.fleet.size), multiplied(run)
    rehearsed = rehearse(run, device_of(run), share.micro)
    phases = planned(run, ask, rehearsed)
    phase, peak = planner.peak_of(phases)
    again, mined = products.again(recomputed(run, rehearsed)), products.forward if run.planning.mines else 0.0
    flops = {"encoder": sum(products.encoder), "rounds": sum(products.masks), "computed_again": again, "mining": mined}
    image = sum(flops.values())
    found: dict[str, Any] = {
        "recipe": run.recipe,
        "device": device_of(run),
        "precision": run.precision,
        "gpu": ask.gpu and asdict(ask.gpu),
        "world": asdict(ask.fleet),
        "parallel": run.parallel,
        "batch": run.batch,
        "share": asdict(share),
        "masks": run.planning.masks_per_image,
        "masks_at_once": min(run.planning.masks_per_image * share.micro, run.planning.masks_per_chunk),
        "rounds": products.rounds,
        "parameters": rehearsed.parameters[0],
        "trained": rehearsed.parameters[1],
        "phases": phases,
        "peak_phase": phase,
        "peak_bytes": peak,
        "flops_an_image": flops,
        "flops_a_step": image * run.batch,
        "steps": run.steps,
    }
    if ask.gpu is not None:
        found |= {"room_bytes": ask.room, "spare_gib": ask.spare_gib, "fits": peak <= ask.room}
        efficiencies = {**planner.PUBLISHED.get(run.verb, {}), **planner.HOPED} if ask.efficiency is None else {"as given": ask.efficiency}
        found["time"] = planner.time(image * share.images, run.steps, ask.gpu, run.precision, ask.fleet, efficiencies, ask.price)
        found["changes"] = [] if found["fits"] else changes(run, ask, products, rehearsed)
    return found


def settled(run: ImageRun, ask: Ask) -> ImageRun:
    """Returns the run with its precision chosen, checked; what a training needs and a plan does not, data and weights, may be missing."""
    precision = choose_precision(run.precision, torch.device(device_of(run)))
    checked = replace(run, data=run.data or ("none",), init=run.init or "none").check()
    checked.sampler.check(run.batch, ask.fleet.size, ask.fleet.nodes)
    if ask.gpu is not None and device_of(run) == "cpu":
        raise Fault(f"--gpu {ask.gpu.name} with --device cpu: a plan is for one of them; leave one out")
    if run.parallel != "ddp" and ask.fleet.size == 1:
        raise Fault(f"--parallel {run.parallel} shares out over several GPUs, --world has one; give more, or leave it out")
    shard.check(run.parallel, ask.fleet.nodes, ask.fleet.each)
    if ask.gpu is not None:
        ask.gpu.peak(precision)
    return replace(run, precision=precision)


def device_of(run: ImageRun) -> Device:
    """Returns what a plan is for: a GPU, unless the run says otherwise."""
    return "cpu" if run.device == "cpu" else "cuda"


def planned(run: ImageRun, ask: Ask, rehearsed: Rehearsed) -> dict[str, dict[str, int]]:
    """Returns the bytes of each kind that the busiest process holds in each phase of a step."""
    images = Share.of(run.batch, run.micro, ask.fleet.size).images
    with torch.device("meta"):
        batch = held_bytes(blank_batch(run.assembly, run.chance, images, images * run.planning.masks_per_image))
    half = 0.5 if run.precision in HALVES else 1.0
    return planner.held(rehearsed.standing, rehearsed.peaks, rehearsed.kept, batch, run.parallel, ask.fleet, half)


def changes(run: ImageRun, ask: Ask, products: Products, rehearsed: Rehearsed) -> list[dict[str, Any]]:
    """Returns what changes make of the peak and of the FLOPs: of each kind from the mildest on until one makes the run fit, and all kinds together
    where none does alone.
    """
    found: list[dict[str, Any]] = []

    def fits(flags: str, leaves: dict[str, Any]) -> bool:
        other = replace(run, **leaves)
        held = altered(run, other, rehearsed)
        peak = planner.peak_of(planned(other, ask, held))[1]
        more = products.again(recomputed(other, held)) / products.total
        found.append({"flags": flags, "peak_bytes": peak, "fits": peak <= ask.room, "more_flops": more})
        return found[-1]["fits"]

    families = levers(run, ask)
    for family in families:
        for flag, leaves in family:
            if fits(flag, leaves):
                break
    if len(families) > 1 and not any(each["fits"] for each in found):
        strongest = [family[-1] for family in families]
        fits(" ".join(flag for flag, _ in strongest), {name: value for _, leaves in strongest for name, value in leaves.items()})
    return found


def altered(run: ImageRun, other: ImageRun, rehearsed: Rehearsed) -> Rehearsed:
    """Returns the rehearsal of a run of which another has been rehearsed, playing what differs alone: rounds know nothing of the encoder's depth, nor
    does the encoder of the masks.
    """
    if other is run:
        return rehearsed
    device, images = device_of(other), min(other.micro, rehearsed.images)
    reduced = other.planning.reduced(run)
    if reduced is None:
        return rehearse(other, device, images)
    phase, smaller = reduced
    found = rehearse(smaller, device, images)
    return found.with_rounds(rehearsed) if phase == "encoder" else rehearsed.with_rounds(found)


def levers(run: ImageRun, ask: Ask) -> list[list[tuple[str, dict[str, Any]]]]:
    """Returns the flags that lower a run's peak, those of one kind together from the mildest on, each with what it changes."""
    micro = Share.of(run.batch, run.micro, ask.fleet.size).micro
    found = run.planning.memory_flags(micro)
    found.append([(f"--micro {count}", {"micro": count}) for count in dict.fromkeys((micro // 4, 1)) if 0 < count < micro])
    if run.parallel == "ddp" and ask.fleet.size > 1 and run.optimizer.shared_out:
        found.append([("--parallel fsdp", {"parallel": "fsdp"})])
    elif run.parallel == "ddp" and type(run.optimizer) is AdamW:
        found.append([("--optimizer adamw8bit", {"optimizer": AdamW8bit()})])
    return [family for family in found if family]


@dataclass(frozen=True)
class Rehearsed:
    """What a step of one micro-batch of so many images held: most in each phase above what stands, what the encoder kept, and what stands."""

    images: int
    peaks: dict[str, int]
    kept: int
    standing: Standing
    parameters: tuple[int, int]

    def with_rounds(self, other: Rehearsed) -> Rehearsed:
        """Returns this one with another's rounds, which hold the same whatever the encoder has kept."""
        return replace(self, peaks=self.peaks | {"rounds": self.kept + other.peaks["rounds"] - other.kept})


def rehearse(run: ImageRun, device: Device, images: int) -> Rehearsed:
    """Makes one update of a run from a micro-batch of so many images, without numbers, on a device of that kind."""
    optimizer = run.optimizer
    by_rule = optimizer.state_bytes if optimizer.state_bytes(1) is not None else None
    if by_rule is not None:  # its kernels want real memory
        run = replace(run, optimizer=AdamW(clip_norm=optimizer.clip_norm))
    masks = images * run.planning.masks_per_image
    played = run.planning.measured(Abridged)
    at_once = min(masks, run.planning.masks_per_chunk)
    model = played.build("meta")
    with stage(device) as book:
        state = TrainState.around(embody(model, device), played)
        state.model.train()
        for each in state.optimizers:  # it keeps nothing before its first step
            each.step()
        seen = Rehearsal(book)
        batches = WatchedBatches([blank_batch(run.assembly, run.chance, images, at_once)])
        batches.mark = seen.mark
        standing, parameters = standing_of(state, by_rule), list(model.parameters())
        counts = sum(each.numel() for each in parameters), sum(each.numel() for each in parameters if each.requires_grad)
        if run.parallel != "ddp" and run.precision in HALVES:
            gather(blocks_of(model), HALVES[run.precision])
        task = Watched(played.task(torch.device("cpu")), seen.mark, masks > at_once)
        seen.begin()
        step(task, state, batches, images, 0.0, run.optimizer.clip_norm)
        seen.mark("update")
        return Rehearsed(images, seen.peaks, seen.kept, standing, counts)


def multiplied(run: ImageRun) -> Products:
    """Returns what the step multiplies for an image with the masks of the recipe."""
    policies: list[Abridged] = []

    def abridge(policy: Policy) -> Abridged:
        policies.append(Abridged(policy))
        return policies[-1]

    def rounds() -> int:
        return max(policies[0].played) if policies else 0

    played, masks = replace(run.planning.measured(abridge, recompute=False), precision="fp32"), run.planning.masks_per_image
    at_once = min(masks, run.planning.masks_per_chunk)
    model, meter = played.build("meta"), Meter()
    freeze(model, played.freeze)
    meter.watch(blocks_of(model))
    batch = blank_batch(run.assembly, run.chance, 1, at_once).to("meta")
    task, totals = Watched(played.task(torch.device("meta")), meter.mark), Totals.zero(1, torch.empty(0, device="meta"))
    with Pretence("cpu"):
        return meter.products(lambda: accumulate(task, model, batch, totals), rounds, masks / max(at_once, 1))


def recomputed(run: ImageRun, rehearsed: Rehearsed) -> int:
    """Returns which blocks of the encoder are recomputed, every so many-th; 0 where none is, nor would be for being frozen."""
    return run.planning.recompute if rehearsed.standing.inside["gradients"] else 0


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """Returns the blocks of a model's encoder, which recomputing and sharding go by."""
    return model.encoder_blocks if isinstance(model, Sam) else list(getattr(model, "blocks", ()))


def standing_of(state: TrainState, by_rule: Callable[[int], int | None] | None) -> Standing:
    """Returns the bytes of weights, gradients and optimizer state, the last by rule where there is one."""
    of_block = {parameter: index for index, block in enumerate(blocks_of(state.model)) for parameter in shard.matrices(block)}
    kept = {parameter: entry for optimizer in state.optimizers for parameter, entry in optimizer.state.items()}
    inside, outside = (dict.fromkeys(planner.STANDING, 0.0) for _ in range(2))
    by_block = [dict.fromkeys(planner.STANDING, 0.0) for _ in range(1 + max(of_block.values(), default=0))]
    for parameter in state.model.parameters():
        sums = [inside, by_block[of_block[parameter]]] if parameter in of_block else [outside]
        for each in sums:
            each["weights"] += parameter.nbytes
            if parameter.grad is not None:
                each["gradients"] += parameter.grad.nbytes
                each["optimizer"] += (by_rule(parameter.numel()) or 0) if by_rule else held_bytes(tuple(kept[parameter].values()))
    outside["weights"] += sum(buffer.nbytes for buffer in state.model.buffers())
    return Standing(inside, outside, max(by_block, key=lambda each: each["weights"]))
