"""What a report says of runs, as data: how fast they were, which evaluation is the best, in what their configurations differ, what they survived.

Enters: `history.History`. Leaves: plain data, of which the page is made and which `--json` holds.

Not here: how it looks (`report.page`).
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from gigamask.report.history import History
from gigamask.report.html import when

ANCHORS = {"SAM ViT-B": {"1": 0.559, "5": 0.809}, "SAM ViT-H": {"1": 0.581, "5": 0.813}}
"""Mean IoU by clicks on the 23 datasets SA-23, as the SAM 2 paper (arXiv 2408.00714) states them."""
ANCHORS_TOLD = (
    "The rows in italics are anchors, not a comparison: the mean IoU that the SAM 2 paper (arXiv 2408.00714) states of SAM's published weights, "
    "means over the 23 datasets of SA-23. The images and masks here are others, and SAM's own code for that evaluation is not public."
)
OWN = ("out", "recipe")
"""Flags in which every run differs and which say nothing of it."""


def tell(
    runs: Mapping[str, History], recipes: Mapping[str, dict[str, Any] | None]
) -> dict[str, Any]:
    """Returns all that a report holds; `recipes` are the configurations that the runs' recipes have by themselves, None where one is not known."""
    told = {}
    for name, run in runs.items():
        recipe = recipes.get(name)
        changed = differences([recipe, run.config]) if recipe and run.config else None
        told[name] = run.plain() | {
            "throughput": throughput(run),
            "best": best(run),
            "survived": survived(run),
            "from_recipe": changed,
        }
    return {
        "runs": told,
        "differences": differences([run.config for run in runs.values()]) if len(runs) > 1 else {},
        "anchors": ANCHORS,
    }


def differences(configs: Sequence[Mapping[str, Any]]) -> dict[str, list[str | None]]:
    """Returns the flags in which configurations differ, with each one's value as text, None where it has no such flag."""
    names = dict.fromkeys(name for config in configs for name in config if name not in OWN)
    found = {name: [_text(config.get(name)) for config in configs] for name in names}
    return {name: values for name, values in found.items() if len(set(values)) > 1}


def _text(value: Any) -> str | None:
    return (
        value if value is None or isinstance(value, str) else " ".join(map(str, value)) or "(none)"
    )


def waiting(run: History) -> list[float | None]:
    """Returns, of each record, the share of its update's time that was spent waiting for data."""
    batch = int(told) if (told := str(run.config.get("batch-size", ""))).isdigit() else 0
    pairs = zip(
        run.records.get("data_time_s", ()), run.records.get("images_per_s", ()), strict=False
    )
    return [
        min(waited * speed / batch, 1.0) if batch and waited is not None and speed else None
        for waited, speed in pairs
    ]


def throughput(run: History) -> dict[str, float | None]:
    """Returns medians and the slow and fast end of speed, in images a second, the waiting share, and about how long training and evaluating took."""
    speeds, shares = _known(run.records.get("images_per_s", [])), _known(waiting(run))
    slow, median, fast = (
        np.quantile(speeds, [0.05, 0.5, 0.95]).tolist() if speeds else (None, None, None)
    )
    step_s = (
        int(run.config["batch-size"]) / median
        if median and str(run.config.get("batch-size", "")).isdigit()
        else None
    )
    trained = step_s * run.records["step"][-1] if step_s is not None else None
    evaluated = _known([each["seconds"] for each in run.evaluations])
    return {
        "images_per_s": median,
        "slow_5": slow,
        "fast_5": fast,
        "step_s": step_s,
        "waiting": float(np.median(shares)) if shares else None,
        "training_s": trained,
        "evaluation_s": sum(evaluated) if evaluated else None,
        "memory_gb": max(_known(run.records.get("memory_gb", [])), default=None),
        "loader_mb": max(_known(run.records.get("loader_mb", [])), default=None),
    }


def last_mean(values: Sequence[float | None]) -> tuple[float | None, int]:
    """Returns the mean of the last records of a column and how many they are.

    Of 30 known records or more the last 5 % count, of fewer the last one.
    """
    known = _known(values)
    count = max(round(0.05 * len(known)), 1) if len(known) >= 30 else 1
    return (float(np.mean(known[-count:])) if known else None), count


def _known(values: Sequence[Any]) -> list[float]:
    return [value for value in values if value is not None]


def best(run: History) -> dict[str, Any] | None:
    """Returns the evaluation that scores highest by what the run keeps its best checkpoint by, `by`; None where it was never evaluated."""
    found = [each for each in run.evaluations if each["scores"]]
    if not found:
        return None
    wanted = str(run.config.get("evaluation.best-by", ""))
    by = wanted if wanted in found[-1]["scores"] else next(iter(found[-1]["scores"]))
    scored = [each for each in found if each["scores"].get(by) is not None]
    return (
        max(scored, key=lambda each: (each["scores"][by], each["step"])) | {"by": by}
        if scored
        else None
    )


def survived(run: History) -> dict[str, list[str]]:
    """Returns a line for each fault by what befell the run."""
    faults = run.faults
    told = {
        "went on after a stop": [_resumed(each) for each in faults["resumed"]],
        "damaged checkpoints": [
            f"{each['checkpoint']} was damaged; training went on from step {each['step']}"
            for each in faults["damaged"]
        ]
        + [f"{each.name}: {each.fault}" for each in run.checkpoints if each.fault],
        "samples left out": [
            f"step {each['step']}: {each.get('reason') or each['rejected']}"
            for each in faults["rejected"]
        ],
        "steps skipped": [
            f"step {each['step']}, its gradient was not finite or it had no mask: {each['skipped']}"
            for each in faults["skipped"]
        ],
        "saves that failed": [
            f"step {each['step']}: {each['unsaved']}" for each in faults["unsaved"]
        ],
        "memory that grows": [
            f"step {each['step']}: {each['leak']} holds {each.get('bytes', 0) / 1e6:,.0f} MB, {each.get('bytes_a_step', 0) / 1e3:,.0f} kB more a step"
            for each in faults["leak"]
        ],
        "lines cut short": [f"{run.torn} of metrics.jsonl"] if run.torn else [],
    }
    return {what: lines for what, lines in told.items() if lines}


def _resumed(event: Mapping[str, Any]) -> str:
    if event["step"] is None:
        return f"after step {event['reached']}, from a step before it"
    again = event["reached"] - event["step"]
    on = f" on {when(event['time'])}" if event["time"] else ""
    return f"at step {event['step']}{on}, " + (
        f"{again} steps or more trained again" if again > 0 else "no recorded step lost"
    )
