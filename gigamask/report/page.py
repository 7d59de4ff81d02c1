"""The report of one run, or of several side by side, as one HTML file.

See `report.history` for what is read, `report.summary` for what is computed, `report.charts` for
the curves and `report.html` for the style.
"""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from gigamask import __version__
from gigamask.report import charts, html, scores, summary
from gigamask.report.history import History
from gigamask.report.html import Markup, cent, figure, folded, listing, marked, note, section, table
from gigamask.report.summary import ANCHORS, ANCHORS_TOLD

Runs = Mapping[str, History]

REPORT = "report.html"
"""Where the report of a run lies in its folder."""
SIGNS = ("blind", "automatic")
"""Scores that are signs of trouble."""
MOST_ROWS = 16
MOST_PICTURES = 6


def page(runs: Runs, told: dict[str, Any]) -> str:
    """Returns the file's text; `told` is what `summary.tell` says of the runs."""
    title = next(iter(runs)) if len(runs) == 1 else f"{len(runs)} runs: {', '.join(runs)}"
    sections = [
        ("Overview", overview(runs, told["runs"])),
        ("Curves", learning(runs)),
        ("Evaluations", evaluations(runs, told["runs"])),
        ("Scores beside SAM's", beside_sam(runs, told["runs"])),
        ("Pictures", pictures(runs)),
        ("Configuration", configuration(runs, told)),
        ("Throughput", throughput(told["runs"])),
        ("Faults survived", faults(told["runs"])),
        ("Checkpoints", checkpoints(runs)),
        ("Origin", origin(runs)),
    ]
    shown = [(name, body) for name, body in sections if body]
    parts = [
        f"<h1>{html.told(title)}</h1>",
        *map(note, under(runs)),
        html.links(name for name, _ in shown),
        *(part for each in shown for part in section(*each)),
    ]
    made_by = note(f"Made by gigamask {__version__}.")
    return html.document(f"Report of {title}", [*parts, made_by], chart_data(runs))


def chart_data(runs: Runs) -> dict[str, Any]:
    """Returns what `report.js` draws the charts from."""
    data: dict[str, Any] = {
        "runs": [{"name": name, **charts.curves(run)} for name, run in runs.items()]
    }
    calibration = _calibration(runs)
    return data | ({"reliability": scores.reliability_bins(calibration)} if calibration else {})


def _calibration(runs: Runs) -> dict[str, Any] | None:
    """Returns the calibration in the evaluation.json of a single run, if it is complete."""
    found = next(iter(runs.values())).scores if len(runs) == 1 else None
    whole = found and {"granularity", "size", "calibration"} <= found.keys()
    return found["calibration"] if found and whole else None


def write(runs: Runs, recipes: Mapping[str, dict[str, Any] | None], out: Path) -> dict[str, Any]:
    """Writes the page of some runs and returns what it shows, as data; `recipes` are told in `summary.tell`."""
    told = summary.tell(runs, recipes)
    out.write_text(page(runs, told))
    return told


def under(runs: Runs) -> list[str]:
    """Returns what stands below the title: of one run what it is, and when it was trained on what."""
    if len(runs) > 1:
        return []
    (run,) = runs.values()
    began, versions = (
        run.begun[0]["time"] if run.begun else None,
        run.origin[-1] if run.origin else {},
    )
    words = [
        f"recipe {run.config['recipe']}" if "recipe" in run.config else "",
        f"begun {html.when(began)}" if began else "",
        f"on {run.begun[-1]['device']}" if run.begun and run.begun[-1]["device"] else "",
        *(f"{name} {versions[name]}" for name in ("gigamask", "torch") if name in versions),
    ]
    return [" · ".join(filter(None, words))]


def overview(runs: Runs, told: Mapping[str, Any]) -> str:
    """Returns the figures to begin with, and what worries."""
    rows = {name: _facts(run, told[name]) for name, run in runs.items()}
    if len(rows) == 1:
        (facts,) = rows.values()
        body = html.tiles((what, value, of) for what, (value, of) in facts.items())
    else:
        names = list(dict.fromkeys(what for facts in rows.values() for what in facts))
        body = table(
            ["", *names],
            [
                [name, *(_fact(*facts.get(what, ("", ""))) for what in names)]
                for name, facts in rows.items()
            ],
        )
    for name, run in runs.items():
        last = run.evaluations[-1] if run.evaluations else None
        if last and last["worries"]:
            head = f"{name}: worries" if len(runs) > 1 else "Worries"
            lines = listing(marked(line, "warn") for line in last["worries"])
            body += f"<h3>{html.told(head)} at step {last['step']:,}</h3>{lines}"
    return body


