"""What `gigamask evaluate` found as one HTML file: tables, calibration, sheets of answers, protocol."""

import json
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

from gigamask.report.history import number
from gigamask.report.html import cent, charts, document, listing, picture, section, table

ROWS = {"small": "up to 32 x 32 px", "medium": "up to 96 x 96 px", "large": "larger"}


def page(summary: dict, sheets: Sequence[Path] = ()) -> str:
    """Returns the file's text."""
    parts = [
        f"<h1>{escape(summary['weights'])}</h1>",
        f"<p>{summary['masks']:,} masks on {summary['images']:,} images of {escape(', '.join(summary['data']))}</p>",
        *section("Mean IoU, %", scores(summary)),
        *(section("Boundaries, %", boundaries(summary)) if "boundary_iou" in summary else ()),
        *section("Predicted IoU after one click", reliability(summary["calibration"])),
        *(
            section("Automatic masks", automatic(summary["automatic"]))
            if "automatic" in summary
            else ()
        ),
        *(part for sheet in sheets for part in section(sheet.stem.capitalize(), picture(sheet))),
        *(section("Left out", listing(summary["rejected"])) if summary["rejected"] else ()),
        *section("Protocol", f"<pre>{escape(json.dumps(summary['protocol'], indent=1))}</pre>"),
    ]
    data = {"reliability": reliability_bins(summary["calibration"])}
    return document(f"Scores of {summary['weights']}", parts, data)


def scores(summary: dict) -> str:
    """Returns the table of IoUs: all masks, then each granularity and size that has any."""
    rows = {"all": summary, **summary["granularity"]}
    rows |= {ROWS[name]: each for name, each in summary["size"].items()}
    names = [
        "",
        *(f"{n} click{'' if n == '1' else 's'}" for n in summary["clicks"]),
        "oracle",
        "box",
        "masks",
    ]
    lines = [
        [
            name,
            *map(cent, (*each["clicks"].values(), each["oracle"], each["box"])),
            f"{each['masks']:,}",
        ]
        for name, each in rows.items()
    ]
    return table(
        names, [line for line, each in zip(lines, rows.values(), strict=True) if each["masks"]]
    )


def boundaries(summary: dict) -> str:
    """Returns the table of boundary scores by clicks."""
    named = {"Boundary IoU": "boundary_iou", "boundary F": "boundary_f"}
    head = ["", *(f"{n} click{'' if n == '1' else 's'}" for n in summary["clicks"])]
    return table(head, [[name, *map(cent, summary[key].values())] for name, key in named.items()])


def reliability(calibration: dict) -> str:
    """Returns the place of the reliability diagram, and the figures below it."""
    values = {
        "calibration error": calibration["expected_error"],
        "bias": calibration["bias"],
        "correlation": calibration["correlation"],
    }
    known = ", ".join(f"{name} {value:.3f}" for name, value in values.items() if value is not None)
    return f"{charts('reliability-chart')}<p>{known}</p>"


def reliability_bins(calibration: dict) -> list[dict[str, Any]]:
    """Returns the bins of the reliability diagram that hold masks, as `charts.js` takes them."""
    names = ("predicted", "actual", "count")
    return [
        {name: number(each[name]) for name in names}
        for each in calibration["bins"]
        if each["count"]
    ]


def automatic(found: dict) -> str:
    """Returns what segmenting everything came to."""
    shares = {
        "pass SAM's thresholds": "passing",
        "best IoU with the truth": "best_iou",
        "AR@1000": "AR@1000",
        "AP": "AP",
    }
    counts = [
        "" if found["masks_an_image"] is None else f"{found['masks_an_image']:,.1f}",
        f"{found['truth']:,}",
    ]
    return table(
        ["masks an image", "of the truth", *(f"{name}, %" for name in shares)],
        [[*counts, *(cent(found[key]) for key in shares.values())]],
    )
