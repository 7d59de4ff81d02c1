"""The command line: `gigamask VERB ...`, from words to exit code.

Whatever is wrong with what the user asked or gave is one line on standard error and exit code 2; a traceback is a bug.
Verbs import what they need when they run, so that `--help` answers at once.

Not here: what a verb prints (`verbs`), how words become values (`arguments`).
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from shlex import quote
from types import ModuleType
from typing import Any

from gigamask.faults import Fault, Stopped

STOPPED = 75  # EX_TEMPFAIL: told to stop before the end; the same command continues

VERBS = ["download", "convert", "synth", "index", "verify", "stats", "repack", "masks", "memory", "train", "evaluate", "ablate", "follow", "demo"]
"""In the order of the work. All but `train` are a class `Verb` in the module of `verbs` that is called like them."""
TRAIN = "trains a recipe, or continues a run: train RECIPE --data PATH... --out RUN, or train --resume RUN"


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one verb and returns the exit code: 0, 2 for what the user can mend, 75 when told to stop before the end."""
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        with warnings.catch_warnings():
            warnings.showwarning = show_warning
            return dispatch(words)
    except Fault as fault:
        print(f"gigamask: {fault}", file=sys.stderr)
        return STOPPED if isinstance(fault, Stopped) else 2
    except OSError as error:  # a full disk, a folder that may not be written: whoever was at work cannot mend it
        if error.filename is None:
            raise
        print(f"gigamask: {error.filename}: {error.strerror}; check the path, its permissions and the disk", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("gigamask: interrupted", file=sys.stderr)
        return 130


def show_warning(message: Warning | str, category: type, filename: str, lineno: int, file: Any = None, line: str | None = None) -> None:
    """Prints a warning as one line, without the place in the code it came from."""
    print(f"gigamask: {message}", file=sys.stderr)


def dispatch(words: list[str]) -> int:
    """Runs the verb that the first word names."""
    if not words or words[0] in ("-h", "--help"):
        print(overview())
        return 0
    if words[0] == "--version":
        from gigamask import __version__

        print(f"gigamask {__version__}")
        return 0
    from gigamask import arguments

    if words[0] == "train":
        return train(words[1:])
    if words[0] not in VERBS:
        raise Fault(f"no verb is called {words[0]!r}; known are {', '.join(sorted(VERBS))}; see 'gigamask --help'")
    verb = arguments.parse_verb(module_of(words[0]).Verb, words[1:], f"gigamask {words[0]}")
    check_json(verb.json)
    done = verb.run()
    write_json(verb.json, done)
    if "fault" in done:
        raise Fault(done["fault"])
    return 0


def module_of(verb: str) -> ModuleType:
    """Returns the module of a verb."""
    return import_module(f"gigamask.verbs.{verb}")


def overview() -> str:
    """Returns what `gigamask --help` prints."""
    rows = "\n".join(f"  {name:9} {TRAIN if name == 'train' else module_of(name).Verb.__doc__}" for name in VERBS)
    head = "usage: gigamask VERB ...\n\nTrains Segment Anything from scratch, from SA-1B's tars."
    return f"{head}\n\n{rows}\n\n'gigamask VERB --help' lists a verb's flags."


def train(words: list[str]) -> int:
    """Trains a recipe, or continues a run."""
    from gigamask import arguments

    if words and words[0] in ("-h", "--help"):
        print(training_overview())
        return 0
    flags = arguments.parse_train(words)
    check_json(flags.json)
    run, changed = arguments.settle(flags)
    if flags.print_config:
        print(arguments.text_of(run))
        return 0
    from gigamask.parallel.precision import choose_device
    from gigamask.parallel.world import join, leave
    from gigamask.train.loop import train as train_run

    def begun() -> None:
        for name, (before, now) in changed.items():
            print(f"--{name} was {before} and is {now} from here on", flush=True)
        arguments.save_run(run)

    world = join(os.environ, choose_device(run.device))
    try:
        state = train_run(run, world, flags.allow_other_order, begun)
    finally:
        leave(world)
    if not world.first:
        return STOPPED if state.step < run.steps else 0
    done = {"run": run.out, "step": state.step, "samples": state.cursor.samples, "steps": run.steps}
    write_json(flags.json, done)
    if state.step < run.steps:
        print(f"{run.out}: stopped and saved at step {state.step} of {run.steps}; continue with: gigamask train --resume {run.out}")
        return STOPPED
    print(f"{run.out}: {state.step} steps, {state.cursor.samples} samples\nnext: gigamask evaluate {quote(run.out)} --data HELD_OUT_TARS")
    return 0


def training_overview() -> str:
    """Returns what `gigamask train --help` prints: the forms and the recipes."""
    from gigamask import names, recipes

    rows = "\n".join(f"  {recipe.__name__:10} {(recipe.__doc__ or '').strip().splitlines()[0]}" for recipe in recipes.BUILT_IN)
    parts = "\n".join(f"  --{part:16} {', '.join(known)}" for part, (_, known) in names.SEAMS.items())
    return (
        "usage: gigamask train RECIPE --data PATH... --out RUN [--section.leaf value ...]\n       gigamask train --resume RUN\n\n"
        f"recipes:\n{rows}\n  file.py:function  your own, a function that returns a Run\n\n"
        f"parts, each by a name or as file.py:Class:\n{parts}\n\n"
        "'gigamask train RECIPE --help' lists every flag and its value there."
    )


def check_json(path: str | None) -> None:
    """Raises Fault for a file that cannot be written later, before the work is done."""
    if path and (os.path.isdir(path) or not os.path.isdir(os.path.dirname(path) or ".")):
        raise Fault(f"--json {path}: cannot be written; name a file in a folder that exists")


def write_json(path: str | None, content: dict[str, Any]) -> None:
    """Writes what a verb printed as data, when a file was named."""
    if path:
        try:
            Path(path).write_text(json.dumps(content, indent=1, default=str) + "\n")
        except OSError as error:
            raise Fault(f"--json {path}: cannot be written ({error.strerror}); name a file in a folder that exists") from None
