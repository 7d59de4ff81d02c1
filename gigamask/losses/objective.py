"""SAM's objective: a round and the truth enter, sums over masks and their count leave. A value, so torch is imported only when it acts.

Not here: the formulas (`mask`, `quality`), the division by the count of all ranks (`train.step`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, get_args

from gigamask.faults import Fault
from gigamask.seams import Objective

if TYPE_CHECKING:
    from gigamask.contracts import Round, Terms, Truth

Supervise = Literal["best", "all", "single"]
SuperviseIou = Literal["best", "all"]
IouLoss = Literal["mse", "l1"]


@dataclass(frozen=True)
class MaskObjective(Objective):
    """Focal, dice and IoU regression, 20 : 1 : 1, of the answer that is right for each mask (Kirillov et al. 2023, section 3 and appendix A).

    Which logits and targets they see, and so the resolution, is the round's and the truth's. The paper does not state alpha, gamma and the
    smoothing; they are those of SAM 2's released training code.
    """

    focal_weight: float = 20.0
    """The weight of the focal loss."""
    dice_weight: float = 1.0
    """The weight of the dice loss."""
    iou_weight: float = 1.0
    """The weight of the IoU head's regression."""
    alpha: float = 0.25
    """The focal loss's weight of foreground pixels; background has one minus this."""
    gamma: float = 2.0
    """The focal loss's exponent: how much less a pixel counts that is right already; 0 gives cross entropy."""
    smooth: float = 1.0
    """Added above and below the dice fraction, in pixels."""
    supervise: Supervise = "best"
    """Which of a mask's answers learn the mask: the one of the lowest mask loss, all (their mean), or the first."""
    iou_supervise: SuperviseIou = "best"
    """Whose predicted IoU learns: the answer's that `supervise` singles out (the best where it is "all"), or all answers' (their mean)."""
    iou_loss: IouLoss = "mse"
    """The IoU head's regression: squared error as in SAM, or absolute error as in SAM 2."""

    def __post_init__(self) -> None:
        for name in ("focal_weight", "dice_weight", "iou_weight", "gamma"):
            if getattr(self, name) < 0:
                raise Fault(f"MaskObjective.{name} is {getattr(self, name)}, it must be at least 0; give another value")
        if self.smooth <= 0:
            raise Fault(f"MaskObjective.smooth is {self.smooth}, it must be above 0, or an empty mask has no dice; give another value")
        if not 0 <= self.alpha <= 1:
            raise Fault(f"MaskObjective.alpha is {self.alpha}, it must be between 0 and 1; give another value")
        for name, choices in (("supervise", Supervise), ("iou_supervise", SuperviseIou), ("iou_loss", IouLoss)):
            if getattr(self, name) not in get_args(choices):
                raise Fault(f"MaskObjective.{name} is {getattr(self, name)!r}, it must be one of {', '.join(get_args(choices))}; choose one")

    def __call__(self, round: Round, truth: Truth) -> Terms:
        """Returns the sums of one round; the parts are unweighted, and `iou` is the actual IoU of the answer that goes on."""
        import torch

        from gigamask.contracts import Terms
        from gigamask.losses.mask import dice, focal
        from gigamask.losses.quality import actual_iou, regression

        logits = round.prediction.logits
        focal_each = focal(logits, truth.masks, truth.valid, self.alpha, self.gamma)
        dice_each = dice(logits, truth.masks, truth.valid, self.smooth)
        actual = actual_iou(logits, truth.foreground, truth.valid)
        head_each = regression(round.prediction.iou, actual, self.iou_loss)

        rows = torch.arange(len(logits), device=logits.device)
        best = (self.focal_weight * focal_each + self.dice_weight * dice_each).detach().argmin(1)
        picked = torch.zeros_like(best) if self.supervise == "single" else best
        every = self.supervise == "all"
        focal_loss, dice_loss = (each.mean(1) if every else each[rows, picked] for each in (focal_each, dice_each))
        head_loss = head_each.mean(1) if self.iou_supervise == "all" else head_each[rows, picked]
        by_mask = self.focal_weight * focal_loss + self.dice_weight * dice_loss + self.iou_weight * head_loss
        parts = {"focal": focal_loss, "dice": dice_loss, "iou_head": head_loss, "iou": actual[rows, round.chosen]}
        return Terms(
            loss=by_mask.sum(),
            count=torch.full((), float(len(logits)), device=logits.device),
            parts={name: each.detach().sum() for name, each in parts.items()},
            by_mask=by_mask,
        )
