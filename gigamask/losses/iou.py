"""The actual IoU of predicted masks, and the regression loss of the IoU head."""

from typing import Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn import functional as F

from gigamask.masks.transforms import above, count_pixels


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
    pred_mask = above(logits.detach(), 0.0) & valid.unsqueeze(1)
    intersection = count_pixels(pred_mask & inside)
    union = count_pixels(pred_mask) + count_pixels(inside) - intersection
    return (intersection / union).nan_to_num(nan=1.0)


def iou_prediction_loss(
    predicted: Float[Tensor, "M K"], actual: Float[Tensor, "M K"], kind: Literal["mse", "l1"]
) -> Float[Tensor, "M K"]:
    """Compute the error of the predicted IoU in float32 or float64.

    Args:
        predicted: Output of the IoU head.
        actual: Actual IoU.
        kind: "mse" (SAM) or "l1" (SAM 2).
    """
    predicted = predicted.to(torch.promote_types(predicted.dtype, torch.float32))
    loss = F.mse_loss if kind == "mse" else F.l1_loss
    return loss(predicted, actual.to(predicted.dtype), reduction="none")
