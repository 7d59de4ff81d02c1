"""Whether a model knows how good its masks are: the IoU it predicts beside the IoU they have.

Enters both for each mask; leaves a reliability table, the expected calibration error (Naeini et al. 2015, with IoU in the place of accuracy)
and the correlation.

Not here: how well a threshold on either sorts masks (`average_precision`).
"""

from dataclasses import asdict, dataclass

import numpy as np
from jaxtyping import Float

from gigamask.errors import GigamaskError


@dataclass(frozen=True)
class Bin:
    """The masks whose predicted IoU lies in [`low`, `high`), in the last also at `high`: how many, and the means of what was predicted and was."""

    low: float
    high: float
    count: int
    predicted: float | None
    actual: float | None


@dataclass(frozen=True)
class Calibration:
    """How far the predicted IoU can be taken at its word.

    `expected_error` is the mean over masks of how far apart the two means of their bin are; `bias` the mean of predicted less actual;
    `correlation` Pearson's. None where there are no masks, and the correlation also where either does not vary.
    """

    masks: int
    expected_error: float | None
    bias: float | None
    correlation: float | None
    bins: tuple[Bin, ...]

    def summary(self) -> dict:
        """Returns the same as plain data, for JSON."""
        return asdict(self)


def calibrate(
    predicted: Float[np.ndarray, "n"], actual: Float[np.ndarray, "n"], bins: int = 10
) -> Calibration:
    """Returns the calibration over bins of equal width in the predicted IoU from 0 to 1.

    A model may predict less than 0 or more than 1: such masks are in the first and the last bin, and enter the means as they are.
    """
    if bins < 1:
        raise GigamaskError(
            f"{bins} bins of predicted IoU, there must be 1 at least; give another number"
        )
    predicted, actual = predicted.astype(np.float64), actual.astype(np.float64)
    for name, values in (("predicted", predicted), ("actual", actual)):
        if not np.isfinite(values).all():
            place = int((~np.isfinite(values)).argmax())
            raise GigamaskError(
                f"the {name} IoU of mask {place} is {values[place]}, it must be finite; leave this mask out"
            )
    edges = np.arange(bins + 1) / bins
    place = np.searchsorted(edges[1:-1], predicted, "right")
    counts = np.bincount(place, minlength=bins)
    means = [
        np.bincount(place, values, bins) / np.maximum(counts, 1) for values in (predicted, actual)
    ]
    rows = tuple(
        Bin(float(low), float(high), int(count), *(float(mean) if count else None for mean in pair))
        for low, high, count, *pair in zip(edges[:-1], edges[1:], counts, *means, strict=True)
    )
    if not len(predicted):
        return Calibration(0, None, None, None, rows)
    error = float((counts * np.abs(means[0] - means[1])).sum() / len(predicted))
    return Calibration(
        len(predicted),
        error,
        float((predicted - actual).mean()),
        _correlation(predicted, actual),
        rows,
    )


def _correlation(one: np.ndarray, other: np.ndarray) -> float | None:
    if np.ptp(one) == 0 or np.ptp(other) == 0:
        return None
    return float(np.corrcoef(one, other)[0, 1])


def table(calibration: Calibration) -> str:
    """Returns the reliability table in per cent, with the error and the correlation below."""
    lines = ["predicted IoU      masks  predicted    actual"]
    for each in calibration.bins:
        means = "".join(
            "         -" if value is None else f"{100 * value:10.1f}"
            for value in (each.predicted, each.actual)
        )
        lines.append(f"{each.low:.2f} to {each.high:.2f}  {each.count:10,} {means}")
    for name, value in (
        ("calibration error", calibration.expected_error),
        ("bias", calibration.bias),
    ):
        lines.append(f"{name:18}" + ("         -" if value is None else f"{100 * value:10.1f}"))
    lines.append(
        f"{'correlation':18}"
        + ("         -" if calibration.correlation is None else f"{calibration.correlation:10.3f}")
    )
    return "\n".join(lines)
