"""Mask losses: logits and targets enter, one number for each mask and answer leaves; padding has no part in it.

Targets are bool or the covered share of a cell. Both losses keep only the logits for the backward pass and compute the rest again there: plain
autograd would keep some ten maps as large. They work in float32 (float64 for float64 logits) whatever autocast says.

Not here: which answer is supervised and how the terms are weighed (`objective`), which pixels count (`pixels`), intersection over union (`quality`).
"""

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from gigamask.losses.ohem_pixels import ohem_pixels


def focal(
    logits: Float[Tensor, "M K H W"],
    targets: Bool[Tensor, "M H W"] | Float[Tensor, "M H W"],
    valid: Bool[Tensor, "M H W"],
    alpha: float = 0.25,
    gamma: float = 2.0,
    share: float = 1.0,
    least: int = 0,
) -> Float[Tensor, "M K"]:
    """Returns the focal loss, mean over valid pixels: `a (1 - p_t)^gamma BCE(x, t)` with `a = alpha t + (1 - alpha)(1 - t)`.

    `p_t = p t + (1 - p)(1 - t)` for a target t in [0, 1], which for t of 0 or 1 is the loss of Lin et al. 2017, equation 5. With a `share` below 1
    the mean is over the pixels of the highest loss only (`pixels.hardest`), a bool map of which is kept for the backward pass.
    """
    return _Focal.apply(logits, targets, valid, alpha, gamma, share, least)


def dice(
    logits: Float[Tensor, "M K H W"],
    targets: Bool[Tensor, "M H W"] | Float[Tensor, "M H W"],
    valid: Bool[Tensor, "M H W"],
    smooth: float = 1.0,
) -> Float[Tensor, "M K"]:
    """Returns the dice loss over valid pixels: `1 - (2 sum p t + smooth) / (sum p + sum t + smooth)` (Milletari et al. 2016, plain sums)."""
    return _Dice.apply(logits, targets, valid, smooth)


class _Focal(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx,
        logits: Tensor,
        targets: Tensor,
        valid: Tensor,
        alpha: float,
        gamma: float,
        share: float,
        least: int,
    ) -> Float[Tensor, "M K"]:
        x, t, outside = _maps(logits, targets, valid.unsqueeze(1))
        wrong = _wrong(torch.sigmoid(x), t)
        loss = _cross_entropy(x, t).mul_(wrong.pow_(gamma)).mul_(_balance(t, alpha))
        del wrong
        kept = valid.unsqueeze(1)
        if share < 1:
            kept = ohem_pixels(loss, kept, share, least)
            outside = ~kept
        ctx.save_for_backward(logits, targets, kept)
        ctx.alpha, ctx.gamma = alpha, gamma
        return loss.masked_fill_(outside, 0).sum((2, 3)) / _count(kept)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Float[Tensor, "M K"]) -> tuple[Tensor | None, ...]:  # pyrefly: ignore[bad-override]
        logits, targets, kept = ctx.saved_tensors
        x, t, outside = _maps(logits, targets, kept)
        p = torch.sigmoid(x)
        wrong = _wrong(p, t).clamp_(min=torch.finfo(x.dtype).tiny)
        slope = _cross_entropy(x, t).mul_(p).mul_(torch.sigmoid(-x)).mul_(ctx.gamma * (1 - 2 * t))
        slope.addcmul_(wrong, p.sub_(t)).mul_(wrong.pow_(ctx.gamma - 1)).mul_(
            _balance(t, ctx.alpha)
        )
        slope.masked_fill_(outside, 0).mul_((grad / _count(kept))[:, :, None, None])
        return slope.to(logits.dtype), None, None, None, None, None, None


class _Dice(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx, logits: Tensor, targets: Tensor, valid: Tensor, smooth: float
    ) -> Float[Tensor, "M K"]:
        x, t, outside = _maps(logits, targets, valid.unsqueeze(1))
        p = torch.sigmoid(x).masked_fill_(outside, 0)
        share = t.masked_fill(outside, 0)
        total = p.sum((2, 3)) + share.sum((2, 3)) + smooth
        overlap = 2 * p.mul_(share).sum((2, 3)) + smooth
        ctx.save_for_backward(logits, targets, valid, overlap, total)
        return 1 - overlap / total

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Float[Tensor, "M K"]) -> tuple[Tensor | None, ...]:  # pyrefly: ignore[bad-override]
        logits, targets, valid, overlap, total = ctx.saved_tensors
        x, t, outside = _maps(logits, targets, valid.unsqueeze(1))
        slope = torch.sigmoid(x)
        slope.mul_(torch.sigmoid(-x))
        constant, by_truth = grad * overlap / total**2, -2 * grad / total
        slope.mul_(torch.addcmul(constant[:, :, None, None], by_truth[:, :, None, None], t))
        return slope.masked_fill_(outside, 0).to(logits.dtype), None, None, None


def _maps(
    logits: Tensor, targets: Tensor, kept: Tensor
) -> tuple[Float[Tensor, "M K H W"], Float[Tensor, "M 1 H W"], Bool[Tensor, "M _ H W"]]:
    """Returns logits and targets as float32 or float64, and what does not count."""
    dtype = torch.promote_types(logits.dtype, torch.float32)
    return logits.to(dtype), targets.to(dtype).unsqueeze(1), ~kept


def _wrong(p: Float[Tensor, "M K H W"], t: Float[Tensor, "M 1 H W"]) -> Float[Tensor, "M K H W"]:
    """Returns `1 - p_t`."""
    return torch.addcmul(t, p, 1 - 2 * t)


def _cross_entropy(
    x: Float[Tensor, "M K H W"], t: Float[Tensor, "M 1 H W"]
) -> Float[Tensor, "M K H W"]:
    return F.logsigmoid(x).neg_().addcmul_(x, 1 - t)


def _balance(t: Float[Tensor, "M 1 H W"], alpha: float) -> Float[Tensor, "M 1 H W"]:
    return alpha * t + (1 - alpha) * (1 - t)


def _count(kept: Bool[Tensor, "M k H W"]) -> Float[Tensor, "M k"]:
    """Returns how many pixels count, at least 1 so that a mask without any costs nothing."""
    return kept.sum((2, 3)).clamp(min=1).float()
