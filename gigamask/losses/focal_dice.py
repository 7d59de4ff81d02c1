"""Focal loss and dice loss of mask logits, ignoring the padding, with hard pixel mining.

Targets are bool or the covered fraction of each cell. The losses save only logits and targets for
the backward pass and recompute the rest there; plain autograd would save about ten maps of that
size. They are computed in float32 (float64 for float64 logits), even under autocast.
"""

import math

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from gigamask.types import Masks

MaskLogits = Float[Tensor, "M K H W"]
TargetMasks = Masks | Float[Tensor, "M H W"]
PerOutput = Float[Tensor, "M K"]
PADDING_LOGIT = -1e4
"""Logit whose probability and loss are exactly 0, in float32 and float64."""
EXACT_SOFTPLUS = 40.0
"""Logit from which log(1 + exp(x)) is x in float64."""


def focal_dice_losses(
    logits: MaskLogits,
    targets: TargetMasks,
    valid: Masks,
    alpha: float = 0.25,
    gamma: float = 2.0,
    smooth: float = 1.0,
    ohem_ratio: float = 1.0,
    ohem_min_pixels: int = 0,
) -> tuple[PerOutput, PerOutput]:
    """Compute focal loss and dice loss together, which share most of their maps.

    Args:
        logits: K predictions for each of M masks.
        targets: Masks, or the covered fraction of each cell in [0, 1]; 0 in the padding.
        valid: False in the padding.
        alpha: Weight of the foreground in the focal loss; the background has 1 - alpha.
        gamma: Exponent of the focal loss.
        smooth: Added to numerator and denominator of the dice loss, in pixels.
        ohem_ratio: Average the focal loss only over this fraction of the pixels, those with the
            highest loss (`ohem_pixels`); a bool map of them is saved for the backward pass.
        ohem_min_pixels: Minimum number of pixels to average.

    Returns:
        The focal loss and the dice loss of each mask and prediction.
    """
    options = alpha, gamma, smooth, ohem_ratio, ohem_min_pixels
    return _FocalDice.apply(logits, targets, valid, options)


def focal_loss(
    logits: MaskLogits,
    targets: TargetMasks,
    valid: Masks,
    alpha: float = 0.25,
    gamma: float = 2.0,
    ohem_ratio: float = 1.0,
    ohem_min_pixels: int = 0,
) -> PerOutput:
    """Compute the focal loss, averaged over valid pixels.

    It is `a (1 - p_t)^gamma BCE(x, t)` with `a = alpha t + (1 - alpha)(1 - t)` and
    `p_t = p t + (1 - p)(1 - t)`; for t of 0 or 1, it is equation 5 of Lin et al. 2017.

    Args:
        logits: K predictions for each of M masks.
        targets: Masks, or the covered fraction of each cell in [0, 1].
        valid: False in the padding.
        alpha: Weight of the foreground; the background has 1 - alpha.
        gamma: Exponent.
        ohem_ratio: Average only over this fraction of the pixels, those with the highest loss.
        ohem_min_pixels: Minimum number of pixels to average.

    Returns:
        The loss of each mask and prediction.
    """
    options = alpha, gamma, 1.0, ohem_ratio, ohem_min_pixels
    return focal_dice_losses(logits, targets.masked_fill(~valid, 0), valid, *options)[0]


def dice_loss(
    logits: MaskLogits, targets: TargetMasks, valid: Masks, smooth: float = 1.0
) -> PerOutput:
    """Compute the dice loss over valid pixels (Milletari et al. 2016, sums without squares).

    It is `1 - (2 sum p t + smooth) / (sum p + sum t + smooth)`.

    Args:
        logits: K predictions for each of M masks.
        targets: Masks, or the covered fraction of each cell in [0, 1].
        valid: False in the padding.
        smooth: Added to numerator and denominator, in pixels.

    Returns:
        The loss of each mask and prediction.
    """
    return focal_dice_losses(logits, targets.masked_fill(~valid, 0), valid, smooth=smooth)[1]


def ohem_pixels(
    losses: MaskLogits, valid: Bool[Tensor, "M 1 H W"], ratio: float, min_pixels: int
) -> Bool[Tensor, "M K H W"]:
    """Return the valid pixels with the highest loss in each mask and prediction.

    Pixels are ranked within each mask and prediction, so the result does not depend on the split
    into processes and micro-batches. Bootstrapped cross entropy: Wu, Shen and van den Hengel 2016
    (arXiv 1605.06885), there over the pixels of a micro-batch; Shrivastava et al. 2016.

    Args:
        losses: Loss of each pixel, compared in float32; NaN counts as the highest, so that it is
            not hidden. Ties are broken by position, row by row.
        valid: False in the padding.
        ratio: Fraction of the n valid pixels to keep, rounded up.
        min_pixels: Minimum number of pixels to keep, at most n.
    """
    cells = losses.shape[-2] * losses.shape[-1]
    if min_pixels >= cells or ratio == 1:
        return valid.expand_as(losses)
    max_kept = max(math.ceil(ratio * cells), min_pixels)
    ranks = to_sortable_int(losses.flatten(2)).masked_fill_(~valid.flatten(2), -1)
    counts = valid.sum((1, 2, 3))
    kept = (counts.double() * ratio).ceil().long().clamp(min=min_pixels).minimum(counts)
    last = (kept - 1).clamp(min=0)[:, None, None].expand(-1, losses.shape[1], 1)
    threshold = ranks.topk(max_kept, dim=2).values.gather(2, last)
    return (ranks >= threshold).view_as(losses) & valid


