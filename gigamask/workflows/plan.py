"""Plan a run before it starts: bytes per process, FLOPs, hours, and changes that make it fit.

The trainer's own step runs once with fake tensors; everything else is calculated.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from torch import nn

from gigamask import recipes
from gigamask.distributed import fsdp
from gigamask.distributed.precision import HALF_DTYPES, choose_precision
from gigamask.errors import GigamaskError, check_positive, check_range
from gigamask.interfaces import PromptSchedule
from gigamask.profiling import gpus, memory_plan
from gigamask.profiling.dry_run import (
    Device,
    FakeScalars,
    KeptGradients,
    PhaseBatches,
    PhasePeaks,
    PhaseTask,
    ShortSchedule,
    blank_batch,
    fake_tensors,
    to_fake,
    use_gathered_weights,
)
from gigamask.profiling.flops import FlopMeter, StepFlops
from gigamask.profiling.gpus import Cluster, Gpu
from gigamask.profiling.held_bytes import held_bytes
from gigamask.profiling.memory_plan import BatchSplit, StateBytes
from gigamask.training.config import ImageTrainConfig, item_sampler
from gigamask.training.optim import AdamW, AdamW8bit, select_trained
from gigamask.training.state import TrainState
from gigamask.training.step import StepMetrics, accumulate, step
from gigamask.workflows.plan_checks import PLACEHOLDER, check_trainable, paths_to_come

MICRO_BATCH_SHARE = 0.85
"""Largest share of the available memory that a micro-batch may be chosen to need; our choice, since
plans have not been compared with a GPU's peak yet."""


@dataclass(frozen=True)
class Hardware:
    """The GPUs that a run is planned for.

    `efficiency` is a fraction of a GPU's peak FLOP/s, `price` is in dollars per GPU hour, and
    `spare_gib` GiB of every GPU are kept free.
    """

    gpu: Gpu | None = None
    cluster: Cluster = field(default_factory=lambda: Cluster(1, 1))
    efficiency: float | None = None
    price: float | None = None
    spare_gib: float = 1.5

    @property
    def available_bytes(self) -> float:
        """Bytes of a GPU that a run may use; infinite if no GPU is named."""
        if self.gpu is None:
            return math.inf
        return (self.gpu.gib - self.spare_gib) * memory_plan.GIB


@dataclass(frozen=True)
class DryRun:
    """Memory of a step with one micro-batch of `images` images.

    `peaks` are the bytes of each phase above `state`; `activation_bytes` is what the encoder keeps
    for its backward pass, both without `cleared_bytes`, gradients that do not exist before it;
    `parameters` holds the number of all and of trained parameters.
    """

    images: int
    peaks: dict[str, int]
    activation_bytes: int
    state: StateBytes
    parameters: tuple[int, int]
    processes: int = 1
    cleared_bytes: int = 0

    def with_rounds_of(self, other: DryRun) -> DryRun:
        """Return this dry run with the rounds of another, corrected for its own activations."""
        rounds = self.activation_bytes + other.peaks["rounds"] - other.activation_bytes
        return replace(self, peaks=self.peaks | {"rounds": rounds})


def plan(
    config: str | ImageTrainConfig,
    *,
    gpu: str | None = None,
    world: str | int = "1",
    efficiency: float | None = None,
    dollars_per_gpu_hour: float | None = None,
    spare_gib: float = 1.5,
    measured: DryRun | None = None,
) -> dict[str, Any]:
    """Plan a run without a GPU: memory, FLOPs and, for a named GPU, hours and whether it fits.

    Args:
        config: Name of a recipe, or a configuration, such as `recipes.sam_vit_b()`; data and
            weights are not needed, but a distillation names its teacher.
        gpu: Name of a GPU, such as "h200", or your own as "NAME=GIB,TFLOPS".
        world: Nodes x GPUs per node, such as "32x8", or the GPUs of one node.
        efficiency: Fraction of the GPU's peak FLOP/s that is reached; None uses published values.
        dollars_per_gpu_hour: Price of one GPU for an hour.
        spare_gib: GiB of the GPU to keep free.
        measured: A dry run of the configuration; None makes one.

    Returns:
        The plan, as `gigamask plan --json` writes it.

    Raises:
        GigamaskError: Training would refuse these values or files, or the GPU is unknown.
    """
    for name, value in (("efficiency", efficiency), ("dollars-per-gpu-hour", dollars_per_gpu_hour)):
        if value is not None and gpu is None:
            raise GigamaskError(f"--{name} needs a GPU; give --gpu")
        check_positive(f"--{name}", value)
    check_range("--efficiency, a share of the GPU's peak,", efficiency, 0, 1)
    check_range("--spare-gib", spare_gib, 0)
    found = gpus.find(str(gpu)) if gpu is not None else None
    cluster = Cluster.parse(str(world))
    hardware = Hardware(found, cluster, efficiency, dollars_per_gpu_hour, spare_gib)
    made = recipes.require_images(recipes.make(config))
    assumed = check_trainable(made)
    return make_plan(made, hardware, measured) | {"assumed": assumed}


