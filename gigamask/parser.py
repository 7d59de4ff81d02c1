"""Parse a command's arguments into a dataclass, with one-line errors, and write its JSON output.

Imports neither numpy nor torch nor a recipe, so that `gigamask COMMAND --help` is fast.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import warnings
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import is_dataclass
from typing import Any, TypeVar

import tyro
from tyro import _errors as tyro_errors
from tyro import _strings as tyro_strings

from gigamask import files
from gigamask.errors import GigamaskError
from gigamask.suggestions import suggest_flag

Command = TypeVar("Command")

METAVARS = {"INT": "a whole number", "FLOAT": "a number"}
"""tyro's names of types, in words."""
UNNAMED = ("run.", "run_planned.")
"""Prefixes of nested configurations, which their flags leave out."""


def parse(
    kind: type[Command],
    argv: Sequence[str],
    prog: str,
    default: Command | None = None,
    extra_flags: Collection[str] = (),
) -> Command:
    """Parse arguments into a command.

    Args:
        kind: The dataclass of the command.
        argv: The arguments, without the names of the program and the command.
        prog: The command as typed, for help and errors.
        default: Default values of the flags.
        extra_flags: Further flags to suggest, which are handled before this parser.

    Raises:
        GigamaskError: An argument is invalid.
    """

    def fail(event: tyro_errors.ParseErrorEvent) -> None:
        if message := _message(event, kind, argv, default, extra_flags):
            raise GigamaskError(f"{message}; see '{prog} --help'")

    if is_dataclass(kind):
        _show_own_flags_first(kind)
    with tyro_errors.on_parse_error(fail), _joined_help():
        return tyro.cli(kind, args=list(argv), prog=prog, default=default, add_help=True)


def _show_own_flags_first(kind: Any) -> None:
    """Let `--help` list the flags of a command before inherited ones, such as `--submit`."""
    declared = [vars(base).get("__annotations__", {}) for base in kind.__mro__]
    order = sorted(
        kind.__dataclass_fields__,
        key=lambda name: next(i for i, names in enumerate(declared) if name in names),
    )
    kind.__dataclass_fields__ = {name: kind.__dataclass_fields__[name] for name in order}


@contextmanager
def _joined_help() -> Iterator[None]:
    """Let tyro join the lines of help texts; it keeps the line breaks of indented docstrings."""

    def join(helptext: str) -> str:
        return "\n\n".join(" ".join(part.split()) for part in helptext.split("\n\n"))

    original = tyro_strings.remove_single_line_breaks
    tyro_strings.remove_single_line_breaks = join
    try:
        yield
    finally:
        tyro_strings.remove_single_line_breaks = original


def _message(
    event: tyro_errors.ParseErrorEvent,
    kind: type[Command],
    argv: Sequence[str],
    default: Command | None,
    extra_flags: Collection[str],
) -> str | None:
    """Return a one-line error message; None leaves the error to tyro."""
    if isinstance(event, tyro_errors.InstantiationFailure):
        return _wrong_value(event, argv, _flags(kind, default)[0])
    known, positional = _flags(kind, default)
    flags = [word.partition("=")[0] for word in argv if word.startswith("--")]
    if unknown := [flag for flag in flags if flag.replace("_", "-") not in known]:
        meant = suggest_flag(unknown[0], {*known, *extra_flags}, positional)
        return f"unknown flag {unknown[0]}" + (f"; perhaps you meant {meant}" if meant else "")
    if isinstance(event, tyro_errors.UnrecognizedArgs):
        return f"unexpected argument {event.tokens[0]!r}"
    if isinstance(event, tyro_errors.MissingArgs):
        return f"missing {', '.join(_name(missing.arg) for missing in event.missing_arguments)}"
    if isinstance(event, tyro_errors.MissingSubcommand):
        got = f" (got {event.found_token!r})" if event.found_token else ""
        return f"missing command: {' or '.join(event.subcommand_spec.parser_from_name)}{got}"
    if isinstance(event, tyro_errors.InvalidChoice):
        choices = ", ".join(event.choices)
        return f"{_name(event.argument)} must be one of {choices} (got {event.value!r})"
    if isinstance(event, tyro_errors.BadValue):
        return f"{_name(event.argument)} needs a value"
    return None


def _wrong_value(
    event: tyro_errors.InstantiationFailure, argv: Sequence[str], known: Collection[str]
) -> str:
    """Return one line about a value that its flag or the check of its section rejected."""
    if event.argument is None:
        section = str(getattr(sys.exc_info()[1], "arg", "")).replace("-", "_")
        for prefix in UNNAMED:
            section = section.removeprefix(prefix)
        flag = f"--{section.replace('_', '-')}"
        field, _, rest = event.message.partition(" ")
        field = field.rpartition(".")[2]
        for name in (f"{flag}.{field}", f"--{field}"):
            if name.replace("_", "-") in known:
                return f"{name.replace('_', '-')} {rest}"
        is_named = not section or flag in event.message
        return event.message if is_named else f"{flag}: {event.message}"
    name = _name(event.argument)
    metavar = str(event.argument.lowered.metavar).removeprefix("{None}|")
    given = _values(name, argv)
    wanted = METAVARS.get(metavar, metavar)
    return f"{name} must be {wanted} (got {given!r})" if given else f"{name}: {event.message}"


def _name(argument: Any) -> str:
    """Return the flag of an argument, or the placeholder of a positional one."""
    if argument.is_positional():
        return str(argument.lowered.metavar)
    return argument.lowered.name_or_flags[0]


def _values(flag: str, argv: Sequence[str]) -> str:
    """Return the last values of a flag, as typed."""
    words = [word.partition("=")[0].replace("_", "-") for word in argv]
    if flag not in words:
        return ""
    last = len(words) - 1 - words[::-1].index(flag)
    if "=" in argv[last]:
        return argv[last].partition("=")[2]
    end = next((i for i in range(last + 1, len(argv)) if argv[i].startswith("--")), len(argv))
    return " ".join(argv[last + 1 : end])


def _flags(kind: type[Command], default: Command | None) -> tuple[set[str], set[str]]:
    """Return all flags of a command and its subcommands, and its positional arguments' names."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        parsers: list[Any] = [tyro.extras.get_parser(kind, default=default)]
    flags: set[str] = set()
    positional: set[str] = set()
    for parser in parsers:  # grows by the subcommands' parsers
        for action in parser._actions:
            flags.update(action.option_strings)
            if isinstance(action.choices, dict):
                parsers.extend(action.choices.values())
            elif not action.option_strings and action.dest != argparse.SUPPRESS:
                positional.add(str(action.dest).rpartition(".")[2].lower())
    return flags, positional


def check_writable(flag: str, path: str | None) -> None:
    """Check, before any work is done, that a file can be written at the end.

    Args:
        flag: The flag that named the file.
        path: The file, if one was named.

    Raises:
        GigamaskError: It is a folder, or in a folder that does not exist.
    """
    if path and (os.path.isdir(path) or not os.path.isdir(os.path.dirname(path) or ".")):
        raise GigamaskError(f"{flag} {path}: cannot be written; pass a file in an existing folder")


def write_json(path: str | None, content: dict[str, Any]) -> None:
    """Write the results of a command as JSON.

    Args:
        path: The file; None writes nothing.
        content: The results.
    """
    if path:
        files.write_text(path, json.dumps(content, indent=1, default=str) + "\n")
