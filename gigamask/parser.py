"""Read the flags of a command into its dataclass: its fields, with their docstrings as help.

Words are split here rather than by argparse, which has no `--section.no-field`, takes -1e-4 for a
flag and cannot state a mistake in one line; msgspec converts each value to the type of its field.
Imports neither numpy nor torch nor a recipe, so that `gigamask COMMAND --help` is fast.
"""

from __future__ import annotations

import ast
import os
import re
import shutil
import sys
import textwrap
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from contextvars import ContextVar
from dataclasses import MISSING, fields, is_dataclass
from functools import cache, partial
from pathlib import Path
from types import MappingProxyType, NoneType
from typing import Any, Literal, NamedTuple, TypeVar, get_args, get_origin, get_type_hints

import msgspec

from gigamask import files
from gigamask.errors import GigamaskError

Command = TypeVar("Command")
Words = tuple[str, list[str]]
"""A flag without dashes, "" for none, and the words up to the next one."""
FLAT, HIDDEN = "flat", "hidden"
"""Marks of a field, as in `Annotated[Config, FLAT]`: the flags of its fields do not begin with its
name; or it is no flag."""
TYPES = {
    int: ("INT", "a whole number"),
    float: ("FLOAT", "a number"),
    str: ("STR", "text"),
    bool: ("", "true or false"),
}
"""Types of values, as `--help` and errors write them."""
NUMBER = re.compile(r"^\+?(-?)(?=\.?\d)(\d*)\.(\d*)")
"""A number that may lack digits before or after its point, or have a plus, which JSON refuses."""
ANNOTATIONS = re.compile(rb'"(images|annotations|shapes)"\s*:\s*\[')
"""What COCO's, SA-1B's and LabelMe's files hold."""
PROGRESS = (
    "  --progress {bar,lines,none}",
    "      how progress is shown on standard error (default: a bar in a terminal; elsewhere",
    "      a line every ten seconds)",
)
"""Help of the flag that `cli.main` reads for all commands."""
NONE: Mapping[str, Any] = MappingProxyType({})
TYPED: ContextVar[bool] = ContextVar("typed", default=False)
"""Whether a person has typed the flags: a list, or a flag under two names, is then not given twice,
where the earlier values would be lost in silence. Of flags that a program puts together, the last
counts."""


class Positional(NamedTuple):
    """Mark of a field that is an argument without a flag, with its name in help and errors."""

    metavar: str


class Leaf(NamedTuple):
    """A field that holds a value.

    Attributes:
        name: Its flag without dashes, such as "optimizer.lr", which is also its key in files.
        path: The names of the fields that lead to it.
        kind: Its type.
        default: Its value if it is not given; `MISSING` if it must be.
        owner: The class that declares it.
        section: The name of the section or component that it belongs to; "" for none.
        about: The docstring of that section's class.
        metavar: The name of an argument without a flag; "" for a flag.
    """

    name: str
    path: tuple[str, ...]
    kind: Any
    default: Any
    owner: type
    section: str
    about: str | None
    metavar: str

    @property
    def words(self) -> int | None:
        """How many words it takes; None: all up to the next flag."""
        for kind in (self.kind, *get_args(self.kind)):
            if get_origin(kind) is tuple:
                return None if ... in get_args(kind) else len(get_args(kind))
        return 1


class Given(NamedTuple):
    """A value as text, and the file that states it; "" for a flag."""

    text: str | list[str]
    file: str = ""

    def name(self, leaf: str) -> str:
        """Return how an error names the value of a leaf."""
        return f"{self.file}: {leaf}" if self.file else f"--{leaf}"


def parse(kind: type[Command], argv: Sequence[str], prog: str) -> Command:
    """Parse arguments into a command.

    Args:
        kind: The dataclass of the command.
        argv: The arguments, without the names of the program and the command.
        prog: The command as typed, for help and errors.

    Raises:
        GigamaskError: An argument is invalid.
        SystemExit: `--help` was printed.
    """
    return parse_words(kind, split(argv), prog)[0]


def split(argv: Sequence[str]) -> list[Words]:
    """Return the flags among arguments with their words."""
    found: list[Words] = [("", [])]
    for word in argv:
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            found.append((name.replace("_", "-"), [value] if equals else []))
        else:
            found[-1][1].append(word)
    return found


