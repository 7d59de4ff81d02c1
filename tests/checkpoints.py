"""Checkpoints of a state at hand."""

from pathlib import Path

import torch

from gigamask.distributed.world import World
from gigamask.models import manifest
from gigamask.training import checkpoint
from gigamask.training.config import TrainConfig
from gigamask.training.retention import Retention
from gigamask.training.state import TrainState


def save(state: TrainState, run: TrainConfig) -> Path:
    """Save a state to the run's folder, and return the checkpoint."""
    return checkpoint.write(checkpoint.Snapshot.from_state(state), run, Retention(run.keep))


def resume(run: TrainConfig, device: torch.device) -> TrainState | None:
    """Load the newest intact checkpoint of a run; None if it has none."""
    folder = manifest.newest(Path(run.out))
    return None if folder is None else checkpoint.load_state(run, device, folder, World())
