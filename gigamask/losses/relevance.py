"""What a relevance network's scores cost: which masks a text means, and whether each one fits better than none.

Enters: scores of masks with that of none behind them, and which masks are right. Leaves: two losses for each query.

- `contrastive`, InfoNCE over masks (van den Oord et al. 2018, equation 4): each right mask against all wrong ones and none, the mean over right ones;
  where no mask is right, none is the right one. Right masks do not compete with each other (supervised contrastive learning, Khosla et al. 2020, has
  them in the denominator).
- `alignment`: each mask's binary cross entropy of scoring above none, the mean over masks, so that a score's distance from none's is the logit of
  the mask being right.

Not here: the scores (`grounding.model`), which queries are trained on (`mining`).
"""

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn import functional


class QueryLosses(NamedTuple):
    """Each query's losses, not reduced."""

    contrastive: Float[Tensor, "B"]
    alignment: Float[Tensor, "B"]


def relevance_losses(
    scores: Float[Tensor, "B M1"], right: Bool[Tensor, "B M"], there: Bool[Tensor, "B M"]
) -> QueryLosses:
    """Returns each query's losses; `right` masks must be `there`. A query without any mask costs nothing: none is all there is."""
    scores = scores.float()
    wrong = there & ~right
    absent = ~right.any(1)
    against = torch.cat(
        [
            scores[:, :-1].masked_fill(~wrong, -torch.inf),
            scores[:, -1:].masked_fill(absent[:, None], -torch.inf),
        ],
        1,
    )
    alone = absent & ~wrong.any(1)  # none has no rival
    rivals = against.masked_fill(alone[:, None], 0.0).logsumexp(1).masked_fill(alone, -torch.inf)
    # log(1 + exp(rivals - score)) is -log softmax of the score among its rivals.
    each = functional.softplus((rivals[:, None] - scores).clamp(min=-1e4))
    chosen = torch.cat([right, absent[:, None]], 1)
    contrastive = (each * chosen).sum(1) / chosen.sum(1)
    logits = scores[:, :-1] - scores[:, -1:]
    costs = functional.binary_cross_entropy_with_logits(
        logits.masked_fill(~there, 0.0), right.to(logits.dtype), reduction="none"
    )
    return QueryLosses(contrastive, (costs * there).sum(1) / there.sum(1).clamp(min=1))
