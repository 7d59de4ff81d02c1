"""Checkpoints: training state as safetensors files, with a manifest of checksums.

A checkpoint is written to a hidden folder, flushed to disk and renamed, so a folder under its final
name is complete. Loading first verifies every byte, since no weight format detects a flipped bit; a
damaged checkpoint is reported, and the previous one is used.
"""

import json
import math
import shutil
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import numpy as np
import torch
from safetensors.numpy import load_file as load_arrays
from safetensors.numpy import save_file as save_arrays
from safetensors.torch import load_file, save_file
from torch import Tensor

from gigamask.distributed.fsdp import full_tensor
from gigamask.distributed.precision import LossScaler, choose_device
from gigamask.errors import GigamaskError
from gigamask.files import crc32, flush, report_write_errors
from gigamask.models import convert, state_dict
from gigamask.models.configs import GroundingModelConfig, MAEConfig
from gigamask.models.init import MAE_PREFIX
from gigamask.models.sam.sam import Sam
from gigamask.samplers.loss_history import LossHistory
from gigamask.training.config import TrainConfig
from gigamask.training.manifest import (
    BEST,
    FORMAT,
    MANIFEST,
    list_checkpoints,
    verify,
    with_checksum,
)
from gigamask.training.state import TrainState
from gigamask.types import DataCursor

MODEL, OPTIMIZER, LOSS_HISTORY = "model.safetensors", "optimizer.safetensors", "ledger.safetensors"


@dataclass(frozen=True, eq=False)
class Snapshot:
    """A copy, on the CPU, of everything that a checkpoint stores.

    Attributes:
        step: Number of finished steps.
        samples: Number of samples consumed.
        config: Configuration of the model.
        model: Weights by name.
        optimizer: Optimizer state, as `TrainState.optimizer_tensors` returns it.
        loss_history: Arrays of the loss history; None if the sampler does not use one.
        loss_subject: Digest of the sampler and the data that the losses belong to.
        scale: State of fp16's loss scale.
    """

    step: int
    samples: int
    config: state_dict.ModelConfig
    model: dict[str, Tensor]
    optimizer: dict[str, Tensor]
    loss_history: dict[str, np.ndarray] | None
    loss_subject: str | None
    scale: dict[str, float] | None

    @classmethod
    def from_state(cls, state: TrainState) -> "Snapshot":
        """Copy a state; a collective operation if it is sharded."""
        model, optimizer = (
            {
                name: full_tensor(tensor.detach()).to("cpu", copy=True).contiguous()
                for name, tensor in tensors.items()
            }
            for tensors in (state.model.state_dict(), state.optimizer_tensors())
        )
        history = state.loss_history
        return cls(
            state.step,
            state.cursor.samples,
            cast(state_dict.ModelConfig, state.model.config),
            model,
            optimizer,
            {name: array.copy() for name, array in history.arrays().items()} if history else None,
            history.subject if history else None,
            state.scale.state_dict() if state.scale else None,
        )


def save(state: TrainState, config: TrainConfig) -> Path:
    """Save a state to the run folder.

    Args:
        state: The state.
        config: The configuration.

    Returns:
        The folder of the checkpoint.
    """
    return write(Snapshot.from_state(state), config)


def write(snapshot: Snapshot, config: TrainConfig) -> Path:
    """Write a checkpoint to the run folder, and remove all but the newest `keep` and the best.

    Args:
        snapshot: Content of the checkpoint.
        config: The configuration.

    Returns:
        The folder of the checkpoint.
    """
    folder = Path(config.out) / "checkpoints"
    final, part = folder / f"step_{snapshot.step:08d}", folder / f".step_{snapshot.step:08d}.part"
    remove_partial(folder)
    part.mkdir(parents=True)
    state_dict.save_weights(snapshot.model, snapshot.config, part / MODEL)
    with report_write_errors(part / OPTIMIZER):
        save_file(snapshot.optimizer, part / OPTIMIZER)
    if snapshot.loss_history:
        with report_write_errors(part / LOSS_HISTORY):
            save_arrays(snapshot.loss_history, part / LOSS_HISTORY)
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
    }
    (part / MANIFEST).write_bytes(with_checksum(manifest))
    for name in (*written, MANIFEST, "."):
        flush(part / name)
    if final.exists():
        shutil.rmtree(final)
    part.rename(final)
    flush(folder)
    _prune(folder, config.keep)
    return final


def record_score(checkpoint: Path, score: float, scored_by: str, keep: int) -> None:
    """Write a checkpoint's score to its manifest, and link `best` to the best checkpoint.

    Args:
        checkpoint: Folder of the checkpoint.
        score: Higher is better.
        scored_by: What was evaluated; only scores with the same value are compared.
        keep: Number of newest checkpoints to keep besides the best.
    """
    manifest = json.loads((checkpoint / MANIFEST).read_bytes()) | {
        "score": score,
        "scored_by": scored_by,
    }
    part = checkpoint / f".{MANIFEST}"
    part.write_bytes(with_checksum(manifest))
    flush(part)
    part.replace(checkpoint / MANIFEST)
    flush(checkpoint)
    _prune(checkpoint.parent, keep)


