"""What the commands of the benchmarks' docs need, beside `tests.journeys.doc_fixtures`."""

import shutil
from pathlib import Path

from tests.plugins.benchmarks.archives import write_archive


def populate(folder: Path) -> None:
    """Archives of GrabCut and SBD."""
    write_archive("grabcut", folder / "GrabCut", count=1)
    write_archive("sbd", folder / "SBD", count=2)
    shutil.copy(folder / "SBD/val.txt", folder / "SBD/train.txt")
