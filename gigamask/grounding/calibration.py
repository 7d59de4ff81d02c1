"""Calibration of grounding scores: confidences, and the threshold above which a mask fits."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Bool, Float, Float64, Int64

from gigamask import files
from gigamask.errors import GigamaskError
from gigamask.evaluation import calibration
from gigamask.serialization import check_checksum, read_json, with_checksum

FILE = "confidence.json"
"""File in the run folder with the `Confidence` fitted to held-out queries."""
MIN_QUERIES = 20
"""Minimum number of queries for a calibration."""

Summaries = dict[str, dict[str, Any]]


@dataclass(frozen=True)
class Confidence:
    """Probability that a mask is correct, `sigmoid(scale * logit + shift)` (Platt 1999).

    A logit is a mask's score minus that of "no mask fits"; a mask fits if its logit is above
    `threshold`.
    """

    scale: float = 1.0
    shift: float = 0.0
    threshold: float = 0.0

    def __call__(self, logits: Float[np.ndarray, "n"]) -> Float64[np.ndarray, "n"]:
        """Convert logits to probabilities."""
        return 0.5 * (1 + np.tanh(0.5 * (self.scale * logits.astype(np.float64) + self.shift)))

    @classmethod
    def fit(
        cls, logits: Float[np.ndarray, "n"], is_target: Bool[np.ndarray, "n"], steps: int = 50
    ) -> "Confidence":
        """Fit scale and shift by maximum likelihood with Newton's method.

        Args:
            logits: Logits of masks.
            is_target: Which masks are correct.
            steps: Number of Newton steps.

        Returns:
            The fit; the default if all masks or none are correct, and scale 0 if correct masks
            score lower.
        """
        if not is_target.any() or is_target.all():
            return cls()
        x = np.stack([logits.astype(np.float64), np.ones(len(logits))], 1)
        y, theta = is_target.astype(np.float64), np.array([1.0, 0.0])
        for _ in range(steps):
            p = cls(*theta.tolist())(x[:, 0])
            # A small L2 prior: with perfectly separable data the scale would diverge.
            gradient = x.T @ (p - y) + 1e-2 * (theta - (1.0, 0.0))
            hessian = (x * (p * (1 - p))[:, None]).T @ x + 1e-2 * np.eye(2)
            update = np.linalg.solve(hessian, gradient)
            theta = theta - update / max(1.0, float(np.abs(update).max()))
        if theta[0] < 0:
            return cls(0.0, float(np.log(y.mean() / (1 - y.mean()))))
        return cls(float(theta[0]), float(theta[1]))

    def save(self, folder: str) -> Path:
        """Write to a run folder and return the file's path."""
        path = Path(folder) / FILE
        files.write_bytes(path, with_checksum(asdict(self)))
        return path

    @classmethod
    def load(cls, folder: str) -> "Confidence":
        """Read from a run folder; the default if nothing was fitted.

        Raises:
            GigamaskError: The file is damaged.
        """
        path = Path(folder) / FILE
        if not path.exists():
            return cls()
        try:
            content = read_json(path)
            check_checksum(content, str(path))
            return cls(*(float(content[name]) for name in ("scale", "shift", "threshold")))
        except (ValueError, TypeError, KeyError) as error:
            raise GigamaskError(
                f"{path}: not a fitted confidence ({error}); fit it again: gigamask ground "
                f"evaluate {folder} --calibrate"
            ) from error


def calibrate(
    logits: Sequence[Float64[np.ndarray, "_"]],
    is_target: Sequence[Bool[np.ndarray, "_"]],
    images: Int64[np.ndarray, "q"],
) -> tuple[Confidence, Summaries]:
    """Fit confidences, and measure the calibration error with cross-validation over two halves.

    Args:
        logits: Logits of the masks of each query.
        is_target: Which masks of each query are correct.
        images: Index row of each query's image; images alternate between the halves.

    Returns:
        The confidence fitted to all queries, and calibration summaries `uncalibrated` and
        `calibrated`. With too few queries or images: the default, and only `uncalibrated`.
    """
    x, y = np.concatenate(logits), np.concatenate(is_target)
    half = _every_other(np.repeat(images, [len(row) for row in logits]))
    confidences = {"uncalibrated": Confidence()(x)}
    enough = len(logits) >= MIN_QUERIES and half.any() and (~half).any()
    if enough:
        confidences["calibrated"] = np.empty(len(x))
        for part in (half, ~half):
            fitted = Confidence.fit(x[~part], y[~part])
            confidences["calibrated"][part] = fitted(x[part])
    summaries = {
        name: calibration.calibrate(values, y.astype(np.float64)).summary()
        for name, values in confidences.items()
    }
    return Confidence.fit(x, y) if enough else Confidence(), summaries


def calibrate_refusal(
    logits: Sequence[Float64[np.ndarray, "_"]],
    is_target: Sequence[Bool[np.ndarray, "_"]],
    images: Int64[np.ndarray, "q"],
) -> tuple[float, dict[str, dict[str, float]]]:
    """Fit the logit at or below which queries are refused, by the balanced accuracy of refusal.

    Args:
        logits: Logits of the masks of each query.
        is_target: Which masks of each query are correct.
        images: Index row of each query's image; images alternate between the halves.

    Returns:
        The threshold fitted to all queries, and the shares of refused queries without targets
        (`absent`) and with targets (`refused`), `uncalibrated` and `calibrated` on the other half.
        With too few queries of a kind: 0, and only `uncalibrated`.
    """
    best = np.array([row.max(initial=-1e4) for row in logits])
    absent = np.array([not row.any() for row in is_target])
    half = _every_other(images)

    def refused_fractions(threshold: Float64[np.ndarray, "q"]) -> dict[str, float]:
        groups = (("absent", absent), ("refused", ~absent))
        refused = best <= threshold
        return {name: float(refused[group].mean()) for name, group in groups if group.any()}

    shares = {"uncalibrated": refused_fractions(np.zeros(len(best)))}
    groups = [part & kind for part in (half, ~half) for kind in (absent, ~absent)]
    if len(best) < MIN_QUERIES or not all(group.any() for group in groups):
        return 0.0, shares
    thresholds = np.where(
        half,
        best_threshold(best[~half], absent[~half]),
        best_threshold(best[half], absent[half]),
    )
    return best_threshold(best, absent), shares | {"calibrated": refused_fractions(thresholds)}


def best_threshold(best: Float64[np.ndarray, "q"], absent: Bool[np.ndarray, "q"]) -> float:
    """Return the threshold with the highest balanced accuracy, the lowest one if tied.

    Args:
        best: Best logit of each query.
        absent: Which queries have no target; they should be below the threshold.

    Returns:
        The midpoint between two adjacent logits.
    """
    order = np.argsort(best, kind="stable")
    gains = np.cumsum(absent[order] / absent.sum() - ~absent[order] / (~absent).sum())
    position = int(gains.argmax())
    above = best[order[min(position + 1, len(order) - 1)]]
    return float((best[order[position]] + above) / 2)


def _every_other(images: Int64[np.ndarray, "n"]) -> Bool[np.ndarray, "n"]:
    return np.searchsorted(np.unique(images), images) % 2 == 0
