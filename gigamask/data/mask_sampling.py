"""The choice of masks to train on: filters by area and score, and mask samplers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gigamask.errors import GigamaskError, check_range
from gigamask.lazy_numpy import np

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Float32, Float64, Int, Int64

    Chosen = Int64[np.ndarray, "k"]

LOG_AREA = 15.0
"""Logarithm of 3.3 million, the pixels of an SA-1B photograph; scales log areas to [0, 1]."""
LLOYD_STEPS = 5
"""Maximum number of k-means iterations; more move the chosen masks apart by just a thousandth."""


@dataclass(frozen=True)
class MaskFilters:
    """Filters for the masks that may be trained on; None disables a filter."""

    max_area: float | None = 0.9
    """maximum share of the image that a mask may cover (SAM drops masks above 0.9)"""
    min_area: int | None = None
    """minimum area in original pixels"""
    min_predicted_iou: float | None = None
    """minimum predicted_iou"""
    min_stability: float | None = None
    """minimum stability_score"""

    def __post_init__(self) -> None:
        if self.max_area is not None and not 0 < self.max_area <= 1:
            raise GigamaskError(
                f"MaskFilters.max_area must be a share of the image in (0, 1], or None to keep all "
                f"masks (got {self.max_area})"
            )
        limits = {"min_area": None, "min_predicted_iou": 1, "min_stability": 1}
        for name, most in limits.items():
            check_range(f"MaskFilters.{name}", getattr(self, name), 0, most)

    def keep(
        self,
        areas: Int[np.ndarray, "n"],
        image_area: int | Int[np.ndarray, "n"],
        predicted_iou: Float[np.ndarray, "n"],
        stability: Float[np.ndarray, "n"],
    ) -> Bool[np.ndarray, "n"]:
        """Return which masks pass the filters.

        Args:
            areas: Area of each mask in original pixels.
            image_area: Number of pixels of the image, or of each mask's image.
            predicted_iou: predicted_iou of each mask.
            stability: stability_score of each mask.
        """
        passes = np.ones(len(areas), dtype=bool)
        if self.max_area is not None:
            passes &= areas <= self.max_area * image_area
        if self.min_area is not None:
            passes &= areas >= self.min_area
        if self.min_predicted_iou is not None:
            passes &= predicted_iou >= self.min_predicted_iou
        if self.min_stability is not None:
            passes &= stability >= self.min_stability
        return passes


@dataclass(frozen=True, eq=False)
class CandidateMasks:
    """Attributes of an image's masks, as the index stores them.

    Boxes are `xyxy` in original pixels with inclusive ends.
    """

    size: tuple[int, int]
    areas: Int64[np.ndarray, "n"]
    boxes: Int[np.ndarray, "n 4"]
    predicted_iou: Float32[np.ndarray, "n"]
    stability_score: Float32[np.ndarray, "n"]

    def __len__(self) -> int:
        return len(self.areas)

    def __getitem__(self, chosen: np.ndarray) -> CandidateMasks:
        """Return the candidates at integer positions, in that order."""
        return CandidateMasks(
            self.size,
            self.areas[chosen],
            self.boxes[chosen],
            self.predicted_iou[chosen],
            self.stability_score[chosen],
        )


@dataclass(frozen=True)
class MaskSampler(ABC):
    """Base class of mask samplers, which choose among an image's masks if it has too many."""

    @abstractmethod
    def choose(
        self, candidates: CandidateMasks, max_masks: int, generator: np.random.Generator
    ) -> Chosen:
        """Choose masks of one image.

        Args:
            candidates: Attributes of the masks that pass the filters.
            max_masks: Maximum number of masks to choose.
            generator: Random generator.

        Returns:
            `min(max_masks, len(candidates))` distinct positions in `candidates`, ascending.
        """


@dataclass(frozen=True)
class RandomMasks(MaskSampler):
    """Masks chosen uniformly without replacement."""

    def choose(
        self, candidates: CandidateMasks, max_masks: int, generator: np.random.Generator
    ) -> Chosen:
        """Choose uniformly.

        Args:
            candidates: Attributes of the masks that pass the filters.
            max_masks: Maximum number of masks to choose.
            generator: Random generator.
        """
        if len(candidates) <= max_masks:
            return np.arange(len(candidates))
        return np.sort(generator.choice(len(candidates), max_masks, replace=False))


@dataclass(frozen=True)
class BestMasks(MaskSampler):
    """The masks with the highest predicted_iou, the same ones in every epoch.

    Ties are broken by the order in the json.
    """

    def choose(
        self, candidates: CandidateMasks, max_masks: int, generator: np.random.Generator
    ) -> Chosen:
        """Choose by predicted_iou.

        Args:
            candidates: Attributes of the masks that pass the filters.
            max_masks: Maximum number of masks to choose.
            generator: Not used.
        """
        return np.sort(np.argsort(-candidates.predicted_iou, kind="stable")[:max_masks])


