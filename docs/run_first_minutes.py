"""Run the commands of docs/first_minutes.md and record what they print.

`python -m docs.run_first_minutes` takes about two minutes on two idle cores.
"""

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from textwrap import indent

PAGE = Path(__file__).parent / "first_minutes.md"
OPENING = """# The first ten minutes

What a new user types, and what it prints, recorded by `python -m docs.run_first_minutes` on two
cores without a GPU. In a terminal a bar moves where lines with seconds are here.
[Your own photographs](own_data.md) is the same with your data.
"""
STEPS = (
    ("Draw scenes to learn from, and others to score on:", "gigamask synth scenes --images 40"),
    ("", "gigamask synth others --images 6 --seed 1"),
    ("Look at what they hold:", "gigamask stats scenes"),
    (
        "Train the package's small model on them. It knows such scenes: scores (of the others) "
        "stay within their errors.",
        "gigamask train compact --init starter --data scenes --evaluation.data others "
        "--evaluation.interval 10 --steps 20 --out runs/first",
    ),
    (
        "Score it as one uses it, by clicks and boxes ([what the scores mean](scores.md)):",
        "gigamask evaluate runs/first --data others --pictures figures",
    ),
    (
        "Let it find all masks of images, which may also be a folder of photographs:",
        "gigamask segment runs/first others --out masks --points-per-side 8",
    ),
    (
        "Put curves, scores and pictures on one page, to open in a browser:",
        "gigamask report runs/first",
    ),
    (
        "A command that cannot work ends with one line that says what would:",
        "gigamask segment start others --out more_masks",
    ),
    ("", "gigamask predict starter others --out more_masks"),
    ("", "gigamask segment others starter --out more_masks"),
)
"""What is done, if it is not the same as before, and the command."""
TIMED = re.compile(r"step \d+/.*|.*: (\d+ of \d+, )?\d+ s(, \d+ s left)?")
"""A line of progress, of which there are more or fewer by the time that a command takes."""


def run(command: str, folder: Path) -> str:
    """Run a command as one would in a shell, and return what it prints.

    Args:
        command: The command.
        folder: The folder to run it in.
    """
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        command,
        shell=True,
        cwd=folder,
        env=os.environ | {"PATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    return done.stdout.replace(str(folder), "/home/me").rstrip() + "\n"


def render(outputs: Sequence[str]) -> str:
    """Return the text of the page.

    Args:
        outputs: What each command of `STEPS` prints.
    """
    parts = [OPENING]
    for (text, command), output in zip(STEPS, outputs, strict=True):
        parts.append(f"{text}\n" if text else "")
        parts.append(indent(f"> {command}\n{output}", "    "))
    return "\n".join(filter(None, parts))


def recorded(page: str) -> list[str]:
    """Return what each command of a page prints.

    Args:
        page: Its text.
    """
    found = re.findall(r"^    > .*\n((?:(?:    (?!> ).*)?\n)*)", page, re.MULTILINE)
    return [re.sub("^    ", "", output, flags=re.MULTILINE).rstrip() + "\n" for output in found]


def shapes(output: str) -> Iterator[str]:
    """Yield the lines of an output but for progress, with # in place of numbers.

    Threads, processes and the precision of a CPU, which the machine chooses, are the same for all.

    Args:
        output: What a command printed.
    """
    for line in output.splitlines():
        if not TIMED.fullmatch(line):
            line = " ".join(re.sub(r"\d+(?:[.,]\d+)*", "#", line).split())
            yield re.sub(r"# threads?( in each of # processes)?(, (fp|bf)#)?", "# threads", line)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        PAGE.write_text(render([run(command, Path(scratch)) for _, command in STEPS]))
