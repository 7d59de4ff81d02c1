"""Configuration of SAMI: pre-training an image encoder to predict a SAM's embedding.

Imports no torch, so that `--help` is fast.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from gigamask.interfaces import Task
from gigamask.plugins.distill.config import Taught
from gigamask.plugins.distill.teacher_weights import check_teacher
from gigamask.training.mae_config import MAETrainConfig

if TYPE_CHECKING:
    from collections.abc import Collection

    import torch


@dataclass(frozen=True)
class SAMITrainConfig(Taught, MAETrainConfig):
    """Configuration of masked-autoencoder pre-training on the embedding of a SAM."""

    next_step: ClassVar[str] = "gigamask train efficient_sam --data TARS --init mae:{out} --out OUT"

    def check_inputs(self, earlier: Collection[str] = ()) -> None:
        """Check, before training starts, that teacher, data and weights exist.

        Args:
            earlier: Run folders of earlier stages, which `init` may name before they exist.

        Raises:
            GigamaskError: Something is missing, or the model does not fit the teacher.
        """
        check_teacher(self.teacher)
        from gigamask.models.pretrained import load_sam
        from gigamask.plugins.distill.teachers import check_sami_teacher

        check_sami_teacher(self.model, load_sam(self.teacher).config, self.teacher)
        super().check_inputs(earlier)

    def task(self, device: torch.device) -> Task:
        """Return the task; on the meta device, with a teacher without values."""
        from gigamask.distributed.precision import choose_precision
        from gigamask.models.pretrained import load_sam
        from gigamask.plugins.distill.sami import SAMITask
        from gigamask.plugins.distill.teachers import check_sami_teacher, planned_teacher

        if device.type == "meta":
            teacher = planned_teacher(self.teacher)
            check_sami_teacher(self.model, teacher.config, self.teacher or "of ViT-H")
        else:
            teacher = load_sam(self.teacher)
        return SAMITask(choose_precision(self.precision, device), teacher=teacher.to(device))