def to_sortable_int(values: Float[Tensor, "*rows n"]) -> Int64[Tensor, "*rows n"]:
    """Map values >= 0 to distinct integers in the same order; among ties, the first is largest."""
    # The bits of a non-negative float32 are ordered like the numbers; the sign is cleared because
    # NaN and zero may carry one.
    bits = values.float().contiguous().view(torch.int32) & 0x7FFFFFFF
    positions = torch.arange(values.shape[-1] - 1, -1, -1, device=values.device)
    return (bits.long() << 32) | positions


class _FocalDice(torch.autograd.Function):
    """Both losses; saves logits and targets without padding, and recomputes the rest."""

    @staticmethod
    def forward(
        ctx,
        logits: Tensor,
        targets: Tensor,
        valid: Tensor,
        options: tuple[float, float, float, float, int],
    ) -> tuple[PerOutput, PerOutput]:
        alpha, gamma, smooth, ohem_ratio, ohem_min_pixels = options
        dtype, kept = torch.promote_types(logits.dtype, torch.float32), valid.unsqueeze(1)
        # In the padding, probability, target and both losses are exactly 0.
        x = torch.where(kept, logits.to(dtype), PADDING_LOGIT)
        t = targets.to(dtype).unsqueeze(1)
        p, loss, error = _probability_loss_error(x, t)
        loss.mul_(error.pow_(gamma))
        del error
        background, foreground = 1 - alpha, 2 * alpha - 1
        if ohem_ratio < 1:
            weighted = loss * (t * foreground + background)
            kept = ohem_pixels(weighted, kept, ohem_ratio, ohem_min_pixels)
            loss.masked_fill_(~kept, 0)
        count = kept.sum((2, 3)).clamp(min=1).to(dtype)  # an empty mask has loss 0
        focal_sum = (loss.sum((2, 3)) * background).add_(loss.mul_(t).sum((2, 3)), alpha=foreground)
        del loss
        total = p.sum((2, 3)) + t.sum((2, 3)) + smooth
        overlap = torch.rsub(p.mul_(t).sum((2, 3)), smooth, alpha=-2)
        ctx.save_for_backward(x, t, kept if ohem_ratio < 1 else None, count, overlap, total)
        ctx.alpha, ctx.gamma, ctx.dtype = alpha, gamma, logits.dtype
        ctx.set_materialize_grads(False)
        return focal_sum / count, 1 - overlap / total

    @staticmethod
    @once_differentiable
    def backward(  # pyrefly: ignore[bad-override]
        ctx, grad_focal: Tensor | None, grad_dice: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        x, t, kept, count, overlap, total = ctx.saved_tensors
        alpha, gamma, slope = ctx.alpha, ctx.gamma, None
        if grad_focal is None:
            p = torch.sigmoid(x)
        else:
            p, loss, error = _probability_loss_error(x, t)
            slope = (p - t).mul_(error)
            slope.addcmul_(
                torch.ops.aten.sigmoid_backward(loss, p), torch.rsub(t, 1, alpha=2), value=gamma
            )
            del loss
            if gamma != 2:
                error.clamp_(min=torch.finfo(x.dtype).tiny).pow_(gamma - 1)
            slope.mul_(error)
            del error
            if kept is not None:
                slope.masked_fill_(~kept, 0)
            scale = (grad_focal / count)[:, :, None, None]
            slope.mul_(torch.addcmul(scale * (1 - alpha), scale, t, value=2 * alpha - 1))
        if grad_dice is not None:
            per_overlap = grad_dice / total
            constant = (per_overlap * overlap / total)[:, :, None, None]
            of_dice = torch.ops.aten.sigmoid_backward(
                torch.addcmul(constant, per_overlap[:, :, None, None], t, value=-2), p
            )
            slope = of_dice if slope is None else slope.add_(of_dice)
        return None if slope is None else slope.to(ctx.dtype), None, None, None


def _probability_loss_error(
    x: MaskLogits, t: Float[Tensor, "M 1 H W"]
) -> tuple[MaskLogits, MaskLogits, MaskLogits]:
    """Return probabilities, binary cross entropy, and `1 - p_t`."""
    p = torch.sigmoid(x)
    loss = F.softplus(x, threshold=EXACT_SOFTPLUS).addcmul_(x, t, value=-1)
    return p, loss, torch.addcmul(t, p, torch.rsub(t, 1, alpha=2))