def make_plan(
    config: ImageTrainConfig, hardware: Hardware, measured: DryRun | None = None
) -> dict[str, Any]:
    """Plan a run, and search for changes if it does not fit.

    Args:
        config: The configuration; data, weights and a folder are not needed.
        hardware: The GPUs to plan for.
        measured: A dry run of the configuration with its micro-batch; None makes one.

    Returns:
        The plan as JSON-compatible data; `memory_plan.table` formats it.

    Raises:
        GigamaskError: The run is not possible with these values.
    """
    config = resolve(config, hardware)
    if config.micro_batch_size is None and hardware.gpu is not None:
        dry_runs: dict[int, DryRun] = {}
        images = largest_micro_batch(config, hardware, hardware.available_bytes, dry_runs)
        config = replace(config, micro_batch_size=images)
        measured = dry_runs.get(images, measured)
    split = split_of(config, hardware)
    step_flops = count_flops(config)
    result = measured or dry_run(
        config, device_of(config), split.micro_batch_size, hardware.cluster.size
    )
    phases = bytes_by_phase(config, hardware, result)
    peak_phase, peak = memory_plan.peak_phase(phases)
    flops = {
        "encoder": sum(step_flops.encoder),
        "rounds": sum(step_flops.masks),
        "recomputed": step_flops.recomputed(recompute_interval(config, result)),
        "mining": step_flops.forward if config.planning.uses_mining else 0.0,
    }
    image_flops, masks = sum(flops.values()), config.planning.masks_per_image
    found: dict[str, Any] = {
        "recipe": config.recipe,
        "device": device_of(config),
        "precision": config.precision,
        "gpu": hardware.gpu and asdict(hardware.gpu),
        "world": asdict(hardware.cluster),
        "parallel": config.parallel,
        "batch": config.batch_size,
        "batch_split": asdict(split),
        "masks": masks,
        "masks_per_chunk": min(masks * split.micro_batch_size, config.planning.masks_per_chunk),
        "rounds": step_flops.rounds,
        "parameters": result.parameters[0],
        "trained": result.parameters[1],
        "phases": phases,
        "peak_phase": peak_phase,
        "peak_bytes": peak,
        "flops_per_image": flops,
        "flops_per_step": image_flops * config.batch_size,
        "steps": config.steps,
    }
    if hardware.gpu is not None:
        fits = peak <= hardware.available_bytes
        hours = training_hours(config, hardware, image_flops * split.images)
        found |= {
            "available_bytes": hardware.available_bytes,
            "spare_gib": hardware.spare_gib,
            "fits": fits,
            "time": hours,
            "loading": memory_plan.loading(hours, config.steps, split.images),
            "changes": [] if fits else suggest_changes(config, hardware, step_flops, result),
        }
    return found


def training_hours(
    config: ImageTrainConfig, hardware: Hardware, flops: float
) -> list[dict[str, Any]]:
    """Return the hours of a run at the given efficiency, or else at published ones.

    Args:
        config: The configuration.
        hardware: The hardware, with a GPU.
        flops: FLOPs of a step on the busiest process.

    Returns:
        A record per efficiency.
    """
    assert hardware.gpu is not None
    efficiencies = memory_plan.PUBLISHED.get(config.command, {}) | memory_plan.EXPECTED
    if hardware.efficiency is not None:
        efficiencies = {"as given": hardware.efficiency}
    return memory_plan.training_hours(
        flops,
        config.steps,
        hardware.gpu,
        config.precision,
        hardware.cluster,
        efficiencies,
        hardware.price,
    )


