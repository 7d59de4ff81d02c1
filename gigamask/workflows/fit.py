"""Choose how a SAM is trained so that it fits into a given memory, by the plan."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from typing import cast

from gigamask.errors import GigamaskError
from gigamask.models.lora_config import LoRA
from gigamask.profiling.memory_plan import GIB
from gigamask.training.config import differences
from gigamask.training.sam_config import SamTrainConfig
from gigamask.workflows.plan import (
    DryRun,
    Hardware,
    device_of,
    dry_run,
    dry_run_change,
    largest_micro_batch,
    peak_bytes,
    resolve,
    split_of,
)

UNITS = {"": 1e9, "g": 1e9, "gb": 1e9, "gib": GIB, "mb": 1e6, "mib": 2**20}
CHUNKS = (16, 4)
"""Masks per chunk to try."""
RANK = 8
"""Rank of adapters that replace the training of an encoder that does not fit."""


def fit(
    config: SamTrainConfig, memory: str, hardware: Hardware | None = None
) -> tuple[SamTrainConfig, str]:
    """Return a training that fits into memory, changed as little as necessary.

    First the gradients stay the same: one image in a micro-batch, fewer masks at a time, recomputed
    activations. If that is not enough, the encoder is trained by adapters, then not at all. The
    micro-batch is then as large as fits.

    Args:
        config: The training.
        memory: Memory of the GPU, or of a process on a CPU, such as 8GB.
        hardware: The processes, and how much of a GPU is kept free.

    Returns:
        The changed configuration, and a line that states the changes.

    Raises:
        GigamaskError: The memory is not a size, or too small for every change.
    """
    return fit_and_measure(config, memory, hardware or Hardware())[:2]


def fit_and_measure(
    config: SamTrainConfig, memory: str, hardware: Hardware
) -> tuple[SamTrainConfig, str, DryRun | None]:
    """Return what `fit` does, and the dry run of the training unless its micro-batch was chosen.

    Args:
        config: As for `fit`.
        memory: As for `fit`.
        hardware: As for `fit`.

    Raises:
        GigamaskError: As for `fit`.
    """
    config = cast(SamTrainConfig, config.phases()[-1])  # which is planned, of several
    planned = cast(SamTrainConfig, resolve(config, hardware))
    spare = hardware.spare_gib * GIB if device_of(config) == "cuda" else 0.0
    available = parse_memory(memory) - spare
    peaks: list[float] = []
    for variant in _variants(planned):
        single = replace(variant, micro_batch_size=variant.micro_batch_size or 1)
        images = split_of(single, hardware).micro_batch_size
        result = dry_run(single, device_of(single), images, hardware.cluster.size)
        for changed in _same_gradients(single):
            measured = dry_run_change(single, changed, result)
            peaks.append(peak_bytes(changed, hardware, measured))
            if peaks[-1] <= available:
                chosen, line = _choose(config, variant, changed, hardware, available, memory)
                is_same = chosen.micro_batch_size in (None, single.micro_batch_size)
                return chosen, line, measured if is_same else None
    kept = f" beside {hardware.spare_gib:g} GiB that are kept free" if spare else ""
    raise GigamaskError(
        f"--fit {memory}: leaves {max(available, 0.0) / GIB:.2g} GiB{kept}, but a step needs at "
        f"least {min(peaks) / GIB:.2g} GiB; use a smaller --model.image-size, or a smaller model"
    )


def parse_memory(text: str) -> float:
    """Return the bytes of a size such as 8GB or 7.5GiB; without a unit, of gigabytes.

    Raises:
        GigamaskError: It is not a size.
    """
    match = re.fullmatch(r"(\d+\.?\d*)\s*([a-z]*)", text.strip().lower())
    if match is None or match[2] not in UNITS or not float(match[1]):
        raise GigamaskError(f"--fit {text}: expected a size above 0, such as 8GB or 7.5GiB")
    return float(match[1]) * UNITS[match[2]]


def _variants(config: SamTrainConfig) -> Iterator[SamTrainConfig]:
    """Yield the training, with adapters if its encoder is trained, and with a frozen encoder."""
    yield config
    if "image_encoder" in config.freeze and not config.lora.rank:
        return
    has_weights = config.init or config.model.encoder.pretrained
    if not has_weights:
        return
    if config.parallel == "ddp" and not config.lora.rank:
        yield replace(config, lora=LoRA(rank=RANK))
    yield replace(config, lora=LoRA(), freeze=(*config.freeze, "image_encoder"))


def _same_gradients(config: SamTrainConfig) -> Iterator[SamTrainConfig]:
    """Yield the training with changes that need less memory and do not change gradients."""
    yield config
    chunks = [count for count in CHUNKS if count < config.masks_per_chunk]
    blocks = config.build("meta").encoder_blocks
    is_trained = "image_encoder" not in config.freeze or config.lora.rank
    recomputed = replace(config, activation_checkpointing=1)
    if blocks and is_trained and config.activation_checkpointing != 1:
        yield recomputed
        for count in chunks:
            yield replace(recomputed, masks_per_chunk=count)
        return
    for count in chunks:
        yield replace(config, masks_per_chunk=count)


def _choose(
    config: SamTrainConfig,
    variant: SamTrainConfig,
    changed: SamTrainConfig,
    hardware: Hardware,
    available: float,
    memory: str,
) -> tuple[SamTrainConfig, str]:
    """Return the changes of a training that fits, with the largest micro-batch."""
    if variant.micro_batch_size is None and device_of(variant) == "cuda":
        whole = replace(changed, micro_batch_size=None)
        size = largest_micro_batch(whole, hardware, available)
        changed = replace(changed, micro_batch_size=size)
    kept = {name: getattr(config, name) for name in ("data", "out", "init", "precision", "device")}
    changed = replace(changed, **kept)
    flags = [f"--{_flag(name, now)}" for name, (_, now) in differences(config, changed).items()]
    return changed, f"--fit {memory}: {' '.join(flags) or 'fits as it is'}"


def _flag(name: str, value: object) -> str:
    words = value if isinstance(value, tuple) else (value,)
    return " ".join((name.removesuffix(".rank"), *map(str, words)))
