"""Checkpoints: a training's whole state as safetensors files beside a manifest with the size and crc32 of each.

A checkpoint is written into a hidden folder, flushed to disk, and renamed; so a folder under its final name is complete. Reading checks every
byte before anything is used, since no weight format notices a flipped bit by itself; a damaged checkpoint is named and the one before it taken.

Not here: what the state is (`train.state`), weight files of other origins (`model.weights`).
"""

import json
import math
import os
import shutil
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
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
from gigamask.models import state_dict
from gigamask.models.configs import GroundingModelConfig, MAEConfig
from gigamask.models.init import build_model
from gigamask.models.sam.sam import Sam
from gigamask.samplers.loss_history import LossHistory
from gigamask.training.config import TrainConfig
from gigamask.training.manifest import (
    BEST,
    FORMAT,
    MANIFEST,
    checksum,
    complete,
    verify,
    with_checksum,
)
from gigamask.training.state import TrainState
from gigamask.types import DataCursor

MODEL, OPTIMIZER, LEDGER = "model.safetensors", "optimizer.safetensors", "ledger.safetensors"


@dataclass(frozen=True, eq=False)
class Snapshot:
    """All that a checkpoint holds, on the CPU: a copy that training does not change any more."""

    step: int
    samples: int
    config: state_dict.ModelConfig
    model: dict[str, Tensor]
    optimizer: dict[str, Tensor]
    ledger: dict[str, np.ndarray] | None
    ledger_of: str | None
    scale: dict[str, float] | None

    @classmethod
    def of(cls, state: TrainState) -> "Snapshot":
        """Copies a state; each process must where they have parts of it."""
        copies = [
            {
                name: full_tensor(tensor.detach()).to("cpu", copy=True).contiguous()
                for name, tensor in tensors.items()
            }
            for tensors in (state.model.state_dict(), state.optimizer_tensors())
        ]
        ledger = (
            {name: array.copy() for name, array in state.loss_history.arrays().items()}
            if state.loss_history
            else None
        )
        ledger_of = state.loss_history.subject if state.loss_history else None
        return cls(
            state.step,
            state.cursor.samples,
            cast(state_dict.ModelConfig, state.model.config),
            copies[0],
            copies[1],
            ledger,
            ledger_of,
            asdict(state.scale) if state.scale else None,
        )


def save(state: TrainState, run: TrainConfig) -> Path:
    """Writes the state as it is now; see `write`."""
    return write(Snapshot.of(state), run)


def write(snapshot: Snapshot, run: TrainConfig) -> Path:
    """Writes a snapshot under `run.out/checkpoints`, removes all but the newest `run.keep` and the best, and returns the new folder."""
    folder = Path(run.out) / "checkpoints"
    final, part = folder / f"step_{snapshot.step:08d}", folder / f".step_{snapshot.step:08d}.part"
    sweep(folder)
    part.mkdir(parents=True)
    state_dict.save_weights(snapshot.model, snapshot.config, part / MODEL)
    with state_dict.writing(part / OPTIMIZER):
        save_file(snapshot.optimizer, part / OPTIMIZER)
    if snapshot.ledger:
        with state_dict.writing(part / LEDGER):
            save_arrays(snapshot.ledger, part / LEDGER)
    written = sorted(path.name for path in part.iterdir())
    files = {
        name: {"bytes": (part / name).stat().st_size, "crc32": checksum(part / name)}
        for name in written
    }
    told = {"ledger": snapshot.ledger_of, "scale": snapshot.scale}
    manifest = {
        "format": FORMAT,
        "step": snapshot.step,
        "samples": snapshot.samples,
        "files": files,
        **told,
    }
    (part / MANIFEST).write_bytes(with_checksum(manifest))
    for name in (*written, MANIFEST, "."):
        _flush(part / name)
    if final.exists():
        shutil.rmtree(final)
    part.rename(final)
    _flush(folder)
    _tidy(folder, run.keep)
    return final


def record_score(checkpoint: Path, score: float, scored_by: str, keep: int) -> None:
    """Notes a checkpoint's score in its manifest, and makes `best` beside it the link to the best there is.

    `scored_by` says what the score means: only equal ones are compared.
    """
    manifest = json.loads((checkpoint / MANIFEST).read_bytes()) | {
        "score": score,
        "scored_by": scored_by,
    }
    part = checkpoint / f".{MANIFEST}"
    part.write_bytes(with_checksum(manifest))
    _flush(part)
    part.replace(checkpoint / MANIFEST)
    _flush(checkpoint)
    _tidy(checkpoint.parent, keep)