def _fact(value: str, of: str) -> Markup:
    return Markup(f"{html.told(value)} {marked(of, 'note')}" if of else html.told(value))


def _facts(run: History, told: Mapping[str, Any]) -> dict[str, tuple[str, str]]:
    """Returns what a run came to, each a value and what it is of."""
    speed, best = told["throughput"], told["best"]
    loss, records = summary.last_mean(run.records.get("loss", []))
    found = {"Steps": (f"{run.step:,}", f"of {run.steps:,}" if run.steps else "")}
    if loss is not None:
        found["Loss"] = (
            figure(loss),
            f"mean of the last {records}" if records > 1 else "last record",
        )
    if best:
        found[f"Best {best['by']}"] = (
            f"{cent(best['scores'][best['by']])} %",
            f"step {best['step']:,}",
        )
    if speed["images_per_s"] is not None:
        share = "" if speed["waiting"] is None else f"{speed['waiting']:.1%} waiting"
        found["Images/s"] = (figure(speed["images_per_s"]), share)
    if speed["memory_gb"] is not None:
        found["Memory"] = (f"{speed['memory_gb']:.1f} GB", "peak")
    if speed["training_s"] is not None:
        found["Training"] = (duration(speed["training_s"]), "about")
    count = sum(map(len, told["survived"].values()))
    found["Faults survived"] = (str(count), "")
    return found


