"""Parts of HTML reports: the document with its style, script and data, sections, tables, tiles, pictures.

A report is one file that loads nothing. Text is escaped unless it is `Markup`. Charts are drawn by
`charts.js` from data that the file holds as JSON; see `report.charts`.
"""

import base64
import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from importlib import resources
from pathlib import Path
from typing import Any

from gigamask.data import image
from gigamask.data.image import encode_jpeg

SCRIPTS = ("charts.js", "report.js")
STYLE = """
:root { color-scheme: light dark; --line: #8884; --soft: #8881; --faint: light-dark(#6b7280, #9aa4b0); --warn: light-dark(#b45309, #f0b35c);
  --bad: light-dark(#b91c1c, #ff8a80); --good: light-dark(#047857, #4fd1a5);
  --paper: light-dark(#fff, #14171b); --ink: light-dark(#1b1f24, #e4e7eb); }
* { box-sizing: border-box; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 76rem; margin: 0 auto; padding: 1.2rem 1rem 3rem; background: var(--paper); color: var(--ink);
  overflow-wrap: break-word; }
h1 { font-size: 1.5rem; margin: .2rem 0; } h2 { font-size: 1.15rem; margin: 2.2rem 0 .6rem; padding-top: .3rem; border-top: 1px solid var(--line); }
h3 { font-size: 1rem; margin: 1.2rem 0 .3rem; } p { margin: .4rem 0; max-width: 60rem; } a { color: var(--c0); }
nav { display: flex; flex-wrap: wrap; gap: .1rem 1rem; margin: .6rem 0; font-size: 14px; }
table { border-collapse: collapse; font-size: 14px; } .wide { overflow-x: auto; }
th, td { padding: .2rem .8rem; text-align: right; border-bottom: 1px solid var(--line); font-variant-numeric: tabular-nums; vertical-align: top; }
td, th { white-space: nowrap; } td .bad { display: inline-block; white-space: normal; min-width: 16rem; text-align: left; }
th { font-weight: 600; color: var(--faint); } th:first-child, td:first-child { text-align: left; padding-left: 0; }
table.words td, table.words th { text-align: left; } table.words td { white-space: normal; max-width: 34rem; overflow-wrap: anywhere;
  min-width: 4rem; }
tr.anchor td { color: var(--faint); font-style: italic; }
img { max-width: 100%; height: auto; background: white; } pre { overflow-x: auto; font-size: 13px; }
figure { margin: 0; } figcaption { font-size: 13px; }
.note { color: var(--faint); font-size: 13px; } .warn { color: var(--warn); } .bad { color: var(--bad); } .good { color: var(--good); }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(8.6rem, 1fr)); gap: .6rem; margin: 1rem 0; }
.tiles div { border: 1px solid var(--line); border-radius: .5rem; padding: .5rem .8rem; background: var(--soft); }
.tiles b { display: block; font-size: 1.25rem; font-weight: 600; font-variant-numeric: tabular-nums; }
.tiles span { font-size: 13px; color: var(--faint); }
.smooth { display: flex; gap: .5rem; align-items: center; font-size: 13px; color: var(--faint); } .smooth input { accent-color: var(--c0); }
.sheets figcaption { margin-bottom: .2rem; }
.sheets { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 26rem), 1fr)); gap: 1rem; }
details { margin: .5rem 0; } summary { cursor: pointer; color: var(--faint); }
ul { padding-left: 1.2rem; margin: .3rem 0; }
"""


class Markup(str):
    """Text that is HTML already."""


def document(title: str, parts: Iterable[str], data: Mapping[str, Any] | None = None) -> str:
    """Returns a whole HTML file.

    Args:
        title: Title of the document.
        parts: HTML of the body.
        data: What `report.js` draws charts from, of JSON's types.

    Returns:
        The text of the file. Its content security policy lets only our own script run.
    """
    folder = resources.files("gigamask.report")
    style = (folder / "charts.css").read_text() + STYLE
    script = "".join((folder / name).read_text() for name in SCRIPTS) if data is not None else ""
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
    head = (
        '<meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{style}</style>"
    )
    body = "\n".join(parts)
    if data is not None:
        body += f'\n<script type="application/json" id="data">{json_in_html(data)}</script>'
        body += f'\n<script type="module">{script}</script>'
    return f'<!doctype html>\n<html lang="en"><head>{head}</head><body>\n{body}\n</body></html>\n'


