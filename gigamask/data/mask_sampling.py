"""Which masks of an image are trained on: filters by area and score, then a choice of at most so many.

In: per-mask areas, boxes and scores, known before any mask is decoded. Out: which masks stay, which are taken.

Not here: who names the chance (`data.dataset`), which images are visited (`samplers`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from gigamask.errors import GigamaskError

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Float32, Float64, Int, Int64

LOG_AREA = 15.0
"""The logarithm of 3.3 million, the pixels of SA-1B's photographs: log areas divided by it lie in [0, 1]."""
LLOYD_STEPS = 5
"""Rounds of k-means at most; later ones move the chosen masks apart by another thousandth."""


@dataclass(frozen=True)
class MaskFilters:
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
            raise GigamaskError(
                f"max_area is {self.max_area}, a share of the image lies in (0, 1]; give such, or None to keep all"
            )

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


@dataclass(frozen=True, eq=False)
class CandidateMasks:
    """The masks of one image as the index, too, knows them; boxes are `xyxy` in original pixels, ends inclusive."""

    size: tuple[int, int]
    areas: Int64[np.ndarray, "n"]
    boxes: Int[np.ndarray, "n 4"]
    predicted_iou: Float32[np.ndarray, "n"]
    stability_score: Float32[np.ndarray, "n"]

    def __len__(self) -> int:
        return len(self.areas)

    def __getitem__(self, chosen: np.ndarray) -> CandidateMasks:
        """Returns the candidates chosen by whole numbers, in that order."""
        return CandidateMasks(
            self.size,
            self.areas[chosen],
            self.boxes[chosen],
            self.predicted_iou[chosen],
            self.stability_score[chosen],
        )


@dataclass(frozen=True)
class MaskSampler(ABC):
    """Says which masks are taken when there are more than wanted."""

    @abstractmethod
    def choose(
        self, candidates: CandidateMasks, max_masks: int, generator: np.random.Generator
    ) -> Int64[np.ndarray, "k"]:
        """Returns `min(max_masks, len(candidates))` distinct numbers of candidates, ascending."""


@dataclass(frozen=True)
class RandomMasks(MaskSampler):
    """Takes masks uniformly, without replacement."""

    def choose(
        self, candidates: CandidateMasks, max_masks: int, generator: np.random.Generator
    ) -> Int64[np.ndarray, "k"]:
        if len(candidates) <= max_masks:
            return np.arange(len(candidates))
        return np.sort(generator.choice(len(candidates), max_masks, replace=False))


@dataclass(frozen=True)
class BestMasks(MaskSampler):
    """Takes the masks of highest predicted_iou; of equal ones those that come first in the json. The same ones at every visit."""

    def choose(
        self, candidates: CandidateMasks, max_masks: int, generator: np.random.Generator
    ) -> Int64[np.ndarray, "k"]:
        return np.sort(np.argsort(-candidates.predicted_iou, kind="stable")[:max_masks])


@dataclass(frozen=True)
class SizeBalancedMasks(MaskSampler):
    """Takes equally many masks from each quarter of the range of log areas, at random within each.

    Where a quarter runs short, the others give more, equally; what does not divide evenly comes from quarters at random.
    """

    def choose(
        self, candidates: CandidateMasks, max_masks: int, generator: np.random.Generator
    ) -> Int64[np.ndarray, "k"]:
        quarter = quarters(candidates.areas)
        by_quarter = np.lexsort((generator.random(len(quarter)), quarter))
        counts = np.bincount(quarter, minlength=4)
        turn = np.empty(len(quarter), np.int64)
        turn[by_quarter] = np.arange(len(quarter)) - np.repeat(np.cumsum(counts) - counts, counts)
        # Every quarter gives its first mask, then its second, and so on; the last turn is shared out at random.
        return np.sort(np.lexsort((generator.random(len(quarter)), turn))[:max_masks])


