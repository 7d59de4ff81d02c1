"""`gigamask download`: SA-1B's tars from the list of links that Meta hands out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from shlex import quote
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import urlsplit

from tyro.conf import Positional, arg

if TYPE_CHECKING:
    from gigamask.datatools.download import Progress, Warn

NAMES_TOLD = 5


@dataclass(frozen=True)
class DownloadCommand:
    """fetches tars from a list of links; the same command again goes on where it stopped"""

    links: Positional[Annotated[str, arg(metavar="LINKS")]]
    """the text file with a name and an address in each line, as Meta hands it out"""
    out: str
    """the folder the tars go to"""
    checksums: str | None = None
    """list of checksums, as Meta hands it out or md5sum and sha256sum write it"""
    count: int | None = None
    """only the first so many"""
    names: tuple[str, ...] = ()
    """only these, such as sa_000020.tar or 'sa_0000*'"""
    workers: int = 4
    """how many files at a time"""
    json: str | None = None
    """file for what was printed, as data"""

    def run(self) -> dict[str, Any]:
        from rich.filesize import decimal

        from gigamask.datatools import checksums, download, links

        chosen = links.choose(links.read(self.links), self.names, self.count)
        sums = checksums.read(self.checksums) if self.checksums else {}
        with _bar(len(chosen)) as (progress, say):
            outcomes = download.download(
                chosen, self.out, sums, self.workers, progress, _proxy(chosen[0].url), warn=say
            )
        counts = Counter(outcome.status for outcome in outcomes)
        for status in ("fetched", "resumed", "skipped", "failed"):
            kept = [outcome for outcome in outcomes if outcome.status == status]
            if kept:
                print(
                    f"  {status:8}{len(kept):6}  {decimal(sum(outcome.bytes for outcome in kept)):>10}"
                )
        failed: dict[str, list[str]] = {}
        for outcome in outcomes:
            if outcome.status == "failed":
                failed.setdefault(outcome.reason, []).append(outcome.name)
        for reason, names in failed.items():
            more = f" and {len(names) - NAMES_TOLD} more" if len(names) > NAMES_TOLD else ""
            print(f"  failed {', '.join(names[:NAMES_TOLD])}{more}: {reason}")
        unlisted = sum(outcome.name not in sums for outcome in outcomes)
        if unlisted:
            print(f"  {unlisted} without a checksum: what arrived was not compared with anything")
        report = {
            "out": self.out,
            **counts,
            "without_checksum": unlisted,
            "files": [asdict(outcome) for outcome in outcomes],
        }
        if counts["failed"]:
            act = "for the reasons above; the same command fetches only what is missing"
            report["fault"] = (
                f"{self.out}: {counts['failed']} of {len(outcomes)} files failed, {act}"
            )
        else:
            print(f"next: gigamask verify {quote(self.out)}")
        return report


@contextmanager
def _bar(count: int) -> Iterator[tuple[Progress, Warn]]:
    """Shows bytes, speed and files on standard error, and gives the function that moves them, and one that prints a line above them."""
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    from gigamask.cli.commands.progress import display

    columns = (
        TextColumn("{task.fields[files]} of " + f"{count} files"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with display(*columns) as shown:
        task = shown.add_task("download", total=None, files=0)
        yield (
            lambda done, total, files: shown.update(
                task, completed=done, total=total or None, files=files
            ),
            lambda line: shown.console.print(line, markup=False, highlight=False, soft_wrap=True),
        )


def _proxy(url: str) -> str | None:
    """Returns the proxy that the environment names for an address."""
    from urllib.request import getproxies, proxy_bypass

    parts = urlsplit(url)
    return None if proxy_bypass(parts.netloc) else getproxies().get(parts.scheme)
