"""Parts of HTML reports: document, sections, tables, tiles and pictures.

A report is one self-contained file. Text is escaped unless it is `Markup`. `charts.js` draws charts
from data that the file contains as JSON; see `report.charts`.
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
from gigamask.serialization import read_limited

MAX_PICTURE_BYTES = 2**25
SCRIPTS = ("charts.js", "report.js")
STYLES = ("charts.css", "report.css")


class Markup(str):
    """Text that is already HTML."""


def document(title: str, parts: Iterable[str], data: Mapping[str, Any] | None = None) -> str:
    """Return the text of an HTML file; its content security policy allows only our script.

    Args:
        title: Title of the document.
        parts: HTML of the body.
        data: Data for the charts of `report.js`, embedded as JSON.
    """
    folder = resources.files("gigamask.report")
    style, script = (
        "".join((folder / name).read_text("utf-8") for name in names)
        for names in (STYLES, SCRIPTS if data is not None else ())
    )
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = (
        "default-src 'none'; img-src data:; style-src 'unsafe-inline';"
        f" script-src 'sha256-{digest}'"
    )
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
    text = f'<!doctype html>\n<html lang="en"><head>{head}</head><body>\n{body}\n</body></html>\n'
    return text.encode(errors="replace").decode()  # names of files may not be valid UTF-8


def json_in_html(data: Mapping[str, Any]) -> str:
    """Return JSON that cannot end the `<script>` element that contains it."""
    text = json.dumps(data, allow_nan=False, separators=(",", ":"))
    return text.replace("&", r"\u0026").replace("<", r"\u003c").replace(">", r"\u003e")


def charts(name: str) -> Markup:
    """Return the element in which `report.js` draws charts."""
    return Markup(
        f'<div id="{name}" class="charts"><noscript>Charts need a browser with scripts enabled.'
        "</noscript></div>"
    )


def section(title: str, body: str) -> tuple[str, str]:
    """Return a heading with an anchor, and a body that scrolls if it is too wide.

    Args:
        title: The heading.
        body: HTML.
    """
    return f'<h2 id="{anchor(title)}">{escape(title)}</h2>', f'<div class="wide">{body}</div>'


def anchor(title: str) -> str:
    """Return the anchor of a heading."""
    return re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-")


def links(titles: Iterable[str]) -> Markup:
    """Return a line of links to sections."""
    return Markup(
        "<nav>"
        + "".join(f'<a href="#{anchor(title)}">{escape(title)}</a>' for title in titles)
        + "</nav>"
    )


def table(head: Sequence[str], rows: Sequence[Sequence[str]], kind: str = "") -> Markup:
    """Return a table whose first column holds names.

    Args:
        head: Titles of the columns.
        rows: Cells of each row.
        kind: CSS class: "words" for text, empty for numbers.
    """
    lines = "".join(f"<tr>{_cells('td', row)}</tr>" for row in rows)
    return Markup(
        f"<table{f' class={kind}' if kind else ''}><tr>{_cells('th', head)}</tr>{lines}</table>"
    )


def _cells(tag: str, cells: Sequence[str]) -> str:
    return "".join(f"<{tag}>{escaped(cell)}</{tag}>" for cell in cells)


def escaped(text: str) -> Markup:
    """Return text as HTML, escaped unless it is `Markup`."""
    return text if isinstance(text, Markup) else Markup(escape(text))


def bullets(lines: Iterable[str]) -> Markup:
    """Return a list of lines."""
    return Markup("<ul>" + "".join(f"<li>{escaped(line)}</li>" for line in lines) + "</ul>")


def note(text: str, kind: str = "note") -> Markup:
    """Return a paragraph.

    Args:
        text: The text.
        kind: CSS class; the default is small print.
    """
    return Markup(f'<p class="{kind}">{escaped(text)}</p>')


def colored(text: str, kind: str) -> Markup:
    """Return colored text.

    Args:
        text: The text.
        kind: CSS class: warn, bad, good or note.
    """
    return Markup(f'<span class="{kind}">{escaped(text)}</span>')


def tiles(facts: Iterable[tuple[str, str, str]]) -> Markup:
    """Return facts side by side, each a name, a value and a detail."""
    parts = (
        f"<div><span>{escaped(name)}</span><b>{escaped(value)}</b>"
        f"<span>{escaped(detail)}</span></div>"
        for name, value, detail in facts
    )
    return Markup(f'<div class="tiles">{"".join(parts)}</div>')


def collapsible(title: str, body: str) -> Markup:
    """Return a section that opens when its title is clicked.

    Args:
        title: The title.
        body: Text or HTML.
    """
    return Markup(f"<details><summary>{escaped(title)}</summary>{escaped(body)}</details>")


def picture(path: Path, quality: int = 85) -> Markup:
    """Return a picture embedded as JPEG, a tenth of the size of a PNG.

    Args:
        path: A JPEG or PNG file.
        quality: JPEG quality, if a PNG is encoded.

    Raises:
        GigamaskError: The file is damaged or too large.
    """
    raw = read_limited(path, MAX_PICTURE_BYTES)
    pixels = image.decode(raw, str(path))
    if path.suffix != ".jpg":
        raw = encode_jpeg(pixels, quality)
    data = base64.b64encode(raw).decode()
    return Markup(f'<img alt="{escape(path.stem)}" src="data:image/jpeg;base64,{data}">')


def format_time(time: str) -> str:
    """Format an ISO 8601 time for reading."""
    return time.replace("T", " ").replace("+00:00", " UTC")


def format_number(value: float | int | None) -> str:
    """Format a number with at least three significant digits, without decimals from 100 on."""
    if value is None:
        return ""
    size = abs(value)
    if isinstance(value, int) or size >= 100:
        return f"{value:,.0f}"
    if size >= 10:
        return f"{value:.1f}"
    return f"{value:.3f}" if size >= 0.1 else f"{value:.3g}"
