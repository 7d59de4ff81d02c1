"""What the charts of runs are drawn from, by the page of `gigamask serve` and by reports.

The drawing itself is `charts.js` beside this file.
"""

from typing import Any

from gigamask.report.history import History
from gigamask.report.summary import waiting

MAX_POINTS = 600
"""Points of a curve; more records are averaged in groups of neighbours."""


def curves(run: History) -> dict[str, Any]:
    """Returns the records, the scores in training, and the steps at which training resumed."""
    waited = [None if share is None else 100 * share for share in waiting(run)]
    records = run.records | ({"waiting": waited} if waited else {})
    return {
        "records": thinned(records),
        "evaluations": [{key: each[key] for key in ("step", "scores")} for each in run.evaluations],
        "resumed": [event["step"] for event in run.faults["resumed"] if event["step"]],
    }


def thinned(records: dict[str, list[Any]]) -> dict[str, list[Any]]:
    """Averages columns to at most `MAX_POINTS` rows; `step` is the last of each group."""
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
