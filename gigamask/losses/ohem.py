"""Hard example mining: each mask's loss enters, which masks are trained on leaves. Values, so torch is imported only when they act.

The losses are those of the whole global batch, so what is kept does not depend on how the batch is split into processes and micro-batches.
Online hard example mining: Shrivastava et al. 2016, section 4. Within strata: after Li et al. 2017 (S-OHEM), where a stratum is a range of losses;
here it is a kind of mask.

Not here: the pass that finds the losses and the one that trains the kept masks (`train.hardest`), mining of pixels (`pixels`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, get_args

from gigamask.errors import GigamaskError, check_range
from gigamask.interfaces import Mining

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int64
    from torch import Tensor

Within = Literal["batch", "granularity", "sampler"]


@dataclass(frozen=True)
class NoMining(Mining):
    """Keeps every mask: no mining."""

    def keep(self, losses: Float[Tensor, "M"], strata: Int64[Tensor, "M"]) -> Bool[Tensor, "M"]:
        """Returns which masks are kept: those that are there."""
        return ~losses.isnan()


@dataclass(frozen=True)
class OHEM(Mining):
    """Keeps the masks of the highest loss, of the whole global batch or of every stratum in it."""

    keep_ratio: float = 0.25
    """the hardest share that is kept, rounded up"""
    min_kept: int = 1
    """keep at least so many, or all where there are fewer; a number beyond the batch's, such as 256 masks of four images, keeps everything"""
    within: Within = "batch"
    """among which masks: all, those of the same granularity (fine, medium, coarse), or those whose samples the sampler drew from the same stratum"""

    def __post_init__(self) -> None:
        if not 0 < self.keep_ratio <= 1:
            raise GigamaskError(
                f"Hardest.share is {self.keep_ratio}, it must be above 0 and at most 1; give another value"
            )
        check_range("Hardest.min_kept", self.min_kept, 0, None)
        if self.within not in get_args(Within):
            raise GigamaskError(
                f"Hardest.within is {self.within!r}, it must be one of {', '.join(get_args(Within))}; choose one"
            )

    @property
    def by_sampler(self) -> bool:
        """Whether the strata it looks within are the sampler's."""
        return self.within == "sampler"

    def keep(self, losses: Float[Tensor, "M"], strata: Int64[Tensor, "M"]) -> Bool[Tensor, "M"]:
        """Returns which masks are kept. One whose loss is NaN never is; of equal losses the first are."""
        return _hardest(
            losses, strata * 0 if self.within == "batch" else strata, self.keep_ratio, self.min_kept
        )


def _hardest(
    losses: Float[Tensor, "M"], strata: Int64[Tensor, "M"], share: float, least: int
) -> Bool[Tensor, "M"]:
    """Returns the hardest of each stratum: `ceil(share * n)` of its n readable losses, at least `least`, at most n."""
    import torch

    readable = ~losses.isnan()
    stratum = strata.unique(return_inverse=True)[1]
    # Three stable sorts, the last one first in rank: by stratum, readable before unreadable, hardest first; ties stay in their order.
    order = losses.argsort(descending=True, stable=True)
    order = order[(~readable)[order].to(torch.uint8).argsort(stable=True)]
    order = order[stratum[order].argsort(stable=True)]
    members, counts = (
        torch.bincount(kind, minlength=len(losses)) for kind in (stratum, stratum[readable])
    )
    kept = (counts.double() * share).ceil().long().clamp(min=least).minimum(counts)
    rank = (
        torch.arange(len(losses), device=losses.device)
        - (members.cumsum(0) - members)[stratum[order]]
    )
    keep = torch.empty_like(readable)
    keep[order] = rank < kept[stratum[order]]
    return keep
