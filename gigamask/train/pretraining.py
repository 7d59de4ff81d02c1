"""The run that pre-trains an image encoder as a masked autoencoder: what it has beside every run's.

Imports no torch, so that `--help` answers at once.

Not here: what a step computes (`train.reconstruction`), the model (`model.mae`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, Literal

from gigamask.data.settings import Assembly
from gigamask.model.sizes import MaeSpec
from gigamask.seams import Task
from gigamask.train.run import ImageRun

if TYPE_CHECKING:
    import torch

    from gigamask.contracts import Chance
    from gigamask.model.mae import Mae


@dataclass(frozen=True)
class Pretraining(ImageRun):
    """Everything that decides what a masked pre-training does; its images need no masks."""

    verb: ClassVar[str] = "pretrain"
    next_step: ClassVar[str] = "gigamask train RECIPE --data TARS --init mae:{out} --out OUT"

    model: MaeSpec = field(default_factory=MaeSpec)

    def build(self, device: str = "cpu") -> Mae:
        """Returns the model that the seed names, not yet trained; on the meta device one without numbers."""
        from gigamask.model.start import build

        return build(self.model, self.seed, device)

    def task(self, device: torch.device) -> Task:
        """Returns what a step computes: the hidden patches of every image."""
        from gigamask.parallel.precision import choose_precision
        from gigamask.train.reconstruction import MaeTask

        return MaeTask(choose_precision(self.precision, device))

    @property
    def items(self) -> Literal["image"]:
        """What is sampled."""
        return "image"

    @property
    def chance(self) -> Chance:
        """How many random numbers a sample carries: one for each patch."""
        from gigamask.contracts import Chance

        return Chance(seed=self.seed, clicks=0, blocks=0, patches=self.model.patches)

    @property
    def assembly(self) -> Assembly:
        """How the loader makes samples: images alone."""
        loading = self.loading
        return Assembly(
            side=self.model.input_side, grid=1, masks=False, augment=loading.augment, colour=loading.colour, half_scale=loading.half_scale
        )
