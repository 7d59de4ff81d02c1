"""Lists of links: names and addresses, as in the text file that Meta provides for SA-1B.

A line has a name and an address, separated by a tab or spaces; the first line may name the
columns. A line with only an address takes its name from the address.
"""

import difflib
import fnmatch
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote, urlsplit

from gigamask.errors import GigamaskError, check_range
from gigamask.serialization import read_lines

MAX_NAME_BYTES = 200
"""File systems allow 255; the name of a partial file is longer than the file's."""


@dataclass(frozen=True)
class Link:
    """Name and address of a file."""

    name: str
    url: str


def read(path: str | Path) -> list[Link]:
    """Return the links of a list, each name once.

    Raises:
        GigamaskError: A line is not a link, or a name is not a plain file name.
    """
    links: dict[str, Link] = {}
    lines = read_lines(path)
    for i, (number, line) in enumerate(lines):
        fields = [
            field.strip()
            for field in (line.split("\t") if "\t" in line else line.split())
            if field.strip()
        ]
        urls = [field for field in fields if field.lower().startswith(("http://", "https://"))]
        if i == 0 and "://" not in line:  # names of the columns
            continue
        names = [field for field in fields if field not in urls]
        if len(urls) != 1 or len(names) > 1:
            raise GigamaskError(
                f"{path}: line {number} is not a name and an http address, separated by a tab:"
                f" {line[:80]!r}; give the list unchanged"
            )
        if not _is_address(urls[0]):
            raise GigamaskError(
                f"{path}: line {number} has an invalid address: {urls[0][:80]!r}; give the list"
                " unchanged"
            )
        name = names[0] if names else unquote(urlsplit(urls[0]).path).rpartition("/")[2]
        if not _is_plain(name):
            raise GigamaskError(
                f"{path}: line {number} names a file {name[:80]!r}; names must have no folder and"
                f" no leading dot, and at most {MAX_NAME_BYTES} bytes"
            )
        if links.setdefault(name, Link(name, urls[0])).url != urls[0]:
            raise GigamaskError(
                f"{path}: line {number} gives {name} a second address; keep one of them"
            )
    if not links:
        raise GigamaskError(
            f"{path}: holds no link; give a text file with a name and an address on each line"
        )
    return list(links.values())


def choose(
    links: Sequence[Link], names: Sequence[str] = (), count: int | None = None
) -> list[Link]:
    """Select links by name and number.

    Args:
        links: All links.
        names: Names or globs; empty selects all.
        count: Number of selected links to keep, starting with the first.

    Returns:
        The selected links, in their order.

    Raises:
        GigamaskError: A name matches no link, or `count` is below 1.
    """
    check_range("--count", count, 1)
    chosen = [
        link
        for link in links
        if not names or any(fnmatch.fnmatchcase(link.name, name) for name in names)
    ]
    for name in names:
        if not any(fnmatch.fnmatchcase(link.name, name) for link in links):
            near = difflib.get_close_matches(name, [link.name for link in links], 3, 0)
            raise GigamaskError(
                f"--names {name}: none of the {len(links)} links has this name; the closest are"
                f" {', '.join(near)}"
            )
    return chosen[:count]


def _is_address(url: str) -> bool:
    """Return whether a URL names a server."""
    try:
        parts = urlsplit(url)
        return bool(parts.hostname) and (parts.port is None or parts.port > 0)
    except ValueError:
        return False


def _is_plain(name: str) -> bool:
    """Return whether a name is a plain file name: no folder, not hidden, printable."""
    return (
        bool(name)
        and name.isprintable()
        and name[0] != "."
        and not set(name) & set("/\\")
        and len(name.encode()) <= MAX_NAME_BYTES
    )
