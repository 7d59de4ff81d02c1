"""Checkpoints: training state as safetensors files, with a manifest of checksums.

The model's weights are those to use. If a training averages its weights, they are the average, and
the weights to continue from are in a file of their own.

A checkpoint is written to a hidden folder, flushed to disk and renamed, so a folder under its final
name is complete. Loading first verifies every byte, since no weight format detects a flipped bit; a
damaged checkpoint is reported, and the previous one is used.
"""

import errno
import json
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

import numpy as np
import torch
from safetensors.numpy import save_file as save_arrays
from safetensors.torch import save_file
from torch import Tensor

from gigamask.distributed.fsdp import full_tensor
from gigamask.distributed.precision import LossScaler, choose_device
from gigamask.distributed.world import World
from gigamask.errors import GigamaskError
from gigamask.files import crc32, flush, uncache, write_atomically, write_bytes
from gigamask.models import weight_files
from gigamask.models.configs import ModelConfig
from gigamask.models.manifest import (
    BASE,
    FORMAT,
    MANIFEST,
    MODEL,
    checkpoint_name,
    newest,  # noqa: F401 (for the trainer, which loads it here)
    verify,
)
from gigamask.models.model import Model
from gigamask.models.promptable import PromptableModel
from gigamask.records import DataCursor
from gigamask.serialization import with_checksum
from gigamask.training.config import TrainConfig
from gigamask.training.retention import PART, Retention, replace, state_of_files, sweep
from gigamask.training.state import Resumed, TrainState, build_to_load
from gigamask.training.unreached import reaching_settings

OPTIMIZER, LOSS_HISTORY = "optimizer.safetensors", "ledger.safetensors"
LAST = "last.safetensors"
"""The weights after the last step, if those of the model are their average."""


@dataclass(frozen=True, eq=False)
class Snapshot:
    """A copy, on the CPU, of everything that a checkpoint stores.

    Attributes:
        step: Number of finished steps.
        samples: Number of samples consumed.
        config: Configuration of the model.
        model: Weights by name, averaged if the training averages them; of adapters, the trained
            ones alone.
        last: In that case, the weights after the last step, else None.
        optimizer: Optimizer state, as `TrainState.optimizer_tensors` returns it.
        loss_history: Arrays of the loss history; None if the sampler does not use one.
        loss_subject: Digest of the sampler and the data that the losses belong to.
        scale: State of fp16's loss scale.
        base: Size and crc32 of the file of the other weights, if there are adapters.
        unreached: Names of the trained parameters that have had no gradient yet.
    """

    step: int
    samples: int
    config: ModelConfig
    model: dict[str, Tensor]
    last: dict[str, Tensor] | None
    optimizer: dict[str, Tensor]
    loss_history: dict[str, np.ndarray] | None
    loss_subject: str | None
    scale: dict[str, float] | None
    base: dict[str, int] | None
    unreached: list[str] = field(default_factory=list)

    @classmethod
    def from_state(cls, state: TrainState) -> "Snapshot":
        """Copy a state; if it is sharded, the others must call `contribute_shards`."""
        last, average, optimizer = map(_on_host, _tensors_of(state))
        history = state.loss_history
        names = {parameter: name for name, parameter in state.model.named_parameters()}
        return cls(
            state.step,
            state.cursor.samples,
            cast(ModelConfig, state.model.config),
            last | average,
            last if average else None,
            optimizer,
            {name: array.copy() for name, array in history.arrays().items()} if history else None,
            history.subject if history else None,
            state.scale.state_dict() if state.scale else None,
            state.base,
            sorted(names[each] for each in state.unreached.everywhere(state.parameters)),
        )


def contribute_shards(state: TrainState) -> None:
    """Send this process's shards to the process that takes a `Snapshot`, and keep no copy."""
    for tensors in _tensors_of(state):
        for tensor in tensors.values():
            full_tensor(tensor.detach())


