"""SAM's loss: focal loss, dice loss and IoU regression, summed over masks.

Imports torch only in methods, so that recipes need no torch.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from functools import reduce
from typing import TYPE_CHECKING, Literal, get_args

from gigamask.errors import GigamaskError, check_choice, check_positive, check_range
from gigamask.interfaces import Loss

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int64
    from torch import Tensor

    from gigamask.types import LossSums, PromptRound, Targets

MaskSupervision = Literal["best", "all", "single"]
IouSupervision = Literal["best", "all"]
IouLoss = Literal["mse", "l1"]


@dataclass(frozen=True)
class SamLoss(Loss):
    """Focal loss, dice loss and IoU regression, 20 : 1 : 1, of the best prediction of each mask.

    Kirillov et al. 2023, section 3 and appendix A. Losses are computed at the resolution of the
    round's logits and targets, or at points if `num_points` is set. The paper does not state alpha,
    gamma and the smoothing; the defaults are those of SAM 2's released training code. Masks are
    independent, so sums over micro-batches and processes can be added.
    """

    focal_weight: float = 20.0
    """weight of the focal loss"""
    dice_weight: float = 1.0
    """weight of the dice loss"""
    iou_weight: float = 1.0
    """weight of the IoU regression"""
    alpha: float = 0.25
    """focal loss: weight of foreground pixels; background pixels have 1 - alpha"""
    gamma: float = 2.0
    """focal loss: exponent that reduces the weight of easy pixels; 0 gives cross entropy"""
    smooth: float = 1.0
    """dice loss: added to numerator and denominator, in pixels"""
    mask_supervision: MaskSupervision = "best"
    """predictions to supervise with the mask: best (lowest loss), all (their mean), or single (the
    first)"""
    iou_supervision: IouSupervision = "best"
    """predictions to supervise with their IoU: best (the one chosen by `mask_supervision`; the
    lowest loss if that is "all"), or all (their mean); with mask_supervision "single" use "all",
    since masks are chosen by predicted IoU, which the other two would never learn"""
    iou_loss: IouLoss = "mse"
    """IoU regression: squared error as in SAM, or absolute error as in SAM 2"""
    num_points: int = 0
    """compute focal and dice loss at this number of points per prediction, as PointRend does
    (usually 12544); 0 uses all pixels"""
    oversample_ratio: float = 3.0
    """candidate points per sampled point, from which the uncertain ones are chosen"""
    importance_sample_ratio: float = 0.75
    """fraction of the points chosen for their small absolute logits; the others are uniform"""
    ohem_pixel_ratio: float | None = None
    """hard pixel mining: average the focal loss over this fraction of the hardest pixels or points;
    None uses all"""
    ohem_min_pixels: int = 100_000
    """minimum number of pixels kept by hard pixel mining; the default keeps all of a 256 x 256 grid
    or of 12544 points"""

    def __post_init__(self) -> None:
        for name in (
            "focal_weight",
            "dice_weight",
            "iou_weight",
            "gamma",
            "num_points",
            "ohem_min_pixels",
        ):
            check_range(f"SamLoss.{name}", getattr(self, name), 0)
        for name in ("alpha", "importance_sample_ratio"):
            check_range(f"SamLoss.{name}", getattr(self, name), 0, 1)
        check_range("SamLoss.oversample_ratio", self.oversample_ratio, 1)
        check_positive("SamLoss.smooth", self.smooth)  # for the dice of empty masks
        if self.ohem_pixel_ratio is not None and not 0 < self.ohem_pixel_ratio <= 1:
            raise GigamaskError(
                "SamLoss.ohem_pixel_ratio must be above 0 and at most 1, or None for all pixels "
                f"(got {self.ohem_pixel_ratio})"
            )
        for name, choices in (
            ("mask_supervision", MaskSupervision),
            ("iou_supervision", IouSupervision),
            ("iou_loss", IouLoss),
        ):
            check_choice(f"SamLoss.{name}", getattr(self, name), get_args(choices))

    @property
    def supports_filling(self) -> bool:
        """The sums leave out masks that do not count."""
        return True

    @property
    def num_uniforms(self) -> int:
        """Pairs of uniform numbers per mask that shift its points: 1, or 0 without points."""
        return int(self.num_points > 0)

    def __call__(self, round: PromptRound, targets: Targets) -> LossSums:
        """Compute the loss of one round.

        Args:
            round: Prompts and predictions of M masks.
            targets: Ground truth of the same masks.

        Returns:
            Sums over the masks. The parts are unweighted; `iou` is the actual IoU of the prediction
            with the highest predicted IoU.
        """
        import torch

        from gigamask.losses.iou import iou_prediction_loss, mask_iou
        from gigamask.types import LossSums

        logits = round.prediction.logits
        terms = self._terms(round, targets)
        weights = {name: self._weight(name) for name in terms}
        actual = mask_iou(logits, targets.foreground, targets.valid)
        iou_losses = iou_prediction_loss(round.prediction.iou_predictions, actual, self.iou_loss)

        index = None
        if self.mask_supervision != "single" and logits.shape[1] > 1:
            index = _weighted_sum(terms, weights).detach().argmin(1)
        mask_losses = {
            name: term.mean(1) if self.mask_supervision == "all" else _select(term, index)
            for name, term in terms.items()
        }
        use_all = self.iou_supervision == "all"
        iou_loss = iou_losses.mean(1) if use_all else _select(iou_losses, index)
        per_mask = _weighted_sum(mask_losses, weights) + _weighted(iou_loss, self.iou_weight)
        iou = actual.squeeze(1) if logits.shape[1] == 1 else _select(actual, round.best_index)
        parts = {**mask_losses, "iou_head": iou_loss, "iou": iou}
        return LossSums(
            loss=targets.total(per_mask),
            count=targets.count,
            parts=dict(
                zip(parts, targets.total(torch.stack(list(parts.values())).detach()), strict=True)
            ),
            per_mask=per_mask,
        )

    def mask_losses(
        self,
        logits: Float[Tensor, "M K H W"],
        targets: Float[Tensor, "M H W"],
        valid: Bool[Tensor, "M H W"],
    ) -> dict[str, Float[Tensor, "M K"]]:
        """Return the terms of the mask loss; override it to swap or add terms.

        Args:
            logits: K predictions for each of M masks, over all cells; with `num_points`, each
                prediction is a separate mask with one prediction and one row of cells.
            targets: The covered fraction of each cell, 0 or 1 for hard targets, 0 in the padding.
            valid: False in the padding, which must be ignored.

        Returns:
            Loss of each mask and prediction by name of the term. The field `NAME_weight` is the
            weight of a term; a term without that field has weight 1.
        """
        from gigamask.losses.focal_dice import focal_dice_losses

        focal, dice = focal_dice_losses(
            logits,
            targets,
            valid,
            self.alpha,
            self.gamma,
            self.smooth,
            1.0 if self.ohem_pixel_ratio is None else self.ohem_pixel_ratio,
            self.ohem_min_pixels,
        )
        return {"focal": focal, "dice": dice}

    def _weight(self, name: str) -> float:
        return getattr(self, f"{name}_weight", 1.0)

    def _terms(self, round: PromptRound, targets: Targets) -> dict[str, Float[Tensor, "M K"]]:
        """Return the terms of each prediction, over all cells or at points."""
        import torch

        logits, masks, valid = round.prediction.logits, targets.fractions, targets.valid
        # Once for all terms, forward and backward.
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        shape = logits.shape[:2]
        if self.num_points:
            if targets.shift is None:
                raise GigamaskError(
                    f"SamLoss.num_points is {self.num_points}, but Targets.shift is None; set "
                    "Targets.shift, or num_points to 0"
                )
            from gigamask.losses.points import sample_points

            points = sample_points(
                round.prediction.low_res_logits,
                targets,
                round.index,
                self.num_points,
                self.oversample_ratio,
                self.importance_sample_ratio,
            )
            # Each prediction has its own points: it becomes a mask with one row of cells.
            logits = points.logits.view(-1, 1, 1, self.num_points)
            valid = points.valid.view(-1, 1, self.num_points)
            masks = points.targets.view(-1, 1, self.num_points).to(logits.dtype)
            masks = masks.masked_fill(~valid, 0)
        terms = self.mask_losses(logits, masks, valid)
        for name, term in terms.items():
            if term.shape != logits.shape[:2]:
                raise GigamaskError(
                    f"{type(self).__name__}.mask_losses: each term must have one value per mask "
                    f"and prediction, {[*logits.shape[:2]]} for logits of {[*logits.shape]} (got "
                    f"{name} of {[*term.shape]})"
                )
        return {name: term.view(shape) for name, term in terms.items()}


def _weighted_sum(terms: dict[str, Tensor], weights: dict[str, float]) -> Tensor:
    return reduce(operator.add, (_weighted(term, weights[name]) for name, term in terms.items()))


def _weighted(term: Tensor, weight: float) -> Tensor:
    return term if weight == 1 else weight * term


def _select(values: Float[Tensor, "M K"], index: Int64[Tensor, "M"] | None) -> Float[Tensor, "M"]:
    """Return the value of each mask at `index`, or the first one if it is None."""
    if values.shape[1] == 1:
        return values.squeeze(1)
    return values[:, 0] if index is None else values.gather(1, index[:, None]).squeeze(1)
