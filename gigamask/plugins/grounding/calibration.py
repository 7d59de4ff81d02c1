"""Calibration of grounding scores: confidences, and the threshold above which a mask fits."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
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
        """Read from a run folder; the default if nothing was fitted, errors as of `find`."""
        return cls.find(folder) or cls()

    @classmethod
    def find(cls, folder: str) -> "Confidence | None":
        """Read from a run folder; None if nothing was fitted.

        Raises:
            GigamaskError: The file is damaged.
        """
        path = Path(folder) / FILE
        if not path.exists():
            return None
        try:
            content = read_json(path)
            check_checksum(content, str(path))
            return cls(*(float(content[name]) for name in ("scale", "shift", "threshold")))
        except (ValueError, TypeError, KeyError) as error:
            raise GigamaskError(
                f"{path}: not a fitted confidence ({error}); fit it again: gigamask ground "
                f"evaluate {folder} --calibrate"
            ) from error


@dataclass(frozen=True, eq=False)
class ScoredQueries:
    """Scores of queries and what is right, for calibration.

    Attributes:
        logits: Logits of the masks of each query.
        is_target: Which masks of each query are correct.
        images: Index row of each query's image; images alternate between the halves.
    """

    logits: Sequence[Float64[np.ndarray, "_"]]
    is_target: Sequence[Bool[np.ndarray, "_"]]
    images: Int64[np.ndarray, "q"]

    @cached_property
    def best(self) -> Float64[np.ndarray, "q"]:
        """Best logit of each query."""
        return np.array([row.max(initial=-1e4) for row in self.logits])

    @cached_property
    def absent(self) -> Bool[np.ndarray, "q"]:
        """Which queries have no target."""
        return np.array([not row.any() for row in self.is_target])

    @cached_property
    def right(self) -> Bool[np.ndarray, "q"]:
        """Which queries have a target as their best mask."""
        pairs = zip(self.logits, self.is_target, strict=True)
        return np.array([bool(len(row)) and bool(hit[row.argmax()]) for row, hit in pairs])

    @cached_property
    def half(self) -> Bool[np.ndarray, "q"]:
        """Which queries are about every other image."""
        return np.searchsorted(np.unique(self.images), self.images) % 2 == 0

    def shares(self, threshold: float | Float64[np.ndarray, "q"]) -> dict[str, float]:
        """Return the effect of a threshold.

        Args:
            threshold: Logit at or below which a query is refused; one for all, or for each query.

        Returns:
            The shares of queries without targets that are refused (`absent`), of those with targets
            that are refused (`refused`) and that are answered by a target (`right`).
        """
        refused, present = self.best <= threshold, ~self.absent
        found = {}
        if self.absent.any():
            found["absent"] = float(refused[self.absent].mean())
        if present.any():
            found["refused"] = float(refused[present].mean())
            found["right"] = float((self.right & ~refused)[present].mean())
        return found


def summarize(queries: ScoredQueries, confidence: Confidence) -> dict[str, Any]:
    """Return the calibration of a confidence on queries.

    Args:
        queries: The queries.
        confidence: The confidence.
    """
    y = np.concatenate(queries.is_target).astype(np.float64)
    return calibration.calibrate(confidence(np.concatenate(queries.logits)), y).summary()


def calibrate(queries: ScoredQueries) -> tuple[Confidence, Summaries]:
    """Fit confidences, and measure the calibration error with cross-validation over two halves.

    Args:
        queries: The queries.

    Returns:
        The confidence fitted to all queries, and calibration summaries `uncalibrated` and
        `calibrated`. With too few queries or images: the default, and only `uncalibrated`. Where
        cross-validation gains nothing: the default.
    """
    x, y = np.concatenate(queries.logits), np.concatenate(queries.is_target)
    half = np.repeat(queries.half, [len(row) for row in queries.logits])
    summaries = {"uncalibrated": summarize(queries, Confidence())}
    if len(queries.logits) < MIN_QUERIES or half.all() or not half.any():
        return Confidence(), summaries
    confidences = np.empty(len(x))
    for part in (half, ~half):
        confidences[part] = Confidence.fit(x[~part], y[~part])(x[part])
    summaries["calibrated"] = calibration.calibrate(confidences, y.astype(np.float64)).summary()
    errors = [summaries[name]["expected_error"] for name in ("uncalibrated", "calibrated")]
    return Confidence.fit(x, y) if errors[1] < errors[0] else Confidence(), summaries


def calibrate_refusal(queries: ScoredQueries) -> tuple[float, dict[str, dict[str, float]]]:
    """Fit the logit at or below which queries are refused, by the mean share of right answers.

    A query without targets is right if it is refused, one with targets if its best mask is one of
    them and it is not refused; both kinds count alike.

    Args:
        queries: The queries.

    Returns:
        The threshold fitted to all queries, and `ScoredQueries.shares`, `uncalibrated` and
        `calibrated` on the other half. With too few queries of a kind: 0, and only `uncalibrated`.
        Where cross-validation finds no more right answers, or worse refusals: 0.
    """
    half, absent, best = queries.half, queries.absent, queries.best
    shares = {"uncalibrated": queries.shares(0.0)}
    groups = [part & kind for part in (half, ~half) for kind in (absent, ~absent)]
    if len(best) < MIN_QUERIES or not all(group.any() for group in groups):
        return 0.0, shares
    right = queries.right
    fitted = [best_threshold(best[part], absent[part], right[part]) for part in (~half, half)]
    shares["calibrated"] = queries.shares(np.where(half, *fitted))
    before, after = shares["uncalibrated"], shares["calibrated"]
    gain = after["absent"] + after["right"] - before["absent"] - before["right"]
    balance = after["absent"] - after["refused"] - before["absent"] + before["refused"]
    threshold = best_threshold(best, absent, right)
    return threshold if gain > 0 and balance >= 0 else 0.0, shares


def best_threshold(
    best: Float64[np.ndarray, "q"], absent: Bool[np.ndarray, "q"], right: Bool[np.ndarray, "q"]
) -> float:
    """Return the threshold with the highest mean share of right answers, the lowest one if tied.

    Args:
        best: Best logit of each query.
        absent: Which queries have no target; they should be refused.
        right: Which queries should be answered, since their best mask is a target.

    Returns:
        The midpoint between two adjacent logits, or less than all of them.
    """
    order = np.argsort(best, kind="stable")
    ordered, present = best[order], max(1, int((~absent).sum()))
    gains = np.cumsum(absent[order] / max(1, int(absent.sum())) - right[order] / present)
    gains[:-1][ordered[1:] == ordered[:-1]] = -np.inf  # equal logits are refused together
    position = int(gains.argmax())
    if gains[position] <= 0:
        return float(ordered[0]) - 1.0
    return float((ordered[position] + ordered[min(position + 1, len(order) - 1)]) / 2)
