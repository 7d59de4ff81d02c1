"""What the pages tell a user to type: commands, pieces of Python and shell scripts, in their order."""

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PAGES = ["README.md", *sorted(f"docs/{path.name}" for path in DOCS.glob("*.md"))]
PROGRAMS = ("gigamask", "torchrun", "make", "pip", "python", "python3", "source", "export")


@dataclass(frozen=True)
class Item:
    """One thing to type. `kind` is `python`, `script` (shell, in full), or `command` (a line of shell without its comment)."""

    kind: str
    text: str
    line: int
    heading: str


def items(page: str) -> list[Item]:
    """Returns what a page tells to type: fenced Python and bash, and indented lines that begin with a program, behind `$ ` where output follows."""
    found, heading, lines = [], "", (ROOT / page).read_text().splitlines()
    number = 0
    while number < len(lines):
        line, start = lines[number], number
        number += 1
        if line.startswith("```"):
            end = next(each for each in range(number, len(lines)) if lines[each].startswith("```"))
            kind, text = line[3:].strip(), "\n".join(lines[number:end]) + "\n"
            number = end + 1
            if kind in ("python", "bash"):
                found.append(Item("script" if kind == "bash" else kind, text, start + 1, heading))
            if kind == "bash":
                found += [
                    Item("command", each, start + 1, heading)
                    for each in _typed(text.replace("\\\n", " ").splitlines())
                ]
        elif line.startswith("#"):
            heading = line
        elif line.startswith("    "):
            while line.endswith("\\"):
                line, number = line[:-1] + lines[number], number + 1
            found += [Item("command", each, start + 1, heading) for each in _typed([line])]
    return found


def benchmarks(page: str) -> list[str]:
    """Returns what stands behind `python -m benchmarks.` wherever a page says it, also within a sentence."""
    text = " ".join((ROOT / page).read_text().split())
    return re.findall(r"python -m benchmarks\.([^`]+)`", text)


def _typed(lines: list[str]) -> list[str]:
    """Returns the commands of some lines."""
    found = []
    for line in lines:
        bare = re.sub(r"\s#\s.*", "", line.strip().removeprefix("$ "))
        for part in re.split(r"\s*(?:&&|;)\s*", bare):
            first = re.sub(r"^(\w+=\S*\s+)+", "", part).split(" ", 1)[0]
            if first in PROGRAMS or (" gigamask " in part and first == "srun"):
                found.append(part.strip())
    return found
