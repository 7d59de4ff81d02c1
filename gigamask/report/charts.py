"""Data for the charts of runs, which `charts.js` draws in reports and pages."""

from typing import Any

from gigamask.report.history import History
from gigamask.report.summary import comparable, waiting

MAX_POINTS = 600
"""Maximum number of points of a curve; more records are averaged in groups of neighbors."""


def curves(run: History) -> dict[str, Any]:
    """Return the records, the comparable evaluations, and the steps at which training resumed."""
    waiting_percent = [None if share is None else 100 * share for share in waiting(run)]
    records = run.records | ({"waiting": waiting_percent} if waiting_percent else {})
    return {
        "records": downsample(records),
        "evaluations": [{key: one[key] for key in ("step", "scores")} for one in comparable(run)],
        "resumed": [event["step"] for event in run.faults["resumed"] if event["step"]],
    }


def downsample(records: dict[str, list[Any]]) -> dict[str, list[Any]]:
    """Average columns to at most `MAX_POINTS` rows; `step` is the last of each group."""
    count = len(records["step"])
    size = -(-count // MAX_POINTS) or 1
    groups = [slice(start, start + size) for start in range(0, count, size)]
    return {
        name: [column[group][-1] if name == "step" else _mean(column[group]) for group in groups]
        for name, column in records.items()
    }


def _mean(values: list[Any]) -> float | None:
    known = [value for value in values if value is not None]
    return float(f"{sum(known) / len(known):.6g}") if known else None