def resolve(config: ImageTrainConfig, hardware: Hardware) -> ImageTrainConfig:
    """Check a run against the hardware.

    Args:
        config: The configuration.
        hardware: The hardware.

    Returns:
        The configuration with its precision chosen.

    Raises:
        GigamaskError: The hardware cannot run it.
    """
    config = config.phases()[-1]
    cluster, gpu = hardware.cluster, hardware.gpu
    precision = choose_precision(config.precision, torch.device(device_of(config)))
    checked = replace(config, data=paths_to_come(config), init=config.init or PLACEHOLDER).check()
    item_sampler(checked).check(config.batch_size, cluster.size, cluster.nodes)
    if gpu is not None and device_of(config) == "cpu":
        raise GigamaskError(
            f"--gpu {gpu.name} with --device cpu: a plan is for one of them; remove one"
        )
    if config.parallel != "ddp" and cluster.size == 1:
        raise GigamaskError(
            f"--parallel {config.parallel} shards over several GPUs, but --world has one; "
            "pass a larger --world, or remove --parallel"
        )
    fsdp.check_mesh(config.parallel, cluster.nodes, cluster.gpus_per_node)
    if gpu is not None:
        gpu.peak(precision)
    return replace(config, precision=precision)


def split_of(config: ImageTrainConfig, hardware: Hardware) -> BatchSplit:
    """Return how the batch of a run is split over processes and micro-batches.

    Args:
        config: Configuration.
        hardware: What to plan for.
    """
    return BatchSplit.from_batch_size(
        config.batch_size, config.micro_batch_size, hardware.cluster.size
    )


def device_of(config: ImageTrainConfig) -> Device:
    """Return the device to plan for: a GPU, unless the configuration has `cpu`."""
    return "cpu" if config.device == "cpu" else "cuda"


