"""LabelMe's and YOLO's polygons become the masks that COCO's polygons become."""

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from gigamask.data.annotation import parse
from gigamask.datatools.convert import ConvertOptions, convert
from tests.errors import error_line
from tests.unit.datatools.test_convert import members

SQUARE = [[2, 3], [12, 3], [12, 9], [2, 9]]
TRIANGLE = [[20, 2], [30, 2], [25, 14]]


@pytest.fixture
def photos(tmp_path) -> Path:
    folder = tmp_path / "photos"
    (folder / "inner").mkdir(parents=True)
    for name in ("a.png", "inner/b.png"):
        Image.fromarray(np.full((20, 40, 3), 90, np.uint8)).save(folder / name)
    return folder


def converted(source: Path, photos: Path, tmp_path: Path) -> tuple[dict, dict[str, dict]]:
    """The counts, and the records by source."""
    counts = convert(source, photos, tmp_path / "out", ConvertOptions())
    found = members(tmp_path / "out" / "sa_000000.tar")
    records = [json.loads(raw) for name, raw in found.items() if name.endswith(".json")]
    return counts, {record["image"]["source"]: record for record in records}


def coco(photos: Path, tmp_path: Path, rings: list[list]) -> dict:
    """The record that COCO's polygons become."""
    annotations = [
        {"id": i, "image_id": 1, "segmentation": [np.ravel(ring).tolist() for ring in part]}
        for i, part in enumerate(rings)
    ]
    row = {"id": 1, "file_name": "a.png", "width": 40, "height": 20}
    path = tmp_path / "coco.json"
    path.write_text(json.dumps({"images": [row], "annotations": annotations}))
    (tmp_path / "of_coco").mkdir()
    _, records = converted(path, photos, tmp_path / "of_coco")
    return records["a.png"]


def masks(record: dict) -> list:
    return [each["segmentation"] for each in record["annotations"]]


def labelme(*shapes: dict) -> str:
    return json.dumps({"imagePath": "x.png", "shapes": list(shapes), "imageData": None})


def test_labelme(photos, tmp_path):
    """Shapes of a group are one object; files may lie beside the images."""
    square = {"label": "box", "points": SQUARE, "shape_type": "polygon", "group_id": None}
    group = {"label": "pair", "group_id": 4}
    (photos / "a.json").write_text(
        labelme(square, group | {"points": TRIANGLE}, group | {"points": SQUARE})
    )
    (photos / "inner" / "b.json").write_text(
        labelme(
            {"label": "r", "points": SQUARE[:2], "shape_type": "rectangle"},
            {"label": "two", "points": SQUARE[:2]},
            {"label": "none"},
            square,
        )
    )
    counts, records = converted(photos, photos, tmp_path)
    assert (counts["images"], counts["masks"]) == (2, 3)
    assert masks(records["a.json"]) == masks(coco(photos, tmp_path, [[SQUARE], [TRIANGLE, SQUARE]]))
    assert [each["category"] for each in records["a.json"]["annotations"]] == ["box", "pair"]
    assert not any("category_id" in each for each in records["a.json"]["annotations"])
    reasons = " ".join(each["reason"] for each in counts["skipped_masks"])
    assert "shape 0: it is a rectangle" in reasons
    assert "shape 2: Object missing" in reasons
    assert len(counts["skipped_masks"]) == 3


def test_yolo(photos, tmp_path):
    labels = tmp_path / "labels"
    (labels / "inner").mkdir(parents=True)
    line = " ".join(f"{x / 40} {y / 20}" for x, y in SQUARE)
    other = " ".join(f"{x / 40} {y / 20}" for x, y in TRIANGLE)
    (labels / "a.txt").write_text(f"3 {line}\n\n0 {other}\n")
    (labels / "inner" / "b.txt").write_text(f"1 0.5 0.5 0.2 0.2\nx 1 2\n1 0.1 0.2 0.3\n2 {line}\n")
    counts, records = converted(labels, photos, tmp_path)
    assert masks(records["a.txt"]) == masks(coco(photos, tmp_path, [[SQUARE], [TRIANGLE]]))
    assert [each["category_id"] for each in records["a.txt"]["annotations"]] == [3, 0]
    assert len(records["inner/b.txt"]["annotations"]) == 1
    reasons = " ".join(each["reason"] for each in counts["skipped_masks"])
    assert "line 1: it is a box" in reasons
    assert "line 2: it is not a class and numbers" in reasons
    assert len(counts["skipped_masks"]) == 3


