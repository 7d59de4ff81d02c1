"""A summary of scores as one HTML file that needs nothing else: tables, the reliability of the predicted IoU, the sheets of answers, the protocol.

Enters: what `gigamask evaluate --json` writes, and picture files. Leaves: text.

Not here: the scores (`evaluate.interactive`, `evaluate.automatic`), the sheets (`evaluate.pictures`), the page's style (`report.html`).
"""

import json
from collections.abc import Sequence
from html import escape
from pathlib import Path

from gigamask.report.html import cent, document, listing, picture, section, table

SIDE = 300
"""Of the reliability diagram, in its own units."""
ROWS = {"small": "up to 32 x 32 px", "medium": "up to 96 x 96 px", "large": "larger"}


def page(summary: dict, sheets: Sequence[Path] = ()) -> str:
    """Returns the file's text."""
    parts = [
        f"<h1>{escape(summary['weights'])}</h1>",
        f"<p>{summary['masks']:,} masks on {summary['images']:,} images of {escape(', '.join(summary['data']))}</p>",
        *section("Mean IoU, %", scores(summary)),
        *(section("Boundaries, %", boundaries(summary)) if "boundary_iou" in summary else ()),
        *section("Predicted IoU after one click", reliability(summary["calibration"])),
        *(section("Automatic masks", automatic(summary["automatic"])) if "automatic" in summary else ()),
        *(section("Edges of automatic masks, approximate", edges(summary["edges"])) if "edges" in summary else ()),
        *(part for sheet in sheets for part in section(sheet.stem.capitalize(), picture(sheet))),
        *(section("Left out", listing(summary["rejected"])) if summary["rejected"] else ()),
        *section("Protocol", f"<pre>{escape(json.dumps(summary['protocol'], indent=1))}</pre>"),
    ]
    return document(f"Scores of {summary['weights']}", parts)


def scores(summary: dict) -> str:
    """Returns the table of IoUs: all masks, then each granularity and size that has any."""
    rows = {"all": summary, **summary["granularity"]}
    rows |= {ROWS[name]: each for name, each in summary["size"].items()}
    names = ["", *(f"{n} click{'' if n == '1' else 's'}" for n in summary["clicks"]), "oracle", "box", "masks"]
    lines = [[name, *map(cent, (*each["clicks"].values(), each["oracle"], each["box"])), f"{each['masks']:,}"] for name, each in rows.items()]
    return table(names, [line for line, each in zip(lines, rows.values(), strict=True) if each["masks"]])


def boundaries(summary: dict) -> str:
    """Returns the table of boundary scores by clicks."""
    named = {"Boundary IoU": "boundary_iou", "boundary F": "boundary_f"}
    head = ["", *(f"{n} click{'' if n == '1' else 's'}" for n in summary["clicks"])]
    return table(head, [[name, *map(cent, summary[key].values())] for name, key in named.items()])


def reliability(calibration: dict) -> str:
    """Returns the reliability diagram, circles by the number of masks in a bin, and the figures below it."""
    bins = [each for each in calibration["bins"] if each["count"]]
    most = max((each["count"] for each in bins), default=1)
    spots = "".join(
        f'<circle cx="{_x(each["predicted"])}" cy="{_y(each["actual"])}" r="{3 + 9 * (each["count"] / most) ** 0.5:.1f}" fill="var(--ours)" '
        f'fill-opacity=".7"><title>{each["count"]:,} masks: predicted {each["predicted"]:.2f}, actual {each["actual"]:.2f}</title></circle>'
        for each in bins
    )
    frame = f'<rect x="0" y="0" width="{SIDE}" height="{SIDE}" fill="none" stroke="var(--line)"/>'
    ideal = f'<line x1="0" y1="{SIDE}" x2="{SIDE}" y2="0" stroke="var(--ideal)" stroke-dasharray="4 4"/>'
    written = 'text-anchor="middle" font-size="12" fill="currentColor"'
    words = f'<text x="{SIDE / 2}" y="{SIDE + 16}" {written}>predicted IoU, 0 to 1</text>'
    words += f'<text x="-12" y="{SIDE / 2}" {written} transform="rotate(-90 -12 {SIDE / 2})">actual</text>'
    told = {"calibration error": calibration["expected_error"], "bias": calibration["bias"], "correlation": calibration["correlation"]}
    figures = ", ".join(f"{name} {value:.3f}" for name, value in told.items() if value is not None)
    return f'<svg viewBox="-26 -8 {SIDE + 36} {SIDE + 32}" role="img" aria-label="reliability">{frame}{ideal}{spots}{words}</svg><p>{figures}</p>'


def automatic(found: dict) -> str:
    """Returns what segmenting everything came to."""
    shares = {"pass SAM's thresholds": "passing", "best IoU with the truth": "best_iou", "AR@1000": "AR@1000", "AP": "AP"}
    counts = ["" if found["masks_an_image"] is None else f"{found['masks_an_image']:,.1f}", f"{found['truth']:,}"]
    return table(["masks an image", "of the truth", *(f"{name}, %" for name in shares)], [[*counts, *(cent(found[key]) for key in shares.values())]])


def edges(found: dict) -> str:
    """Returns the scores of edges, and what they were held against."""
    names = ("ODS", "OIS", "AP", "R50")
    return table([f"{name}, %" for name in names], [[cent(found[name]) for name in names]]) + f"<p>{escape(found['protocol']['truth'])}</p>"


def _x(value: float) -> float:
    return round(SIDE * min(max(value, 0.0), 1.0), 1)


def _y(value: float) -> float:
    return round(SIDE - _x(value), 1)
