"""Boundary scores of masks: DAVIS's boundary F and Boundary IoU, in [0, 1].

Both match the published code bit for bit: boundary F that of Perazzi et al. 2016 (`f_measure` of
davis2017-evaluation), Boundary IoU that of Cheng et al. 2021 (`mask_to_boundary` of
boundary-iou-api).
"""

import math
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float64, Shaped

from gigamask.masks.boundary import Mask, dilate, inner_band, mask_extent, outline

MaskStack = Shaped[np.ndarray, "n H W"]


@dataclass(frozen=True)
class BoundaryProtocol:
    """Settings that the scores depend on; saved with every result."""

    tolerance: float = 0.008
    """distance at which boundary pixels match, as a fraction of the image diagonal, rounded up"""
    band: float = 0.02
    """width of the band along a boundary, as a fraction of the image diagonal, at least one
    pixel"""
    empty: str = "1 if neither mask has a boundary, 0 if only one has"

    def tolerance_px(self, size: tuple[int, int]) -> int:
        """Return the distance at which pixels match in an image of size (H, W)."""
        return math.ceil(self.tolerance * math.hypot(*size))

    def band_px(self, size: tuple[int, int]) -> int:
        """Return the width of the band in an image of size (H, W)."""
        return max(1, round(self.band * math.hypot(*size)))


def boundary_f(
    predicted: MaskStack, truth: MaskStack, protocol: BoundaryProtocol | None = None
) -> Float64[np.ndarray, "n"]:
    """Return each mask's boundary F, the harmonic mean of precision and recall of its outline.

    Precision is the fraction of the predicted outline's pixels near the true outline, recall the
    reverse. Outlines are DAVIS's (`masks.boundary.outline`): a full mask has none and therefore
    matches an empty one.

    Args:
        predicted: Predicted masks at the size of the stored image; 0 is background.
        truth: Annotated masks.
        protocol: Tolerance; the default is DAVIS's.
    """
    radius = (protocol or BoundaryProtocol()).tolerance_px(predicted.shape[1:])
    pairs = zip(predicted.astype(bool), truth.astype(bool), strict=True)
    return np.array([_f(outline(a), outline(b), radius) for a, b in pairs], np.float64)


def boundary_iou(
    predicted: MaskStack, truth: MaskStack, protocol: BoundaryProtocol | None = None
) -> Float64[np.ndarray, "n"]:
    """Return the IoU of the bands inside each mask's boundary and its annotation's.

    The image's border counts as a boundary. Two empty masks score 1, as in `losses.iou.mask_iou`;
    the published code divides 0 by 0 there.

    Args:
        predicted: Predicted masks at the size of the stored image; 0 is background.
        truth: Annotated masks.
        protocol: Width of the bands; the default is that of boundary-iou-api.
    """
    width = (protocol or BoundaryProtocol()).band_px(predicted.shape[1:])
    pairs = zip(predicted.astype(bool), truth.astype(bool), strict=True)
    return np.array([_iou(inner_band(a, width), inner_band(b, width)) for a, b in pairs])


def _f(predicted: Mask, truth: Mask, radius: int) -> float:
    """Return the F score of two outlines."""
    if not predicted.any() or not truth.any():
        return float(predicted.any() == truth.any())
    # Pixels outside the box around both outlines change nothing.
    top, bottom, left, right = mask_extent(predicted | truth)
    predicted, truth = predicted[top:bottom, left:right], truth[top:bottom, left:right]
    precision = (predicted & dilate(truth, radius)).sum() / float(predicted.sum())
    recall = (truth & dilate(predicted, radius)).sum() / float(truth.sum())
    return float(2 * precision * recall / (precision + recall)) if precision + recall else 0.0


def _iou(a: Mask, b: Mask) -> float:
    union = (a | b).sum()
    return float((a & b).sum() / union) if union else 1.0
