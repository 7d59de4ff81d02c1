"""The contents of a report as data: speed, best evaluation, changed flags and recovered faults."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from gigamask.report.history import History, count_of
from gigamask.report.html import format_time
from gigamask.training.config import differences

IGNORED_FLAGS = ("out", "recipe")
"""Flags that always differ and do not characterize a run."""


def summarize(
    runs: Mapping[str, History], recipes: Mapping[str, dict[str, Any] | None]
) -> dict[str, Any]:
    """Return the contents of a report.

    Args:
        runs: Runs by name.
        recipes: The configuration of each run's recipe, None if it cannot be read.
    """
    entries = {}
    for name, run in runs.items():
        recipe = recipes.get(name)
        changed = differing_flags(recipe, run.config) if recipe and run.config else None
        entries[name] = run.to_dict() | {
            "throughput": throughput(run),
            "best": best(run),
            "recovered": recovered(run),
            "from_recipe": changed,
        }
    return {
        "runs": entries,
        "differences": differing_flags(*(run.config for run in runs.values())) if runs else {},
    }


def differing_flags(*configs: Mapping[str, Any]) -> dict[str, list[str | None]]:
    """Return the flags that differ, with each run's value as text (None if it has none)."""
    return {
        name: [None if value is None else flag_text(value) for value in values]
        for name, values in differences(*configs).items()
        if name not in IGNORED_FLAGS
    }


def flag_text(value: str | Sequence[str]) -> str:
    """Return a flag's value or values as text; "(none)" if there are none."""
    return value if isinstance(value, str) else " ".join(map(str, value)) or "(none)"


def waiting(run: History) -> list[float | None]:
    """Return the share of each recorded step's time that was spent waiting for data."""
    batch = count_of(run.config, "batch-size")
    pairs = zip(
        run.records.get("data_time_s", ()), run.records.get("images_per_s", ()), strict=False
    )
    return [
        min(data_time_s * speed / batch, 1.0)
        if batch and data_time_s is not None and speed
        else None
        for data_time_s, speed in pairs
    ]


def throughput(run: History) -> dict[str, float | None]:
    """Return the median speed and share of time waiting for data, total times, and peak memory.

    `slow_5` and `fast_5` are the 5 % and 95 % quantiles of the speed in images per second.
    """
    speeds, shares = _known(run.records.get("images_per_s", [])), _known(waiting(run))
    slow, median, fast = (
        np.quantile(speeds, [0.05, 0.5, 0.95]).tolist() if speeds else (None, None, None)
    )
    batch = count_of(run.config, "batch-size")
    step_s = batch / median if median and batch else None
    training_s = step_s * run.records["step"][-1] if step_s is not None else None
    evaluation_s = _known([evaluation["seconds"] for evaluation in run.evaluations])
    return {
        "images_per_s": median,
        "slow_5": slow,
        "fast_5": fast,
        "step_s": step_s,
        "waiting": float(np.median(shares)) if shares else None,
        "training_s": training_s,
        "evaluation_s": sum(evaluation_s) if evaluation_s else None,
        "memory_gb": max(_known(run.records.get("memory_gb", [])), default=None),
        "loader_mb": max(_known(run.records.get("loader_mb", [])), default=None),
    }


def last_mean(values: Sequence[float | None]) -> tuple[float | None, int]:
    """Return the mean of the last records of a column, and their number.

    With 30 or more known records, these are the last 5 %; otherwise only the last one.
    """
    known = _known(values)
    count = max(round(0.05 * len(known)), 1) if len(known) >= 30 else 1
    return (float(np.mean(known[-count:])) if known else None), count


def _known(values: Sequence[Any]) -> list[float]:
    return [value for value in values if value is not None]


def best(run: History) -> dict[str, Any] | None:
    """Return the evaluation with the best score, and the score's name as `by`.

    The score is the one that selects the run's best checkpoint; only those of `comparable` count.
    None if there is no evaluation.
    """
    evaluations = comparable(run)
    if not evaluations:
        return None
    last = evaluations[-1]
    best_by = str(run.config.get("evaluation.best-by", ""))
    by = best_by if best_by in last["scores"] else next(iter(last["scores"]))
    scored = [one | {"by": by} for one in evaluations if one["scores"].get(by) is not None]
    return max(scored, key=lambda one: (one["scores"][by], one["step"]), default=None)


def comparable(run: History) -> list[dict[str, Any]]:
    """Return the evaluations of what the last one scored: the same masks, images and precision.

    Of those that do not state it, as of earlier versions, only the numbers are compared.
    """
    evaluations = [evaluation for evaluation in run.evaluations if evaluation["scores"]]
    return [
        one
        for one in evaluations
        if one["of"] == evaluations[-1]["of"] and one["subject"] in ("", evaluations[-1]["subject"])
    ]


def recovered(run: History) -> dict[str, list[str]]:
    """Return the recovered faults by kind, one line each."""
    faults = run.faults
    lines_by_kind = {
        "resumed after a stop": [_resumed(event) for event in faults["resumed"]],
        "damaged checkpoints": [
            f"{event['checkpoint']} was damaged; training resumed from step {event['step']}"
            for event in faults["corrupt_checkpoints"]
        ]
        + [f"{one.name}: {one.fault}" for one in run.checkpoints if one.fault],
        "samples left out": [
            f"step {event['step']}: {event.get('reason') or event['skipped_sample']}"
            for event in faults["skipped_sample"]
        ],
        "skipped steps": [
            f"step {event['step']}, gradient not finite or no mask: {event['skipped_step']}"
            for event in faults["skipped_step"]
        ],
        "failed saves": [
            f"step {event['step']}: {event['save_failed']}" for event in faults["save_failed"]
        ],
        "growing memory": [
            f"step {event['step']}: {event['leak']} holds {event.get('bytes', 0) / 1e6:,.0f} MB,"
            f" growing by {event.get('bytes_per_step', 0) / 1e3:,.0f} kB per step"
            for event in faults["leak"]
        ],
        "damaged lines": [f"{run.invalid_lines} of metrics.jsonl"] if run.invalid_lines else [],
    }
    return {kind: lines for kind, lines in lines_by_kind.items() if lines}


def _resumed(event: Mapping[str, Any]) -> str:
    if event["step"] is None:
        return f"after step {event['reached']}, from an earlier step"
    repeated = event["reached"] - event["step"]
    on = f" on {format_time(event['time'])}" if event["time"] else ""
    return f"at step {event['step']}{on}, " + (
        f"at least {repeated} steps trained again" if repeated > 0 else "no recorded step lost"
    )
