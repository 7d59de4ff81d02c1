"""The command line: `gigamask VERB ...`, from words to exit code.

Whatever is wrong with what the user asked or gave is one line on standard error and exit code 2; a traceback is a bug.
Verbs import what they need when they run, and their docstrings are read without importing them, so that `--help` answers at once.

Not here: what a verb prints (`verbs`), how words become values (`parser`, `arguments`).
"""

from __future__ import annotations

import ast
import os
import select
import sys
import warnings
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from gigamask.errors import GigamaskError, TrainingInterruptedError
from gigamask.suggestions import suggest_command

STOPPED = 75  # EX_TEMPFAIL: told to stop before the end; the same command continues
UNREAD = 141  # what a shell says of a program that SIGPIPE ended

VERBS = [
    *(
        "download",
        "convert",
        "synth",
        "index",
        "verify",
        "stats",
        "repack",
        "masks",
        "memory",
        "plan",
    ),
    *(
        "pretrain",
        "train",
        "evaluate",
        "export",
        "segment",
        "ground",
        "ask",
        "ablate",
        "report",
        "serve",
        "follow",
        "demo",
    ),
]
"""In the order of the work. All but those that train are a class `Verb` in the module of `verbs` that is called like them, which may have a `parse`
of its own."""
TRAIN = {
    "pretrain": "pre-trains an image encoder on images alone, or continues that: pretrain RECIPE --data PATH... --out RUN, or pretrain --resume RUN",
    "train": "trains a recipe, or continues a run: train RECIPE --data PATH... --out RUN, or train --resume RUN",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one verb and returns the exit code: 0, 2 for what the user can mend, 75 when told to stop before the end, 141 when nobody reads on."""
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        with warnings.catch_warnings():
            warnings.showwarning = show_warning
            code = dispatch(words)
            sys.stdout.flush()
            return code
    except GigamaskError as fault:
        print(f"gigamask: {fault}", file=sys.stderr)
        return STOPPED if isinstance(fault, TrainingInterruptedError) else 2
    except BrokenPipeError:
        if not unread():
            raise
        return UNREAD
    except (
        OSError
    ) as error:  # a full disk, a folder that may not be written: whoever was at work cannot mend it
        if error.filename is None:
            raise
        print(
            f"gigamask: {error.filename}: {error.strerror}; check the path, its permissions and the disk",
            file=sys.stderr,
        )
        return 2
    except KeyboardInterrupt:
        print("gigamask: interrupted", file=sys.stderr)
        return 130


def unread() -> bool:
    """Tells whether nobody reads what is printed any more, as behind `| head`; nothing more is printed then."""
    pipe = select.poll()
    pipe.register(sys.stdout.fileno(), 0)
    if gone := any(event & select.POLLERR for _, event in pipe.poll(0)):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return gone


def show_warning(
    message: Warning | str,
    category: type,
    filename: str,
    lineno: int,
    file: Any = None,
    line: str | None = None,
) -> None:
    """Prints a warning as one line, without the place in the code it came from."""
    print(f"gigamask: {message}", file=sys.stderr)


def dispatch(words: list[str]) -> int:
    """Runs the verb that the first word names."""
    if not words or words[0] in ("-h", "--help"):
        print(overview())
        return 0
    if "" in words:
        raise GigamaskError(
            f"argument {words.index('') + 1} is empty, as a variable of the shell that is not set; give a value, or leave it out"
        )
    if words[0] == "--version":
        from gigamask import __version__

        print(f"gigamask {__version__}")
        return 0
    if words[0] in TRAIN:
        return train(words[0], words[1:])
    if words[:2] == ["ground", "train"]:
        return train("ground train", words[2:])
    if words[0] not in VERBS:
        near = suggest_command(words[0], VERBS)
        hint = f"perhaps you meant {near}" if near else f"known are {', '.join(VERBS)}"
        raise GigamaskError(f"unknown command {words[0]!r}; {hint}; see 'gigamask --help'")
    from gigamask import parser

    module = import_module(f"gigamask.cli.commands.{words[0]}")
    verb = (
        module.parse(words[1:])
        if hasattr(module, "parse")
        else parser.parse(module.Verb, words[1:], f"gigamask {words[0]}")
    )
    parser.check_writable("--json", verb.json)
    done = verb.run()
    if done is None:  # one of several processes, of which the first speaks
        return 0
    parser.write_json(verb.json, done)
    if "fault" in done:
        raise GigamaskError(done["fault"])
    return 0


def told(verb: str) -> str:
    """Returns what the docstring of a verb's class says, read from its module's text."""
    tree = ast.parse((Path(__file__).parent / "verbs" / f"{verb}.py").read_text(encoding="utf-8"))
    return next(
        ast.get_docstring(node) or ""
        for node in tree.body
        if isinstance(node, ast.ClassDef) and node.name == "Verb"
    )


def overview() -> str:
    """Returns what `gigamask --help` prints."""
    rows = "\n".join(f"  {name:9} {TRAIN.get(name) or told(name)}" for name in VERBS)
    head = "usage: gigamask VERB ...\n\nTrains Segment Anything from scratch, from SA-1B's tars."
    return f"{head}\n\n{rows}\n\n'gigamask VERB --help' lists a verb's flags."


def train(verb: str, words: list[str]) -> int:
    """Trains a recipe, or continues a run."""
    from gigamask import parser
    from gigamask.workflows import train

    path, done = train.run_command(verb, words)
    parser.write_json(path, done)
    return STOPPED if done and done["step"] < done["steps"] else 0
