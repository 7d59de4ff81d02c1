"""What the commands of the docs of ablations need, beside `tests.journeys.doc_fixtures`."""

from pathlib import Path


def populate(folder: Path) -> None:
    """A table of two variants."""
    (folder / "two.yaml").write_text("plain: []\nlanes: {sampler: streamed, sampler.lanes: 2}\n")
