"""The commands of a page, so that tests can run what a user would type."""

import re
import shlex
from pathlib import Path

DOCS = Path(__file__).resolve().parents[2] / "docs"


def commands(page: str) -> list[list[str]]:
    """Returns the words behind `gigamask` of every command that the page shows in a line of its own, comments left out."""
    text = (DOCS / page).read_text().replace("\\\n", " ")
    return [shlex.split(line, comments=True)[1:] for line in text.splitlines() if line.startswith("    gigamask ")]


def blocks(page: str) -> list[str]:
    """Returns the page's blocks of Python."""
    return re.findall(r"```python\n(.*?)```", (DOCS / page).read_text(), re.DOTALL)
