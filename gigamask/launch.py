"""Commands in parts, and flags of plugins that run a command elsewhere, such as `--submit`."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, make_dataclass
from functools import cache
from typing import Any, ClassVar, Literal

from gigamask import plugin


@dataclass(frozen=True, kw_only=True)
class PartOptions:
    """A command that can run in parts."""

    heading: ClassVar[str] = "in parts"

    part: str = ""
    """for schedulers: 0/8@FOLDER runs the first of 8 parts and writes its results to FOLDER,
    join/8@FOLDER joins all 8"""

    def check_parts(self) -> None:
        """Raise `GigamaskError` if the other flags do not allow parts."""


@cache
def with_launchers(kind: type, what: Literal["training", "parts"]) -> Any:
    """Return the class of a command with the flags of plugins that run it elsewhere.

    Args:
        kind: The class.
        what: Which flags: those of a training, or of a command that can run in parts.
    """
    added = plugin.merged("launchers").get(what)
    if added is None:
        return kind
    names = {"__doc__": kind.__doc__, "__module__": kind.__module__}
    bases = (kind, plugin.load(added))
    return make_dataclass(kind.__name__, (), bases=bases, frozen=True, namespace=names)


def is_elsewhere(command: Any) -> bool:
    """Return whether the flags of a command ask to run it elsewhere.

    Args:
        command: The parsed command.
    """
    return getattr(command, "is_elsewhere", False)


def launched(
    command: Any, name: str, arguments: Sequence[str], out: str = ""
) -> AbstractContextManager[Any]:
    """Run a command elsewhere if its flags ask for it.

    Args:
        command: The parsed command.
        name: Its name, such as "verify".
        arguments: The arguments after the name.
        out: The run folder of a training.

    Returns:
        The command to run here, which is entered: itself, the one that joins the parts, or None if
        nothing is left.
    """
    if not is_elsewhere(command):
        return nullcontext(command)
    if isinstance(command, PartOptions):
        command.check_parts()
    return command.launch(name, arguments, out)
