"""`gigamask download`: fetch SA-1B's tars from Meta's list of links."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass
from shlex import quote
from typing import Annotated, Any
from urllib.parse import urlsplit

from gigamask.parser import Positional

MAX_NAMES = 5
"""Maximum number of failed files printed per reason."""


@dataclass(frozen=True)
class DownloadCommand:
    """download the tars of a list of links; run the same command again to resume"""

    links: Annotated[str, Positional("LINKS")]
    """text file with a name and a URL per line, such as Meta's list"""
    out: str
    """output folder for the tars"""
    checksums: str | None = None
    """file of checksums: Meta's list, or the output of md5sum or sha256sum"""
    count: int | None = None
    """number of files to download, from the start of the list; default: all"""
    names: tuple[str, ...] = ()
    """names or patterns of the files to download, such as sa_000020.tar or 'sa_0000*'"""
    workers: int = 4
    """files to download at the same time"""
    json: str | None = None
    """write the results to this JSON file"""

    def run(self) -> dict[str, Any]:
        """Download, and return the status of each file."""
        from rich.filesize import decimal

        from gigamask.datatools import checksums
        from gigamask.plugins.download import download, links
        from gigamask.progress import progress_bar, say

        chosen = links.choose(links.read(self.links), self.names, self.count)
        sums = checksums.read(self.checksums) if self.checksums else {}
        proxy = _proxy(chosen[0].url)
        with progress_bar("MB downloaded") as update:
            results = download.download(
                chosen,
                self.out,
                sums,
                self.workers,
                lambda done, total, files: update(done / 1e6, total // 1_000_000),
                proxy,
                warn=say,
            )
        counts = Counter(result.status for result in results)
        for status in ("fetched", "resumed", "skipped", "failed"):
            if counts[status]:
                size = decimal(sum(result.bytes for result in results if result.status == status))
                print(f"  {status:8}{counts[status]:6}  {size:>10}")
        failed: dict[str, list[str]] = {}
        for result in results:
            if result.status == "failed":
                failed.setdefault(result.reason, []).append(result.name)
        for reason, names in failed.items():
            more = f" and {len(names) - MAX_NAMES} more" if len(names) > MAX_NAMES else ""
            print(f"  failed {', '.join(names[:MAX_NAMES])}{more}: {reason}")
        unlisted = sum(result.name not in sums for result in results)
        if unlisted:
            print(f"  {unlisted} without a checksum: their contents were not verified")
        report = {
            "out": self.out,
            **counts,
            "without_checksum": unlisted,
            "files": [asdict(result) for result in results],
        }
        if counts["failed"]:
            report["fault"] = (
                f"{self.out}: {counts['failed']} of {len(results)} files failed (reasons above); "
                "run the same command again to download the missing ones"
            )
        else:
            print(f"next: gigamask verify {quote(self.out)}")
        return report


def _proxy(url: str) -> str | None:
    """Return the proxy that the environment sets for a URL."""
    from urllib.request import getproxies, proxy_bypass

    parts = urlsplit(url)
    return None if proxy_bypass(parts.netloc) else getproxies().get(parts.scheme)
