"""The reconstruction loss of masked autoencoders (He et al. 2021)."""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

EPSILON = 1e-6
"""Added to a patch's variance before normalization (MAE, `models_mae.py`)."""


def patchify(pixels: Float[Tensor, "B 3 S S"], patch: int) -> Float[Tensor, "B P D"]:
    """Split images into patches.

    Args:
        pixels: Images.
        patch: Side of a patch in pixels.

    Returns:
        Pixels of each patch, row by row, with the three channels of a pixel together.
    """
    return (
        pixels.unflatten(3, (-1, patch))
        .unflatten(2, (-1, patch))
        .permute(0, 2, 4, 3, 5, 1)
        .flatten(3)
        .flatten(1, 2)
    )


def mae_loss(
    pred: Float[Tensor, "B P D"],
    target: Float[Tensor, "B P D"],
    scored: Bool[Tensor, "B P"],
    normalize: bool = True,
) -> Float[Tensor, "B"]:
    """Compute the mean squared error over the scored patches of each image.

    Args:
        pred: Predicted pixels of P patches.
        target: Pixels of the same patches.
        scored: Patches to compute the loss on.
        normalize: Compare with `(x - mean) / sqrt(variance + 1e-6)` of each patch (unbiased
            variance).

    Returns:
        The loss of each image in float32 or float64; 0 if no patch is scored.
    """
    dtype = torch.promote_types(pred.dtype, torch.float32)
    target = target.to(dtype)
    if normalize:
        variance, mean = torch.var_mean(target, 2, keepdim=True)
        target = (target - mean) / (variance + EPSILON).sqrt()
    by_patch = (pred.to(dtype) - target).square().mean(2)
    return torch.where(scored, by_patch, 0.0).sum(1) / scored.sum(1).clamp(min=1)
