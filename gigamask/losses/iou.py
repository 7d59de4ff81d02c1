"""The actual IoU of predicted masks, and the regression loss of the IoU head."""

from typing import Literal

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor


def mask_iou(
    logits: Float[Tensor, "M K H W"], targets: Bool[Tensor, "M H W"], valid: Bool[Tensor, "M H W"]
) -> Float[Tensor, "M K"]:
    """Compute the IoU between predictions (logits above 0) and targets, without gradient.

    Args:
        logits: K predictions for each of M masks.
        targets: Masks.
        valid: False in the padding.

    Returns:
        The IoU of each mask and prediction; 1 if both are empty.
    """
    inside = (targets & valid).unsqueeze(1)
    pred_mask = (logits.detach() > 0) & valid.unsqueeze(1)
    intersection = _count(pred_mask & inside)
    union = _count(pred_mask) + _count(inside) - intersection
    return torch.where(union > 0, intersection / union.clamp(min=1), 1.0)


def _count(masks: Bool[Tensor, "M K H W"]) -> Int64[Tensor, "M K"]:
    """Return the area of each mask; on a CPU, counting each mask takes a tenth of a sum's time.

    Fake tensors, which are CPU tensors also when planning for a GPU, take the GPU's way.
    """
    if type(masks) is not Tensor or masks.device.type != "cpu" or not masks.shape[:2].numel():
        return masks.sum((2, 3))
    counts = [torch.count_nonzero(mask) for mask in masks.flatten(0, 1)]
    return torch.stack(counts).view(masks.shape[:2])


def iou_prediction_loss(
    predicted: Float[Tensor, "M K"], actual: Float[Tensor, "M K"], kind: Literal["mse", "l1"]
) -> Float[Tensor, "M K"]:
    """Compute the error of the predicted IoU in float32 or float64.

    Args:
        predicted: Output of the IoU head.
        actual: Actual IoU.
        kind: "mse" (SAM) or "l1" (SAM 2).
    """
    error = predicted.to(torch.promote_types(predicted.dtype, torch.float32)) - actual
    return error.square() if kind == "mse" else error.abs()
