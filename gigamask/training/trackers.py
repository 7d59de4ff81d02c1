"""Experiment trackers: TensorBoard if it is installed, and Weights & Biases on request."""

import importlib.util
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
from jaxtyping import UInt8

from gigamask import files
from gigamask.errors import GigamaskError
from gigamask.training.config import TrainConfig, flatten_config


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
    """TensorBoard event files in the subfolder `tensorboard` of the run."""

    def __init__(self, config: TrainConfig) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(Path(config.out) / "tensorboard"))

    def scalars(self, values: Mapping[str, float], step: int) -> None:
        """Add scalars.

        Args:
            values: Scalars by name.
            step: Number of the step.
        """
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

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
    """

    def __init__(self, config: TrainConfig) -> None:
        import wandb

        self._wandb: Any = wandb
        id_file = Path(config.out) / "wandb_id"
        if not id_file.exists():
            files.write_text(id_file, secrets.token_hex(4))
        try:
            self._run = wandb.init(
                project=config.wandb,
                name=Path(config.out).name,
                id=id_file.read_text(),
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
        # Steps trained again after a crash are logged again; W&B's own step only increases.
        self._run.define_metric("*", step_metric="step")

    def scalars(self, values: Mapping[str, float], step: int) -> None:
        """Add scalars.

        Args:
            values: Scalars by name.
            step: Number of the step.
        """
        self._run.log({"step": step, **values})

    def picture(self, name: str, rgb: UInt8[np.ndarray, "H W 3"], step: int) -> None:
        """Add a picture.

        Args:
            name: Name of the picture.
            rgb: Pixels of the picture.
            step: Number of the step.
        """
        self._run.log({"step": step, name: self._wandb.Image(rgb)})

    def close(self) -> None:
        """Flush buffers and close."""
        self._run.finish()


def make_trackers(config: TrainConfig) -> list[Tracker]:
    """Return the trackers of a run."""
    trackers: list[Tracker] = []
    if importlib.util.find_spec("tensorboard") is not None:
        trackers.append(TensorBoardTracker(config))
    if config.wandb:
        trackers.append(WandbTracker(config))
    return trackers
