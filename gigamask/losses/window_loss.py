"""The loss of models that answer in windows: mask losses in the window, IoU over the image.

Imports torch only in methods, so that recipes need no torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from gigamask.errors import GigamaskError, check_positive, check_range
from gigamask.interfaces import Loss

if TYPE_CHECKING:
    from jaxtyping import Bool, Float
    from torch import Tensor

    from gigamask.types import LossSums, PromptRound, Prompts, Targets

COVERED = 0.95
"""Part of a mask that must lie in a window for the window to answer with this mask."""


@dataclass(frozen=True)
class WindowLoss(Loss):
    """Cross entropy and dice loss in windows, and IoU regression, for the recipe `compact`.

    A click trains the mask of the smallest of its three windows that holds the target; a box or an
    earlier mask leaves no doubt what is meant and trains all three. Every window trains its
    predicted IoU.
    """

    bce_weight: float = 1.5
    """weight of the cross entropy, averaged over the window"""
    dice_weight: float = 1.0
    """weight of the dice loss"""
    iou_weight: float = 4.0
    """weight of the IoU regression"""
    choice_weight: float = 1.0
    """weight of the choice among three windows: one minus the expected IoU of a choice by predicted
    IoU"""
    choice_sharpness: float = 10.0
    """factor of the predicted IoU in the softmax of that choice"""
    smooth: float = 1.0
    """dice loss: added to numerator and denominator, in samples"""
    jaccard: bool = False
    """soft Jaccard loss in place of dice where a box or an earlier mask says what is meant"""

    def __post_init__(self) -> None:
        for name in ("bce_weight", "dice_weight", "iou_weight", "choice_weight"):
            check_range(f"WindowLoss.{name}", getattr(self, name), 0)
        for name in ("choice_sharpness", "smooth"):
            check_positive(f"WindowLoss.{name}", getattr(self, name))

    @property
    def supports_filling(self) -> bool:
        """The sums leave out masks that do not count."""
        return True

    def __call__(self, round: PromptRound, targets: Targets) -> LossSums:
        """Compute the loss of one round.

        Args:
            round: Prompts and predictions of M masks, in windows.
            targets: Ground truth of the same masks.

        Returns:
            Sums over the masks. The parts are unweighted; `iou` is the actual IoU of the prediction
            with the highest predicted IoU.

        Raises:
            GigamaskError: The model does not answer in windows.
        """
        import torch

        from gigamask.losses.iou import iou_prediction_loss, mask_iou
        from gigamask.types import LossSums

        prediction = round.prediction
        if prediction.in_window is None:
            raise GigamaskError(
                "--loss window is for models that answer in windows, such as the recipe compact; "
                "use --loss sam"
            )
        bce, dice, covered = self._mask_losses(round, targets)
        if self.jaccard:
            dice = torch.where(is_certain(round.prompts)[:, None], 2 * dice / (1 + dice), dice)
        weights = window_weights(covered, round.prompts)
        actual = mask_iou(prediction.logits, targets.foreground, targets.valid)
        predicted = prediction.iou_predictions
        terms = {
            "bce": (bce * weights).sum(1),
            "dice": (dice * weights).sum(1),
            "iou_head": iou_prediction_loss(predicted, actual, "mse").mean(1),
        }
        per_mask = (
            self.bce_weight * terms["bce"]
            + self.dice_weight * terms["dice"]
            + self.iou_weight * terms["iou_head"]
        )
        if self.choice_weight:
            wide = predicted.to(torch.promote_types(predicted.dtype, torch.float32))
            chosen = (self.choice_sharpness * wide).softmax(1)
            terms["choice"] = 1 - (chosen * actual).sum(1)
            per_mask = per_mask + self.choice_weight * terms["choice"]
        parts = {**terms, "iou": actual.gather(1, round.best_index[:, None])[:, 0]}
        return LossSums(
            loss=targets.total(per_mask),
            count=targets.count,
            parts={name: targets.total(part.detach()) for name, part in parts.items()},
            per_mask=per_mask,
        )

    def _mask_losses(
        self, round: PromptRound, targets: Targets
    ) -> tuple[Float[Tensor, "M K"], Float[Tensor, "M K"], Float[Tensor, "M K"]]:
        """Return cross entropy, dice loss and the covered part of the mask, of each window."""
        import torch
        from torch.nn import functional

        from gigamask.masks.devices import constant
        from gigamask.masks.windows import sample_per_window, sampling_matrices

        answer = round.prediction.in_window
        assert answer is not None
        shape, samples = answer.logits.shape[:2], answer.logits.shape[-1]
        dtype = torch.promote_types(answer.logits.dtype, torch.float32)
        cell = constant(targets.cell_xy * 2, answer.windows.device, dtype)
        windows = answer.windows.flatten(0, 1).to(dtype) / cell
        height, width = targets.masks.shape[1:]
        matrices = sampling_matrices(windows, (height, width), samples)
        inside = (targets.masks * targets.valid).to(dtype)
        maps = (inside, targets.valid.to(dtype))
        target, valid = (sample_per_window(each, matrices, shape[1]) for each in maps)
        logits = answer.logits.flatten(0, 1).to(dtype)
        target = target / valid.clamp(min=1e-6)
        losses = functional.binary_cross_entropy_with_logits(
            logits, target, weight=valid, reduction="none"
        )
        bce = losses.sum((1, 2)) / valid.sum((1, 2)).clamp(min=1)
        probability = torch.sigmoid(logits) * valid
        overlap = (probability * target).sum((1, 2))
        total = probability.sum((1, 2)) + (target * valid).sum((1, 2))
        dice = 1 - (2 * overlap + self.smooth) / (total + self.smooth)
        # Area inside a window in cells: samples may overlap where they are smaller than a cell.
        rows, columns = ((each.amax(1) > 0).to(dtype).unflatten(0, shape) for each in matrices)
        areas = inside.sum((1, 2)).clamp(min=1e-6)
        covered = (rows @ inside * columns).sum(2) / areas[:, None]
        return bce.unflatten(0, shape), dice.unflatten(0, shape), covered


def window_weights(covered: Float[Tensor, "M K"], prompts: Prompts) -> Float[Tensor, "M K"]:
    """Return the weight of each window's mask losses, which add up to 1 for each mask.

    Args:
        covered: Part of the mask that lies in each window, from the smallest window to the largest.
        prompts: The prompts of the masks.
    """
    import torch
    from torch.nn import functional

    count = covered.shape[1]
    holds = covered >= COVERED
    holds = torch.cat([holds[:, :-1], torch.ones_like(holds[:, -1:])], 1)
    smallest = functional.one_hot(holds.long().argmax(1), count).to(covered.dtype)
    return torch.where(is_certain(prompts)[:, None], 1 / count, smallest)


def is_certain(prompts: Prompts) -> Bool[Tensor, "M"]:
    """Return whether a box or an earlier mask leaves no doubt what each prompt means."""
    import torch

    certain = prompts.has_box
    if prompts.masks is not None:
        given = prompts.has_mask_prompt
        certain = certain | (torch.ones_like(certain) if given is None else given)
    return certain
