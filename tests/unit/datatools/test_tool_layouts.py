"""Folders as other tools write them give the masks and classes that those tools read from them."""

from PIL import Image

from gigamask.datatools.convert import ConvertOptions, convert
from tests.unit.datatools.test_convert import parsed

ROBOFLOW = """{
"info": {"year": "2024", "version": "1"},
"licenses": [{"id": 1, "url": "", "name": "CC BY 4.0"}],
"categories": [{"id": 0, "name": "cats", "supercategory": "none"},
               {"id": 1, "name": "cat", "supercategory": "cats"}],
"images": [{"id": 0, "license": 1, "file_name": "a_jpg.rf.0123abcd.jpg", "height": 20, "width": 30,
            "date_captured": "2024-01-01T00:00:00+00:00", "extra": {"name": "a.jpg"}}],
"annotations": [{"id": 0, "image_id": 0, "category_id": 1, "bbox": [4, 4, 10, 6], "area": 60,
                 "segmentation": [[4, 4, 14, 4, 14, 10, 4, 10]], "iscrowd": 0},
                {"id": 1, "image_id": 0, "category_id": 1, "bbox": [4, 4, 10, 6], "area": 60,
                 "segmentation": [], "iscrowd": 0}]
}"""
"""A supercategory 0 that no mask has, and an outline that is missing."""


def test_roboflow_and_its_coco(tmp_path):
    """_annotations.coco.json beside the photographs."""
    train = tmp_path / "train"
    train.mkdir()
    Image.new("RGB", (30, 20), (90, 80, 70)).save(train / "a_jpg.rf.0123abcd.jpg")
    path = train / "_annotations.coco.json"
    path.write_text(ROBOFLOW)
    (tmp_path / "README.roboflow.txt").write_text("exported\n")
    counts = convert(path, train, tmp_path / "out", ConvertOptions())
    (record,) = parsed(tmp_path / "out")
    assert [(each["category"], each["area"]) for each in record["annotations"]] == [("cat", 60)]
    assert counts["left_out"] == {"images": {}, "masks": {"no outline": 1}}