def _tidy(folder: Path, keep: int) -> None:
    """Links `best`, and removes all checkpoints but it and the newest `keep`."""
    best = _best(folder)
    _link(folder / BEST, best)
    for old in complete(folder)[:-keep]:
        if old != best:
            shutil.rmtree(old)


def _best(folder: Path) -> Path | None:
    """Returns, of those whose score means what the newest score means, the checkpoint of the highest, of equal ones the newest; None without any."""
    scores = {each: told for each in complete(folder) if (told := _score(each)) is not None}
    newest_by = next((by for _, by in reversed(scores.values())), None)
    same = {each: score for each, (score, by) in scores.items() if by == newest_by}
    return max(same, key=lambda each: (same[each], each.name), default=None)


def _score(folder: Path) -> tuple[float, str] | None:
    """Returns a checkpoint's score and what it means; None where it has none that is a number, or its manifest is damaged."""
    try:
        manifest = json.loads((folder / MANIFEST).read_bytes())
        score, by = manifest["score"], manifest["scored_by"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return (score, by) if isinstance(score, float | int) and not math.isnan(score) else None


def _link(path: Path, target: Path | None) -> None:
    """Makes a link that appears whole and replaces the one before, or removes it where there is nothing to link to."""
    if target is None:
        path.unlink(missing_ok=True)
        return
    beside = path.with_name(f".{path.name}.link")
    beside.unlink(missing_ok=True)
    beside.symlink_to(target.name)
    beside.replace(path)


def resume(run: TrainConfig, device: torch.device) -> TrainState | None:
    """Returns the state of the newest sound checkpoint of a run, or None when it has none yet."""
    folder = newest(Path(run.out))
    if folder is None:
        return None
    manifest = json.loads((folder / MANIFEST).read_bytes())
    model = run.build()
    state_dict.load_weights(model, load_file(folder / MODEL), str(folder))
    state = TrainState.from_model(model.to(device), run)
    state.load_optimizer(load_file(folder / OPTIMIZER), str(folder))
    state.step, state.cursor = manifest["step"], DataCursor(manifest["samples"])
    if state.scale and manifest["scale"]:
        state.scale = LossScaler(**manifest["scale"])
    if run.sampler.decay is not None and LEDGER in manifest["files"]:
        state.loss_history = LossHistory.from_arrays(
            load_arrays(folder / LEDGER), manifest["ledger"], run.sampler.decay, str(folder)
        )
    return state


def newest(out: Path) -> Path | None:
    """Returns the newest sound checkpoint of a run folder, or None when it has none.

    A damaged one is reported by a warning and the one before it is taken; when all are damaged this is a `GigamaskError`.
    """
    found = complete(out / "checkpoints")
    for folder in reversed(found):
        try:
            verify(folder)
        except GigamaskError as fault:
            warnings.warn(f"{fault}; going back to the checkpoint before it", stacklevel=2)
        else:
            return folder
    if found:
        raise GigamaskError(
            f"{out}: none of its {len(found)} checkpoints is sound; train anew with another --out"
        )
    return None


def locate(path: str) -> str:
    """Returns where the weights of `path` lie, or of `mae:path`: the newest sound checkpoint when it is a run folder, else the path itself."""
    prefix = state_dict.MAE_PREFIX if path.startswith(state_dict.MAE_PREFIX) else ""
    bare = path.removeprefix(prefix)
    return prefix + str(newest(Path(bare)) or bare)


def load_model(
    path: str, device: str = "auto", run_of: Callable[[str], TrainConfig | None] = lambda path: None
) -> Sam:
    """Returns the model whose weights lie at `path`: a run folder, a checkpoint, or any file or folder that `model.weights` reads.

    Weights of an image encoder of the user's own are not what their spec says; `run_of(path)` returns the run that builds it, or None.
    """
    tensors, config = state_dict.read_weights(locate(path))
    if isinstance(config, GroundingModelConfig):
        raise GigamaskError(
            f"{path}: scores masks by words and makes none; name the segmenter it was trained over, or ask it: gigamask ask {path}"
        )
    if isinstance(config, MAEConfig):
        raise GigamaskError(
            f"{path}: holds an encoder's pre-training alone; train on with --init mae:{path}, then name that run"
        )
    model = build_model(config or state_dict.infer_config(tensors), seed=0)
    if model.state_dict().keys() != tensors.keys() and (run := run_of(path)) is not None:
        model = cast(Sam, run.build())
    state_dict.load_weights(model, tensors, path)
    return model.to(choose_device(device)).eval()


def sweep(folder: Path) -> None:
    """Removes what an interrupted save left behind."""
    for part in folder.glob(".step_*.part"):
        shutil.rmtree(part)


def _flush(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    os.fsync(handle)
    os.close(handle)
