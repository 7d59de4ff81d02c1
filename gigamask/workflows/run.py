"""A run: the folder of a training, with its configuration, metrics and model."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gigamask.errors import GigamaskError

if TYPE_CHECKING:
    from torch import nn

    from gigamask.training.config import TrainConfig
    from gigamask.workflows.opening import Paths


@dataclass(frozen=True)
class Run:
    """A training on disk.

    Attributes:
        folder: The run folder.
        config: The configuration it was trained with.
        step: Steps trained so far.
    """

    folder: Path
    config: TrainConfig
    step: int

    @classmethod
    def open(cls, folder: str | Path) -> Run:
        """Open a run folder.

        Args:
            folder: The folder that `--out` or `config.out` named.

        Raises:
            GigamaskError: The folder is not that of a run, or holds no checkpoint yet.
        """
        from gigamask.config_files import load_config
        from gigamask.training.checkpoint import newest

        config = load_config(str(folder))
        checkpoint = newest(Path(folder))
        if checkpoint is None:
            raise GigamaskError(f"{folder}: holds no complete checkpoint yet")
        return cls(Path(folder), config, int(checkpoint.name.rpartition("_")[2]))

    @property
    def finished(self) -> bool:
        """Whether all steps of the configuration are done."""
        return self.step >= self.config.steps

    @cached_property
    def model(self) -> nn.Module:
        """The trained model in evaluation mode, on the device of the configuration."""
        from gigamask.distributed.precision import choose_device
        from gigamask.models import state_dict
        from gigamask.training.checkpoint import locate

        tensors, _ = state_dict.read_weights(locate(str(self.folder)))
        model = self.config.build()
        state_dict.load_weights(model, tensors, str(self.folder))
        return model.to(choose_device(self.config.device)).eval()

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """The records of `metrics.jsonl`, one dictionary per logged step or event."""
        lines = (self.folder / "metrics.jsonl").read_text().splitlines()
        return [json.loads(line) for line in lines if line.strip()]

    def evaluate(self, data: Paths, **options: Any) -> dict[str, Any]:
        """Evaluate the model on annotated images.

        Args:
            data: Tars, folders of tars, globs, URLs, or an index.
            **options: As for `gigamask.evaluate`, such as `images=100`.

        Returns:
            The scores, as `gigamask.evaluate` returns them.
        """
        from gigamask.workflows.evaluate import evaluate

        options = {"device": self.config.device} | options
        return evaluate(str(self.folder), data, **options)
