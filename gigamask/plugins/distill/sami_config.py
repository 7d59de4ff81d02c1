"""Configuration of SAMI: pre-training an image encoder to predict a SAM's embedding.

Imports no torch, so that `--help` is fast.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from gigamask.interfaces import Task
from gigamask.models.configs import vit_h
from gigamask.training.distill_config import check_teacher, load_teacher, planned_teacher
from gigamask.training.mae_config import MAETrainConfig

if TYPE_CHECKING:
    from collections.abc import Collection

    import torch


@dataclass(frozen=True)
class SAMITrainConfig(MAETrainConfig):
    """Configuration of masked-autoencoder pre-training on the embedding of a SAM."""

    next_step: ClassVar[str] = "gigamask train efficient_sam --data TARS --init mae:{out} --out OUT"

    teacher: str = ""
    """weights of the SAM whose embedding is predicted: a run folder, a checkpoint, a .pth, a
    .safetensors, a Hugging Face folder or id, or starter"""

    def check_inputs(self, earlier: Collection[str] = ()) -> None:
        """Check, before training starts, that teacher, data and weights exist.

        Args:
            earlier: Run folders of earlier stages, which `init` may name before they exist.

        Raises:
            GigamaskError: Something is missing, or the model does not fit the teacher.
        """
        from gigamask.training.sami import check_sami_teacher

        check_teacher(self.teacher)
        check_sami_teacher(self.model, load_teacher(self.teacher).config, self.teacher)
        super().check_inputs(earlier)

    @property
    def tables(self) -> tuple[str, ...]:
        """Paths of the attribute table, if there is one, and of the teacher's weights."""
        from gigamask.models.state_dict import find_weights

        return (*super().tables, str(find_weights(self.teacher)))

    def task(self, device: torch.device) -> Task:
        """Return the task; on the meta device, with a teacher without values."""
        from gigamask.distributed.precision import choose_precision
        from gigamask.training.sami import SAMITask, check_sami_teacher

        if device.type == "meta":
            teacher = planned_teacher(self.teacher, vit_h())
            check_sami_teacher(self.model, teacher.config, self.teacher or "of ViT-H")
        else:
            teacher = load_teacher(self.teacher)
        return SAMITask(choose_precision(self.precision, device), teacher=teacher.to(device))