def parse_words(
    kind: type[Command],
    words: Sequence[Words],
    prog: str,
    values: Mapping[str, Any] = NONE,
    stated: Mapping[str, Given] = NONE,
    aliases: Mapping[str, str] = NONE,
    first: Sequence[str] = (),
) -> tuple[Command, dict[str, Given]]:
    """Parse flags, and values that files state, into a command.

    Args:
        kind: The dataclass of the command.
        words: The flags.
        prog: The command as typed, for help and errors.
        values: Values of fields in place of their defaults.
        stated: Values of leaves that flags override.
        aliases: Short names of leaves.
        first: Names of the leaves that `--help` lists first.

    Returns:
        The command, and all values that were given.

    Raises:
        GigamaskError: An argument is invalid.
        SystemExit: `--help` was printed.
    """
    values = {**values_of(kind), **values}
    known = {leaf.name: leaf for leaf in _leaves(kind, values)}
    aliases = {alias: name for alias, name in aliases.items() if name in known or alias == name}
    try:
        given = {}
        for name, value in stated.items():
            if (name := aliases.get(name, name)) in given and given[name].file == value.file:
                raise GigamaskError(f"{value.file}: {name} is given under two names; give it once")
            given[name] = value
            if name not in known:
                near = _near(name, known, aliases).replace(" --", " ")
                raise GigamaskError(f"{value.file}: unknown key {near}")
        if any(flag == "help" or "-h" in typed for flag, typed in words):
            print("\n".join(_help(kind, known, prog, aliases, first)))
            raise SystemExit(0)
        given |= _read(words, known, aliases)
        missing = [leaf for leaf in known.values() if leaf.default is MISSING]
        if missing := [leaf for leaf in missing if leaf.name not in given]:
            names = (leaf.metavar or f"--{leaf.name}" for leaf in missing)
            raise GigamaskError(f"missing {', '.join(names)}")
        changes: dict[tuple[str, ...], dict[str, Any]] = {}
        chosen = {name: leaf.default for name, leaf in known.items()}
        for name, value in given.items():
            *path, last = known[name].path
            chosen[name] = _convert(known[name], value)
            changes.setdefault(tuple(path), {})[last] = chosen[name]
        _check_used(known, chosen)
        return _build(kind, values, changes, known, given), given
    except GigamaskError as error:
        raise GigamaskError(f"{error}; see '{prog} --help'") from None


def _check_used(known: Mapping[str, Leaf], chosen: Mapping[str, Any]) -> None:
    """Refuse a value without effect: its class states in `needs_flags` which flag it needs, which
    value of it, or which of several, as in "cache", "gpu or fit", "to coco" or "verify false"."""
    for name, leaf in known.items():
        needs = getattr(leaf.owner, "needs_flags", NONE).get(leaf.path[-1])
        if not needs or chosen[name] == leaf.default:
            continue
        pairs = (need.partition(" ") for need in needs.split(" or "))
        found = ((chosen.get(flag, 1), value) for flag, _, value in pairs)  # 1: a component
        if not any(value in str(given).lower() if value else given for given, value in found):
            raise GigamaskError(
                f"--{name}: has no effect without --{needs.replace(' or ', ' or --')} (got "
                f"{chosen[name]}); give that, too, or leave it out"
            )


def values_of(config: Any) -> dict[str, Any]:
    """Return the fields of a dataclass object, or those of a class that have defaults, by name."""
    if not isinstance(config, type):
        return {each.name: getattr(config, each.name) for each in fields(config)}
    defaults = {
        each.name: each.default if each.default_factory is MISSING else each.default_factory()
        for each in fields(config)
    }
    return {name: value for name, value in defaults.items() if value is not MISSING}


def _leaves(
    kind: type, values: Mapping[str, Any], path: tuple[str, ...] = (), section: str = ""
) -> list[Leaf]:
    """Return the leaves of a dataclass: its own, then inherited ones."""
    found: list[Leaf] = []
    hints, unseen = _hints(kind), {each.name for each in fields(kind)}
    for owner in kind.__mro__:
        for name in [each for each in vars(owner).get("__annotations__", {}) if each in unseen]:
            unseen.remove(name)
            marks = getattr(hints[name], "__metadata__", ())
            value = values.get(name, MISSING)
            flag = f"{section}.{name}".lstrip(".").replace("_", "-")
            if is_dataclass(value):
                inner = section if FLAT in marks else flag
                found += _leaves(type(value), values_of(value), (*path, name), inner)
            elif HIDDEN not in marks:
                plain = hints[name].__origin__ if marks else hints[name]
                metavar = marks[0].metavar if marks else ""
                found.append(
                    Leaf(flag, (*path, name), plain, value, owner, section, kind.__doc__, metavar)
                )
    return found


_hints = cache(partial(get_type_hints, include_extras=True))


