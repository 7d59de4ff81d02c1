"""The report of one run, or of several side by side, as one HTML file."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from gigamask import __version__, files
from gigamask.errors import GigamaskError, counted, score_text
from gigamask.evaluation.score_names import EXPLAINED, by_prompt, score_texts
from gigamask.report import charts, html, schema, scores, summary, tables
from gigamask.report.history import History
from gigamask.report.html import (
    Markup,
    bullets,
    colored,
    format_number,
    note,
    section,
    table,
)

Runs = Mapping[str, History]

REPORT = "report.html"
"""File name of a run's report in its folder."""
GOOD_ANSWERS = "best"
"""Name of the picture that opens a report: answers of the model with the highest IoU."""
PROMPTS = ("1 click", "3 clicks", "5 clicks", "9 clicks", "oracle", "box")
"""Columns of the final scores."""
MAX_ROWS = 16
MAX_PICTURES = 6
LEGEND = (
    "Yellow outline: ground truth. Blue: prediction. Green dots: clicks on the mask; orange:"
    " clicks outside it; white: the box. Numbers: IoU."
)


def page(runs: Runs, report: dict[str, Any], guide: str = "") -> str:
    """Return the text of the HTML file.

    Args:
        runs: Runs by name.
        report: The result of `summary.summarize` for them.
        guide: HTML about what to do next, after the first pictures.
    """
    title = next(iter(runs)) if len(runs) == 1 else f"{len(runs)} runs: {', '.join(runs)}"
    sections = [
        ("Answers", good_answers(runs)),
        ("What next", guide),
        ("Overview", overview(runs, report["runs"])),
        ("Curves", curves(runs)),
        ("Evaluations", evaluations(runs, report["runs"])),
        ("Scores", final_scores(runs, report["runs"])),
        ("Pictures", pictures(runs)),
        ("Configuration", tables.configuration(runs, report)),
        ("Throughput", tables.throughput(report["runs"])),
        ("Recovered faults", tables.faults(report["runs"])),
        ("Checkpoints", tables.checkpoints(runs)),
        ("Origin", tables.origin(runs)),
    ]
    shown = [(name, body) for name, body in sections if body]
    parts = [
        f"<h1>{html.escaped(title)}</h1>",
        *map(note, subtitle(runs)),
        html.links(name for name, _ in shown),
        *(part for name, body in shown for part in section(name, body)),
    ]
    made_by = note(f"Made by gigamask {__version__}.")
    return html.document(f"Report of {title}", [*parts, made_by], chart_data(runs))


def chart_data(runs: Runs) -> dict[str, Any]:
    """Return the data from which `report.js` draws the charts."""
    data: dict[str, Any] = {
        "runs": [{"name": name, **charts.curves(run)} for name, run in runs.items()]
    }
    calibration = _calibration(runs)
    return data | ({"reliability": scores.reliability_bins(calibration)} if calibration else {})


def _calibration(runs: Runs) -> dict[str, Any] | None:
    """Return the calibration in the evaluation.json of a single run, if it is complete."""
    found = next(iter(runs.values())).scores if len(runs) == 1 else None
    # Only few masks have standard errors, and earlier versions stated no step.
    known = schema.Scores.__annotations__.keys() - {"standard_error", "step"}
    return found["calibration"] if found and known <= found.keys() else None


def write(
    runs: Runs, recipes: Mapping[str, dict[str, Any] | None], out: Path, guide: str = ""
) -> dict[str, Any]:
    """Write the report of one or several runs.

    Args:
        runs: Runs by name.
        recipes: The configuration of each run's recipe, None if it cannot be read.
        out: The HTML file.
        guide: HTML about what to do next, after the first pictures.

    Returns:
        The contents of the report, as data.
    """
    report = summary.summarize(runs, recipes)
    files.write_text(out, page(runs, report, guide))
    return report


def subtitle(runs: Runs) -> list[str]:
    """Return the line below the title of a single run: recipe, start, device and versions."""
    if len(runs) > 1:
        return []
    (run,) = runs.values()
    start = run.starts[0]["time"] if run.starts else None
    versions = run.origin[-1] if run.origin else {}
    facts = [
        f"recipe {run.config['recipe']}" if "recipe" in run.config else "",
        f"started {html.format_time(start)}" if start else "",
        f"on {run.starts[-1]['device']}" if run.starts and run.starts[-1]["device"] else "",
        *(f"{name} {versions[name]}" for name in ("gigamask", "torch") if name in versions),
    ]
    return [" · ".join(filter(None, facts))]


