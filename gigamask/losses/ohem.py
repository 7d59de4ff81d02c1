"""Online hard example mining of masks (Shrivastava et al. 2016, section 4).

Losses are compared over the whole global batch, so the choice does not depend on the split into
processes and micro-batches. Mining within strata follows Li et al. 2017 (S-OHEM), where a stratum
is a range of losses; here it is a kind of mask.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, get_args

from gigamask.errors import GigamaskError, check_choice, check_range
from gigamask.interfaces import Mining
from gigamask.interfaces import NoMining as NoMining

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int64
    from torch import Tensor

GroupBy = Literal["batch", "granularity", "sampler"]


@dataclass(frozen=True)
class OHEM(Mining):
    """Train on the masks with the highest loss, in the global batch or in each of its strata."""

    keep_ratio: float = 0.25
    """fraction of the masks to keep, rounded up"""
    min_kept: int = 1
    """minimum number of masks to keep"""
    group_by: GroupBy = "batch"
    """compare all masks of the batch, those of the same granularity (fine, medium, coarse), or
    those of the same stratum of the sampler"""

    def __post_init__(self) -> None:
        if not 0 < self.keep_ratio <= 1:
            raise GigamaskError(
                f"OHEM.keep_ratio must be above 0 and at most 1 (got {self.keep_ratio})"
            )
        check_range("OHEM.min_kept", self.min_kept, 0)
        check_choice("OHEM.group_by", self.group_by, get_args(GroupBy))

    @property
    def use_sampler_strata(self) -> bool:
        """Whether strata are those of the sampler."""
        return self.group_by == "sampler"

    def keep(self, losses: Float[Tensor, "M"], strata: Int64[Tensor, "M"]) -> Bool[Tensor, "M"]:
        """Return which masks to train on; ties are broken by position.

        Args:
            losses: Loss of each mask; NaN is never kept.
            strata: Stratum of each mask.
        """
        import torch

        is_number = ~losses.isnan()
        groups = strata * 0 if self.group_by == "batch" else strata
        stratum = groups.unique(return_inverse=True)[1]
        # Three stable sorts give the order by stratum, then NaN last, then hardest first.
        order = losses.argsort(descending=True, stable=True)
        order = order[(~is_number)[order].to(torch.uint8).argsort(stable=True)]
        order = order[stratum[order].argsort(stable=True)]
        members, counts = (
            torch.bincount(values, minlength=len(losses))
            for values in (stratum, stratum[is_number])
        )
        kept = (counts.double() * self.keep_ratio).ceil().long()
        kept = kept.clamp(min=self.min_kept).minimum(counts)
        rank = (
            torch.arange(len(losses), device=losses.device)
            - (members.cumsum(0) - members)[stratum[order]]
        )
        keep = torch.empty_like(is_number)
        keep[order] = rank < kept[stratum[order]]
        return keep
