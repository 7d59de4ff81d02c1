"""The loss of masked pre-training: guessed and true pixels of patches enter, one number for each image leaves (He et al. 2021).

Not here: which patches are hidden (`model.mae`), weights and sums (`train.reconstruction`).
"""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

EPSILON = 1e-6
"""Added to a patch's variance before its root is divided by (MAE, `models_mae.py`)."""


def patchify(pixels: Float[Tensor, "B 3 S S"], patch: int) -> Float[Tensor, "B P D"]:
    """Returns the pixels of each patch, row by row, red, green and blue of a pixel together."""
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
    normalise: bool = True,
) -> Float[Tensor, "B"]:
    """Returns the mean squared error of each image's scored patches, 0 where it has none, in float32 or float64.

    With `normalise` the truth of a patch is first `(x - mean) / sqrt(variance + 1e-6)` over its own numbers, the variance being the unbiased one.
    """
    dtype = torch.promote_types(pred.dtype, torch.float32)
    target = target.to(dtype)
    if normalise:
        variance, mean = torch.var_mean(target, 2, keepdim=True)
        target = (target - mean) / (variance + EPSILON).sqrt()
    by_patch = (pred.to(dtype) - target).square().mean(2)
    return torch.where(scored, by_patch, 0.0).sum(1) / scored.sum(1).clamp(min=1)
