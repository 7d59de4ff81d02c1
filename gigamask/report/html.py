"""What all pages are made of: one HTML file that needs nothing else, its style in light and dark, sections, tables, tiles, pictures.

Enters: text and numbers. Leaves: text of HTML; whatever comes from files is escaped, but for `Markup`.

Not here: curves (`report.curves`), what is on a page (`report.page`, `report.scores`).
"""

import base64
import re
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path

from gigamask.data import image
from gigamask.data.image import encode_jpeg

COLOURS = 8
STYLE = """
:root { color-scheme: light dark; --line: #8884; --soft: #8881; --faint: #6b7280; --ours: #0072b2; --ideal: #d55e00; --warn: #b45309; --bad: #b91c1c;
  --good: #047857; --paper: #fff; --ink: #1b1f24; --c0: #0072b2; --c1: #d55e00; --c2: #009e73; --c3: #b0508c; --c4: #a67c00; --c5: #3aa0d8;
  --c6: #7a4fd0; --c7: #6b7280; }
@media (prefers-color-scheme: dark) { :root { --faint: #9aa4b0; --ours: #56b4e9; --ideal: #f0945c; --warn: #f0b35c; --bad: #ff8a80; --good: #4fd1a5;
  --paper: #14171b; --ink: #e4e7eb; --c0: #56b4e9; --c1: #f0945c; --c2: #2fc79a; --c3: #e59cc8; --c4: #e6c84a; --c5: #8fb8ff; --c6: #b79cf5;
  --c7: #aab2bd; } }
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
img { max-width: 100%; height: auto; background: white; } svg { max-width: 24rem; } pre { overflow-x: auto; font-size: 13px; }
figure { margin: 0; } figcaption { font-size: 13px; }
.note { color: var(--faint); font-size: 13px; } .warn { color: var(--warn); } .bad { color: var(--bad); } .good { color: var(--good); }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(8.6rem, 1fr)); gap: .6rem; margin: 1rem 0; }
.tiles div { border: 1px solid var(--line); border-radius: .5rem; padding: .5rem .8rem; background: var(--soft); }
.tiles b { display: block; font-size: 1.25rem; font-weight: 600; font-variant-numeric: tabular-nums; }
.tiles span { font-size: 13px; color: var(--faint); }
.charts { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 21rem), 1fr)); gap: 1.2rem 1.4rem; }
.charts svg { display: block; width: 100%; max-width: none; height: auto; overflow: visible; } .charts text { font-size: 12px; fill: var(--faint); }
.charts figcaption b { font-size: 14px; } 
.legend { display: flex; flex-wrap: wrap; gap: 0 .9rem; font-size: 13px; } .legend i { display: inline-block;
  width: .75rem; height: .2rem; vertical-align: middle; margin-right: .3rem; border-radius: 1px; }
.legend i.dash { background-image: linear-gradient(90deg, transparent 35%, var(--paper) 35% 65%, transparent 65%); }
.wide > .legend { margin-bottom: .6rem; }
.at line, .at circle { opacity: 0; } .at:hover line, .at:hover circle { opacity: 1; }
.sheets figcaption { margin-bottom: .2rem; }
.sheets { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 26rem), 1fr)); gap: 1rem; }
details { margin: .5rem 0; } summary { cursor: pointer; color: var(--faint); }
ul { padding-left: 1.2rem; margin: .3rem 0; }
""" + "".join(f".k{n} {{ stroke: var(--c{n}); }} .f{n} {{ fill: var(--c{n}); }} .b{n} {{ background: var(--c{n}); }}\n" for n in range(COLOURS))


class Markup(str):
    """Text that is HTML already."""


def document(title: str, parts: Iterable[str]) -> str:
    """Returns a whole file."""
    head = f'<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1"><title>{escape(title)}</title>'
    return f'<!doctype html>\n<html lang="en"><head>{head}<style>{STYLE}</style></head><body>\n' + "\n".join(parts) + "\n</body></html>\n"


def section(title: str, body: str) -> tuple[str, str]:
    """Returns a part of a page under a heading that can be linked to; what is too wide for the page scrolls."""
    return f'<h2 id="{anchor(title)}">{escape(title)}</h2>', f'<div class="wide">{body}</div>'


def anchor(title: str) -> str:
    """Returns what a heading is linked to by."""
    return re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-")


def links(titles: Iterable[str]) -> Markup:
    """Returns a line of links to sections."""
    return Markup("<nav>" + "".join(f'<a href="#{anchor(title)}">{escape(title)}</a>' for title in titles) + "</nav>")


def table(head: Sequence[str], rows: Sequence[Sequence[str]], kind: str = "", anchors: int = 0) -> Markup:
    """Returns a table of which the first column is names; `kind` is words or nothing, the last `anchors` rows are not ours."""
    lines = "".join(f"<tr{' class=anchor' if place >= len(rows) - anchors else ''}>{_cells('td', row)}</tr>" for place, row in enumerate(rows))
    return Markup(f"<table{f' class={kind}' if kind else ''}><tr>{_cells('th', head)}</tr>{lines}</table>")


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
    each = (f"<div><span>{told(name)}</span><b>{told(value)}</b><span>{told(of)}</span></div>" for name, value, of in facts)
    return Markup(f'<div class="tiles">{"".join(each)}</div>')


def folded(title: str, body: str) -> Markup:
    """Returns a part that is shown when it is asked for."""
    return Markup(f"<details><summary>{told(title)}</summary>{told(body)}</details>")


def picture(path: Path, quality: int = 85) -> Markup:
    """Returns a picture as a part of the page, as a JPEG, which takes a tenth of a sheet's PNG."""
    raw = path.read_bytes() if path.suffix == ".jpg" else b""
    if not raw:
        raw = encode_jpeg(image.decode(path.read_bytes(), str(path)), quality)
    return Markup(f'<img alt="{escape(path.stem)}" src="data:image/jpeg;base64,{base64.b64encode(raw).decode()}">')


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
    return f"{value:.3g}" if abs(value) < 0.01 or abs(value) >= 100 else f"{value:.1f}" if abs(value) >= 10 else f"{value:.3f}"