@dataclass(frozen=True)
class SizeBalancedMasks(MaskSampler):
    """The same number of masks from each quarter of the range of log areas, chosen at random.

    If a quarter has too few masks, the others contribute more, in equal numbers; the remainder of
    the division comes from random quarters.
    """

    def choose(
        self, candidates: CandidateMasks, max_masks: int, generator: np.random.Generator
    ) -> Chosen:
        """Choose from each quarter in turn.

        Args:
            candidates: Attributes of the masks that pass the filters.
            max_masks: Maximum number of masks to choose.
            generator: Random generator.
        """
        quarter = quarters(candidates.areas)
        by_quarter = np.lexsort((generator.random(len(quarter)), quarter))
        counts = np.bincount(quarter, minlength=4)
        turn = np.empty(len(quarter), np.int64)
        turn[by_quarter] = np.arange(len(quarter)) - np.repeat(np.cumsum(counts) - counts, counts)
        # The first mask of every quarter, then the second, and so on; in the last turn, random
        # quarters.
        return np.sort(np.lexsort((generator.random(len(quarter)), turn))[:max_masks])


@dataclass(frozen=True)
class DiverseMasks(MaskSampler):
    """The mask with the highest predicted_iou of each of `max_masks` k-means clusters.

    Clusters are formed by position, size and shape: center x / width, center y / height, log area /
    15, and the aspect ratio as box width / (width + height). All lie in [0, 1], so that none
    outweighs the others, and a mask ten times as wide as tall is as far from a square as one ten
    times as tall as wide. If similar masks give fewer clusters, the masks with the highest
    predicted_iou among the rest are added.
    """

    def choose(
        self, candidates: CandidateMasks, max_masks: int, generator: np.random.Generator
    ) -> Chosen:
        """Choose one mask from each cluster.

        Args:
            candidates: Attributes of the masks that pass the filters.
            max_masks: Maximum number of masks to choose.
            generator: Random generator.
        """
        n = len(candidates)
        if n <= max_masks:
            return np.arange(n)
        cluster = k_means(features(candidates), max_masks, generator)
        best_first = np.argsort(-candidates.predicted_iou, kind="stable")
        _, heads = np.unique(cluster[best_first], return_index=True)
        rest = np.delete(best_first, heads)[: max_masks - len(heads)]
        return np.sort(np.concatenate([best_first[heads], rest]))


def quarters(areas: Int64[np.ndarray, "n"]) -> Int64[np.ndarray, "n"]:
    """Return each mask's quarter of the range of log areas, 0 to 3; 0 if all areas are equal."""
    logs = np.log(np.maximum(areas, 1))
    low, high = logs.min(initial=np.inf), logs.max(initial=-np.inf)
    if not low < high:
        return np.zeros(len(areas), np.int64)
    return np.minimum((logs - low) / (high - low) * 4, 3).astype(np.int64)


def features(candidates: CandidateMasks) -> Float64[np.ndarray, "4 n"]:
    """Return the features by which `DiverseMasks` compares masks, one row per feature."""
    x0, y0, x1, y1 = candidates.boxes.T.astype(np.float64)
    height, width = candidates.size
    box_width, box_height = x1 + 1 - x0, y1 + 1 - y0
    aspect = box_width / np.maximum(box_width + box_height, 1)
    return np.stack(
        [
            (x0 + box_width / 2) / width,
            (y0 + box_height / 2) / height,
            np.log(np.maximum(candidates.areas, 1)) / LOG_AREA,
            aspect,
        ]
    )


def k_means(
    points: Float64[np.ndarray, "d n"], k: int, generator: np.random.Generator
) -> Int64[np.ndarray, "n"]:
    """Cluster points: k-means++ (Arthur and Vassilvitskii 2007), then Lloyd's iterations.

    Args:
        points: Coordinates, one row per dimension.
        k: Number of clusters.
        generator: Random generator.

    Returns:
        Cluster of each point; fewer than `k` clusters if fewer points are distinct.
    """
    centers = _initial_centers(points, k, generator)
    cluster = np.full(points.shape[1], -1)
    for _ in range(LLOYD_STEPS):
        nearest = _squared_distances(points, centers).argmin(0)
        if (nearest == cluster).all():
            break
        cluster, clusters = nearest, len(centers[0])
        counts = np.bincount(cluster, minlength=clusters)
        sums = np.stack([np.bincount(cluster, row, clusters) for row in points])
        centers = np.where(counts > 0, sums / np.maximum(counts, 1), centers)
    return cluster


def _initial_centers(
    points: Float64[np.ndarray, "d n"], k: int, generator: np.random.Generator
) -> Float64[np.ndarray, "d c"]:
    """Draw points with probability proportional to the squared distance from those drawn before."""
    chosen = [int(generator.integers(points.shape[1]))]
    nearest = np.full(points.shape[1], np.inf)
    for uniform in generator.random(k - 1):
        nearest = np.minimum(nearest, np.square(points - points[:, chosen[-1:]]).sum(0))
        total = nearest.cumsum()
        if total[-1] == 0:
            break
        # Rounding may make the product equal to the total, which is beyond the last point.
        chosen.append(min(int(total.searchsorted(uniform * total[-1], "right")), len(total) - 1))
    return points[:, chosen]


def _squared_distances(
    points: Float64[np.ndarray, "d n"], centers: Float64[np.ndarray, "d k"]
) -> Float64[np.ndarray, "k n"]:
    """Return squared distances, summed by feature: unlike a matmul, it rounds alike everywhere."""
    total = np.zeros((centers.shape[1], points.shape[1]))
    offset = np.empty_like(total)
    for point, center in zip(points, centers, strict=True):
        np.subtract(point, center[:, None], out=offset)
        total += np.square(offset, out=offset)
    return total
