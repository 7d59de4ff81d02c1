"""Where a training's numbers are shown as curves while it goes on: TensorBoardTracker when it is installed, Weights & Biases on request.

Not here: metrics.jsonl, which is the record (`train.watch`), and the page made of it (`report`).
"""

import importlib.util
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
from jaxtyping import UInt8

from gigamask.errors import GigamaskError
from gigamask.training.config import TrainConfig, flatten_config


@runtime_checkable
class Tracker(Protocol):
    """Shows numbers and pictures by name over steps."""

    def scalars(self, values: Mapping[str, float], step: int) -> None:
        """Takes some numbers."""
        ...

    def picture(self, name: str, rgb: UInt8[np.ndarray, "H W 3"], step: int) -> None:
        """Takes a picture."""
        ...

    def close(self) -> None:
        """Writes what is left; takes nothing any more."""
        ...


class TensorBoardTracker:
    """Event files in the folder `tensorboard` of the run."""

    def __init__(self, run: TrainConfig) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(Path(run.out) / "tensorboard"))

    def scalars(self, values: Mapping[str, float], step: int) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def picture(self, name: str, rgb: UInt8[np.ndarray, "H W 3"], step: int) -> None:
        self._writer.add_image(name, rgb, step, dataformats="HWC")

    def close(self) -> None:
        self._writer.close()


class WandbTracker:
    """A run of the project `run.wandb`, the same one whenever the training goes on: its name is kept in the file `wandb_id` of the run folder."""

    def __init__(self, run: TrainConfig) -> None:
        import wandb

        self._wandb: Any = wandb
        known = Path(run.out) / "wandb_id"
        if not known.exists():
            known.write_text(secrets.token_hex(4))
        told = {
            "project": run.wandb,
            "name": Path(run.out).name,
            "id": known.read_text(),
            "dir": run.out,
            "config": flatten_config(run),
        }
        try:
            self._run = wandb.init(resume="allow", settings=wandb.Settings(console="off"), **told)
        except wandb.Error as error:
            said = " ".join(str(error).split())
            raise GigamaskError(
                f"--wandb {run.wandb}: {said}; log in with 'wandb login', set WANDB_MODE=offline, or leave it out"
            ) from None
        # Steps that are trained again, behind a crash, come again: W&B's own count only goes up.
        self._run.define_metric("*", step_metric="step")

    def scalars(self, values: Mapping[str, float], step: int) -> None:
        self._run.log({"step": step, **values})

    def picture(self, name: str, rgb: UInt8[np.ndarray, "H W 3"], step: int) -> None:
        self._run.log({"step": step, name: self._wandb.Image(rgb)})

    def close(self) -> None:
        self._run.finish()


def make_trackers(run: TrainConfig) -> list[Tracker]:
    """Returns what shows a run."""
    found: list[Tracker] = []
    if importlib.util.find_spec("tensorboard") is not None:
        found.append(TensorBoardTracker(run))
    if run.wandb:
        found.append(WandbTracker(run))
    return found
