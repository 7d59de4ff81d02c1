"""Lists of links: the text file that Meta hands out enters, names and addresses leave, all of them or those that were chosen.

A line has a name and an address, separated by a tab or spaces; the first line may name the columns. A line with an address alone takes its name
from it.

Not here: fetching what the links lead to (`download`).
"""

import difflib
import fnmatch
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote, urlsplit

from gigamask.datatools.checksums import read_text
from gigamask.errors import GigamaskError

MAX_NAME_BYTES = 200
"""File systems allow 255; a partial file's name is longer than the file's."""


@dataclass(frozen=True)
class Link:
    """Where a file is fetched from, and its name."""

    name: str
    url: str


def read(path: str | Path) -> list[Link]:
    """Returns the links of a list, each name once; raises Fault for a line that is none, or a name that is no plain file name."""
    found: dict[str, Link] = {}
    lines = [
        (number, line)
        for number, line in enumerate(read_text(path).splitlines(), 1)
        if line.strip() and line[0] != "#"
    ]
    for place, (number, line) in enumerate(lines):
        fields = [
            field.strip()
            for field in (line.split("\t") if "\t" in line else line.split())
            if field.strip()
        ]
        urls = [field for field in fields if field.lower().startswith(("http://", "https://"))]
        if place == 0 and "://" not in line:  # the columns' names
            continue
        names = [field for field in fields if field not in urls]
        if len(urls) != 1 or len(names) > 1:
            raise GigamaskError(
                f"{path}: line {number} is not a name and an http address, separated by a tab: {line[:80]!r}; give the list as it was handed out"
            )
        if not _is_address(urls[0]):
            raise GigamaskError(
                f"{path}: line {number} holds no address that can be used: {urls[0][:80]!r}; give the list as it was handed out"
            )
        name = names[0] if names else unquote(urlsplit(urls[0]).path).rpartition("/")[2]
        if not _is_plain(name):
            raise GigamaskError(
                f"{path}: line {number} names a file {name[:80]!r}; names are plain, without folders, no dot in front, {MAX_NAME_BYTES} bytes long"
            )
        if found.setdefault(name, Link(name, urls[0])).url != urls[0]:
            raise GigamaskError(
                f"{path}: line {number} gives {name} a second address; keep one of them"
            )
    if not found:
        raise GigamaskError(
            f"{path}: holds no link; give the text file with a name and an address in each line"
        )
    return list(found.values())


def choose(
    links: Sequence[Link], names: Sequence[str] = (), count: int | None = None
) -> list[Link]:
    """Returns the links whose name is among `names`, which may be globs (all by default), and of these the first `count`."""
    if count is not None and count < 1:
        raise GigamaskError(
            f"--count {count}: at least one file has to be fetched; give a number from 1 on"
        )
    chosen = [
        link
        for link in links
        if not names or any(fnmatch.fnmatchcase(link.name, name) for name in names)
    ]
    for name in names:
        if not any(fnmatch.fnmatchcase(link.name, name) for link in links):
            near = difflib.get_close_matches(name, [link.name for link in links], 3, 0)
            raise GigamaskError(
                f"--names {name}: none of the {len(links)} links has such a name; the nearest: {', '.join(near)}"
            )
    return chosen[:count]


def _is_address(url: str) -> bool:
    """Says whether a URL names a server."""
    try:
        parts = urlsplit(url)
        return bool(parts.hostname) and (parts.port is None or parts.port > 0)
    except ValueError:
        return False


def _is_plain(name: str) -> bool:
    """Says whether a name from a list may become a file's: nothing that leads elsewhere, hides or cannot be printed."""
    return (
        bool(name)
        and name.isprintable()
        and name[0] != "."
        and not set(name) & set("/\\")
        and len(name.encode()) <= MAX_NAME_BYTES
    )
