"""What the commands of the docs of formats need, beside `tests.journeys.doc_fixtures`."""

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq


def populate(folder: Path) -> None:
    """YOLO's text of the photographs, and a parquet file of them and their label images."""
    (folder / "yolo").mkdir()
    for name in ("train.json", "held_out.json"):
        content = json.loads((folder / name).read_text())
        for image in content["images"]:
            sides = image["width"], image["height"]
            rings = [
                np.reshape(each["segmentation"][0], (-1, 2)) / sides
                for each in content["annotations"]
                if each["image_id"] == image["id"]
            ]
            lines = [" ".join(map(str, [1, *ring.ravel().tolist()])) for ring in rings]
            (folder / f"yolo/{image['id']}.txt").write_text("\n".join(lines))
    images, labels = (
        [{"bytes": (folder / f"{name}/{number}.png").read_bytes()} for number in range(4)]
        for name in ("photos", "labels")
    )
    pq.write_table(pa.table({"image": images, "label": labels}), folder / "cells.parquet")