def _prune(folder: Path, keep: int) -> None:
    """Update the link `best`; remove all checkpoints except the best and the newest `keep`."""
    best = _best(folder)
    _link(folder / BEST, best)
    for path in list_checkpoints(folder)[:-keep]:
        if path != best:
            shutil.rmtree(path)


def _best(folder: Path) -> Path | None:
    """Return the checkpoint with the highest score; ties go to the newest.

    Only scores comparable with the newest score count.
    """
    scores = {
        path: score for path in list_checkpoints(folder) if (score := _score(path)) is not None
    }
    newest_by = next((by for _, by in reversed(scores.values())), None)
    comparable = {path: score for path, (score, by) in scores.items() if by == newest_by}
    return max(comparable, key=lambda path: (comparable[path], path.name), default=None)


def _score(folder: Path) -> tuple[float, str] | None:
    """Return a checkpoint's score and what was evaluated; None if it has no valid score."""
    try:
        manifest = json.loads((folder / MANIFEST).read_bytes())
        score, by = manifest["score"], manifest["scored_by"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return (score, by) if isinstance(score, float | int) and not math.isnan(score) else None


def _link(path: Path, target: Path | None) -> None:
    """Replace a symbolic link atomically, or remove it if there is no target."""
    if target is None:
        path.unlink(missing_ok=True)
        return
    temporary = path.with_name(f".{path.name}.link")
    temporary.unlink(missing_ok=True)
    temporary.symlink_to(target.name)
    temporary.replace(path)


def resume(config: TrainConfig, device: torch.device) -> TrainState | None:
    """Load the newest intact checkpoint of a run.

    Args:
        config: The configuration.
        device: Device to train on.

    Returns:
        The state; None if the run has no checkpoint yet.
    """
    folder = newest(Path(config.out))
    if folder is None:
        return None
    manifest = json.loads((folder / MANIFEST).read_bytes())
    model = config.build()
    state_dict.load_weights(model, load_file(folder / MODEL), str(folder))
    state = TrainState.from_model(model.to(device), config)
    state.load_optimizer(load_file(folder / OPTIMIZER), str(folder))
    state.step, state.cursor = manifest["step"], DataCursor(manifest["samples"])
    if state.scale and manifest["scale"]:
        state.scale = LossScaler.from_state_dict(manifest["scale"])
    if config.sampler.decay is not None and LOSS_HISTORY in manifest["files"]:
        state.loss_history = LossHistory.from_arrays(
            load_arrays(folder / LOSS_HISTORY),
            manifest["ledger"],
            config.sampler.decay,
            str(folder),
        )
    return state


def newest(out: Path) -> Path | None:
    """Return the newest intact checkpoint of a run folder; None if it has no checkpoint.

    A damaged checkpoint causes a warning, and the previous one is used.

    Raises:
        GigamaskError: All checkpoints are damaged.
    """
    folders = list_checkpoints(out / "checkpoints")
    for folder in reversed(folders):
        try:
            verify(folder)
        except GigamaskError as error:
            warnings.warn(f"{error}; going back to the checkpoint before it", stacklevel=2)
        else:
            return folder
    if folders:
        raise GigamaskError(
            f"{out}: all {len(folders)} checkpoints are damaged; train again with another --out"
        )
    return None


def locate(path: str) -> str:
    """Return the newest intact checkpoint if a path is a run folder, else the path itself.

    A prefix `mae:` is kept.
    """
    prefix = MAE_PREFIX if path.startswith(MAE_PREFIX) else ""
    bare_path = path.removeprefix(prefix)
    return prefix + str(newest(Path(bare_path)) or bare_path)


def load_model(
    path: str,
    device: str = "auto",
    config_of: Callable[[str], TrainConfig | None] = lambda path: None,
) -> Sam:
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
    tensors, config = state_dict.read_weights(locate(path))
    if isinstance(config, GroundingModelConfig):
        raise GigamaskError(
            f"{path}: a grounding model, which predicts no masks; use the segmenter it was trained "
            f"on, or run: gigamask ask {path}"
        )
    if isinstance(config, MAEConfig):
        raise GigamaskError(
            f"{path}: a pre-trained encoder without a mask decoder; train a SAM with "
            f"--init mae:{path}, then use that run"
        )
    model = Sam.uninitialized(config or convert.infer_config(tensors))
    if model.state_dict().keys() != tensors.keys() and (train_config := config_of(path)):
        model = cast(Sam, train_config.build())
    state_dict.load_weights(model, tensors, path)
    return model.to(choose_device(device)).eval()


def remove_partial(folder: Path) -> None:
    """Remove the leftovers of interrupted saves from a folder of checkpoints."""
    for part in folder.glob(".step_*.part"):
        shutil.rmtree(part)
