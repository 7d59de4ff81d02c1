"""From words on the command line to one value, and from it to a file of data: one parser, one set of errors, each of them one line.

Imports neither numpy nor torch nor a recipe, so that `gigamask VERB --help` answers at once.

Not here: the flags of a training, files of flags (`arguments`), the verbs (`verbs`).
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

import tyro

from gigamask.faults import Fault

Verb = TypeVar("Verb")


def parse(kind: type[Verb], argv: Sequence[str], prog: str, default: Verb | None = None) -> Verb:
    """Returns the value that `argv` describes; raises `Fault` with one line where it does not describe one."""
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            return tyro.cli(kind, args=list(argv), prog=prog, default=default, add_help=True)
    except SystemExit as leaving:
        if not leaving.code:
            raise
        raise Fault(f"{one_line(said.getvalue())}; see '{prog} --help'") from None


def one_line(boxed: str) -> str:
    """Returns what a boxed message says first, and the flag it suggests; boxes are drawn with hyphens where stdout is not UTF-8."""
    drawn = "╭" in boxed
    lines = [line.strip(" │") for line in boxed.splitlines() if line.strip() and not line.startswith(("╭", "╰"))]
    blocks: list[list[str]] = [[]]
    for line in lines:
        if set(line) <= set("─-"):
            blocks.append([])
        else:
            blocks[-1].append(line)
    blocks = blocks if drawn else blocks[1:]
    suggested = [block[1].split()[0] for block in blocks if block and block[0].startswith(("Perhaps you meant", "Arguments similar to"))]
    return plainly(" ".join(blocks[0]).rstrip(". ")) + (f"; perhaps you meant {suggested[0]}" if suggested else "")


def plainly(said: str) -> str:
    """Returns what was said of a wrong value without what only a programmer reads: a section's flag, and that a number is none."""
    said = re.sub(r"^Error parsing (?:--|run(?:-planned)?\.)?(\S+):", r"--\1:", said)
    said = re.sub(r"no type matching \{None\}\|(INT|FLOAT) could be instantiated from \['(.*?)'\].*$", _no_number, said)
    said = re.sub(r"invalid literal for int\(\) with base 10: ('.*')$", r"\1 is no whole number", said)
    return re.sub(r"could not convert string to float: ('.*')$", r"\1 is no number", said)


def _no_number(said: re.Match[str]) -> str:
    return f"'{said[2]}' is no {'whole ' * (said[1] == 'INT')}number"


def check_writable(flag: str, path: str | None) -> None:
    """Raises Fault for a file that cannot be written later, before the work is done."""
    if path and (os.path.isdir(path) or not os.path.isdir(os.path.dirname(path) or ".")):
        raise Fault(f"{flag} {path}: cannot be written; name a file in a folder that exists")


def write_json(path: str | None, content: dict[str, Any]) -> None:
    """Writes what a verb printed as data, when a file was named."""
    if path:
        try:
            Path(path).write_text(json.dumps(content, indent=1, default=str) + "\n")
        except OSError as error:
            raise Fault(f"--json {path}: cannot be written ({error.strerror}); name a file in a folder that exists") from None