def _read(
    words: Sequence[Words], known: Mapping[str, Leaf], aliases: Mapping[str, str]
) -> dict[str, Given]:
    """Return the values of flags and of arguments without a flag, by leaf."""
    given: dict[str, Given] = {}
    spelled: dict[str, str] = {}
    loose: list[str] = []
    negative = {_negated(leaf.name): leaf.name for leaf in known.values() if leaf.kind is bool}
    for typed, values in words:
        name = aliases.get(typed, typed)
        spelled.setdefault(name, typed)
        if name in negative:
            name, values = negative[name], ["false", *values]
        leaf, count = known.get(name), 1
        if not typed:
            count = 0
        elif leaf is None or leaf.metavar:
            raise GigamaskError(f"unknown flag --{_near(typed, known, aliases)}")
        elif leaf.kind is bool:
            count = int(values[:1] in (["true"], ["false"]))
            given[name] = Given(values[0] if count else "true")
        elif name in given and TYPED.get() and (leaf.words is None or spelled[name] != typed):
            raise GigamaskError(
                f"--{spelled[name]} is given twice; give it once, with all its values, as --{typed}"
            )
        elif leaf.words != 1 and (values or leaf.default is not MISSING):
            count = leaf.words or len(values)
            given[name] = Given([] if values == ["[]"] else values[:count])
        elif values:
            given[name] = Given(values[0])
        else:
            raise GigamaskError(f"--{name} needs a value")
        loose += values[count:]
    for leaf in [leaf for leaf in known.values() if leaf.metavar]:
        if leaf.words is None:
            given[leaf.name], loose = Given(loose), []
        elif loose:
            given[leaf.name] = Given(loose.pop(0))
    if loose:
        name, equals, value = loose[0].partition("=")
        hint = ""
        if "project" in known and os.path.isdir(loose[0]):
            hint = f"; to annotate its images: --images {loose[0]} --project FOLDER"
        elif os.path.exists(loose[0]) and (flags := [*filter(known.get, ("data", "images"))]):
            hint = f"; perhaps you meant --{flags[0]} {loose[0]}"
        elif equals:  # as ultralytics and Hydra write it
            hint = f"; flags are written as --{name} {value}"
        raise GigamaskError(f"unexpected argument {loose[0]!r}{hint}")
    return given


def _negated(name: str) -> str:
    return re.sub(r"([^.-][^.]*)$", r"no-\1", name)


def _near(name: str, known: Mapping[str, Leaf], others: Collection[str]) -> str:
    """Return an unknown name, and which flag it most likely means."""
    flags = {f"--{leaf.name}" for leaf in known.values() if not leaf.metavar}
    positional = {leaf.path[-1] for leaf in known.values() if leaf.metavar}
    from gigamask.suggestions import suggest_flag

    near = suggest_flag(f"--{name}", flags | {f"--{other}" for other in others}, positional)
    return f"{name}; perhaps you meant {near}" if near else name


def _convert(leaf: Leaf, given: Given) -> Any:
    """Return the value of a leaf; `GigamaskError` if the text is of another type."""
    text = given.text
    if NoneType in get_args(leaf.kind) and text in ("null", "None", ["null"]):
        return None
    words = [text] if isinstance(text, str) else text
    in_json = [NUMBER.sub(lambda n: f"{n[1]}{n[2] or 0}.{n[3] or 0}", word) for word in words]
    for spelled in (words, in_json):
        with suppress(msgspec.ValidationError):
            listed = spelled[0] if leaf.words == 1 and isinstance(text, str) else spelled
            return msgspec.convert(listed, leaf.kind, strict=False)
    typed, wanted = " ".join(words), _type(leaf.kind)[1]
    raise GigamaskError(f"{given.name(leaf.name)} must be {wanted} (got {typed!r})")


def _type(kind: Any) -> tuple[str, str]:
    """Return a type as `--help` and as errors write it."""
    parts = [part for part in get_args(kind) if part is not NoneType]
    if kind in TYPES or not parts:
        return TYPES.get(kind, ("", str(kind)))
    if get_origin(kind) is Literal:
        choices = [str(part) for part in parts]
        return f"{{{','.join(choices)}}}", f"one of {', '.join(choices)}"
    metavar, words = _type(parts[0])
    if get_origin(kind) is not tuple:
        return metavar, words
    if ... in parts:
        return f"[{metavar} ...]", f"a list, each {words}"
    return " ".join([metavar] * len(parts)), f"{len(parts)} values, each {words}"


