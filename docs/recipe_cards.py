"""Bring the tables of the recipe cards up to date with the recipes: `python -m docs.recipe_cards`.

The pages, docs/recipes.md and those of plugins, are written by hand except for the values in their
tables. A table belongs to the recipes in its head, a row to one or more flags. Values are filled
in, flags that are gone are removed, and flags without a row are appended to the recipe's last table
with a source, with empty cells for the source to be written.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gigamask import recipes
from gigamask.config_files import config_as_text

DOCS = Path(__file__).parent
PAGES = (DOCS / "recipes.md", *sorted(DOCS.glob("plugins/*/recipes.md")))
NEXT_PAGE = "<!-- next page -->\n"
FLAG = re.compile(r"`--([\w.-]+)`")
Config = Mapping[str, Any]


@dataclass(frozen=True)
class Table:
    """A table of the page.

    Attributes:
        first_line: Index of its head in the page's lines.
        headings: Its column headings, without backticks.
        rows: The cells of each row.
        base: The recipe that the table's own recipes are compared to; None if it lists every flag.
    """

    first_line: int
    headings: list[str]
    rows: list[list[str]] = field(default_factory=list)
    base: str | None = None

    @property
    def columns(self) -> dict[str, int]:
        """Which column each of its recipes has."""
        known = set(recipes.names())
        return {name: at for at, name in enumerate(self.headings) if name in known}

    @property
    def flags(self) -> set[str]:
        """The flags that have a row."""
        column = self.headings.index("flag")
        return {flag for row in self.rows for flag in FLAG.findall(row[column])}


def built_in() -> dict[str, Config]:
    """Return each built-in recipe's flags and values as its configuration file states them."""
    return {recipe.__name__: config_as_text(recipe()) for recipe in recipes.built_in()}


def cells(line: str) -> list[str]:
    """Split a line of a table into its cells."""
    return [cell.strip() for cell in line.strip().strip("|").split("|")]


def tables_of(page: str) -> list[Table]:
    """Return the page's tables that have a column for a recipe."""
    found: list[Table] = []
    prose, table = "", None
    for number, line in enumerate(page.splitlines()):
        if not line.startswith("|"):
            table, prose = None, line if line.startswith("#") else f"{prose} {line}"
        elif table is None:
            base = re.search(r"Only what differs from `(\w+)`", prose)
            headings = [cell.strip("`") for cell in cells(line)]
            table = Table(number, headings, base=base[1] if base else None)
            found.append(table)
        elif set(line) - set("|- "):
            table.rows.append(cells(line))
    return [table for table in found if "flag" in table.headings and table.columns]


def values(flags: Sequence[str], table: Table, configs: Mapping[str, Config]) -> list[str]:
    """Return the row's value cells: later columns say `same` where they equal the first."""
    texts = []
    for name in table.columns:
        found = [configs[name][flag] for flag in flags]
        words = [
            f"[{', '.join(each)}]" if isinstance(each, list) else each or "''" for each in found
        ]
        texts.append(", ".join(words))
    return [texts[0]] + ["same" if text == texts[0] else text for text in texts[1:]]


def missing_flags(tables: Sequence[Table], configs: Mapping[str, Config]) -> dict[int, list[str]]:
    """Return the flags that need a row, by the first line of the table to append them to."""
    missing: dict[int, list[str]] = {}
    for name, config in configs.items():
        own = [table for table in tables if name in table.columns]
        if not any("mark" in table.headings for table in own):
            raise SystemExit(
                f"{name} has no table in the recipe cards: add its head there, with a mark"
            )
        known = set().union(*(table.flags for table in own))
        base = next((configs[table.base] for table in own if table.base), {})
        last = [table.first_line for table in own if "mark" in table.headings][-1]
        for flag in config:
            if flag not in known and flag != "recipe" and base.get(flag) != config[flag]:
                missing.setdefault(last, []).append(flag)
    return {line: list(dict.fromkeys(flags)) for line, flags in missing.items()}


def updated(
    table: Table, new_flags: Sequence[str], configs: Mapping[str, Config]
) -> list[list[str]]:
    """Return the table's rows with the recipes' values."""
    at, columns, rows = table.headings.index("flag"), table.columns, []
    empty = [
        [f"`--{flag}`" if i == at else "" for i in range(len(table.headings))] for flag in new_flags
    ]
    base = configs[table.base] if table.base else {}
    for row in [*table.rows, *empty]:
        if stated := FLAG.findall(row[at]):
            flags = [
                flag
                for flag in stated
                if all(flag in configs[name] for name in columns)
                and any(configs[name][flag] != base.get(flag) for name in columns)
            ]
            if not flags:
                continue
            texts = dict(zip(columns.values(), values(flags, table, configs), strict=True))
            texts[at] = ", ".join(f"`--{flag}`" for flag in flags)
            row = [texts.get(i, cell) for i, cell in enumerate(row)]
        rows.append(row)
    return rows


def render(page: str, configs: Mapping[str, Config]) -> str:
    """Return the page with its tables brought up to date.

    Args:
        page: The page as it is, in Markdown.
        configs: Each recipe's flags and their values; see `built_in`.
    """
    lines, tables = page.splitlines(), tables_of(page)
    missing = missing_flags(tables, configs)
    for table in reversed(tables):
        rows = updated(table, missing.get(table.first_line, []), configs)
        start = table.first_line + 2
        lines[start : start + len(table.rows)] = [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join(lines) + "\n"


def read() -> str:
    """Return all pages as one text."""
    return NEXT_PAGE.join(path.read_text() for path in PAGES)


if __name__ == "__main__":
    texts = render(read(), built_in()).split(NEXT_PAGE)
    for path, text in zip(PAGES, texts, strict=True):
        path.write_text(text)
