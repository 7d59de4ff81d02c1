"""SAM's loss in one kernel, its gradient in another; each reads logits and targets once.

A program sums over all pixels of a mask, in a fixed order and in float32, and chooses among its
predictions. The formulas are those of `losses.focal_dice`; what is close to 0 keeps its digits.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl
from jaxtyping import Float
from torch import Tensor
from torch.autograd.function import once_differentiable

from gigamask.losses.class_loss import ClassLoss
from gigamask.losses.sam_loss import SamLoss
from gigamask.plugins.kernels.blocks import narrow
from gigamask.plugins.kernels.operators import contiguous, launch, parts, register, tuned
from gigamask.types import LossSums

if TYPE_CHECKING:
    from gigamask.types import PromptRound, Targets

MOST = 4
"""Most predictions of a mask."""
PARTS = "focal", "dice", "iou_head", "iou"


@triton.jit
def _pixels(tensors, mask, k, places, N, K: tl.constexpr):
    """Return logits of a prediction, targets, 0 in the padding, and what is no padding."""
    logits, masks, _, valid, _ = tensors
    inside = places < N
    kept = tl.load(valid + mask * N + places, inside, 0) != 0
    x = tl.load(logits + (mask * K + k) * N + places, inside, 0.0).to(tl.float32)
    target = tl.load(masks + mask * N + places, inside, 0).to(tl.float32)
    return x, tl.where(kept, target, 0.0), kept


@triton.jit
def _measures(x, target):
    """Return probabilities, 1 less these, binary cross entropy, and `1 - p_t`."""
    small = tl.exp(-tl.abs(x))
    wide = 1 + small
    p, rest = tl.where(x >= 0, 1.0, small) / wide, tl.where(x >= 0, small, 1.0) / wide
    # log(1 + small), also where 1 + small loses digits
    ratio = small / tl.where(wide > 1, wide - 1, 1.0)
    log = tl.where(wide > 1, tl.log(wide) * ratio, small)
    cross = tl.maximum(x, 0.0) - x * target + log
    return p, rest, cross, target * rest + (1 - target) * p


@triton.jit
def _sums(tensors, mask, k, N, alpha, K: tl.constexpr, BP: tl.constexpr):
    """Return sums over pixels: of focal losses, probabilities and targets, of the products of both,
    of no padding, and of the intersection and union of prediction and foreground."""
    zero = tl.zeros([BP], tl.float32)
    losses, p_sum, t_sum, shared, count, both, either = zero, zero, zero, zero, zero, zero, zero
    for start in range(0, N, BP):
        places = start + tl.arange(0, BP)
        x, target, kept = _pixels(tensors, mask, k, places, N, K)
        p, _, cross, error = _measures(x, target)
        weight = alpha * target + (1 - alpha) * (1 - target)
        losses += tl.where(kept, weight * error * error * cross, 0.0)
        p_sum, t_sum = p_sum + tl.where(kept, p, 0.0), t_sum + target
        shared, count = shared + p * target, count + tl.where(kept, 1.0, 0.0)
        own, positive = target > 0, kept & (x > 0)
        if tensors[2] is not None:
            own = kept & (tl.load(tensors[2] + mask * N + places, places < N, 0) != 0)
        both += tl.where(positive & own, 1.0, 0.0)
        either += tl.where(positive | own, 1.0, 0.0)
    p_total, t_total, overlap = tl.sum(p_sum, 0), tl.sum(t_sum, 0), tl.sum(shared, 0)
    intersection, union = tl.sum(both, 0), tl.sum(either, 0)
    return tl.sum(losses, 0), p_total, t_total, overlap, tl.sum(count, 0), intersection, union


@tuned(({"BP": 2048}, 8), ({"BP": 1024}, 8))
def _forward_kernel(tensors, found, numbers, S: tl.constexpr, BP: tl.constexpr):
    """Compute the loss of one mask, its parts, and by what its gradient is multiplied."""
    K: tl.constexpr = S[0]
    per_mask, of_parts, state = found
    N, alpha, smooth, focal_weight, dice_weight, iou_weight = numbers
    mask = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, 4)
    focal, total, overlap = tl.zeros([4], tl.float32), tl.full([4], 1.0, tl.float32), smooth
    actual, area = tl.zeros([4], tl.float32), 0.0
    for k in tl.static_range(K):
        losses, p, t, shared, count, both, either = _sums(tensors, mask, k, N, alpha, K, BP)
        area, is_own = tl.maximum(count, 1.0), column == k  # an empty mask has loss 0
        focal = tl.where(is_own, losses / area, focal)
        total = tl.where(is_own, p + t + smooth, total)
        overlap = tl.where(is_own, 2 * shared + smooth, overlap)
        iou = tl.where(either > 0, both / tl.maximum(either, 1.0), 1.0)
        actual = tl.where(is_own, iou, actual)
    exists, dice = column < K, 1 - overlap / total
    weighted = focal_weight * focal + dice_weight * dice
    chosen = 0 if S[1] == 2 else tl.argmin(tl.where(exists, weighted, float("inf")), 0)
    share, iou_share = tl.where(column == chosen, 1.0, 0.0), tl.where(column == chosen, 1.0, 0.0)
    if S[1] == 1:
        share = tl.where(exists, 1.0 / K, 0.0)
    if S[2] == 1:
        iou_share = tl.where(exists, 1.0 / K, 0.0)
    given = tl.load(tensors[4] + mask * K + column, exists, -float("inf")).to(tl.float32)
    best = tl.argmax(given, 0)
    difference = tl.where(exists, given - actual, 0.0)
    iou_losses, slope = difference * difference, 2 * difference
    if S[3] == 1:
        iou_losses = tl.abs(difference)
        slope = tl.where(difference > 0, 1.0, 0.0) - tl.where(difference < 0, 1.0, 0.0)
    iou_loss = tl.sum(iou_share * iou_losses, 0)
    loss = tl.sum(share * weighted, 0) + iou_weight * iou_loss
    tl.store(per_mask + mask, loss)
    masks = tl.num_programs(0)
    tl.store(of_parts + mask, tl.sum(share * focal, 0))
    tl.store(of_parts + masks + mask, tl.sum(share * dice, 0))
    tl.store(of_parts + 2 * masks + mask, iou_loss)
    tl.store(of_parts + 3 * masks + mask, tl.sum(tl.where(column == best, actual, 0.0), 0))
    state += mask * 16 + column
    tl.store(state, focal_weight * share / area)
    per_overlap = dice_weight * share / total
    tl.store(state + 4, -2 * per_overlap)
    tl.store(state + 8, per_overlap * overlap / total)
    tl.store(state + 12, iou_weight * iou_share * slope)


@tuned(({"BP": 2048}, 8), ({"BP": 1024}, 4))
def _backward_kernel(tensors, state, gradient, found, numbers, S: tl.constexpr, BP: tl.constexpr):
    """Compute the gradients of a block of pixels of one mask, and of its predicted IoU."""
    K: tl.constexpr = S[0]
    of_logits, of_predicted = found
    N, alpha, _, _, _, _ = numbers
    mask = tl.program_id(1).to(tl.int64)
    places, column = tl.program_id(0) * BP + tl.arange(0, BP), tl.arange(0, 4)
    given = tl.load(gradient + mask).to(tl.float32)
    for k in tl.static_range(K):
        x, target, kept = _pixels(tensors, mask, k, places, N, K)
        p, rest, cross, error = _measures(x, target)
        weight = alpha * target + (1 - alpha) * (1 - target)
        own_state = state + mask * 16 + k
        slope = error * (p - target) + 2 * (1 - 2 * target) * p * rest * cross
        slope *= tl.load(own_state) * weight * error
        slope += (tl.load(own_state + 8) + tl.load(own_state + 4) * target) * p * rest
        slope = tl.where(kept, slope * given, 0.0)
        of_k = of_logits + (mask * K + k) * N + places
        tl.store(of_k, narrow(slope, of_logits.dtype.element_ty), places < N)
    if tl.program_id(0) == 0:
        of_iou = tl.load(state + mask * 16 + 12 + column) * given
        into = of_predicted + mask * K + column
        tl.store(into, narrow(of_iou, of_predicted.dtype.element_ty), column < K)


def mask_loss(
    tensors: list[Tensor | None], numbers: list[float], choices: list[int]
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the loss of each mask, its parts, and by what its gradient is multiplied.

    Args:
        tensors: Logits, targets, foreground or None for targets of 0 and 1, what is no padding, and
            predicted IoU.
        numbers: Weight of the foreground, smoothing, weights of focal, dice and IoU loss.
        choices: Which predictions are supervised with masks and with IoU, and which IoU loss.
    """
    found, logits = _forward_shape(tensors), tensors[0]
    assert logits is not None
    launch(
        _forward_kernel,
        lambda _: (len(logits),),
        *(tuple(tensors), found, (logits[0, 0].numel(), *numbers)),
        S=(logits.shape[1], *choices),
    )
    return found