def overview(runs: Runs, reports: Mapping[str, Any]) -> str:
    """Return the main figures and the warnings of the last evaluation.

    Args:
        runs: Runs by name.
        reports: Their entries in the result of `summary.summarize`.
    """
    rows = {name: _facts(run, reports[name]) for name, run in runs.items()}
    if len(rows) == 1:
        (facts,) = rows.values()
        body = html.tiles((name, value, detail) for name, (value, detail) in facts.items())
    else:
        names = list(dict.fromkeys(fact for facts in rows.values() for fact in facts))
        body = table(
            ["", *names],
            [
                [name, *(_fact(*facts.get(fact, ("", ""))) for fact in names)]
                for name, facts in rows.items()
            ],
        )
    for name, run in runs.items():
        last = run.evaluations[-1] if run.evaluations else None
        if last and last["warnings"]:
            head = f"{name}: warnings" if len(runs) > 1 else "Warnings"
            lines = bullets(colored(line, "warn") for line in last["warnings"])
            body += f"<h3>{html.escaped(head)} at step {last['step']:,}</h3>{lines}"
    if damaged := [colored(line, "bad") for run in runs.values() for line in run.damaged]:
        body += f"<h3>Damaged files, left out</h3>{bullets(damaged)}"
    return body


def _fact(value: str, detail: str) -> Markup:
    text = html.escaped(value)
    return Markup(f"{text} {colored(detail, 'note')}") if detail else text


def _facts(run: History, report: Mapping[str, Any]) -> dict[str, tuple[str, str]]:
    """Return the main figures of a run by name, each a value and a detail."""
    speed, best = report["throughput"], report["best"]
    loss, records = summary.last_mean(run.records.get("loss", []))
    facts = {"Steps": (f"{run.step:,}", f"of {run.steps:,}" if run.steps else "")}
    if loss is not None:
        detail = f"mean of the last {records}" if records > 1 else "last record"
        facts["Loss"] = (format_number(loss), detail)
    if best:
        value = score_text(best["scores"][best["by"]])
        facts[f"Best {best['by']}"] = (value, f"step {best['step']:,}")
    if speed["images_per_s"] is not None:
        share = "" if speed["waiting"] is None else f"{speed['waiting']:.1%} waiting"
        facts["Images/s"] = (format_number(speed["images_per_s"]), share)
    if speed["memory_gb"] is not None:
        facts["Memory"] = (f"{speed['memory_gb']:.1f} GB", "peak")
    if speed["training_s"] is not None:
        facts["Training"] = (tables.duration(speed["training_s"]), "about")
    count = sum(map(len, report["recovered"].values()))
    facts["Recovered faults"] = (str(count), "")
    return facts


def curves(runs: Runs) -> str:
    """Return the element for the curves of recorded metrics, with the runs overlaid."""
    if not any(run.records["step"] for run in runs.values()):
        return ""
    slider = (
        '<label class="smooth">smooth <input id="smooth" type="range" min="0" max="0.98"'
        ' step="0.02" value="0.8"></label>'
    )
    resumed = (
        " Dashed vertical lines: training resumed."
        if len(runs) == 1 and next(iter(runs.values())).faults["resumed"]
        else ""
    )
    text = (
        "Lines are exponential moving averages of the recorded values (faint); learning rates,"
        f" scales and memory are not smoothed.{resumed}"
    )
    return f"{slider}{html.charts('curve-charts')}{note(text)}"


def evaluations(runs: Runs, reports: Mapping[str, Any]) -> str:
    """Return the scores over training as curves and as a table.

    Args:
        runs: Runs by name.
        reports: Their entries in the result of `summary.summarize`.
    """
    evaluated = {name: run for name, run in runs.items() if run.evaluations}
    if not evaluated:
        return ""
    names = list(
        dict.fromkeys(
            score
            for run in evaluated.values()
            for evaluation in run.evaluations
            for score in evaluation["scores"]
        )
    )
    if len(runs) == 1:
        (run,) = evaluated.values()
        best = reports[next(iter(evaluated))]["best"]
        rows = [
            _evaluation_row(evaluation, names, f"step {evaluation['step']:,}", best)
            for evaluation in _evenly(run.evaluations, MAX_ROWS)
        ]
    else:
        rows = [
            _evaluation_row(evaluation, names, f"{name}, {which}, step {evaluation['step']:,}")
            for name, run in evaluated.items()
            for which, evaluation in (
                ("best", reports[name]["best"]),
                ("last", run.evaluations[-1]),
            )
            if evaluation
        ]
    count = sum(len(run.evaluations) for run in evaluated.values())
    omitted = (
        note(f"{len(rows)} of {count} evaluations, evenly spaced; --json has all.")
        if count > len(rows) and len(runs) == 1
        else ""
    )
    others = count - sum(len(summary.comparable(run)) for run in evaluated.values())
    if others:
        omitted += note(
            f"Curves leave out {counted(others, 'evaluation')} of other data than the last."
        )
    explanation = note(EXPLAINED) if "oracle" in names else ""
    body = table(["", *names, "of", "seconds", "warnings"], rows)
    return f"{html.charts('score-charts')}{explanation}{body}{omitted}"


