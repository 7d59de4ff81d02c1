"""Experiment trackers: TensorBoard if it is installed, and Weights & Biases on request."""

import importlib.util
import os
import secrets
import sys
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol, cast, runtime_checkable

import numpy as np
from jaxtyping import UInt8

from gigamask import files
from gigamask.errors import GigamaskError
from gigamask.training.config import TrainConfig, flatten_config

NEVER_S = 10**9
SENT = {kind: f"sent/{kind}" for kind in ("training", "evaluation", "picture")}
"""Keys under which W&B has the last step of each kind of record."""


@runtime_checkable
class Tracker(Protocol):
    """Receives scalars and pictures by name and step."""

    def scalars(self, values: Mapping[str, float], step: int) -> None:
        """Add scalars.

        Args:
            values: Scalars by name.
            step: Number of the step.
        """
        ...

    def picture(self, name: str, rgb: UInt8[np.ndarray, "H W 3"], step: int) -> None:
        """Add a picture.

        Args:
            name: Name of the picture.
            rgb: Pixels of the picture.
            step: Number of the step.
        """
        ...

    def close(self) -> None:
        """Flush buffers and close."""
        ...


class TensorBoardTracker:
    """TensorBoard event files in the subfolder `tensorboard` of the run.

    Steps that a run trains again after a crash replace those logged before.

    Args:
        config: The configuration.
        first_step: Number of steps finished before this start.
    """

    def __init__(self, config: TrainConfig, first_step: int) -> None:
        self._folder, self._first_step = str(Path(config.out) / "tensorboard"), first_step

    @cached_property
    def _writer(self) -> Any:
        """The writer, made at the first record: a full disk then stops this tracker alone."""
        # TensorBoard imports these, if they are installed, for logs in S3, which takes seconds.
        cloud = [name for name in ("boto3", "botocore") if name not in sys.modules]
        sys.modules.update((name, cast(ModuleType, None)) for name in cloud)  # as if they were not
        try:
            from torch.utils.tensorboard import SummaryWriter
        finally:
            for name in cloud:
                del sys.modules[name]

        # The thread of the writer would hang on a full disk, so it is this one that flushes.
        return SummaryWriter(self._folder, purge_step=self._first_step + 1, flush_secs=NEVER_S)

    def scalars(self, values: Mapping[str, float], step: int) -> None:
        """Add scalars.

        Args:
            values: Scalars by name.
            step: Number of the step.
        """
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def picture(self, name: str, rgb: UInt8[np.ndarray, "H W 3"], step: int) -> None:
        """Add a picture.

        Args:
            name: Name of the picture.
            rgb: Pixels of the picture.
            step: Number of the step.
        """
        self._writer.add_image(name, rgb, step, dataformats="HWC")

    def close(self) -> None:
        """Flush buffers and close."""
        self._writer.close()


class WandbTracker:
    """A Weights & Biases run in the project `config.wandb`.

    A resumed training continues the same run, whose id is in the file `wandb_id` of the run folder.
    What it has of steps that are trained again after a crash stays, and is not sent again.
    """

    def __init__(self, config: TrainConfig) -> None:
        import wandb

        self._wandb: Any = wandb
        try:
            self._run = wandb.init(
                project=config.wandb,
                name=Path(config.out).name,
                id=run_id(Path(config.out) / "wandb_id"),
                dir=config.out,
                config=flatten_config(config),
                resume="allow",
                settings=wandb.Settings(console="off"),
            )
        except wandb.Error as error:
            reason = " ".join(str(error).split())
            raise GigamaskError(
                f"--wandb {config.wandb}: {reason}; log in with 'wandb login', "
                "set WANDB_MODE=offline, or leave the flag out"
            ) from None
        # W&B's own step counts calls, and nothing that was sent can be replaced.
        self._run.define_metric("*", step_metric="step")
        self._sent = {key: self._run.summary.get(key) or 0 for key in SENT.values()}

    def scalars(self, values: Mapping[str, float], step: int) -> None:
        """Add scalars.

        Args:
            values: Scalars by name.
            step: Number of the step.
        """
        is_evaluation = any(name.startswith("evaluation/") for name in values)
        self._log("evaluation" if is_evaluation else "training", values, step)

    def picture(self, name: str, rgb: UInt8[np.ndarray, "H W 3"], step: int) -> None:
        """Add a picture.

        Args:
            name: Name of the picture.
            rgb: Pixels of the picture.
            step: Number of the step.
        """
        self._log("picture", {name: self._wandb.Image(rgb)}, step)

    def _log(self, kind: str, values: Mapping[str, Any], step: int) -> None:
        """Send a record, unless W&B has it from before a crash."""
        if step > self._sent[SENT[kind]]:
            self._run.log({"step": step, SENT[kind]: step, **values})

    def close(self) -> None:
        """Flush buffers and close."""
        self._run.finish()


def run_id(path: Path) -> str:
    """Return the id of a run at W&B; a copy of a run folder beside the first gets one of its own.

    Args:
        path: The file of the id and of its own path, which is written if the run has none.
    """
    name, _, first = path.read_bytes().partition(b" ") if path.exists() else (b"", b"", b"")
    is_copy = os.path.isfile(first) and not os.path.samefile(first, path)
    if not name or (is_copy and Path(os.fsdecode(first)).read_bytes().startswith(name)):
        name = secrets.token_hex(4).encode()
        files.write_bytes(path, name + b" " + os.fsencode(path.absolute()))
    return name.decode()


def make_trackers(config: TrainConfig, first_step: int = 0) -> list[Tracker]:
    """Return the trackers of a run.

    Args:
        config: The configuration.
        first_step: Number of steps finished before this start.
    """
    trackers: list[Tracker] = []
    if importlib.util.find_spec("tensorboard") is not None:
        trackers.append(TensorBoardTracker(config, first_step))
    if config.wandb:
        trackers.append(WandbTracker(config))
    return trackers