def _forward_shape(tensors: Any, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    wide, masks = torch.float32, len(tensors[0])
    shapes = (masks,), (len(PARTS), masks), (masks, 4, MOST)
    one, parts_of_it, state = (tensors[0].new_empty(shape, dtype=wide) for shape in shapes)
    return one, parts_of_it, state


def mask_loss_backward(
    tensors: list[Tensor | None], state: Tensor, gradient: Tensor, numbers: list[float]
) -> tuple[Tensor, Tensor]:
    """Return the gradients of logits and of predicted IoU.

    Args:
        tensors: What the forward pass had.
        state: By what the gradient is multiplied.
        gradient: Gradient of the loss of each mask.
        numbers: What the forward pass had.
    """
    found, logits = _backward_shape(tensors), tensors[0]
    assert logits is not None
    cells = logits[0, 0].numel()
    launch(
        _backward_kernel,
        lambda blocks: (parts(cells, blocks["BP"]), len(logits)),
        *(tuple(tensors), state, gradient, found, (cells, *numbers)),
        S=(logits.shape[1],),
    )
    return found


def _backward_shape(tensors: Any, *_: Any) -> tuple[Tensor, Tensor]:
    return torch.empty_like(tensors[0]), torch.empty_like(tensors[4])


FORWARD = register(mask_loss, _forward_shape, lambda *_: 0)
BACKWARD = register(mask_loss_backward, _backward_shape, lambda *_: 0)


class MaskLoss(torch.autograd.Function):
    """The loss of each mask, and its parts, which have no gradient; saves its inputs."""

    @staticmethod
    def forward(
        ctx, numbers: list[float], choices: list[int], *tensors: Tensor | None
    ) -> tuple[Float[Tensor, "M"], Float[Tensor, "parts M"]]:
        """Return loss and parts.

        Args:
            ctx: What the backward pass needs.
            numbers: As of `mask_loss`.
            choices: As of `mask_loss`.
            *tensors: As of `mask_loss`.
        """
        given = contiguous(*tensors)
        per_mask, of_parts, state = FORWARD(given, numbers, choices)
        ctx.save_for_backward(*given, state)
        ctx.numbers = numbers
        ctx.mark_non_differentiable(of_parts)
        ctx.set_materialize_grads(False)
        return per_mask, of_parts

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient: Tensor | None, _: Any) -> tuple[Tensor | None, ...]:  # pyrefly: ignore[bad-override]
        """Return the gradients of logits and predicted IoU.

        Args:
            ctx: What the forward pass kept.
            gradient: Gradient of the loss of each mask.
        """
        if gradient is None:
            return (None,) * 7
        *given, state = ctx.saved_tensors
        logits, predicted = BACKWARD(given, state, gradient.contiguous(), ctx.numbers)
        return None, None, logits, None, None, None, predicted


