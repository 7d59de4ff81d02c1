"""Runs: started as processes, what they recorded, and held against each other."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import torch
from safetensors.torch import load_file

from gigamask.models import manifest
from gigamask.models.convert import MAE_PARTS, MAE_PATCHES
from gigamask.training import checkpoint

GIGAMASK = str(Path(sys.executable).parent / "gigamask")
"""The command as pip installs it."""

CONSTANT_LR = [
    *("--schedule", "multistep"),
    *("--schedule.milestones", "1.0"),
    *("--schedule.warmup-steps", "3"),
]
"""Flags of a learning rate that does not depend on the number of steps."""


PRETRAIN = (
    "pretrain mae_tiny --model.image-size 64 --model.patch-size 8 --model.embed-dim 16 "
    "--model.depth 2 --model.num-heads 2 --model.decoder-dim 16 --model.decoder-depth 1 "
    "--model.decoder-num-heads 2 --batch-size 3 --micro-batch-size 2 --loader.workers 0 "
    "--device cpu --log-every 1"
)
"""A pre-training of a little encoder."""


def wait_until(condition: Callable[[], object], timeout_s: float = 300.0) -> None:
    """Wait until a condition holds, and fail if it does not in time.

    Args:
        condition: What is asked again and again.
        timeout_s: Most seconds.
    """
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def kill_all(process: subprocess.Popen) -> None:
    """Kill a process and all that it has started."""
    with suppress(psutil.NoSuchProcess):
        for each in psutil.Process(process.pid).children(recursive=True):
            each.kill()
    process.kill()


def newest_step(out: Path) -> int:
    """The step of the newest checkpoint of a run; 0 without any."""
    found = manifest.list_checkpoints(out / "checkpoints")
    return int(found[-1].name[-8:]) if found else 0


def wait_for_step(out: Path, step: int, timeout_s: float = 300.0) -> int:
    """Wait until a run has a checkpoint of a step or a later one, and return the newest one's.

    Args:
        out: The run folder.
        step: The step.
        timeout_s: Most seconds.
    """
    wait_until(lambda: newest_step(out) >= step, timeout_s)
    return newest_step(out)


def lines(run: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl."""
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def records(run: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl that record updates."""
    return [line for line in lines(run) if "images_per_s" in line]


def weights(run: Path) -> dict[str, torch.Tensor]:
    """The weights of the last checkpoint."""
    return load_file(checkpoint.newest(run) / checkpoint.MODEL)


def check_pretrained(mae: dict[str, torch.Tensor], sam: dict[str, torch.Tensor]) -> None:
    """Check that the encoder of a SAM is that of an MAE, but for its neck."""
    blocks = [
        f"blocks.{block}.{part}.{kind}"
        for block in (0, 1)
        for part in MAE_PARTS
        for kind in ("weight", "bias")
    ]
    for name in (*MAE_PATCHES, *blocks):
        there = f"image_encoder.{name.replace('.fc1.', '.lin1.').replace('.fc2.', '.lin2.')}"
        assert torch.equal(mae[name], sam[there]), name
    assert torch.equal(mae["pos_embed"][0, 1:], sam["image_encoder.pos_embed"].flatten(0, 2))


@contextmanager
def started(words: str, run: Path) -> Iterator[subprocess.Popen]:
    """A command in a process group of its own that has recorded an update."""
    process = subprocess.Popen(
        [GIGAMASK, *words.split()],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
        text=True,
    )
    metrics = run / "metrics.jsonl"
    try:
        wait_until(
            lambda: process.poll() is not None or (metrics.exists() and metrics.stat().st_size), 120
        )
        yield process
    finally:
        process.kill()


def same(a: Path, b: Path) -> bool:
    """Whether the last checkpoints of two runs are equal bit for bit."""
    for name in (checkpoint.MODEL, checkpoint.OPTIMIZER):
        mine, others = (load_file(checkpoint.newest(run) / name) for run in (a, b))
        if mine.keys() != others.keys() or not all(
            torch.equal(mine[key], others[key]) for key in mine
        ):
            return False
    return True