@pytest.mark.parametrize(
    "name, text",
    [
        ("labels/classes.txt", "cat\ndog\n"),
        ("data.yaml", "nc: 2\nnames:\n  0: cat\n  1: dog\n"),
        ("data.yaml", "names: [cat, dog]\n"),
        ("coco8-seg.yml", "names: [cat, dog]\n"),
        ("obj.names", "cat\ndog\n"),
    ],
)
def test_names_of_yolo_classes(photos, tmp_path, name, text):
    """A number without a name keeps the number alone. Another program's file has no names."""
    (tmp_path / "labels").mkdir()
    (tmp_path / "a.yaml").write_text("on: push\n")
    (tmp_path / "obj.data").write_text("classes = 2\n")
    (tmp_path / name).write_text(text)
    line = " ".join(f"{x / 40} {y / 20}" for x, y in SQUARE)
    (tmp_path / "labels" / "a.txt").write_text(f"1 {line}\n0 {line}\n7 {line}\n")
    counts, records = converted(tmp_path / "labels", photos, tmp_path)
    found = [(e["category_id"], e.get("category")) for e in records["a.txt"]["annotations"]]
    assert found == [(1, "dog"), (0, "cat"), (7, None)]
    parsed = parse(json.dumps(records["a.txt"]).encode(), "a")
    assert parsed.categories == ("dog", "cat", "7")
    assert counts["skipped_images"] == []
    assert counts["notes"][f"images whose classes {tmp_path / name} names"] == 1


def test_a_data_yaml_without_names_is_refused(photos, tmp_path):
    (tmp_path / "labels").mkdir()
    (tmp_path / "labels" / "a.txt").write_text("0 0 0 1 0 1 1\n")
    (tmp_path / "data.yaml").write_text("nc: 2\n")
    with error_line(r"data\.yaml.*names"):
        convert(tmp_path / "labels", photos, tmp_path / "out", ConvertOptions())


def test_label_images_in_tiff(photos, tmp_path):
    labels = tmp_path / "labels"
    labels.mkdir()
    pixels = np.zeros((20, 40), np.uint16)
    pixels[2:5, 3:9], pixels[8:12, 20:30] = 1, 4000
    Image.fromarray(pixels).save(labels / "a.tif")
    counts, records = converted(labels, photos, tmp_path)
    assert counts["masks"] == 2
    assert [each["label"] for each in records["a.tif"]["annotations"]] == [1, 4000]
    found = parse(json.dumps(records["a.tif"]).encode(), "a")
    assert sorted(found.masks.areas().tolist()) == [18, 40]


def test_what_is_refused(photos, tmp_path):
    labels = tmp_path / "labels"
    labels.mkdir()
    (labels / "a.json").write_text("[]")
    (labels / "a.txt").write_text("0 0 0 1 0 1 1\n")
    with error_line(r"LabelMe .* and of YOLO"):
        convert(labels, photos, tmp_path / "out", ConvertOptions())
    (labels / "a.txt").unlink()
    (labels / "a.json").write_text('{"objects": [{"geometryType": "polygon"}]}')
    with error_line("not a file of LabelMe .*; it is JSON of Supervisely"):
        convert(labels, photos, tmp_path / "out", ConvertOptions())
    with error_line("drop --split-components"):
        convert(labels, photos, tmp_path / "out", ConvertOptions(split_components=True))
    (labels / "a.json").rename(labels / "other.json")
    with error_line("no image other"):
        convert(labels, photos, tmp_path / "out", ConvertOptions())
