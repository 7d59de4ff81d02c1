"""Focal loss and dice loss of mask logits, ignoring the padding, with hard pixel mining.

Targets are bool or the covered fraction of each cell. Both losses save only the logits for the
backward pass and recompute the rest there; plain autograd would save about ten maps of that size.
They are computed in float32 (float64 for float64 logits), even under autocast.
"""

import math

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F


def focal_loss(
    logits: Float[Tensor, "M K H W"],
    targets: Bool[Tensor, "M H W"] | Float[Tensor, "M H W"],
    valid: Bool[Tensor, "M H W"],
    alpha: float = 0.25,
    gamma: float = 2.0,
    ohem_ratio: float = 1.0,
    ohem_min_pixels: int = 0,
) -> Float[Tensor, "M K"]:
    """Compute the focal loss, averaged over valid pixels.

    It is `a (1 - p_t)^gamma BCE(x, t)` with `a = alpha t + (1 - alpha)(1 - t)` and
    `p_t = p t + (1 - p)(1 - t)`; for t of 0 or 1, it is equation 5 of Lin et al. 2017.

    Args:
        logits: K predictions for each of M masks.
        targets: Masks, or the covered fraction of each cell in [0, 1].
        valid: False in the padding.
        alpha: Weight of the foreground; the background has 1 - alpha.
        gamma: Exponent.
        ohem_ratio: Average only over this fraction of the pixels, those with the highest loss
            (`ohem_pixels`); a bool map of them is saved for the backward pass.
        ohem_min_pixels: Minimum number of pixels to average.

    Returns:
        The loss of each mask and prediction.
    """
    return _FocalLoss.apply(logits, targets, valid, alpha, gamma, ohem_ratio, ohem_min_pixels)


def dice_loss(
    logits: Float[Tensor, "M K H W"],
    targets: Bool[Tensor, "M H W"] | Float[Tensor, "M H W"],
    valid: Bool[Tensor, "M H W"],
    smooth: float = 1.0,
) -> Float[Tensor, "M K"]:
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
    return _DiceLoss.apply(logits, targets, valid, smooth)


def ohem_pixels(
    losses: Float[Tensor, "M K H W"], valid: Bool[Tensor, "M 1 H W"], ratio: float, min_pixels: int
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


class _FocalLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx,
        logits: Tensor,
        targets: Tensor,
        valid: Tensor,
        alpha: float,
        gamma: float,
        ohem_ratio: float,
        ohem_min_pixels: int,
    ) -> Float[Tensor, "M K"]:
        x, t, ignored = _promote(logits, targets, valid.unsqueeze(1))
        error = _error(torch.sigmoid(x), t)
        loss = _cross_entropy(x, t).mul_(error.pow_(gamma)).mul_(_alpha_weight(t, alpha))
        del error
        kept = valid.unsqueeze(1)
        if ohem_ratio < 1:
            kept = ohem_pixels(loss, kept, ohem_ratio, ohem_min_pixels)
            ignored = ~kept
        ctx.save_for_backward(logits, targets, kept)
        ctx.alpha, ctx.gamma = alpha, gamma
        return loss.masked_fill_(ignored, 0).sum((2, 3)) / _count(kept)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Float[Tensor, "M K"]) -> tuple[Tensor | None, ...]:  # pyrefly: ignore[bad-override]
        logits, targets, kept = ctx.saved_tensors
        x, t, ignored = _promote(logits, targets, kept)
        p = torch.sigmoid(x)
        error = _error(p, t).clamp_(min=torch.finfo(x.dtype).tiny)
        slope = (
            _cross_entropy(x, t)
            .mul_(p)
            .mul_(torch.sigmoid(-x))
            .mul_(torch.rsub(t, 1, alpha=2).mul_(ctx.gamma))
        )
        slope.addcmul_(error, p.sub_(t)).mul_(error.pow_(ctx.gamma - 1))
        slope.mul_(_alpha_weight(t, ctx.alpha))
        slope.masked_fill_(ignored, 0).mul_((grad / _count(kept))[:, :, None, None])
        return slope.to(logits.dtype), None, None, None, None, None, None


class _DiceLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx, logits: Tensor, targets: Tensor, valid: Tensor, smooth: float
    ) -> Float[Tensor, "M K"]:
        x, t, ignored = _promote(logits, targets, valid.unsqueeze(1))
        p = torch.sigmoid(x).masked_fill_(ignored, 0)
        inside = t.masked_fill(ignored, 0)
        total = p.sum((2, 3)) + inside.sum((2, 3)) + smooth
        overlap = 2 * p.mul_(inside).sum((2, 3)) + smooth
        ctx.save_for_backward(logits, targets, valid, overlap, total)
        return 1 - overlap / total

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Float[Tensor, "M K"]) -> tuple[Tensor | None, ...]:  # pyrefly: ignore[bad-override]
        logits, targets, valid, overlap, total = ctx.saved_tensors
        x, t, ignored = _promote(logits, targets, valid.unsqueeze(1))
        slope = torch.sigmoid(x)
        slope.mul_(torch.sigmoid(-x))
        constant, per_target = grad * overlap / total**2, -2 * grad / total
        slope.mul_(torch.addcmul(constant[:, :, None, None], per_target[:, :, None, None], t))
        return slope.masked_fill_(ignored, 0).to(logits.dtype), None, None, None


def _promote(
    logits: Tensor, targets: Tensor, kept: Tensor
) -> tuple[Float[Tensor, "M K H W"], Float[Tensor, "M 1 H W"], Bool[Tensor, "M _ H W"]]:
    """Return logits and targets in float32 or float64, and the pixels that are ignored."""
    dtype = torch.promote_types(logits.dtype, torch.float32)
    return logits.to(dtype), targets.to(dtype).unsqueeze(1), ~kept


def _error(p: Float[Tensor, "M K H W"], t: Float[Tensor, "M 1 H W"]) -> Float[Tensor, "M K H W"]:
    """Return `1 - p_t`."""
    return torch.addcmul(t, p, torch.rsub(t, 1, alpha=2))


def _cross_entropy(
    x: Float[Tensor, "M K H W"], t: Float[Tensor, "M 1 H W"]
) -> Float[Tensor, "M K H W"]:
    return torch.mul(x, 1 - t).sub_(F.logsigmoid(x))


def _alpha_weight(t: Float[Tensor, "M 1 H W"], alpha: float) -> Float[Tensor, "M 1 H W"]:
    return (t * (2 * alpha - 1)).add_(1 - alpha)


def _count(kept: Bool[Tensor, "M k H W"]) -> Float[Tensor, "M k"]:
    """Return the number of kept pixels, at least 1 so that an empty mask has loss 0."""
    return kept.sum((2, 3)).clamp(min=1).float()
