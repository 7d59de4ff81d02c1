"""Runs held against each other."""

from pathlib import Path

import torch
from safetensors.torch import load_file

from gigamask.train import checkpoint


def same(a: Path, b: Path) -> bool:
    """Whether the last checkpoints of two runs are equal bit for bit."""
    for name in (checkpoint.MODEL, checkpoint.OPTIMIZER):
        mine, others = (load_file(checkpoint.newest(run) / name) for run in (a, b))
        if mine.keys() != others.keys() or not all(torch.equal(mine[key], others[key]) for key in mine):
            return False
    return True
