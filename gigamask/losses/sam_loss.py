"""SAM's objective: a round and the truth enter, sums over masks and their count leave. A value, so torch is imported only when it acts.

Not here: the formulas (`mask`, `quality`), places and pixels (`points`, `pixels`), which masks are trained on (`mining`), the
division by the count of all ranks (`train.step`).
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from functools import reduce
from typing import TYPE_CHECKING, Literal, get_args

from gigamask.errors import GigamaskError, check_range
from gigamask.interfaces import Loss

if TYPE_CHECKING:
    from jaxtyping import Bool, Float
    from torch import Tensor

    from gigamask.types import LossSums, PromptRound, Targets

MaskSupervision = Literal["best", "all", "single"]
IouSupervision = Literal["best", "all"]
IouLoss = Literal["mse", "l1"]


@dataclass(frozen=True)
class SamLoss(Loss):
    """Focal, dice and IoU regression, 20 : 1 : 1, of the answer that is right for each mask (Kirillov et al. 2023, section 3 and appendix A).

    Which logits and targets they see, and so the resolution, is the round's and the truth's, or with `points` some places of theirs. The paper does
    not state alpha, gamma and the smoothing; they are those of SAM 2's released training code. Nothing compares masks with each other, so masks in
    parts, over micro-batches and processes, add up to all.
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
    mask_supervision: MaskSupervision = "best"
    """Which of a mask's answers learn the mask: the one of the lowest mask loss, all (their mean), or the first."""
    iou_supervision: IouSupervision = "best"
    """Whose predicted IoU learns: the answer's that `supervise` singles out (the best where it is "all"), or all answers' (their mean). With "single"
    take "all": the answer is chosen by predicted IoU, which two of three would never learn."""
    iou_loss: IouLoss = "mse"
    """The IoU head's regression: squared error as in SAM, or absolute error as in SAM 2."""
    num_points: int = 0
    """Compute focal and dice at so many places of each mask and answer, as PointRend does; 0 for all cells. The literature takes 12,544."""
    oversample_ratio: float = 3.0
    """With points: how many times as many places are looked at to find the uncertain ones."""
    importance_sample_ratio: float = 0.75
    """With points: which share of them has the smallest absolute logits among the places looked at; the others lie anywhere."""
    ohem_pixel_ratio: float | None = None
    """Hard pixel mining: the focal loss is the mean over this hardest share of each answer's pixels or points; dice sees all. None for all pixels."""
    ohem_min_pixels: int = 100_000
    """With pixel_share: keep at least so many pixels, or all where there are fewer: every one of a 256 x 256 grid or of 12,544 points."""

    def __post_init__(self) -> None:
        for name in ("focal_weight", "dice_weight", "iou_weight", "gamma", "num_points", "ohem_min_pixels"):
            check_range(f"SamLoss.{name}", getattr(self, name), 0, None)
        for name in ("alpha", "importance_sample_ratio"):
            check_range(f"SamLoss.{name}", getattr(self, name), 0, 1)
        check_range("SamLoss.oversample_ratio", self.oversample_ratio, 1, None)
        if not self.smooth > 0:
            raise GigamaskError(
                f"SamLoss.smooth is {self.smooth}, it must be above 0, or an empty mask has no dice; give another value"
            )
        if self.ohem_pixel_ratio is not None and not 0 < self.ohem_pixel_ratio <= 1:
            raise GigamaskError(
                f"SamLoss.ohem_pixel_ratio is {self.ohem_pixel_ratio}, it must be above 0 and at most 1; give another value, or None for all pixels"
            )
        for name, choices in (
            ("mask_supervision", MaskSupervision),
            ("iou_supervision", IouSupervision),
            ("iou_loss", IouLoss),
        ):
            if getattr(self, name) not in get_args(choices):
                raise GigamaskError(
                    f"SamLoss.{name} is {getattr(self, name)!r}, it must be one of {', '.join(get_args(choices))}; choose one"
                )

    @property
    def num_uniforms(self) -> int:
        """One pair of uniform numbers of each mask moves its points."""
        return int(self.num_points > 0)

    def __call__(self, round: PromptRound, targets: Targets) -> LossSums:
        """Returns the sums of one round; the parts are unweighted, and `iou` is the actual IoU of the answer that goes on."""
        import torch

        from gigamask.losses.iou import actual_iou, iou_regression
        from gigamask.types import LossSums

        logits = round.prediction.logits
        terms = self._terms(round, targets)
        weights = {name: self._weight(name) for name in terms}
        actual = actual_iou(logits, targets.foreground, targets.valid)
        head_each = iou_regression(round.prediction.iou_predictions, actual, self.iou_loss)

        rows = torch.arange(len(logits), device=logits.device)
        best = _weighted_sum(terms, weights).detach().argmin(1)
        picked = torch.zeros_like(best) if self.mask_supervision == "single" else best
        every = self.mask_supervision == "all"
        chosen = {
            name: each.mean(1) if every else each[rows, picked] for name, each in terms.items()
        }
        head_loss = head_each.mean(1) if self.iou_supervision == "all" else head_each[rows, picked]
        by_mask = _weighted_sum(chosen, weights) + self.iou_weight * head_loss
        parts = {**chosen, "iou_head": head_loss, "iou": actual[rows, round.best_index]}
        return LossSums(
            loss=by_mask.sum(),
            count=torch.full((), float(len(logits)), device=logits.device),
            parts={name: each.detach().sum() for name, each in parts.items()},
            per_mask=by_mask,
        )

    def mask_losses(
        self,
        logits: Float[Tensor, "M K H W"],
        targets: Bool[Tensor, "M H W"] | Float[Tensor, "M H W"],
        valid: Bool[Tensor, "M H W"],
    ) -> dict[str, Float[Tensor, "M K"]]:
        """Return the terms of the mask loss; override it to swap or add terms.

        Args:
            logits: mask logits of M masks with K answers each, over all cells; with `points`
                each answer is a mask of its own with one answer and one row of cells.
            targets: the right masks, or each cell's covered share.
            valid: false in the padding, which must not count.

        Returns:
            Each term's loss per mask and answer, by name. The field `NAME_weight` is its weight;
            a term without such a field has weight 1.
        """
        from gigamask.losses.focal_dice import dice, focal

        share = 1.0 if self.ohem_pixel_ratio is None else self.ohem_pixel_ratio
        return {
            "focal": focal(
                logits, targets, valid, self.alpha, self.gamma, share, self.ohem_min_pixels
            ),
            "dice": dice(logits, targets, valid, self.smooth),
        }

    def _weight(self, name: str) -> float:
        return getattr(self, f"{name}_weight", 1.0)

    def _terms(self, round: PromptRound, targets: Targets) -> dict[str, Float[Tensor, "M K"]]:
        """Returns the terms of each answer, over all cells or at points."""
        from gigamask.losses.points import sample_points

        logits, masks, valid = round.prediction.logits, targets.masks, targets.valid
        answers = logits.shape[:2]
        if self.num_points:
            if targets.shift is None:
                raise GigamaskError(
                    f"SamLoss.points is {self.num_points}, but the truth has no shift to place them by; fill Truth.shift, or set points to 0"
                )
            places = sample_points(
                round.prediction.low_res_logits,
                targets,
                round.index,
                self.num_points,
                self.oversample_ratio,
                self.importance_sample_ratio,
            )
            # Each answer has places of its own, so it becomes a mask of one answer and one row of cells.
            logits, masks, valid = (
                places.logits.view(-1, 1, 1, self.num_points),
                *(each.view(-1, 1, self.num_points) for each in places[1:]),
            )
        return {
            name: loss.view(answers)
            for name, loss in self.mask_losses(logits, masks, valid).items()
        }


def _weighted_sum(terms: dict[str, Tensor], weights: dict[str, float]) -> Tensor:
    """Returns the sum of the terms, each times its weight."""
    return reduce(operator.add, (weights[name] * term for name, term in terms.items()))