def _build(
    kind: type[Command],
    values: Mapping[str, Any],
    changes: Mapping[tuple[str, ...], Mapping[str, Any]],
    known: Mapping[str, Leaf],
    given: Mapping[str, Given],
    path: tuple[str, ...] = (),
) -> Command:
    """Make the section at a path of its values and of what changes in and below it."""
    own = {**values, **changes.get(path, {})}
    for name in {at[len(path)] for at in changes if at[: len(path)] == path != at}:
        section = values[name]
        below = values_of(section)
        own[name] = _build(type(section), below, changes, known, given, (*path, name))
    try:
        return kind(**own)
    except GigamaskError as error:  # of the check of the section, which names its class
        members = [leaf for leaf in known.values() if leaf.path[:-1] == path]
        files = [given[leaf.name].file for leaf in members if leaf.name in given]
        section = members[0].section
        named = re.match(r"(?:\w+\.)?(\w+)", str(error))
        leaf = next((leaf for leaf in members if named and named[1] == leaf.path[-1]), None)
        message = f"--{leaf.name}{str(error)[named.end() :]}" if named and leaf else str(error)
        about = "" if "--" in message or not section else f"--{section}"
        raise GigamaskError(": ".join(filter(None, (*files[-1:], about, message)))) from None


def _help(
    kind: type,
    known: Mapping[str, Leaf],
    prog: str,
    aliases: Mapping[str, str],
    first: Sequence[str],
) -> list[str]:
    """Return the lines of `--help`."""
    groups: dict[str, list[Leaf]] = {"arguments": [], "options": []}
    groups["options"] += [known[name] for name in first if name in known]
    more = "more options" if first else "options"
    for leaf in sorted(known.values(), key=lambda leaf: "heading" in vars(leaf.owner)):
        title = vars(leaf.owner).get("heading") or leaf.section or more
        if leaf.name not in first:
            groups.setdefault("arguments" if leaf.metavar else title, []).append(leaf)
    usage = " ".join([prog, *(leaf.metavar for leaf in groups["arguments"]), "[OPTIONS]"])
    lines = [f"usage: {usage}", "", *_wrapped(kind.__doc__, "")]
    for title, members in groups.items():
        about = members[0].about if members and title == members[0].section else ""
        lines += ["", f"{title}:", *_wrapped(about, "  ")] if members else []
        for leaf in members:
            names = [*(short for short, name in aliases.items() if name == leaf.name), leaf.name]
            names += [_negated(leaf.name)] if leaf.kind is bool else []
            flags = ", ".join(f"--{name}" for name in names)
            text = _docstrings(leaf.owner.__module__).get((leaf.owner.__name__, leaf.path[-1]), "")
            if leaf.default is not False and leaf.default not in (MISSING, None, (), ""):
                listed = leaf.default if isinstance(leaf.default, tuple) else [leaf.default]
                text += f" (default: {' '.join(map(str, listed))})"
            head = leaf.metavar or f"{flags} {_type(leaf.kind)[0]}".rstrip()
            lines += [f"  {head}", *_wrapped(text, " " * 6)]
    return [*lines, "", "of all commands:", *PROGRESS]


def _wrapped(text: str | None, indent: str) -> list[str]:
    """Return the first paragraph of a text as lines."""
    width = min(shutil.get_terminal_size().columns, 100)
    words = " ".join((text or "").strip().partition("\n\n")[0].split())
    return textwrap.wrap(words, width, initial_indent=indent, subsequent_indent=indent)


@cache
def _docstrings(module: str) -> dict[tuple[str, str], str]:
    """Return the docstrings of fields of a module's classes, by class and field."""
    path = getattr(sys.modules.get(module), "__file__", None)
    tree = ast.parse(Path(path).read_text(encoding="utf-8") if path else "")
    return {
        (node.name, ast.unparse(field.target)): str(ast.literal_eval(text.value))
        for node in tree.body
        if isinstance(node, ast.ClassDef)
        for field, text in zip(node.body, node.body[1:], strict=False)
        if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr)
    }


def check_writable(flag: str, path: str | None) -> None:
    """Check, before any work is done, that a file can be written at the end.

    Args:
        flag: The flag that named the file.
        path: The file, if one was named.

    Raises:
        GigamaskError: It is a folder, or in a folder that does not exist, or holds annotations,
            weights, an image or settings.
    """
    if not path:
        return
    if os.path.isdir(path) or not os.path.isdir(os.path.dirname(path) or "."):
        raise GigamaskError(f"{flag} {path}: cannot be written; pass a file in an existing folder")
    with suppress(FileNotFoundError), open(path, "rb") as file:
        begin = file.read(1 << 16)
        if ANNOTATIONS.search(begin):
            raise GigamaskError(
                f"{flag} {path}: would replace annotations by results; give the annotations as "
                "data, and the results another file"
            )
        if b"\0" in begin or path.endswith((".yaml", ".yml")):
            raise GigamaskError(f"{flag} {path}: holds no results; give these another file")


def write_json(path: str | None, content: dict[str, Any]) -> None:
    """Write the results of a command as JSON.

    Args:
        path: The file; None writes nothing.
        content: The results.
    """
    if path:
        from gigamask.serialization import to_json

        files.write_text(path, to_json(content, 1) + "\n")
