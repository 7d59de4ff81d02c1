"""The run that pre-trains an image encoder as a masked autoencoder: what it has beside every run's.

Imports no torch, so that `--help` answers at once.

Not here: what a step computes (`train.reconstruction`), the model (`model.mae`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, Literal

from gigamask.data.sample_config import SampleConfig
from gigamask.interfaces import Task
from gigamask.models.configs import MAEConfig
from gigamask.training.config import ImageTrainConfig

if TYPE_CHECKING:
    import torch

    from gigamask.models.mae import MAE
    from gigamask.types import RandomSpec


@dataclass(frozen=True)
class MAETrainConfig(ImageTrainConfig):
    """Everything that decides what a masked pre-training does; its images need no masks."""

    verb: ClassVar[str] = "pretrain"
    next_step: ClassVar[str] = "gigamask train RECIPE --data TARS --init mae:{out} --out OUT"

    model: MAEConfig = field(default_factory=MAEConfig)

    def build(self, device: str = "cpu") -> MAE:
        """Returns the model that the seed names, not yet trained; on the meta device one without numbers."""
        from gigamask.models.init import build_model

        return build_model(self.model, self.seed, device)

    def task(self, device: torch.device) -> Task:
        """Returns what a step computes: the hidden patches of every image."""
        from gigamask.distributed.precision import choose_precision
        from gigamask.training.mae_task import MAETask

        return MAETask(choose_precision(self.precision, device))

    @property
    def items(self) -> Literal["image"]:
        """What is sampled."""
        return "image"

    @property
    def random_spec(self) -> RandomSpec:
        """How many random numbers a sample carries: one for each patch."""
        from gigamask.types import RandomSpec

        return RandomSpec(seed=self.seed, clicks=0, blocks=0, patches=self.model.patches)

    @property
    def sample_config(self) -> SampleConfig:
        """How the loader makes samples: images alone."""
        loading = self.loader
        return SampleConfig(
            image_size=self.model.image_size,
            mask_size=1,
            masks=False,
            augment=loading.augment,
            color_jitter=loading.color_jitter,
            half_scale=loading.half_scale,
        )
