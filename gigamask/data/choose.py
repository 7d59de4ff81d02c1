"""Which masks of an image are trained on: filters by area and score, then a choice of at most so many.

In: per-mask areas and scores, of one image or of a whole index. Out: which masks stay, which are taken.

Not here: who names the chance (`data.assemble`), which images are visited (`samplers`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from gigamask.faults import Fault

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int, Int64


@dataclass(frozen=True)
class Filters:
    """Which masks may be trained on; None switches a filter off."""

    max_area: float | None = 0.9
    """largest share of the image a mask may cover (SAM drops masks above 0.9)"""
    min_area: int | None = None
    """smallest area in original pixels"""
    min_predicted_iou: float | None = None
    """smallest predicted_iou"""
    min_stability: float | None = None
    """smallest stability_score"""

    def __post_init__(self) -> None:
        if self.max_area is not None and not 0 < self.max_area <= 1:
            raise Fault(f"max_area is {self.max_area}, a share of the image lies in (0, 1]; give such, or None to keep all")

    def keep(
        self,
        areas: Int[np.ndarray, "n"],
        image_area: int | Int[np.ndarray, "n"],
        predicted_iou: Float[np.ndarray, "n"],
        stability: Float[np.ndarray, "n"],
    ) -> Bool[np.ndarray, "n"]:
        """Returns which masks stay; `image_area` may be one image's, or each mask's own."""
        kept = np.ones(len(areas), dtype=bool)
        if self.max_area is not None:
            kept &= areas <= self.max_area * image_area
        if self.min_area is not None:
            kept &= areas >= self.min_area
        if self.min_predicted_iou is not None:
            kept &= predicted_iou >= self.min_predicted_iou
        if self.min_stability is not None:
            kept &= stability >= self.min_stability
        return kept


@dataclass(frozen=True)
class RandomChoice:
    """Takes masks uniformly, without replacement."""

    def choose(self, n: int, max_masks: int, generator: np.random.Generator) -> Int64[np.ndarray, "k"]:
        """Returns `min(max_masks, n)` distinct numbers below `n`, ascending."""
        if n <= max_masks:
            return np.arange(n)
        return np.sort(generator.choice(n, max_masks, replace=False))