def largest_micro_batch(
    config: ImageTrainConfig,
    hardware: Hardware,
    available_bytes: float,
    dry_runs: dict[int, DryRun] | None = None,
) -> int:
    """Return the most images of a micro-batch that fit on a GPU; 1 if none does.

    Args:
        config: The configuration.
        hardware: The processes that the batch is split over.
        available_bytes: Memory of the GPU, of which a share is kept free.
        dry_runs: Receives the dry runs that were made, by images of a micro-batch.

    Returns:
        A number that shares the images of a process evenly among its micro-batches.
    """
    images = BatchSplit.from_batch_size(config.batch_size, 1, hardware.cluster.size).images

    def peak_of(size: int) -> int:
        sized = replace(config, micro_batch_size=size)
        result = dry_run(sized, "cuda", size, hardware.cluster.size)
        if dry_runs is not None:
            dry_runs[size] = result
        return peak_bytes(sized, hardware, result)

    sizes = sorted({-(-images // count) for count in range(1, images + 1)})
    fitting = bisect_right(sizes[1:], MICRO_BATCH_SHARE * available_bytes, key=peak_of)
    return sizes[fitting]


def bytes_by_phase(
    config: ImageTrainConfig, hardware: Hardware, result: DryRun
) -> dict[str, dict[str, int]]:
    """Return the bytes that the busiest process holds in each phase of a step.

    Args:
        config: The configuration.
        hardware: The hardware.
        result: A dry run of it.

    Returns:
        Bytes by phase and kind.
    """
    images = split_of(config, hardware).images
    with torch.device("meta"):
        batch = blank_batch(
            config.sample_config,
            config.random_spec,
            images,
            images * config.planning.masks_per_image,
        )
    return memory_plan.bytes_by_phase(
        result.state,
        result.peaks,
        result.activation_bytes,
        held_bytes(batch),
        config.parallel,
        hardware.cluster,
        gathered=0.5 if config.precision in HALF_DTYPES else 1.0,
        cleared_bytes=result.cleared_bytes,
    )


def peak_bytes(config: ImageTrainConfig, hardware: Hardware, result: DryRun) -> int:
    """Return the most bytes that the busiest process holds in a step.

    Args:
        config: As for `bytes_by_phase`.
        hardware: As for `bytes_by_phase`.
        result: As for `bytes_by_phase`.
    """
    return memory_plan.peak_phase(bytes_by_phase(config, hardware, result))[1]


def suggest_changes(
    config: ImageTrainConfig, hardware: Hardware, step_flops: StepFlops, result: DryRun
) -> list[dict[str, Any]]:
    """Return the peak and the extra FLOPs of changes that lower memory.

    Changes of each kind are tried from mildest to strongest until the run fits. If no single kind
    is enough, the strongest change of every kind is tried together.

    Args:
        config: The configuration.
        hardware: The hardware, with a GPU.
        step_flops: FLOPs of an image.
        result: A dry run of it.
    """
    found: list[dict[str, Any]] = []

    def fits(flags: str, fields: dict[str, Any]) -> bool:
        changed = replace(config, **fields)
        changed_result = dry_run_change(config, changed, result)
        peak = peak_bytes(changed, hardware, changed_result)
        extra = step_flops.recomputed(recompute_interval(changed, changed_result))
        enough = peak <= hardware.available_bytes
        more = extra / step_flops.total
        found.append({"flags": flags, "peak_bytes": peak, "fits": enough, "more_flops": more})
        return enough

    families = memory_options(config, hardware)
    for family in families:
        for flag, fields in family:
            if fits(flag, fields):
                break
    if len(families) > 1 and not any(change["fits"] for change in found):
        strongest = [family[-1] for family in families]
        fields = {name: value for _, each in strongest for name, value in each.items()}
        fits(" ".join(flag for flag, _ in strongest), fields)
    return found


def dry_run_change(config: ImageTrainConfig, changed: ImageTrainConfig, result: DryRun) -> DryRun:
    """Dry-run a changed run, reusing the parts of `result` that the change does not affect.

    The rounds do not depend on the encoder's depth, nor the encoder on the masks.

    Args:
        config: The configuration of `result`.
        changed: The changed configuration.
        result: A dry run of `config`.
    """
    if changed is config:
        return result
    device, images = device_of(changed), min(changed.micro_batch_size or 1, result.images)
    reduced = changed.planning.smaller_config(config)
    if reduced is None:
        return dry_run(changed, device, images, result.processes)
    phase, smaller = reduced
    measured = dry_run(smaller, device, images, result.processes)
    return (
        measured.with_rounds_of(result) if phase == "encoder" else result.with_rounds_of(measured)
    )


def memory_options(
    config: ImageTrainConfig, hardware: Hardware
) -> list[list[tuple[str, dict[str, Any]]]]:
    """Return the flags that lower a run's peak: for each kind, from the mildest to the strongest.

    Args:
        config: The configuration.
        hardware: The hardware.

    Returns:
        The options of each kind: a flag and the configuration fields that it changes.
    """
    cluster = hardware.cluster
    micro = split_of(config, hardware).micro_batch_size
    found = config.planning.memory_flags(micro)
    smaller = [count for count in dict.fromkeys((micro // 4, 1)) if 0 < count < micro]
    found.append(
        [(f"--micro-batch-size {count}", {"micro_batch_size": count}) for count in smaller]
    )
    if config.parallel == "ddp" and cluster.size > 1 and config.optimizer.supports_sharding:
        found.append([("--parallel fsdp", {"parallel": "fsdp"})])
    elif config.parallel == "ddp" and type(config.optimizer) is AdamW:
        found.append([("--optimizer adamw8bit", {"optimizer": AdamW8bit()})])
    return [family for family in found if family]


def dry_run(config: ImageTrainConfig, device: Device, images: int, processes: int = 1) -> DryRun:
    """Run one training step with fake tensors, on one micro-batch.

    Args:
        config: The configuration, after `resolve`.
        device: The device to plan for, `cuda` or `cpu`.
        images: Number of images in the micro-batch.
        processes: Number of processes; several keep the encoder's gradients between steps.

    Returns:
        The memory of the step.
    """
    optimizer = config.optimizer
    state_bytes = optimizer.state_bytes if optimizer.state_bytes(1) is not None else None
    if state_bytes is not None:  # its kernels need real memory
        config = replace(config, optimizer=AdamW(grad_clip=optimizer.grad_clip))
    masks = images * config.planning.masks_per_image
    shortened = config.planning.measured_config(ShortSchedule)
    at_once = min(masks, config.planning.masks_per_chunk)
    model, inner = shortened.build("meta"), shortened.task(torch.device("meta"))
    with fake_tensors(device) as tracker:
        frozen = [to_fake(each, device) for each in inner.frozen_models]
        state = TrainState.from_model(to_fake(model, device), shortened)
        state.model.train()
        for each in state.optimizers:  # creates the optimizer state
            each.step()
        if processes > 1:
            encoder = state.model.encoder
            state.exchange = KeptGradients(p for p in encoder.parameters() if p.requires_grad)
        phase_peaks = PhasePeaks(tracker)
        batches = PhaseBatches(
            [blank_batch(config.sample_config, config.random_spec, images, at_once)]
        )
        batches.enter = phase_peaks.enter
        held = bytes_of_state(state, state_bytes, frozen)
        parameters = list(model.parameters())
        trained = sum(each.numel() for each in parameters if each.requires_grad)
        if config.parallel != "ddp" and config.precision in HALF_DTYPES:
            use_gathered_weights(model.encoder_blocks, HALF_DTYPES[config.precision])
        task = PhaseTask(inner, phase_peaks.enter, accumulated=masks > at_once)
        phase_peaks.start()
        step(task, state, batches, images, 0.0, config.optimizer.grad_clip)
        phase_peaks.enter("update")
        counts = sum(each.numel() for each in parameters), trained
        kept = set(state.exchange.parameters) if state.exchange else set()
        cleared = sum(each.nbytes for each in parameters if each.requires_grad and each not in kept)
        activations = phase_peaks.activation_bytes
        return DryRun(images, phase_peaks.peaks, activations, held, counts, processes, cleared)


def count_flops(config: ImageTrainConfig) -> StepFlops:
    """Count the FLOPs of one image with the recipe's number of masks."""
    schedules: list[ShortSchedule] = []

    def shorten(schedule: PromptSchedule) -> ShortSchedule:
        schedules.append(ShortSchedule(schedule))
        return schedules[-1]

    def rounds() -> int:
        return max(schedules[0].round_counts) if schedules else 0

    shortened = replace(config.planning.measured_config(shorten, recompute=False), precision="fp32")
    masks = config.planning.masks_per_image
    at_once = min(masks, config.planning.masks_per_chunk)
    model, meter = shortened.build("meta"), FlopMeter()
    select_trained(model, shortened.freeze, shortened.unfreeze, shortened.lora)
    meter.watch(model.encoder_blocks)
    batch = blank_batch(config.sample_config, config.random_spec, 1, at_once).to("meta")
    task = PhaseTask(shortened.task(torch.device("meta")), meter.enter)
    totals = StepMetrics.zero(1, torch.empty(0, device="meta"))
    with FakeScalars():
        return meter.measure(
            lambda: accumulate(task, model, batch, totals),
            rounds,
            masks / max(at_once, 1),
        )


def recompute_interval(config: ImageTrainConfig, result: DryRun) -> int:
    """Return the interval of recomputed blocks, or 0 if the encoder is frozen.

    Args:
        config: The configuration.
        result: A dry run of it.
    """
    return config.planning.activation_checkpointing if result.state.sharded["gradients"] else 0


def bytes_of_state(
    state: TrainState,
    rule: Callable[[int], int | None] | None,
    frozen_models: Sequence[nn.Module] = (),
) -> StateBytes:
    """Return the bytes of weights, gradients and optimizer state, with the average of the weights.

    Args:
        state: The training state after a step of its optimizers.
        rule: Maps a number of parameters to bytes of optimizer state; None measures the state.
        frozen_models: Other models that the task runs.

    Returns:
        The bytes by kind.
    """
    blocks = state.model.encoder_blocks
    block_of = {
        parameter: index
        for index, block in enumerate(blocks)
        for parameter in fsdp.shardable_parameters(block)
    }
    entries = {
        parameter: entry
        for optimizer in state.optimizers
        for parameter, entry in optimizer.state.items()
    }
    sharded, replicated = (dict.fromkeys(memory_plan.STATE_KINDS, 0.0) for _ in range(2))
    count = 1 + max(block_of.values(), default=0)
    by_block = [dict.fromkeys(memory_plan.STATE_KINDS, 0.0) for _ in range(count)]
    average = state.average or {}
    for name, parameter in state.model.named_parameters():
        in_block = parameter in block_of
        sums = [sharded, by_block[block_of[parameter]]] if in_block else [replicated]
        for each in sums:
            each["weights"] += parameter.nbytes
            if parameter.grad is not None:
                held = held_bytes(tuple(entries[parameter].values()))
                each["gradients"] += parameter.grad.nbytes
                each["optimizer"] += (rule(parameter.numel()) or 0) if rule else held
            if name in average:
                each["optimizer"] += average[name].nbytes
    others = [tensor for each in frozen_models for tensor in (*each.parameters(), *each.buffers())]
    replicated["weights"] += sum(tensor.nbytes for tensor in (*state.model.buffers(), *others))
    return StateBytes(sharded, replicated, max(by_block, key=lambda each: each["weights"]))
