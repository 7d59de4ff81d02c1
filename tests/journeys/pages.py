"""What the docs ask users to type, in order: commands, Python code and shell scripts."""

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PAGES = [
    "README.md",
    *sorted(
        str(path.relative_to(ROOT))
        for path in DOCS.rglob("*.md")
        if path.parent.name != "reference"
    ),
]
PLUGINS = "docs/plugins/"
"""The pages of a plugin are in `docs/plugins/NAME/`; all others are of the core."""
PROGRAMS = ("gigamask", "torchrun", "make", "pip", "python", "python3", "source", "export")


@dataclass(frozen=True)
class Item:
    """One thing to type.

    Attributes:
        kind: `python`, `script` (a whole shell script), or `command` (a shell line, no comment).
        text: The text to type.
        line: Its line in the page.
        heading: The heading above it.
    """

    kind: str
    text: str
    line: int
    heading: str


def items(page: str) -> list[Item]:
    """Return fenced Python and bash, and indented lines that start with a program or `$ `."""
    found, heading, lines = [], "", (ROOT / page).read_text().splitlines()
    number = 0
    while number < len(lines):
        line, start = lines[number], number
        number += 1
        if line.startswith("```"):
            end = next(n for n in range(number, len(lines)) if lines[n].startswith("```"))
            kind, text = line[3:].strip(), "\n".join(lines[number:end]) + "\n"
            number = end + 1
            if kind in ("python", "bash"):
                found.append(Item("script" if kind == "bash" else kind, text, start + 1, heading))
            if kind == "bash":
                commands = _commands(text.replace("\\\n", " ").splitlines())
                found += [Item("command", text, start + 1, heading) for text in commands]
        elif line.startswith("#"):
            heading = line
        elif line.startswith("    "):
            while line.endswith("\\"):
                line, number = line[:-1] + lines[number], number + 1
            found += [Item("command", text, start + 1, heading) for text in _commands([line])]
    return found


def benchmarks(page: str) -> list[str]:
    """Return what follows `python -m benchmarks.` in code spans and in indented lines of a page."""
    lines = (ROOT / page).read_text().splitlines()
    indented = [line for line in lines if line.startswith("    ")]
    prose = " ".join(" ".join(line for line in lines if line not in indented).split())
    found = re.findall(r"python -m benchmarks\.([^`]+)`", prose)
    return found + re.findall(r"python -m benchmarks\.(.+)", "\n".join(indented))


def _commands(lines: list[str]) -> list[str]:
    found = []
    for line in lines:
        bare = re.sub(r"\s#\s.*", "", line.strip().removeprefix("$ "))
        for part in re.split(r"\s*(?:&&|;)\s*", bare):
            first = re.sub(r"^(\w+=\S*\s+)+", "", part).split(" ", 1)[0]
            if first in PROGRAMS or (" gigamask " in part and first == "srun"):
                found.append(part.strip())
    return found
