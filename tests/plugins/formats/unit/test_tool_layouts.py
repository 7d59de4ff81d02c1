"""Folders as other tools write them give the masks and classes that those tools read from them."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from gigamask.datatools.convert import ConvertOptions, convert
from gigamask.datatools.find_source import find
from gigamask.datatools.objects import NO_PIXEL
from tests.unit.datatools.test_convert import parsed

SQUARE = [[4, 4], [14, 4], [14, 10], [4, 10]]
TRIANGLE = [[20, 2], [28, 2], [28, 14]]


def photo(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (30, 20), (90, 80, 70)).save(path)


def converted(source: Path, images: Path, out: Path) -> tuple[dict, list[list[tuple]]]:
    """Return the counts, and category and area of each mask of each image."""
    counts = convert(source, images, out, ConvertOptions())
    objects = [record["annotations"] for record in parsed(out)]
    return counts, [[(each.get("category"), each["area"]) for each in of] for of in objects]


def test_what_labelme_exports_to_voc(tmp_path):
    voc = tmp_path / "data_dataset_voc"
    photo(voc / "JPEGImages" / "apc.jpg")
    (voc / "class_names.txt").write_text("_background_\nhighland\nshelf\n")
    palette = [0, 0, 0, 128, 0, 0, 0, 128, 0] + [0] * (3 * 252) + [224, 224, 192]
    for name, values in (("SegmentationClass", (2, 1)), ("SegmentationObject", (1, 2))):
        pixels = np.zeros((20, 30), np.uint8)
        pixels[4:10, 4:14], pixels[12:18, 4:14], pixels[4:10, 14] = *values, 255
        image = Image.fromarray(pixels, "P")
        image.putpalette(palette)
        (voc / name).mkdir()
        image.save(voc / name / "apc.png")
    _, [masks] = converted(voc / "SegmentationObject", voc / "JPEGImages", tmp_path / "out_voc")
    assert masks == [("shelf", 60), ("highland", 60)]


@pytest.mark.parametrize("flags", [(None, None), (None, "~/bowl"), ("bowl/", None)])
def test_the_data_science_bowl_of_2018(tmp_path, monkeypatch, flags):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", ".")
    for number, name in enumerate(("a1", "b2", "c3")):
        photo(tmp_path / "bowl" / name / "images" / f"{name}.png")
        (tmp_path / "bowl" / name / "masks").mkdir()
        for i in range(3 * number):
            pixels = np.zeros((20, 30), np.uint8)
            pixels[2 : 5 + i, 2:6] = 255 * (i < 5)
            Image.fromarray(pixels).save(tmp_path / f"bowl/{name}/masks/{i}.png")
    (tmp_path / "bowl" / "d4" / "masks").mkdir(parents=True)
    counts = convert(find(["bowl"], *flags), None, tmp_path / "out", ConvertOptions())
    found = [[each["area"] for each in one["annotations"]] for one in parsed(tmp_path / "out")]
    assert found == [[], [12, 16, 20], [12, 16, 20, 24, 28]]
    assert counts["left_out"] == {"images": {"no image of its name": 1}, "masks": {NO_PIXEL: 1}}


def test_ultralytics(tmp_path):
    """images/train beside labels/train, with data.yaml above and a cache of the loader."""
    photo(tmp_path / "images" / "train" / "000000000009.jpg")
    photo(tmp_path / "images" / "train" / "000000000025.jpg")
    labels = tmp_path / "labels" / "train"
    labels.mkdir(parents=True)
    lines = [
        f"{number} " + " ".join(f"{x / 30:.6f} {y / 20:.6f}" for x, y in points)
        for number, points in ((45, SQUARE), (1, TRIANGLE))
    ]
    (labels / "000000000009.txt").write_text("\n".join(lines) + "\n")
    (labels / "000000000025.txt").write_text("")
    (tmp_path / "labels" / "train.cache").write_bytes(b"\x93NUMPY")
    names = "\n".join(f"  {i}: class {i}" for i in range(80))
    (tmp_path / "data.yaml").write_text(f"path: coco8-seg\ntrain: images/train\nnames:\n{names}\n")
    counts, masks = converted(labels, tmp_path / "images" / "train", tmp_path / "out")
    assert masks == [[("class 45", 60), ("class 1", masks[0][1][1])], []]
    assert counts["left_out"] == {"images": {}, "masks": {}}


def test_label_studio(tmp_path):
    """Its folder itself, with images whose names are those of other text files."""
    for name in ("license_plate_1", "car_1"):
        photo(tmp_path / "images" / f"{name}.jpg")
    labels = tmp_path / "labels"
    labels.mkdir()
    line = " ".join(f"{x / 30:.6f} {y / 20:.6f}" for x, y in SQUARE)
    for name in ("license_plate_1", "car_1", "license"):
        (labels / f"{name}.txt").write_text(f"0 {line}\n")
    (tmp_path / "classes.txt").write_text("car\n")
    (tmp_path / "notes.json").write_text('{"categories": [{"id": 0, "name": "car"}]}')
    _, masks = converted(tmp_path, tmp_path / "images", tmp_path / "out")
    assert masks == [[("car", 60)], [("car", 60)]]
