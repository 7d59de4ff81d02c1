"""Tables of a report: configuration, throughput, faults, checkpoints and origin."""

from collections.abc import Mapping, Sequence
from typing import Any

from gigamask.report import html
from gigamask.report.history import History
from gigamask.report.html import (
    Markup,
    bullets,
    collapsible,
    colored,
    format_number,
    note,
    table,
)
from gigamask.report.summary import flag_text

MAX_LINES = 16


def configuration(runs: Mapping[str, History], report: Mapping[str, Any]) -> str:
    """Return the flags that differ between runs, or between one run and its recipe.

    Args:
        runs: Runs by name.
        report: The result of `summary.summarize` for them.
    """
    all_flags = "".join(
        collapsible(f"all flags of {name}", table(["flag", "value"], flags, "words"))
        for name, run in runs.items()
        if (flags := [[flag, flag_text(value)] for flag, value in run.config.items()])
    )
    if len(runs) > 1:
        head, differences = ["flag", *runs], report["differences"]
        same = "All runs have the same flags, except for their folders."
    else:
        (run,), (entry,) = runs.values(), report["runs"].values()
        if not run.config:
            return ""
        recipe, differences = run.config.get("recipe", ""), entry["from_recipe"]
        head, same = ["flag", f"recipe {recipe}", "this run"], f"All as in the recipe {recipe}."
        if differences is None:
            text = (
                f"Differences from the recipe {recipe} are unknown: it cannot be read, or it is "
                "not built in, and only --trust runs it."
            )
            return note(text) + all_flags
    rows = [[name, *(_value(value) for value in values)] for name, values in differences.items()]
    return (table(head, rows, "words") if rows else note(same)) + all_flags


def _value(value: str | None) -> str:
    if value is None:
        return Markup('<span class="note">no such flag</span>')
    return "None" if value == "null" else value


def throughput(reports: Mapping[str, Any]) -> str:
    """Return a table of speed and memory; empty if nothing was recorded."""
    rows = []
    for name, report in reports.items():
        speed = report["throughput"]
        if speed["images_per_s"] is not None:
            times = [speed[key] for key in ("training_s", "evaluation_s")]
            rows.append(
                [
                    name,
                    *(
                        format_number(speed[key])
                        for key in ("images_per_s", "slow_5", "fast_5", "step_s")
                    ),
                    "" if speed["waiting"] is None else f"{speed['waiting']:.1%}",
                    *("" if time is None else duration(time) for time in times),
                    format_number(speed["memory_gb"]),
                    format_number(speed["loader_mb"]),
                ]
            )
    if not rows:
        return ""
    head = [
        "",
        "images/s",
        "slowest 5 %",
        "fastest 5 %",
        "s per step",
        "waiting",
        "training, about",
        "evaluating",
        "memory, GB",
        "loader process, MB",
    ]
    explanation = (
        "Medians over the records. Training: the number of steps times the median; evaluating: the"
        " sum. For grounding, a query counts as an image."
    )
    return table(head, rows) + note(explanation)


def duration(seconds: float) -> str:
    """Format a duration in seconds, minutes or hours."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def faults(reports: Mapping[str, Any]) -> str:
    """Return lists of the faults that did not end the runs."""
    kinds = list(dict.fromkeys(kind for report in reports.values() for kind in report["recovered"]))
    if not kinds:
        return note(
            "None on record: no stop, sample left out, skipped step, failed save or damaged"
            " checkpoint."
        )
    counts = table(
        ["", *kinds],
        [
            [name, *(str(len(report["recovered"].get(kind, ()))) for kind in kinds)]
            for name, report in reports.items()
        ],
    )
    label = "{1}" if len(reports) == 1 else "{0}, {1}"
    parts = [
        f"<h3>{html.escaped(label.format(name, kind).capitalize())}</h3>"
        + _shortened(report["recovered"][kind])
        for name, report in reports.items()
        for kind in kinds
        if kind in report["recovered"]
    ]
    return (counts if len(reports) > 1 else "") + "".join(parts)


def _shortened(lines: Sequence[str]) -> str:
    rest = (
        collapsible(f"{len(lines) - MAX_LINES} more", bullets(lines[MAX_LINES:]))
        if len(lines) > MAX_LINES
        else ""
    )
    return bullets(lines[:MAX_LINES]) + rest


def checkpoints(runs: Mapping[str, History]) -> str:
    """Return a table of the checkpoints and whether they are intact."""
    rows = []
    for name, run in runs.items():
        intact = "size and crc32 as written" if run.verified else "sizes as written"
        for checkpoint in run.checkpoints:
            state = (
                colored(checkpoint.fault, "bad") if checkpoint.fault else colored(intact, "good")
            )
            by = (
                f" ({checkpoint.scored_by.partition(' on ')[0].partition(' of ')[0]})"
                if checkpoint.scored_by
                else ""
            )
            rows.append(
                [
                    f"{name}, {checkpoint.name}" if len(runs) > 1 else checkpoint.name,
                    f"{checkpoint.step:,}",
                    f"{checkpoint.bytes / 1e6:,.1f}",
                    "" if checkpoint.score is None else f"{checkpoint.score:.3f}{by}",
                    "best" if checkpoint.best else "",
                    state,
                    html.format_time(checkpoint.written),
                ]
            )
    if not rows:
        return ""
    body = table(["", "step", "MB", "score", "", "state", "written"], rows)
    if all(run.verified for run in runs.values()):
        return body
    return body + note(
        "Contents were not read: --verify compares them with the crc32 in the manifests."
    )


def origin(runs: Mapping[str, History]) -> str:
    """Return the commands and versions of the runs, and the starts of training."""
    rows = []
    for name, run in runs.items():
        for entry in run.origin:
            argv = ["gigamask", *map(str, entry.get("argv", [])[1:])]
            versions = [
                f"{package} {entry[package]}"
                for package in ("gigamask", "torch", "numpy")
                if entry.get(package)
            ]
            rows.append(
                [
                    name,
                    Markup(f"<code>{html.escaped(' '.join(argv))}</code>"),
                    ", ".join(versions),
                    str(entry.get("git") or "")[:12],
                ]
            )
    lines = []
    for name, run in runs.items():
        starts = [start for start in run.starts if start["device"]]
        if starts:
            steps = ", ".join(f"step {start['step']} on {start['device']}" for start in starts)
            lines.append(f"{name} started at {steps}")
    body = table(["", "command", "versions", "git"], rows, "words") if rows else ""
    return body + (bullets(lines) if lines else "")
