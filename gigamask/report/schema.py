"""Types of what a report shows of a run's JSON files.

A run folder may be damaged or made by others: what has another type is left out.
"""

from typing import Annotated, Any, Literal, NotRequired, Required, TypedDict

from msgspec import Meta

MAX_NUMBER = 1e100
"""Larger numbers, infinity and NaN count as unknown."""
Finite = Annotated[float, Meta(ge=-MAX_NUMBER, le=MAX_NUMBER)]
Number = Finite | None
Count = Annotated[int, Meta(ge=0, le=2**53)]
Clicks = dict[str, Number]


class MetricsEvent(TypedDict, total=False):
    """A line of metrics.jsonl; records of steps have further metrics."""

    step: Required[Count]
    started: str
    device: str | None
    corrupt_checkpoints: list[str]
    evaluation: dict[str, Any]
    of: str
    subject: str
    standard_error: dict[str, Any]
    warnings: list[str]
    seconds: Number
    skipped_sample: str
    reason: str
    skipped_step: str
    save_failed: str
    leak: str
    bytes: Finite
    bytes_per_step: Finite
    since: Finite


class Start(TypedDict, total=False):
    """A line of origin.jsonl."""

    argv: list[str]
    gigamask: str
    torch: str
    numpy: str
    git: str | None


class Means(TypedDict):
    """Scores of some masks, or their standard errors."""

    clicks: Clicks
    oracle: Number
    box: Number


class MaskScores(Means):
    """Scores of the masks of one granularity or size."""

    masks: Count
    standard_error: NotRequired[Means]


class CalibrationBin(TypedDict):
    """Predicted and actual IoU of the masks in a bin."""

    predicted: Number
    actual: Number
    count: Count


class CalibrationScores(TypedDict):
    """Calibration of the predicted IoU."""

    expected_error: Number
    bias: Number
    correlation: Number
    bins: list[CalibrationBin]


class Scores(TypedDict, total=False):
    """The parts of evaluation.json that a report shows."""

    clicks: Required[Clicks]
    oracle: Number
    box: Number
    standard_error: Means
    masks: Count
    images: Count
    granularity: dict[str, MaskScores]
    size: dict[Literal["small", "medium", "large"], MaskScores]
    calibration: CalibrationScores
    data: list[str]
    weights: str
    step: Count | None
    protocol: dict[str, Any]