def _on_host(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return copies on the CPU; those from a GPU lie in pinned memory and travel one after another.

    Pageable memory would be filled at a fraction of the speed, tensor by tensor.
    """
    copies = {}
    for name, tensor in tensors.items():
        whole = full_tensor(tensor.detach()).contiguous()
        copies[name] = whole.to("cpu", non_blocking=True, copy=True)
    if any(tensor.is_cuda for tensor in tensors.values()):
        torch.cuda.synchronize()
    return copies


def _tensors_of(state: TrainState) -> tuple[dict[str, Tensor], ...]:
    """Return the weights, their averages and the optimizer state."""
    averaged, weights = state.average.by_state_name(state.model) if state.average else {}, {}
    if state.base:
        from gigamask.models.lora import split_trained

        weights, _ = split_trained(state.model)
    return weights or state.model.state_dict(), averaged, state.optimizer_tensors()


def write_base(state: TrainState, config: TrainConfig) -> None:
    """Write the weights that a training of adapters does not change, before its first checkpoint.

    Args:
        state: The state, whose `base` is set.
        config: The configuration.
    """
    from gigamask.models.lora import split_trained

    _, frozen = split_trained(state.model)
    path = Path(config.out) / "checkpoints" / BASE
    path.parent.mkdir(parents=True, exist_ok=True)
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in frozen.items()}
    weight_files.save_weights(tensors, cast(ModelConfig, state.model.config), path)
    state.base = {"bytes": path.stat().st_size, "crc32": crc32(path)}


def write(snapshot: Snapshot, config: TrainConfig, retention: Retention) -> Path:
    """Write a checkpoint to the run folder, read it back, and remove those not to be kept.

    Args:
        snapshot: Content of the checkpoint.
        config: The configuration.
        retention: Decides what is kept.

    Returns:
        The folder of the checkpoint.

    Raises:
        OSError: It cannot be written, or not be read back as it was written.
    """
    folder = Path(config.out) / "checkpoints"
    final = folder / checkpoint_name(snapshot.step)
    part = folder / f".{final.name}{PART}"
    sweep(folder)
    part.mkdir(parents=True)
    weight_files.save_weights(snapshot.model, snapshot.config, part / MODEL)
    if snapshot.last:
        weight_files.save_weights(snapshot.last, snapshot.config, part / LAST)
    write_atomically(part / OPTIMIZER, lambda path: save_file(snapshot.optimizer, path))
    if losses := snapshot.loss_history:
        write_atomically(part / LOSS_HISTORY, lambda path: save_arrays(losses, path))
    written = sorted(path.name for path in part.iterdir())
    files = {
        name: {"bytes": (part / name).stat().st_size, "crc32": crc32(part / name)}
        for name in written
    }
    manifest = {
        "format": FORMAT,
        "step": snapshot.step,
        "samples": snapshot.samples,
        "files": files,
        "ledger": snapshot.loss_subject,
        "scale": snapshot.scale,
        "unreached": {"names": snapshot.unreached, "settings": reaching_settings(config)},
    } | ({"base": snapshot.base} if snapshot.base else {})
    write_bytes(part / MANIFEST, with_checksum(manifest))
    flush(part)
    for name in written:
        uncache(part / name)
    try:
        retention.verify(part, known_as=final)
    except GigamaskError as error:
        raise OSError(errno.EIO, f"not read back as it was written ({error})", str(part)) from None
    replace(part, final)
    retention.prune(folder, final)
    return final


def record_score(
    checkpoint: Path, score: float, scored_by: str, keep: int, retention: Retention | None = None
) -> None:
    """Write a checkpoint's score to its manifest, and link `best` to the best checkpoint.

    Args:
        checkpoint: Folder of the checkpoint.
        score: Higher is better.
        scored_by: What was evaluated; only scores with the same value are compared.
        keep: Number of newest checkpoints to keep besides the best.
        retention: Decides what is kept; None means these.

    Raises:
        GigamaskError: The checkpoint has been damaged.
        OSError: The manifest cannot be written.
    """
    manifest = verify(checkpoint, contents=False) | {
        "score": None if math.isnan(score) else score,  # JSON has no NaN
        "scored_by": scored_by,
    }
    retention = retention or Retention(keep)
    is_verified = retention.verified.get(checkpoint) == state_of_files(checkpoint)
    write_bytes(checkpoint / MANIFEST, with_checksum(manifest))
    flush(checkpoint)
    if is_verified:  # need not be read again for its new manifest
        retention.verified[checkpoint] = state_of_files(checkpoint)
    retention.prune(checkpoint.parent, checkpoint)


def load_state(
    config: TrainConfig,
    device: torch.device,
    folder: Path,
    world: World,
    damaged: tuple[str, ...] = (),
) -> TrainState:
    """Load a checkpoint of a run without verifying its checksums; a collective operation.

    Only the main process reads the files. The others receive them, one file at a time.

    Args:
        config: The configuration.
        device: Device to train on.
        folder: The checkpoint, which `newest` has verified in the main process.
        world: The processes of the run.
        damaged: Names of the newer checkpoints, which are damaged.

    Raises:
        GigamaskError: The checkpoint does not fit the configuration.
    """
    from gigamask.models.lora import join_trained

    def read(name: str) -> dict[str, Tensor]:
        def read_file() -> dict[str, Tensor]:
            return weight_files.read_safetensors(folder / name)[0] if world.is_main else {}

        return world.broadcast(world.run_on_all(read_file), device)

    from gigamask.models import state_dict  # which a training that starts does not need

    manifest = json.loads((folder / MANIFEST).read_bytes())
    weights = LAST if LAST in manifest["files"] else MODEL
    if (weights == LAST) != bool(config.ema):
        raise GigamaskError(
            f"{folder}: was saved {'with' if weights == LAST else 'without'} an average of the "
            f"weights, but --ema is {config.ema}; keep --ema as it was, or start a new run from "
            f"its weights: --init {folder} and another --out"
        )
    base = read(f"../{BASE}") if manifest.get("base") else {}
    state = TrainState.from_model(build_to_load(config, device), config)
    state.base = manifest.get("base")
    state.resumed = Resumed(folder, "scored_by" in manifest, damaged)
    state_dict.load_weights(state.model, join_trained(read(weights), base), str(folder))
    if state.average is not None:
        averaged = read(MODEL)
        whole = join_trained(averaged, base)
        state_dict.fit_weights(state.model, whole, str(folder), resample=False)
        for name, tensor in state.average.items():
            tensor.copy_(averaged[name])
        del averaged, whole
    state.load_optimizer(read(OPTIMIZER), str(folder))
    unreached = manifest.get("unreached", {"names": (), "settings": reaching_settings(config)})
    if unreached["settings"] == reaching_settings(config):  # else it shows anew
        names = set(unreached["names"])
        state.unreached.note({p for name, p in state.model.named_parameters() if name in names})
    state.step, state.cursor = manifest["step"], DataCursor(manifest["samples"])
    if state.scale and manifest["scale"]:
        state.scale = LossScaler(manifest["scale"]["value"], manifest["scale"]["good"])
    if config.sampler.decay is not None and LOSS_HISTORY in manifest["files"]:
        from gigamask.samplers.loss_history import LossHistory

        state.loss_history = LossHistory.from_arrays(
            {name: tensor.cpu().numpy() for name, tensor in read(LOSS_HISTORY).items()},
            manifest["ledger"],
            config.sampler.decay,
            str(folder),
        )
    return state


def load_model(
    path: str,
    device: str = "auto",
    config_of: Callable[[str], TrainConfig | None] = lambda path: None,
) -> PromptableModel:
    """Load a SAM for inference.

    Args:
        path: A run folder, a checkpoint, or weights of any format that `models.state_dict` reads.
        device: Device to load it to; auto is cuda if there is a GPU, else cpu.
        config_of: Returns the training configuration that builds the model of a path, or None.
            Called only if the weights do not match their own configuration, as with a custom image
            encoder.

    Raises:
        GigamaskError: The weights are damaged or not those of a SAM.
    """

    def build() -> Model | None:
        config = config_of(path)
        return config.build() if config else None

    from gigamask.models.pretrained import load_sam

    return load_sam(path, build_custom=build).to(choose_device(device))