def json_in_html(data: Mapping[str, Any]) -> str:
    """Returns JSON that cannot end the `<script>` element that holds it."""
    text = json.dumps(data, allow_nan=False, separators=(",", ":"))
    return text.replace("&", r"\u0026").replace("<", r"\u003c").replace(">", r"\u003e")


def charts(name: str) -> Markup:
    """Returns the place of charts that `report.js` draws."""
    return Markup(
        f'<div id="{name}" class="charts"><noscript>Charts need a browser with scripts enabled.</noscript></div>'
    )


def section(title: str, body: str) -> tuple[str, str]:
    """Returns a part of a page under a heading that can be linked to; what is too wide for the page scrolls."""
    return f'<h2 id="{anchor(title)}">{escape(title)}</h2>', f'<div class="wide">{body}</div>'


def anchor(title: str) -> str:
    """Returns what a heading is linked to by."""
    return re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-")


def links(titles: Iterable[str]) -> Markup:
    """Returns a line of links to sections."""
    return Markup(
        "<nav>"
        + "".join(f'<a href="#{anchor(title)}">{escape(title)}</a>' for title in titles)
        + "</nav>"
    )


def table(
    head: Sequence[str], rows: Sequence[Sequence[str]], kind: str = "", anchors: int = 0
) -> Markup:
    """Returns a table of which the first column is names; `kind` is words or nothing, the last `anchors` rows are not ours."""
    lines = "".join(
        f"<tr{' class=anchor' if place >= len(rows) - anchors else ''}>{_cells('td', row)}</tr>"
        for place, row in enumerate(rows)
    )
    return Markup(
        f"<table{f' class={kind}' if kind else ''}><tr>{_cells('th', head)}</tr>{lines}</table>"
    )


def _cells(tag: str, cells: Sequence[str]) -> str:
    return "".join(f"<{tag}>{told(cell)}</{tag}>" for cell in cells)


def told(text: str) -> Markup:
    """Returns text as HTML."""
    return text if isinstance(text, Markup) else Markup(escape(text))


def listing(lines: Iterable[str]) -> Markup:
    """Returns lines as a list."""
    return Markup("<ul>" + "".join(f"<li>{told(line)}</li>" for line in lines) + "</ul>")


def note(text: str, kind: str = "note") -> Markup:
    """Returns a paragraph in small print, or of another kind."""
    return Markup(f'<p class="{kind}">{told(text)}</p>')


def marked(text: str, kind: str) -> Markup:
    """Returns words in the colour of warn, bad or good."""
    return Markup(f'<span class="{kind}">{told(text)}</span>')


def tiles(facts: Iterable[tuple[str, str, str]]) -> Markup:
    """Returns facts side by side, each a name, a value, and what it is of."""
    each = (
        f"<div><span>{told(name)}</span><b>{told(value)}</b><span>{told(of)}</span></div>"
        for name, value, of in facts
    )
    return Markup(f'<div class="tiles">{"".join(each)}</div>')


def folded(title: str, body: str) -> Markup:
    """Returns a part that is shown when it is asked for."""
    return Markup(f"<details><summary>{told(title)}</summary>{told(body)}</details>")


def picture(path: Path, quality: int = 85) -> Markup:
    """Returns a picture as a part of the page, as a JPEG, which takes a tenth of a sheet's PNG."""
    raw = path.read_bytes() if path.suffix == ".jpg" else b""
    if not raw:
        raw = encode_jpeg(image.decode(path.read_bytes(), str(path)), quality)
    return Markup(
        f'<img alt="{escape(path.stem)}" src="data:image/jpeg;base64,{base64.b64encode(raw).decode()}">'
    )


def when(time: str) -> str:
    """Returns a time of ISO 8601 as it is read."""
    return time.replace("T", " ").replace("+00:00", " UTC")


def cent(share: float | None) -> str:
    """Returns a share in per cent."""
    return "" if share is None else f"{100 * share:.1f}"


def figure(value: float | int | None) -> str:
    """Returns a number as it is read: three digits that count, whole ones above a thousand."""
    if value is None:
        return ""
    if isinstance(value, int) or abs(value) >= 1000:
        return f"{value:,.0f}"
    return (
        f"{value:.3g}"
        if abs(value) < 0.01 or abs(value) >= 100
        else f"{value:.1f}"
        if abs(value) >= 10
        else f"{value:.3f}"
    )