def _evaluation_row(
    evaluation: Mapping[str, Any],
    names: Iterable[str],
    label: str,
    best: Mapping[str, Any] | None = None,
) -> list[str]:
    is_best = best and best["step"] == evaluation["step"]
    count = len(evaluation["warnings"])
    return [
        Markup(f"<b>{html.escaped(label)}</b> best") if is_best else label,
        *score_texts(evaluation["scores"], evaluation["standard_error"], names),
        evaluation["of"],
        format_number(evaluation["seconds"]),
        colored(str(count), "warn") if count else "",
    ]


def _evenly(items: Sequence[Any], most: int) -> list[Any]:
    """Return at most `most` evenly spaced items, including the first and the last."""
    rows = np.unique(np.linspace(0, len(items) - 1, min(most, len(items))).round().astype(int))
    return [items[row] for row in rows]


def final_scores(runs: Runs, reports: Mapping[str, Any]) -> str:
    """Return the scores of each run's evaluation.json and of its best evaluation in training.

    Args:
        runs: Runs by name.
        reports: Their entries in the result of `summary.summarize`.
    """
    rows = []
    for name, run in runs.items():
        best = reports[name]["best"]
        if run.scores:
            counts = (
                counted(run.scores[key], key[:-1])
                for key in ("masks", "images")
                if key in run.scores
            )
            errors = by_prompt(run.scores.get("standard_error", {}))
            cells = score_texts(by_prompt(run.scores), errors, PROMPTS)
            label = f"{name}, evaluation.json"
            if "weights" in run.scores:
                label += f" of {run.scores['weights']}"
            protocol = run.scores.get("protocol", {})
            of, clicks = " on ".join(counts), "first " * protocol.get("feed_mask", True) + "clicks"
            of += f", boxes and {clicks} refined" * bool(protocol.get("refine"))
            rows.append([label, *cells, of])
        if best and "1 click" in best["scores"]:
            cells = score_texts(best["scores"], best["standard_error"], PROMPTS)
            rows.append([f"{name}, best in training, step {best['step']:,}", *cells, best["of"]])
    if not rows:
        return ""
    head = ["mean IoU", *PROMPTS, "of"]
    filled = [i for i, cells in enumerate(zip(*rows, strict=True)) if any(cells)]
    body = table([head[i] for i in filled], [[row[i] for i in filled] for row in rows])
    stated = [best.get("subject", "") for name in runs if (best := reports[name]["best"])]
    subjects = {subject.partition(" on ")[2] for subject in stated if subject}
    if len(subjects) > 1:
        body += note(
            "In training, the runs were scored on different images or in other precisions."
        )
    evaluation, calibration = next(iter(runs.values())).scores, _calibration(runs)
    if evaluation and calibration:
        body += f"<h3>By size</h3>{scores.scores(evaluation)}"
        body += f"<h3>Predicted IoU after one click</h3>{scores.reliability(calibration)}"
    return body


def good_answers(runs: Runs) -> str:
    """Return a large picture of good answers of a single run, if there is one."""
    if len(runs) > 1:
        return ""
    (run,) = runs.values()
    found = [picture for picture in run.pictures if picture.name == GOOD_ANSWERS]
    if not found:
        return ""
    return (
        f"<figure>{_picture(found[0].path)}</figure>"
        f"{note('Held-out images with the highest IoU. ' + LEGEND)}"
    )


def pictures(runs: Runs) -> str:
    """Return pictures of predictions: over training for one run, the last ones for several."""
    parts = []
    for name, run in runs.items():
        steps = [picture for picture in run.pictures if picture.step is not None]
        if len(runs) > 1:
            last = steps[-1:]
            parts += [(f"{name}, step {picture.step:,}", picture.path) for picture in last]
            continue
        chosen = _evenly(steps, MAX_PICTURES) if steps else []
        parts += [(f"step {picture.step:,}", picture.path) for picture in chosen]
        others = [
            picture
            for picture in run.pictures
            if picture.step is None and picture.name != GOOD_ANSWERS
        ][:MAX_ROWS]
        parts += [(picture.name.capitalize(), picture.path) for picture in others]
    shown = [
        f"<figure><figcaption>{html.escaped(label)}</figcaption>{_picture(path)}</figure>"
        for label, path in parts
    ]
    if not shown:
        return ""
    return f'<div class="figures">{"".join(shown)}</div>{note(LEGEND)}'


def _picture(path: str) -> Markup:
    """Return a picture, or why it is left out."""
    try:
        return html.picture(Path(path))
    except (GigamaskError, OSError) as error:
        return colored(str(error), "bad")