def duration(seconds: float) -> str:
    """Returns a time as it is said."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def learning(runs: Runs) -> str:
    """Returns the place of the curves of what was recorded, runs laid over each other."""
    if not any(run.records["step"] for run in runs.values()):
        return ""
    slider = '<label class="smooth">smooth <input id="smooth" type="range" min="0" max="0.98" step="0.02" value="0.8"></label>'
    resumed = (
        " Dashed vertical lines: training resumed."
        if len(runs) == 1 and next(iter(runs.values())).faults["resumed"]
        else ""
    )
    text = f"Lines are exponential means, faint below them what was recorded; rates, scales and memory are as recorded.{resumed}"
    return f"{slider}{html.charts('curve-charts')}{note(text)}"


def evaluations(runs: Runs, told: Mapping[str, Any]) -> str:
    """Returns the scores over training: curves, and a table of the best and of the others."""
    found = {name: run for name, run in runs.items() if run.evaluations}
    if not found:
        return ""
    names = list(
        dict.fromkeys(
            score for run in found.values() for each in run.evaluations for score in each["scores"]
        )
    )
    if len(runs) == 1:
        (run,) = found.values()
        best = told[next(iter(found))]["best"]
        rows = [
            _row(each, names, f"step {each['step']:,}", best)
            for each in _some(run.evaluations, MOST_ROWS)
        ]
    else:
        ends = [
            (name, what, each)
            for name, run in found.items()
            for what, each in (("best", told[name]["best"]), ("last", run.evaluations[-1]))
            if each
        ]
        rows = [
            _row(each, names, f"{name}, {what}, step {each['step']:,}", None)
            for name, what, each in ends
        ]
    count = sum(len(run.evaluations) for run in found.values())
    also = (
        note(f"{len(rows)} of {count} evaluations, evenly; --json holds all.")
        if count > len(rows) and len(runs) == 1
        else ""
    )
    shares = note(
        "Scores in per cent. blind: one click on another picture; automatic: share of a grid's points whose mask passes SAM's thresholds."
    )
    signed = shares if set(SIGNS) & set(names) else note("Scores in per cent.")
    return f"{html.charts('score-charts')}{signed}{table(['', *names, 'seconds', 'worries'], rows)}{also}"


def _row(
    each: Mapping[str, Any], names: Iterable[str], label: str, best: Mapping[str, Any] | None
) -> list[str]:
    head = (
        Markup(f"<b>{html.told(label)}</b> best")
        if best and best["step"] == each["step"]
        else label
    )
    count = len(each["worries"])
    return [
        head,
        *(cent(each["scores"].get(name)) for name in names),
        figure(each["seconds"]),
        marked(str(count), "warn") if count else "",
    ]


def _some(items: Sequence[Any], most: int) -> list[Any]:
    """Returns some of many, evenly, the first and the last among them."""
    places = np.unique(np.linspace(0, len(items) - 1, min(most, len(items))).round().astype(int))
    return [items[place] for place in places]


def beside_sam(runs: Runs, told: Mapping[str, Any]) -> str:
    """Returns the scores of evaluation.json, or of the best evaluation in training, beside what is published of SAM."""
    rows = []
    for name, run in runs.items():
        best = told[name]["best"]
        if run.scores:
            clicks, found = run.scores["clicks"], run.scores
            counted = [
                f"{found[key]:,}" if isinstance(found.get(key), int) else ""
                for key in ("masks", "images")
            ]
            given = [cent(clicks.get(n)) for n in ("1", "3", "5", "9")]
            rows.append(
                [
                    f"{name}, evaluation.json",
                    *given,
                    cent(found.get("oracle")),
                    cent(found.get("box")),
                    *counted,
                ]
            )
        if best and "1 click" in best["scores"]:
            given = [
                cent(best["scores"].get(score)) for score in ("1 click", "3 clicks", "5 clicks")
            ]
            label = f"{name}, best in training, step {best['step']:,}"
            rows.append(
                [
                    label,
                    *given,
                    "",
                    cent(best["scores"].get("oracle")),
                    cent(best["scores"].get("box")),
                    "",
                    "",
                ]
            )
    if not rows:
        return ""
    rows += [
        [f"{name}, SA-23", cent(each["1"]), "", cent(each["5"]), "", "", "", "", ""]
        for name, each in ANCHORS.items()
    ]
    head = [
        "mean IoU, %",
        "1 click",
        "3 clicks",
        "5 clicks",
        "9 clicks",
        "oracle",
        "box",
        "masks",
        "images",
    ]
    filled = [place for place, cells in enumerate(zip(*rows, strict=True)) if any(cells)]
    body = table(
        [head[place] for place in filled],
        [[row[place] for place in filled] for row in rows],
        anchors=len(ANCHORS),
    ) + note(ANCHORS_TOLD)
    whole, calibration = next(iter(runs.values())).scores, _calibration(runs)
    if whole and calibration:
        body += f"<h3>By size, %</h3>{scores.scores(whole)}"
        body += f"<h3>Predicted IoU after one click</h3>{scores.reliability(calibration)}"
    return body


def pictures(runs: Runs) -> str:
    """Returns pictures of predictions: of one run over training and its sheets, of several the last of each."""
    parts = []
    for name, run in runs.items():
        during, sheets = (
            [each for each in run.pictures if each.step is not None],
            [each for each in run.pictures if each.step is None],
        )
        for each in _some(during, MOST_PICTURES) if during and len(runs) == 1 else during[-1:]:
            parts.append(
                (
                    f"step {each.step:,}" if len(runs) == 1 else f"{name}, step {each.step:,}",
                    each.path,
                )
            )
        parts += [(each.name.capitalize(), each.path) for each in sheets] if len(runs) == 1 else []
    shown = [
        f"<figure><figcaption>{html.told(label)}</figcaption>{html.picture(Path(path))}</figure>"
        for label, path in parts
    ]
    if not shown:
        return ""
    told = "Yellow outline: the truth. Blue: the answer. Green dots: clicks on the mask, orange: beside it; white: the box. Numbers: IoU."
    return f'<div class="sheets">{"".join(shown)}</div>{note(told)}'


def configuration(runs: Runs, told: Mapping[str, Any]) -> str:
    """Returns what differs: between runs, or of a run from its recipe."""
    whole = "".join(
        folded(f"all flags of {name}", table(["flag", "value"], _flags(run), "words"))
        for name, run in runs.items()
        if run.config
    )
    if len(runs) > 1:
        rows = [
            [name, *(_value(value) for value in values)]
            for name, values in told["differences"].items()
        ]
        return (
            table(["flag", *runs], rows, "words")
            if rows
            else note("The same in all runs, but for their folders.")
        ) + whole
    (run,), (of,) = runs.values(), told["runs"].values()
    if not run.config:
        return ""
    recipe, found = run.config.get("recipe", ""), of["from_recipe"]
    if found is None:
        return (
            note(
                f"The recipe {recipe} cannot be read here any more, so what differs from it is not known."
            )
            + whole
        )
    rows = [[name, *(_value(value) for value in values)] for name, values in found.items()]
    return (
        table(["flag", f"recipe {recipe}", "this run"], rows, "words")
        if rows
        else note(f"All as in the recipe {recipe}.")
    ) + whole


def _flags(run: History) -> list[list[str]]:
    return [
        [name, value if isinstance(value, str) else " ".join(map(str, value))]
        for name, value in run.config.items()
    ]


def _value(value: str | None) -> str:
    return (
        Markup('<span class="note">no such flag</span>')
        if value is None
        else "None"
        if value == "null"
        else value
    )


def throughput(told: Mapping[str, Any]) -> str:
    """Returns how fast the runs were."""
    rows = []
    for name, each in told.items():
        found = each["throughput"]
        if found["images_per_s"] is not None:
            speeds = [figure(found[key]) for key in ("images_per_s", "slow_5", "fast_5", "step_s")]
            times = [
                "" if found[key] is None else duration(found[key])
                for key in ("training_s", "evaluation_s")
            ]
            rows.append(
                [
                    name,
                    *speeds,
                    f"{cent(found['waiting'])}",
                    *times,
                    figure(found["memory_gb"]),
                    figure(found["loader_mb"]),
                ]
            )
    if not rows:
        return ""
    head = [
        "",
        "images/s",
        "slowest 5 %",
        "fastest 5 %",
        "s a step",
        "waiting, %",
        "training, about",
        "evaluating",
        "memory, GB",
        "a loader, MB",
    ]
    told_of = "Medians over the records. Training: that many steps at the median; evaluating: the sum. Queries count as images where words are learned."
    return table(head, rows) + note(told_of)


def faults(told: Mapping[str, Any]) -> str:
    """Returns what befell the runs and did not end them."""
    kinds = list(dict.fromkeys(kind for each in told.values() for kind in each["survived"]))
    if not kinds:
        return note(
            "None: no stop, no sample left out, no step skipped, no save that failed, no damaged checkpoint is on record."
        )
    counts = table(
        ["", *kinds],
        [
            [name, *(str(len(each["survived"].get(kind, ()))) for kind in kinds)]
            for name, each in told.items()
        ],
    )
    lines = [
        (name, kind, each["survived"][kind])
        for name, each in told.items()
        for kind in kinds
        if kind in each["survived"]
    ]
    label = "{1}" if len(told) == 1 else "{0}, {1}"
    parts = [
        f"<h3>{html.told(label.format(name, kind).capitalize())}</h3>{_shortened(found)}"
        for name, kind, found in lines
    ]
    return (counts if len(told) > 1 else "") + "".join(parts)


def _shortened(lines: Sequence[str]) -> str:
    rest = (
        folded(f"{len(lines) - MOST_ROWS} more", listing(lines[MOST_ROWS:]))
        if len(lines) > MOST_ROWS
        else ""
    )
    return listing(lines[:MOST_ROWS]) + rest


def checkpoints(runs: Runs) -> str:
    """Returns the checkpoints there are, and whether they are sound."""
    rows, several = [], len(runs) > 1
    for name, run in runs.items():
        for each in run.checkpoints:
            sound = "size and crc32 as written" if run.verified else "sizes as written"
            state = marked(each.fault, "bad") if each.fault else marked(sound, "good")
            by = (
                f" ({each.scored_by.partition(' on ')[0].partition(' of ')[0]})"
                if each.scored_by
                else ""
            )
            score = "" if each.score is None else f"{cent(each.score)} %{by}"
            label = f"{name}, {each.name}" if several else each.name
            rows.append(
                [
                    label,
                    f"{each.step:,}",
                    f"{each.bytes / 1e6:,.1f}",
                    score,
                    "best" if each.best else "",
                    state,
                    html.when(each.written),
                ]
            )
    if not rows:
        return ""
    unread = (
        ""
        if all(run.verified for run in runs.values())
        else "Their contents were not read: --verify holds all of it against the crc32 in the manifests."
    )
    return table(["", "step", "MB", "score", "", "state", "written"], rows) + (
        note(unread) if unread else ""
    )


def origin(runs: Runs) -> str:
    """Returns the commands that made the runs, and by what."""
    rows = []
    for name, run in runs.items():
        for each in run.origin:
            argv = ["gigamask", *map(str, each.get("argv", [])[1:])]
            versions = ", ".join(
                f"{what} {each[what]}" for what in ("gigamask", "torch", "numpy") if each.get(what)
            )
            rows.append(
                [
                    name,
                    Markup(f"<code>{html.told(' '.join(argv))}</code>"),
                    versions,
                    str(each.get("git") or "")[:12],
                ]
            )
    begun = {
        name: ", ".join(
            f"step {each['step']} on {each['device']}" for each in run.begun if each["device"]
        )
        for name, run in runs.items()
    }
    lines = [f"{name} began at {what}" for name, what in begun.items() if what]
    return (table(["", "command", "versions", "git"], rows, "words") if rows else "") + (
        listing(lines) if lines else ""
    )
