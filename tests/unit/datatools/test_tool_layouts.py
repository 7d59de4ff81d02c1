"""Folders as other tools write them give the masks and classes that those tools read from them."""

import json
import tarfile
from pathlib import Path

from PIL import Image

from gigamask.datatools.convert import ConvertOptions, convert

SQUARE = [[4, 4], [14, 4], [14, 10], [4, 10]]


def photo(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (30, 20), (90, 80, 70)).save(path)


def converted(source: Path, images: Path, out: Path) -> tuple[dict, list[list[tuple]]]:
    """Return the counts, and category and area of each mask of each image."""
    counts = convert(source, images, out, ConvertOptions())
    with tarfile.open(counts["tars"][0]) as archive:
        records = [
            json.loads(archive.extractfile(member).read())["annotations"]
            for member in archive
            if member.name.endswith(".json")
        ]
    return counts, [[(each.get("category"), each["area"]) for each in record] for record in records]


def test_roboflow_and_its_coco(tmp_path):
    """_annotations.coco.json beside the photographs, with a supercategory 0 that no mask has."""
    train = tmp_path / "train"
    photo(train / "a_jpg.rf.0123abcd.jpg")
    flat = [value for point in SQUARE for value in point]
    content = {
        "info": {"year": "2024", "version": "1"},
        "licenses": [{"id": 1, "url": "", "name": "CC BY 4.0"}],
        "categories": [
            {"id": 0, "name": "cats", "supercategory": "none"},
            {"id": 1, "name": "cat", "supercategory": "cats"},
        ],
        "images": [
            {
                "id": 0,
                "license": 1,
                "file_name": "a_jpg.rf.0123abcd.jpg",
                "height": 20,
                "width": 30,
                "date_captured": "2024-01-01T00:00:00+00:00",
                "extra": {"name": "a.jpg"},
            }
        ],
        "annotations": [
            {
                "id": 0,
                "image_id": 0,
                "category_id": 1,
                "bbox": [4, 4, 10, 6],
                "area": 60,
                "segmentation": [flat],
                "iscrowd": 0,
            },
            {
                "id": 1,
                "image_id": 0,
                "category_id": 1,
                "bbox": [4, 4, 10, 6],
                "area": 60,
                "segmentation": [],
                "iscrowd": 0,
            },
        ],
    }
    path = train / "_annotations.coco.json"
    path.write_text(json.dumps(content))
    (tmp_path / "README.roboflow.txt").write_text("exported\n")
    counts, [masks] = converted(path, train, tmp_path / "out")
    assert masks == [("cat", 60)]
    assert counts["left_out"] == {"images": {}, "masks": {"no outline": 1}}
