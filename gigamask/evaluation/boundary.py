"""Scores of masks that look at their boundaries alone: DAVIS's boundary F and Boundary IoU.

Enters predicted masks and their truth as pixels of the stored image; leaves a score in [0, 1] for each. Both are the published definitions to the
last bit: F of Perazzi et al. 2016 (`f_measure` of davis2017-evaluation), Boundary IoU of Cheng et al. 2021 (`mask_to_boundary` of boundary-iou-api).

Not here: the pixels along a boundary (`geometry.boundary`).
"""

import math
from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float64

from gigamask.masks.boundary import box_of, grow, inner_band, outline


@dataclass(frozen=True)
class BoundaryProtocol:
    """What the two scores depend on besides the masks; written beside every result."""

    tolerance: float = 0.008
    """how far apart matching boundary pixels may be, as a share of the image's diagonal, rounded up to whole pixels"""
    band: float = 0.02
    """how wide the band along a mask's boundary is, as a share of the image's diagonal, rounded to whole pixels, one at least"""
    empty: str = "two masks without a boundary agree, 1; one without and one with, 0"

    def tolerance_px(self, size: tuple[int, int]) -> int:
        """Returns how far apart matching pixels may be in an image of `size`."""
        return math.ceil(self.tolerance * _diagonal(size))

    def band_px(self, size: tuple[int, int]) -> int:
        """Returns the width of the band in an image of `size`."""
        return max(1, round(self.band * _diagonal(size)))


def boundary_f(
    guess: Bool[np.ndarray, "n H W"],
    truth: Bool[np.ndarray, "n H W"],
    protocol: BoundaryProtocol | None = None,
) -> Float64[np.ndarray, "n"]:
    """Returns each mask's harmonic mean of precision and recall: the shares of one outline's pixels that are near the other's.

    Outlines are DAVIS's (`geometry.boundary.outline`): a full mask has none, and so agrees with an empty one.
    """
    radius = (protocol or BoundaryProtocol()).tolerance_px(guess.shape[1:])
    return np.array(
        [_f(outline(one), outline(other), radius) for one, other in zip(guess, truth, strict=True)],
        np.float64,
    )


def boundary_iou(
    guess: Bool[np.ndarray, "n H W"],
    truth: Bool[np.ndarray, "n H W"],
    protocol: BoundaryProtocol | None = None,
) -> Float64[np.ndarray, "n"]:
    """Returns the IoU of the bands inside each mask's boundary and its truth's; the image's border is a boundary.

    Two empty masks score 1, as in `losses.quality.actual_iou`; the reference divides 0 by 0 there.
    """
    width = (protocol or BoundaryProtocol()).band_px(guess.shape[1:])
    return np.array(
        [
            _iou(inner_band(one, width), inner_band(other, width))
            for one, other in zip(guess, truth, strict=True)
        ],
        np.float64,
    )


def _f(guess: Bool[np.ndarray, "H W"], truth: Bool[np.ndarray, "H W"], radius: int) -> float:
    """Returns F of two outlines."""
    if not guess.any() or not truth.any():
        return float(guess.any() == truth.any())
    # What lies outside both outlines' box is asked for by neither.
    top, bottom, left, right = box_of(guess | truth)
    guess, truth = guess[top:bottom, left:right], truth[top:bottom, left:right]
    precision = (guess & grow(truth, radius)).sum() / float(guess.sum())
    recall = (truth & grow(guess, radius)).sum() / float(truth.sum())
    return float(2 * precision * recall / (precision + recall)) if precision + recall else 0.0


def _iou(guess: Bool[np.ndarray, "H W"], truth: Bool[np.ndarray, "H W"]) -> float:
    union = (guess | truth).sum()
    return float((guess & truth).sum() / union) if union else 1.0


def _diagonal(size: tuple[int, int]) -> float:
    return math.sqrt(size[0] ** 2 + size[1] ** 2)
