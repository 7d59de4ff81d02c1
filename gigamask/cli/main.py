"""The command line: `gigamask COMMAND ...`."""

from __future__ import annotations

import errno
import gc
import os
import re
import signal
import sys
import traceback
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from contextvars import copy_context
from typing import Any

from gigamask import files, parser, plugin, progress
from gigamask.errors import GigamaskError, TrainingInterruptedError, abridged, check_choice
from gigamask.signals import STOP_SIGNALS, discard_if_closed, stop_signals_handled

INTERRUPTED = 75
"""Exit code (EX_TEMPFAIL) of an interrupted and saved run; the same command resumes it."""
SIGNALED = 128
"""A command that a signal ended exits with this plus the signal's number, as in a shell."""
UNNAMED = {errno.ENOSPC: "an output", errno.ENOENT: "the working directory"}
"""What errors without a file name are about: a write to an open file, and a folder that is gone."""
PIPE_CLOSED = 141
"""Exit code that a shell reports for a program ended by SIGPIPE."""

CORE = (
    *("convert", "synth", "index", "verify", "stats", "masks"),
    *("plan", "pretrain", "train", "evaluate", "export", "segment", "report", "follow", "demo"),
)
"""Commands of the core in the order of use. Each is a module of `cli.commands` with a class
`NAMECommand` and optionally a function `parse`; those of `TRAINING` share a module."""
TRAINING = {
    "pretrain": "pre-train an image encoder on images without masks (MAE), or resume a run",
    "train": "train a recipe on images with masks, or resume a run",
}
"""Lines in the overview of the commands that train recipes."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Errors that the user can fix are printed as one line on standard error.

    Args:
        argv: The arguments; None means `sys.argv[1:]`.

    Returns:
        Exit code: 0; 1 for an exception in a component of the user's own; 2 for wrong input; 75 if
        interrupted and resumable, but 0 if it runs under torchrun and its time was over; 128 plus
        its number after another signal (130: Ctrl-C, 143: SIGTERM); 141 if the reader of standard
        output has exited.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        if argv is None:
            open_missing_streams()
            with suppress(AttributeError):  # another object
                # For names that the encoding of a file or a pipe lacks.
                sys.stdout.reconfigure(errors="backslashreplace")  # pyrefly: ignore
        context = copy_context()
        context.run(parser.TYPED.set, argv is None)
        with warnings.catch_warnings(), stop_signals_raised():
            warnings.showwarning = print_warning
            try:
                code = context.run(run_command, arguments)
            except (OSError, RuntimeError) as error:
                files.check_file_limit(error)
                raise
            sys.stdout.flush()
            return code
    except GigamaskError as error:
        print_line(error)
        return INTERRUPTED if isinstance(error, TrainingInterruptedError) else 2
    except BrokenPipeError:
        if not discard_if_closed(sys.stdout):
            raise
        return PIPE_CLOSED
    except OSError as error:  # a full disk, a folder without write permission
        name = error.filename or UNNAMED.get(error.errno or 0)
        if name is None:
            raise
        discard_if_closed(sys.stdout, is_full=name == UNNAMED[errno.ENOSPC])
        is_file = isinstance(error, FileExistsError | NotADirectoryError)
        act = "give a folder" if is_file else "check the path, its permissions and the disk"
        print_line(f"{name}: {error.strerror}; {act}")
        return 2
    except KeyboardInterrupt as interrupt:
        if isinstance(failure := interrupt.__context__, GigamaskError):  # it was being cleaned up
            print_line(failure)
        number = signal.Signals(next(iter(interrupt.args), signal.SIGINT))
        print_line(f"stopped by {number.name}; run the same command again")
        return SIGNALED + number
    except Exception as error:
        from gigamask.recipes.user_code import describe_error

        if (line := describe_error(error)) is None:
            raise
        print_line(line)
        traceback.print_exception(error)
        return 1


def open_missing_streams() -> None:
    """Open the standard streams that this process was started without, so that a file which it
    opens is not taken for one of them."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if not getattr(sys, name):
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_RDWR), mode))


@contextmanager
def stop_signals_raised() -> Iterator[None]:
    """Raise `KeyboardInterrupt` on any stop signal, so that temporary files are removed.

    Its argument is the signal's number, but Python's own for SIGINT has none.
    """

    def stop(number: int, handled: frozenset[int]) -> None:
        for each in handled:  # a second one must not interrupt the clean-up
            signal.signal(each, signal.SIG_IGN)
        for stream in (sys.stdout, sys.stderr):  # nor an output that has closed
            discard_if_closed(stream)
        raise KeyboardInterrupt(number)

    with stop_signals_handled(stop, set(STOP_SIGNALS) - {signal.SIGINT}):
        yield


def print_line(message: object) -> None:
    """Print a line on standard error."""
    print(f"gigamask: {message}", file=sys.stderr)


def print_warning(message: Warning | str, *_where: Any, **_named: Any) -> None:
    """Print a warning as one line, in place of `warnings.showwarning`.

    Args:
        message: The warning.
        _where: Its category, file and line.
        _named: The same, by name.
    """
    with suppress(OSError):  # a closed terminal
        print_line(message)