@dataclass(frozen=True)
class FusedSamLoss(SamLoss):
    """SAM's loss by kernels; without them for another gamma, points, or hard pixel mining."""

    def __call__(self, round: PromptRound, targets: Targets) -> LossSums:
        """Compute the loss of one round, as `SamLoss` does.

        Args:
            round: Prompts and predictions of M masks.
            targets: Ground truth of the same masks.
        """
        prediction, masks, foreground = round.prediction, targets.masks, targets.foreground
        is_known = self.gamma == 2 and not self.num_points and self.ohem_pixel_ratio is None
        kinds = torch.bool, torch.float32
        if not is_known or masks.dtype not in kinds or prediction.logits.shape[1] > MOST:
            return super().__call__(round, targets)
        weights = self.focal_weight, self.dice_weight, self.iou_weight
        choices = [
            ("best", "all", "single").index(self.mask_supervision),
            ("best", "all").index(self.iou_supervision),
            ("mse", "l1").index(self.iou_loss),
        ]
        shares = (foreground, None) if masks.dtype == torch.bool else (masks, foreground)
        tensors = prediction.logits, *shares, targets.valid, prediction.iou_predictions
        per_mask, of_parts = MaskLoss.apply(
            [float(each) for each in (self.alpha, self.smooth, *weights)], choices, *tensors
        )
        return LossSums(
            loss=targets.total(per_mask),
            count=targets.count,
            parts=dict(zip(PARTS, targets.total(of_parts), strict=True)),
            per_mask=per_mask,
        )


def fused_loss(loss: Any) -> Any:
    """Return a loss that uses the kernels, if it is SAM's, or has SAM's in it as `ClassLoss` does.

    Args:
        loss: The loss.
    """
    if type(loss) is SamLoss:
        return FusedSamLoss(**vars(loss))
    return replace(loss, loss=fused_loss(loss.loss)) if type(loss) is ClassLoss else loss
