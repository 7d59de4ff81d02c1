"""What runs recorded, and runs held against each other."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from gigamask.training import checkpoint

CONSTANT_LR = [
    *("--schedule", "multistep"),
    *("--schedule.milestones", "1.0"),
    *("--schedule.warmup-steps", "3"),
]
"""Flags of a learning rate that does not depend on the number of steps."""


def records(run: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl that record updates."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if "images_per_s" in line]


def same(a: Path, b: Path) -> bool:
    """Whether the last checkpoints of two runs are equal bit for bit."""
    for name in (checkpoint.MODEL, checkpoint.OPTIMIZER):
        mine, others = (load_file(checkpoint.newest(run) / name) for run in (a, b))
        if mine.keys() != others.keys() or not all(
            torch.equal(mine[key], others[key]) for key in mine
        ):
            return False
    return True
