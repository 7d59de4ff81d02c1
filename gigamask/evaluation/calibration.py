"""Calibration of predicted IoU: how close it is to the actual IoU of the masks.

The expected calibration error is that of Naeini et al. 2015, with IoU in place of accuracy.
"""

from dataclasses import asdict, dataclass

import numpy as np
from jaxtyping import Float

from gigamask.errors import GigamaskError

BINS = 10


@dataclass(frozen=True)
class Bin:
    """Masks with a predicted IoU in [`low`, `high`); the last bin includes `high`."""

    low: float
    high: float
    count: int
    predicted: float | None
    """mean predicted IoU"""
    actual: float | None
    """mean actual IoU"""


@dataclass(frozen=True)
class Calibration:
    """Calibration over some masks; values are None if there are no masks."""

    masks: int
    expected_error: float | None
    """mean over masks of the absolute difference between the two means of their bin"""
    bias: float | None
    """mean of predicted minus actual IoU"""
    correlation: float | None
    """Pearson's correlation; also None if either IoU does not vary"""
    bins: tuple[Bin, ...]

    def summary(self) -> dict:
        """Return the calibration as plain data, for JSON."""
        return asdict(self)


def calibrate(predicted: Float[np.ndarray, "n"], actual: Float[np.ndarray, "n"]) -> Calibration:
    """Compute the calibration over ten bins of equal width in the predicted IoU from 0 to 1.

    Predictions below 0 or above 1 belong to the first or last bin, and their values are not
    clipped.

    Args:
        predicted: Predicted IoU of each mask.
        actual: Actual IoU of each mask.

    Raises:
        GigamaskError: An IoU is not finite.
    """
    predicted, actual = predicted.astype(np.float64), actual.astype(np.float64)
    for name, values in (("predicted", predicted), ("actual", actual)):
        if not np.isfinite(values).all():
            mask = int((~np.isfinite(values)).argmax())
            raise GigamaskError(
                f"the {name} IoU of mask {mask} must be finite (got {values[mask]}): "
                "leave this mask out, or take other weights if these diverged"
            )
    edges = np.arange(BINS + 1) / BINS
    bin_index = np.searchsorted(edges[1:-1], predicted, "right")
    counts = np.bincount(bin_index, minlength=BINS)
    means = [
        np.bincount(bin_index, values, BINS) / np.maximum(counts, 1)
        for values in (predicted, actual)
    ]
    rows = tuple(
        Bin(float(low), float(high), int(count), *(float(mean) if count else None for mean in pair))
        for low, high, count, *pair in zip(edges[:-1], edges[1:], counts, *means, strict=True)
    )
    if not len(predicted):
        return Calibration(0, None, None, None, rows)
    error = float((counts * np.abs(means[0] - means[1])).sum() / len(predicted))
    bias = float((predicted - actual).mean())
    varies = np.ptp(predicted) and np.ptp(actual)
    correlation = float(np.corrcoef(predicted, actual)[0, 1]) if varies else None
    return Calibration(len(predicted), error, bias, correlation, rows)
