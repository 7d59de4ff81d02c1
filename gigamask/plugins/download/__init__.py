"""Fetch SA-1B's tars from a list of links: resumable, in parallel, with checksums."""

from gigamask.plugin import Plugin

PLUGIN = Plugin(
    name="download",
    commands={"download": "gigamask.plugins.download.command:DownloadCommand"},
)
