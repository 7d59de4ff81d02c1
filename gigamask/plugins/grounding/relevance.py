"""Losses of the grounding model's scores of the masks that a text refers to, if any.

- `contrastive`, InfoNCE over masks (van den Oord et al. 2018, equation 4): each target mask against
  all other masks and "none", averaged over target masks; without a target mask "none" is the
  target. Target masks do not compete with each other (in supervised contrastive learning, Khosla et
  al. 2020, they are in the denominator).
- `alignment`: binary cross entropy of each mask scoring above "none", averaged over masks, so that
  the difference of the two scores is the logit of the mask being a target.
"""

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn import functional


class QueryLosses(NamedTuple):
    """Losses of each query, not reduced."""

    contrastive: Float[Tensor, "B"]
    alignment: Float[Tensor, "B"]


def relevance_losses(
    scores: Float[Tensor, "B M1"], is_target: Bool[Tensor, "B M"], mask_valid: Bool[Tensor, "B M"]
) -> QueryLosses:
    """Compute the losses of each query.

    Args:
        scores: Score of each mask, followed by that of "none".
        is_target: Masks that the text refers to; they must be valid.
        mask_valid: False for padding.

    Returns:
        Both losses of each query; 0 for a query without masks.
    """
    scores = scores.float()
    is_negative = mask_valid & ~is_target
    no_target = ~is_target.any(1)
    negatives = torch.cat(
        [
            scores[:, :-1].masked_fill(~is_negative, -torch.inf),
            scores[:, -1:].masked_fill(no_target[:, None], -torch.inf),
        ],
        1,
    )
    empty = no_target & ~is_negative.any(1)  # "none" has no competitor
    total = negatives.masked_fill(empty[:, None], 0.0).logsumexp(1).masked_fill(empty, -torch.inf)
    # log(1 + exp(total - score)) is -log softmax of the score among the negatives.
    losses = functional.softplus((total[:, None] - scores).clamp(min=-1e4))
    positives = torch.cat([is_target, no_target[:, None]], 1)
    contrastive = (losses * positives).sum(1) / positives.sum(1)
    logits = scores[:, :-1] - scores[:, -1:]
    alignment = functional.binary_cross_entropy_with_logits(
        logits.masked_fill(~mask_valid, 0.0), is_target.to(logits.dtype), reduction="none"
    )
    alignment = (alignment * mask_valid).sum(1) / mask_valid.sum(1).clamp(min=1)
    return QueryLosses(contrastive, alignment)
