"""Configuration of pre-training an image encoder as a masked autoencoder (MAE).

Imports no torch, so that `--help` is fast.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, Literal

from gigamask.data.sample_config import SampleConfig
from gigamask.interfaces import Task
from gigamask.models.configs import MAEConfig
from gigamask.samplers.validation import UNREAD, reads_attributes
from gigamask.training.config import ImageTrainConfig, item_sampler

if TYPE_CHECKING:
    import torch

    from gigamask.models.mae import MAE
    from gigamask.types import RandomSpec


@dataclass(frozen=True)
class MAETrainConfig(ImageTrainConfig):
    """Configuration of masked-autoencoder pre-training, which needs no masks."""

    command: ClassVar[str] = "pretrain"
    next_step: ClassVar[str] = "gigamask train RECIPE --data TARS --init mae:{out} --out OUT"

    model: MAEConfig = field(default_factory=MAEConfig)

    def build(self, device: str = "cpu") -> MAE:
        """Build the model and initialize it from the seed; on the meta device, without storage."""
        from gigamask.models.init import build_model

        return build_model(self.model, self.seed, device)

    def task(self, device: torch.device) -> Task:
        """Return the task that reconstructs the hidden patches of each image."""
        from gigamask.distributed.precision import choose_precision
        from gigamask.training.mae_task import MAETask

        return MAETask(choose_precision(self.precision, device))

    @property
    def unused(self) -> dict[str, str]:  # pyrefly: ignore[bad-override]
        """Why values have no effect, by flag without dashes."""
        why = "it is relative to the prompt encoder and mask decoder, of which a MAE has none"
        unread = {} if reads_attributes(item_sampler(self)) else {"loader.attributes": UNREAD}
        return unread | {"optimizer.encoder-lr-scale": why}

    @property
    def items(self) -> Literal["image"]:
        """Unit of sampling: images."""
        return "image"

    @property
    def random_spec(self) -> RandomSpec:
        """How many random numbers a sample carries: one for each patch."""
        from gigamask.types import RandomSpec

        return RandomSpec(seed=self.seed, clicks=0, blocks=0, patches=self.model.patches)

    @property
    def sample_config(self) -> SampleConfig:
        """How the loader builds samples: images without masks."""
        loader = self.loader
        return SampleConfig(
            image_size=self.model.image_size,
            mask_size=1,
            with_masks=False,
            augment=loader.augment,
            color_jitter=loader.color_jitter,
            half_scale=loader.half_scale,
        )
