"""The results of `gigamask evaluate` as one HTML file."""

import json
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

from gigamask.errors import counted, score_text
from gigamask.evaluation.score_names import by_prompt, score_texts
from gigamask.report.history import number
from gigamask.report.html import bullets, charts, document, picture, section, table

ROWS = {"small": "up to 32 x 32 px", "medium": "up to 96 x 96 px", "large": "larger"}


def page(summary: dict, figures: Sequence[Path] = ()) -> str:
    """Return the text of the HTML file.

    Args:
        summary: The contents of evaluation.json.
        figures: Picture files with predictions.
    """
    data_names = escape(", ".join(summary["data"]))
    parts = [
        f"<h1>{escape(summary['weights'])}</h1>",
        f"<p>{counted(summary['masks'], 'mask')} on {counted(summary['images'], 'image')} of "
        f"{data_names}</p>",
        *section("Mean IoU", scores(summary)),
        *(section("Boundaries", boundaries(summary)) if "boundary_iou" in summary else ()),
        *section("Predicted IoU after one click", reliability(summary["calibration"])),
        *(
            section("Automatic masks", automatic(summary["automatic"]))
            if "automatic" in summary
            else ()
        ),
        *(part for path in figures for part in section(path.stem.capitalize(), picture(path))),
        *(section("Left out", bullets(summary["skipped"])) if summary["skipped"] else ()),
        *section("Protocol", f"<pre>{escape(json.dumps(summary['protocol'], indent=1))}</pre>"),
    ]
    data = {"reliability": reliability_bins(summary["calibration"])}
    return document(f"Scores of {summary['weights']}", parts, data)


def scores(summary: dict) -> str:
    """Return a table of IoUs of all masks, and of each granularity and size that has masks."""
    rows = {"all": summary, **summary["granularity"]}
    rows |= {ROWS[name]: group for name, group in summary["size"].items()}
    lines = []
    for name, group in rows.items():
        if group["masks"]:
            errors = by_prompt(group.get("standard_error", {}))
            cells = score_texts(by_prompt(group), errors)
            lines.append([name, *cells, f"{group['masks']:,}"])
    return table(["", *by_prompt(summary), "masks"], lines)


def boundaries(summary: dict) -> str:
    """Return a table of boundary scores by clicks."""
    keys = {"Boundary IoU": "boundary_iou", "boundary F": "boundary_f"}
    rows = [[name, *map(score_text, summary[key].values())] for name, key in keys.items()]
    return table(["", *by_prompt({"clicks": summary["clicks"]})], rows)


def reliability(calibration: dict) -> str:
    """Return the element of the reliability diagram, with summary statistics below it."""
    values = {
        "calibration error": calibration["expected_error"],
        "bias": calibration["bias"],
        "correlation": calibration["correlation"],
    }
    known = ", ".join(f"{name} {value:.3f}" for name, value in values.items() if value is not None)
    return f"{charts('reliability-chart')}<p>{known}</p>"


def reliability_bins(calibration: dict) -> list[dict[str, Any]]:
    """Return the bins of the reliability diagram that hold masks, for `charts.js`."""
    names = ("predicted", "actual", "count")
    return [
        {name: number(one[name]) for name in names} for one in calibration["bins"] if one["count"]
    ]


def automatic(found: dict) -> str:
    """Return a table of the scores of automatic mask generation."""
    shares = {
        "share that passes the thresholds": "passing",
        "best IoU with ground truth": "best_iou",
        "AR@1000": "AR@1000",
        "AP": "AP",
    }
    counts = [
        "" if found["masks_an_image"] is None else f"{found['masks_an_image']:,.1f}",
        f"{found['truth']:,}",
    ]
    return table(
        ["masks per image", "ground truth", *shares],
        [[*counts, *(score_text(found[key]) for key in shares.values())]],
    )