@dataclass(frozen=True)
class DiverseMasks(MaskSampler):
    """Takes the mask of highest predicted_iou from each of `max_masks` clusters of place, size and shape (k-means).

    The features: centre x / width, centre y / height, log area / 15, and the aspect ratio as box width / (width + height). All lie in [0, 1], so
    none outweighs the others, and a mask ten times as wide as tall is as far from a square as one ten times as tall as wide.
    Where masks are so alike that there are fewer clusters, the best predicted_iou of what is left fills up.
    """

    def choose(
        self, candidates: CandidateMasks, max_masks: int, generator: np.random.Generator
    ) -> Int64[np.ndarray, "k"]:
        n = len(candidates)
        if n <= max_masks:
            return np.arange(n)
        cluster = k_means(features(candidates), max_masks, generator)
        best_first = np.argsort(-candidates.predicted_iou, kind="stable")
        _, heads = np.unique(cluster[best_first], return_index=True)
        rest = np.delete(best_first, heads)[: max_masks - len(heads)]
        return np.sort(np.concatenate([best_first[heads], rest]))


def quarters(areas: Int64[np.ndarray, "n"]) -> Int64[np.ndarray, "n"]:
    """Returns which quarter of the range of log areas each mask is in: 0 to 3, and 0 for all where they are equally large."""
    logs = np.log(np.maximum(areas, 1))
    low, high = logs.min(initial=np.inf), logs.max(initial=-np.inf)
    if not low < high:
        return np.zeros(len(areas), np.int64)
    return np.minimum((logs - low) / (high - low) * 4, 3).astype(np.int64)


def features(candidates: CandidateMasks) -> Float64[np.ndarray, "4 n"]:
    """Returns what `DiverseMasks` compares masks by, a row for each feature."""
    x0, y0, x1, y1 = candidates.boxes.T.astype(np.float64)
    height, width = candidates.size
    wide, tall = x1 + 1 - x0, y1 + 1 - y0
    shape = wide / np.maximum(wide + tall, 1)
    return np.stack(
        [
            (x0 + wide / 2) / width,
            (y0 + tall / 2) / height,
            np.log(np.maximum(candidates.areas, 1)) / LOG_AREA,
            shape,
        ]
    )


def k_means(
    columns: Float64[np.ndarray, "d n"], k: int, generator: np.random.Generator
) -> Int64[np.ndarray, "n"]:
    """Returns each point's cluster, fewer than `k` where fewer points are distinct.

    Seeded by k-means++ (Arthur and Vassilvitskii 2007), then Lloyd's rounds.
    """
    centres = _seed(columns, k, generator)
    cluster = np.full(columns.shape[1], -1)
    for _ in range(LLOYD_STEPS):
        nearest = _distances(columns, centres).argmin(0)
        if (nearest == cluster).all():
            break
        cluster, shown = nearest, len(centres[0])
        counts = np.bincount(cluster, minlength=shown)
        sums = np.stack([np.bincount(cluster, column, shown) for column in columns])
        centres = np.where(counts > 0, sums / np.maximum(counts, 1), centres)
    return cluster


def _seed(
    columns: Float64[np.ndarray, "d n"], k: int, generator: np.random.Generator
) -> Float64[np.ndarray, "d c"]:
    """Returns points that are likely far apart: each is drawn with a chance that grows with its squared distance from those before."""
    chosen = [int(generator.integers(columns.shape[1]))]
    nearest = np.full(columns.shape[1], np.inf)
    for share in generator.random(k - 1):
        nearest = np.minimum(nearest, np.square(columns - columns[:, chosen[-1:]]).sum(0))
        total = nearest.cumsum()
        if total[-1] == 0:
            break
        # Rounding may take the product up to the total itself, which is no point's.
        chosen.append(min(int(total.searchsorted(share * total[-1], "right")), len(total) - 1))
    return columns[:, chosen]


def _distances(
    columns: Float64[np.ndarray, "d n"], centres: Float64[np.ndarray, "d k"]
) -> Float64[np.ndarray, "k n"]:
    """Returns squared distances, summed feature by feature: no machine rounds that otherwise, as matrix products may be."""
    total = np.zeros((centres.shape[1], columns.shape[1]))
    offset = np.empty_like(total)
    for column, centre in zip(columns, centres, strict=True):
        np.subtract(column, centre[:, None], out=offset)
        total += np.square(offset, out=offset)
    return total
