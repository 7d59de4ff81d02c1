"""Hard pixel mining: each pixel's loss enters, which pixels count leaves.

Pixels are ranked within their own mask and answer, so what counts does not depend on how a batch is split into processes and micro-batches.
Bootstrapped cross entropy: Wu, Shen and van den Hengel 2016 (arXiv 1605.06885), there over the pixels of a micro-batch; Shrivastava et al. 2016.

Not here: mining of masks (`mining`), the loss whose pixels they are (`mask.focal`).
"""

import math

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor


def ohem_pixels(
    losses: Float[Tensor, "M K H W"], valid: Bool[Tensor, "M 1 H W"], share: float, least: int
) -> Bool[Tensor, "M K H W"]:
    """Returns the hardest pixels of each mask and answer: `ceil(share * n)` of its n valid ones, at least `least`, at most n.

    Of equal losses the first count, row by row. Losses are compared in float32; NaN is the hardest, so that it is not hidden.
    """
    cells = losses.shape[-2] * losses.shape[-1]
    if least >= cells or share == 1:
        return valid.expand_as(losses)
    most = max(math.ceil(share * cells), least)
    ranks = sorted_descending(losses.flatten(2)).masked_fill_(~valid.flatten(2), -1)
    counts = valid.sum((1, 2, 3))
    kept = (counts.double() * share).ceil().long().clamp(min=least).minimum(counts)
    last = (kept - 1).clamp(min=0)[:, None, None].expand(-1, losses.shape[1], 1)
    bar = ranks.topk(most, dim=2).values.gather(2, last)
    return (ranks >= bar).view_as(losses) & valid


def sorted_descending(values: Float[Tensor, "*rows n"]) -> Int64[Tensor, "*rows n"]:
    """Returns whole numbers in the order of values of at least 0, all different: among equal values the first has the largest."""
    # The bits of a float32 that is not negative are in its own order; the sign is cleared because NaN and zero may carry one.
    bits = values.float().contiguous().view(torch.int32) & 0x7FFFFFFF
    places = torch.arange(values.shape[-1] - 1, -1, -1, device=values.device)
    return (bits.long() << 32) | places
