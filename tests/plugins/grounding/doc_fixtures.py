"""What the commands of the docs of grounding need, beside `tests.journeys.doc_fixtures`."""

import json
from pathlib import Path

from gigamask.plugins.grounding import described_scenes
from tests.plugins.grounding import texts


def populate(folder: Path) -> None:
    """Described scenes with their queries, and a language model."""
    for name, first, queries in (
        ("coco128", 0, "queries.jsonl"),
        ("coco_tiny_train", 100, "queries_sets.jsonl"),
    ):
        described_scenes.write(folder / name, 3, seed=3, first=first)
        lines = (folder / name / "queries.jsonl").read_text().splitlines()
        without_tar = [{k: v for k, v in json.loads(line).items() if k != "tar"} for line in lines]
        (folder / queries).write_text("".join(json.dumps(query) + "\n" for query in without_tar))
    texts.write("qwen3", folder / "language")