def expand_home_of(argument: str) -> str:
    """Return an argument, or the value of `--flag=VALUE`, with the home folder in place of `~`."""
    flag, equals, value = argument.partition("=")
    if flag.startswith("--") and equals:
        return f"{flag}={files.expand_home(value)}"
    return files.expand_home(argument)


def run_command(arguments: list[str]) -> int:
    """Run the command that the first argument names, and return its exit code."""
    if not arguments or arguments[0] in ("-h", "--help"):
        print(overview())
        return 0
    # Threads of OpenMP that spin while they wait nearly stop on a busy machine; torch reads this
    # when it is imported.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    # Batches differ in size by their masks, for which fixed segments of GPU memory are too small or
    # too large; torch reads this before its first allocation.
    if sys.platform == "linux" and "PYTORCH_CUDA_ALLOC_CONF" not in os.environ:
        os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    files.raise_file_limit()
    for number, word in enumerate(arguments, 1):
        if not word or re.fullmatch("--[^=]*=", word):
            what = word or f"argument {number}"
            raise GigamaskError(f"{what} is empty (an unset shell variable?); give a value")
    name, *rest = choose_progress(map(expand_home_of, arguments))
    if name == "--version":
        from gigamask import __version__

        print(f"gigamask {__version__}")
        return 0
    known_trainings = trainings()
    for words in (1, 2):
        if (command := " ".join([name, *rest][:words])) in known_trainings:
            return run_training(command, rest[words - 1 :])
    known = commands()
    if name not in known:
        from gigamask.suggestions import OF_PLUGINS, suggest_command

        if name in OF_PLUGINS:
            hint = f"it needs {plugin.MISSING.format(OF_PLUGINS[name])}"
        elif near := suggest_command(name, known):
            hint = f"perhaps you meant {near}"
        else:
            hint = f"choose one of {', '.join(known)}"
        raise GigamaskError(f"unknown command {name!r}; {hint}; see 'gigamask --help'")
    from gigamask import launch

    kind = plugin.load(known[name])
    if issubclass(kind, launch.PartOptions):
        kind = launch.with_launchers(kind, "parts")
    if parse := getattr(sys.modules[kind.__module__], "parse", None):
        command = parse(rest)
    else:
        command = parser.parse(kind, rest, f"gigamask {name}")
    told = getattr(command, "json", None)  # of a plugin's command, which need not have it
    parser.check_writable("--json", told)
    if hasattr(command, "json") and command.__doc__:
        progress.say(f"{abridged([name, *rest])}: {command.__doc__.splitlines()[0]}")
    with launch.launched(command, name, rest) as here:
        result = here.run()
    if result is None:  # not the main process
        return 0
    parser.write_json(told, result)
    if "fault" in result:
        raise GigamaskError(result["fault"])
    return 0


def choose_progress(arguments: Iterable[str]) -> list[str]:
    """Set how progress is shown in this context, and return the arguments but for `--progress`."""
    others, words = [], iter(arguments)
    for word in words:
        flag, equals, value = word.partition("=")
        if flag != "--progress":
            others.append(word)
            continue
        value = value if equals else next(words, "")
        check_choice("--progress", value, progress.MODES)
        progress.CHOSEN.set(value)
    if os.environ.get("RANK", "0") != "0":  # of several processes, one shows it
        progress.CHOSEN.set("none")
    return others or [""]


def trainings() -> dict[str, str]:
    """Return the lines in the overview of the commands that train recipes, also of plugins."""
    return TRAINING | plugin.merged("trainings", CORE)


def commands() -> dict[str, str]:
    """Return a reference to the class of each command, of the core and of plugins; "" for those
    that train recipes."""
    core = {name: f"gigamask.cli.commands.{name}:{name.capitalize()}Command" for name in CORE}
    added = {name: "" for name in trainings() if " " not in name}
    return core | added | plugin.merged("commands", core)


def overview() -> str:
    """Return the text of `gigamask --help`."""
    lines = trainings()
    rows = "\n".join(
        f"  {name:9} {lines.get(name) or plugin.docstring(where)}"
        for name, where in commands().items()
    )
    return (
        "usage: gigamask COMMAND ...\n\n"
        "Train Segment Anything (SAM) from scratch on SA-1B's tars, or on your own images.\n\n"
        f"{rows}\n\n'gigamask COMMAND --help' lists a command's flags."
    )


def run_training(command: str, arguments: list[str]) -> int:
    """Run a command that trains recipes, and return its exit code.

    Args:
        command: The command.
        arguments: The arguments after the command.
    """
    from gigamask.cli.commands import train

    if arguments and arguments[0].startswith("--resume="):
        arguments[:1] = arguments[0].split("=", 1)
    gc.disable()  # a start makes a million objects that stay; the trainer enables it for its steps
    try:
        path, result = train.run(command, arguments)
    finally:
        gc.enable()
    parser.write_json(path, result)
    # Not 75 if its time was over: torchrun would take it for a failure, and start it again.
    is_stopped = result and train.is_interrupted(result) and "time_over" not in result
    return INTERRUPTED if is_stopped else 0
