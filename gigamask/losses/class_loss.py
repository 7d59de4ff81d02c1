"""The loss of models with classes: that of the masks, and the cross entropy of their classes.

Imports torch only in methods, so that recipes need no torch.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from gigamask.interfaces import Loss

if TYPE_CHECKING:
    from gigamask.types import LossSums, PromptRound, Targets


@dataclass(frozen=True)
class ClassLoss(Loss):
    """Another loss, plus the cross entropy of each mask's class.

    Of several predictions for a mask, the one with the highest actual IoU is classified. Masks
    without a class add nothing.

    Args:
        loss: The loss of the masks.
        weight: Weight of the cross entropy.
    """

    loss: Loss
    weight: float = 1.0

    @property
    def supports_filling(self) -> bool:
        """Whether the sums leave out masks that do not count."""
        return self.loss.supports_filling

    @property
    def num_uniforms(self) -> int:
        """Pairs of uniform numbers per mask."""
        return self.loss.num_uniforms

    def __call__(self, round: PromptRound, targets: Targets) -> LossSums:
        """Compute the loss of one round.

        Args:
            round: Prompts and predictions of M masks.
            targets: Ground truth of the same masks.

        Returns:
            The sums of the other loss with the cross entropy; `class_loss` and `class_accuracy`
            count only masks with a class.
        """
        import torch
        from torch.nn import functional

        from gigamask.losses.iou import mask_iou

        sums, prediction = self.loss(round, targets), round.prediction
        classes, logits = targets.classes, prediction.class_logits
        if classes is None or logits is None:
            return sums
        best = mask_iou(prediction.logits, targets.foreground, targets.valid).argmax(1)
        chosen = logits.gather(1, best[:, None, None].expand(-1, 1, logits.shape[2]))[:, 0]
        chosen = chosen.to(torch.promote_types(chosen.dtype, torch.float32))
        losses = functional.cross_entropy(chosen, classes, ignore_index=-1, reduction="none")
        correct = (chosen.detach().argmax(1) == classes).to(losses.dtype)
        parts = {"class_loss": losses.detach(), "class_accuracy": correct}
        count = targets.total((classes >= 0).to(losses.dtype))
        return replace(
            sums,
            loss=sums.loss + self.weight * targets.total(losses),
            per_mask=sums.per_mask + self.weight * losses,
            parts=sums.parts | {name: targets.total(values) for name, values in parts.items()},
            part_counts=sums.part_counts | dict.fromkeys(parts, count),
        )
