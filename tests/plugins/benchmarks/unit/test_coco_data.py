"""COCO's annotations and a detector's boxes: what is read, and what is refused."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from gigamask.errors import CorruptSampleError
from gigamask.plugins.benchmarks import coco_data
from tests.errors import error_line

BOX = {"image_id": 2, "category_id": 7, "bbox": [4, 4, 10, 6], "score": 0.5}
RING = [[4, 4, 14, 4, 14, 10, 4, 10]]


def read(folder: Path, boxes: object, **content: object) -> coco_data.CocoData:
    rows = [{"id": i, "file_name": f"{i}.png", "height": 20, "width": 30} for i in (1, 2)]
    annotations = [
        {"id": 1, "image_id": 2, "category_id": 7, "segmentation": RING, "area": 59.5}
        | {"bbox": [3.5, 4, 10, 6]},
        {"id": 2, "image_id": 2, "category_id": 7, "segmentation": [[0, 0]]},
        {"id": 3, "image_id": 2, "category_id": 7, "segmentation": RING, "area": "large"}
        | {"bbox": [1, 2], "iscrowd": 1},
    ]
    whole = {"images": rows, "annotations": annotations, "categories": [{"id": 7, "name": "owl"}]}
    (folder / "instances.json").write_text(json.dumps(whole | content))
    text = boxes if isinstance(boxes, str) else json.dumps(boxes)
    (folder / "boxes.json").write_text(text)
    return coco_data.read(folder / "instances.json", folder, folder / "boxes.json")


def test_fields_are_the_stated_ones_or_those_of_the_masks(tmp_path):
    pixels = np.random.default_rng(0).integers(0, 255, (20, 30, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(tmp_path / "2.png")
    later = BOX | {"bbox": [-3, 2.5, 40, 6], "score": 0.75}
    data = read(tmp_path, [BOX, BOX | {"image_id": 1}, later])
    shown, annotation = data[1]
    assert len(data) == 2
    assert shown.shape == (20, 30, 3)
    assert annotation.masks.areas().tolist() == [60, 60]
    found = annotation.instances
    assert (found.image_id, found.areas.tolist(), found.crowd.tolist()) == (
        2,
        [59.5, 60],
        [False, True],
    )
    assert found.boxes.tolist() == [[3.5, 4, 13.5, 10], [4, 4, 14, 10]]
    assert found.category_ids.tolist() == [7, 7]
    assert len(data.broken) == 1
    assert "its annotation 1 (id 2)" in data.broken[0]
    boxes = data.detected(2)
    assert boxes.boxes.tolist() == [[4, 4, 14, 10], [-3, 2.5, 37, 8.5]]
    assert boxes.scores.tolist() == [0.5, 0.75]
    assert len(data.detected(1).scores) == 1
    assert len(data.detected(9).scores) == 0
    assert data.frequencies is None
    with pytest.raises(CorruptSampleError, match=r"1\.png"):
        data[0]


def test_lvis_states_more(tmp_path):
    categories = [{"id": 7, "name": "owl", "frequency": "r"}]
    more = {"neg_category_ids": [3], "not_exhaustive_category_ids": [7]}
    rows = [{"id": 2, "coco_url": "http://x/val2017/2.png", "height": 20, "width": 30} | more]
    data = read(tmp_path, [BOX], images=rows, categories=categories)
    assert data.frequencies == {7: "r"}
    assert data.labels[2].neg_category_ids == (3,)
    assert data.labels[2].not_exhaustive_category_ids == (7,)
    assert data.images[0].path == tmp_path / "val2017" / "2.png"


@pytest.mark.parametrize(
    "boxes, reason",
    [
        ([], "holds no detection"),
        ({}, "is not COCO's results format"),
        ("[", "is not COCO's results format"),
        ([BOX | {"score": "high"}], r"is not COCO's .*score"),
        ([BOX | {"bbox": [1, 2, 3]}], r"is not COCO's .*length"),
        (json.dumps([BOX | {"score": float("nan")}]), "is not COCO's results format"),
        ([BOX, BOX | {"image_id": 3}], r"detection 1 of 2: its image_id 3 is not in"),
        ([BOX | {"category_id": 8}], r"detection 0 of 1: its category_id 8 is not in"),
        ([BOX | {"score": 1e308 * 10}], r"not COCO's results format|score inf must be finite"),
        ([BOX | {"bbox": [31, 4, 5, 5]}], r"its bbox \[31.0, 4.0, 5.0, 5.0\] must be x, y, width"),
        ([BOX | {"bbox": [-9, 4, 5, 5]}], "must be x, y, width"),
        ([BOX | {"bbox": [4, 4, -1, 5]}], "must be x, y, width"),
    ],
)
def test_what_is_refused(tmp_path, boxes, reason):
    with error_line(re.escape(str(tmp_path / "boxes.json"))) as error:
        read(tmp_path, boxes)
    assert re.search(reason, str(error.value))


def test_other_files_are_refused(tmp_path):
    named = [{"id": "a", "file_name": "a.png", "height": 20, "width": 30}]
    with error_line("ids of images must be whole numbers"):
        read(tmp_path, [BOX], images=named, annotations=[])
    with error_line("with 'categories'"):
        read(tmp_path, [BOX], categories=[{"name": "owl"}])
    read(tmp_path, [BOX])
    with error_line(r"none.json: cannot be read"):
        coco_data.read(tmp_path / "instances.json", tmp_path, tmp_path / "none.json")
