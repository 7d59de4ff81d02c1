"""What the commands of the docs of grounding need, beside `tests.journeys.doc_fixtures`."""

import json
import shutil
from pathlib import Path

import yaml

from gigamask.plugins.grounding import described_scenes
from tests.plugins.grounding import substitutions, texts


def populate(folder: Path) -> None:
    """Described scenes with their queries, and a language model."""
    for name, first, queries in (
        ("coco128", 0, "queries.jsonl"),
        ("coco_tiny_train", 100, "queries_sets.jsonl"),
    ):
        shutil.rmtree(folder / name)
        described_scenes.write(folder / name, 3, seed=3, first=first)
        lines = (folder / name / "queries.jsonl").read_text().splitlines()
        without_tar = [{k: v for k, v in json.loads(line).items() if k != "tar"} for line in lines]
        (folder / queries).write_text("".join(json.dumps(query) + "\n" for query in without_tar))
    texts.write("qwen3", folder / "language")
    config = {
        "device": "cpu",
        "log-every": 1,
        "batch-size": 4,
        "micro-batch-size": 4,
        "model": {"embedding-dim": 16, "dim": 16},
    }
    (folder / substitutions.SMALL_GROUND).write_text(yaml.safe_dump(config))
