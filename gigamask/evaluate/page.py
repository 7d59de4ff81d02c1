"""A summary of scores as one HTML file that needs nothing else: tables, the reliability of the predicted IoU, the sheets of answers, the protocol.

Enters: what `gigamask evaluate --json` writes, and picture files. Leaves: text.

Not here: the scores (`evaluate.interactive`, `evaluate.automatic`), the sheets (`evaluate.pictures`).
"""

import base64
import io
import json
from collections.abc import Sequence
from html import escape
from pathlib import Path

from PIL import Image

STYLE = """
:root { color-scheme: light dark; --line: #8884; --ours: #0072b2; --ideal: #d55e00; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 70rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.15rem; margin-top: 2rem; }
table { border-collapse: collapse; } .wide { overflow-x: auto; }
th, td { padding: .2rem .8rem; text-align: right; border-bottom: 1px solid var(--line); font-variant-numeric: tabular-nums; }
th:first-child, td:first-child { text-align: left; }
img { max-width: 100%; background: white; } svg { max-width: 24rem; } pre { overflow-x: auto; font-size: 13px; }
"""
SIDE = 300
"""Of the reliability diagram, in its own units."""
ROWS = {"small": "up to 32 x 32 px", "medium": "up to 96 x 96 px", "large": "larger"}


def page(summary: dict, sheets: Sequence[Path] = ()) -> str:
    """Returns the file's text."""
    parts = [
        f"<h1>{escape(summary['weights'])}</h1>",
        f"<p>{summary['masks']:,} masks on {summary['images']:,} images of {escape(', '.join(summary['data']))}</p>",
        *_section("Mean IoU, %", scores(summary)),
        *(_section("Boundaries, %", boundaries(summary)) if "boundary_iou" in summary else ()),
        *_section("Predicted IoU after one click", reliability(summary["calibration"])),
        *(_section("Automatic masks", automatic(summary["automatic"])) if "automatic" in summary else ()),
        *(_section("Edges of automatic masks, approximate", edges(summary["edges"])) if "edges" in summary else ()),
        *(part for sheet in sheets for part in _section(sheet.stem.capitalize(), picture(sheet))),
        *(_section("Left out", _list(summary["rejected"])) if summary["rejected"] else ()),
        *_section("Protocol", f"<pre>{escape(json.dumps(summary['protocol'], indent=1))}</pre>"),
    ]
    head = f'<meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>Scores of {escape(summary["weights"])}</title>'
    return f'<!doctype html>\n<html lang="en"><head>{head}<style>{STYLE}</style></head><body>\n' + "\n".join(parts) + "\n</body></html>\n"


def scores(summary: dict) -> str:
    """Returns the table of IoUs: all masks, then each granularity and size that has any."""
    rows = {"all": summary, **summary["granularity"]}
    rows |= {ROWS[name]: each for name, each in summary["size"].items()}
    names = ["", *(f"{n} click{'' if n == '1' else 's'}" for n in summary["clicks"]), "oracle", "box", "masks"]
    lines = [[name, *map(_cent, (*each["clicks"].values(), each["oracle"], each["box"])), f"{each['masks']:,}"] for name, each in rows.items()]
    return _table(names, [line for line, each in zip(lines, rows.values(), strict=True) if each["masks"]])


def boundaries(summary: dict) -> str:
    """Returns the table of boundary scores by clicks."""
    named = {"Boundary IoU": "boundary_iou", "boundary F": "boundary_f"}
    head = ["", *(f"{n} click{'' if n == '1' else 's'}" for n in summary["clicks"])]
    return _table(head, [[name, *map(_cent, summary[key].values())] for name, key in named.items()])


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
    return _table(
        ["masks an image", "of the truth", *(f"{name}, %" for name in shares)], [[*counts, *(_cent(found[key]) for key in shares.values())]]
    )


def edges(found: dict) -> str:
    """Returns the scores of edges, and what they were held against."""
    names = ("ODS", "OIS", "AP", "R50")
    return _table([f"{name}, %" for name in names], [[_cent(found[name]) for name in names]]) + f"<p>{escape(found['protocol']['truth'])}</p>"


def picture(path: Path) -> str:
    """Returns a picture as a part of the page, as a JPEG, which takes a tenth of a sheet's PNG."""
    jpeg = io.BytesIO()
    Image.open(path).convert("RGB").save(jpeg, "JPEG", quality=85)
    return f'<img alt="{escape(path.stem)}" src="data:image/jpeg;base64,{base64.b64encode(jpeg.getvalue()).decode()}">'


def _section(title: str, body: str) -> tuple[str, str]:
    return f"<h2>{escape(title)}</h2>", f'<div class="wide">{body}</div>'


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = ["".join(f"<th>{escape(name)}</th>" for name in head), *("".join(f"<td>{escape(cell)}</td>" for cell in row) for row in rows)]
    return "<table>" + "".join(f"<tr>{line}</tr>" for line in lines) + "</table>"


def _list(lines: Sequence[str]) -> str:
    return "<ul>" + "".join(f"<li>{escape(line)}</li>" for line in lines) + "</ul>"


def _cent(share: float | None) -> str:
    return "" if share is None else f"{100 * share:.1f}"


def _x(value: float) -> float:
    return round(SIDE * min(max(value, 0.0), 1.0), 1)


def _y(value: float) -> float:
    return round(SIDE - _x(value), 1)
