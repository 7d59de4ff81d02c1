"""Names of classes in Pascal VOC's layout: VOC's own, LabelMe's list, CVAT's colors."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from gigamask.datatools import voc_classes
from gigamask.datatools.convert_labels import CLASSLESS, LabelImageSource
from gigamask.datatools.formats import ConvertOptions
from tests.errors import error_line

COLORS = "# label:color_rgb:parts:actions\nbackground:0,0,0::\ncat:128,0,0::\ndog:0,128,0::\n"


def fields(folder: Path, classes: np.ndarray, objects: np.ndarray) -> list[tuple]:
    for name, pixels in (("SegmentationClass", classes), ("SegmentationObject", objects)):
        (folder / name).mkdir()
        Image.fromarray(pixels).save(folder / name / "a.png")
    (folder / "JPEGImages").mkdir(exist_ok=True)
    Image.new("RGB", (30, 20)).save(folder / "JPEGImages" / "a.jpg")
    source = LabelImageSource(folder / "SegmentationObject", folder / "JPEGImages")
    found = source.listing(ConvertOptions())
    extras = found.images[0].objects(b"").extras
    return [(each.get("category_id"), each.get("category")) for each in extras]


def gray(*values: int) -> np.ndarray:
    pixels = np.zeros((20, 30), np.uint8)
    for i, value in enumerate(values):
        pixels[2:18, 2 + 8 * i : 8 + 8 * i] = value
    return pixels


def test_the_classes_of_voc(tmp_path):
    assert fields(tmp_path, gray(2, 1), gray(1, 2)) == [(2, "bicycle"), (1, "aeroplane")]


@pytest.mark.parametrize("place", [".", "JPEGImages"])
def test_a_list_of_names(tmp_path, place):
    (tmp_path / place).mkdir(exist_ok=True)
    (tmp_path / place / "class_names.txt").write_text("\ufeff_background_\ncat\ndog\n")
    expected = [(2, "dog"), (1, "cat"), (7, None)]
    assert fields(tmp_path, gray(2, 1, 7), gray(1, 2, 3)) == expected


def test_colors_of_cvat(tmp_path):
    (tmp_path / "labelmap.txt").write_text(COLORS)
    classes, objects = np.zeros((2, 20, 30, 3), np.uint8)
    classes[2:18, 2:8], classes[2:18, 10:16] = (0, 128, 0), (128, 0, 0)
    objects[2:18, 2:8], objects[2:18, 10:16] = (128, 0, 0), (0, 128, 0)
    classes[18], objects[18] = (224, 224, 192), (224, 224, 192)
    assert fields(tmp_path, classes, objects) == [(2, "dog"), (1, "cat")]


def test_a_color_that_is_the_number_of_another_class(tmp_path):
    more = "".join(f"class{number}:1,{number},0::\n" for number in range(3, 80))
    (tmp_path / "labelmap.txt").write_text(COLORS.replace("dog:0,128,0", "dog:64,0,0") + more)
    classes, objects = np.zeros((2, 20, 30, 3), np.uint8)
    classes[2:18, 2:8] = objects[2:18, 2:8] = 64, 0, 0
    assert fields(tmp_path, classes, objects) == [(2, "dog")]
    found = voc_classes.read([tmp_path])
    assert found[64].name == "class64"


def test_indices_with_a_file_of_colors(tmp_path):
    (tmp_path / "labelmap.txt").write_text(COLORS)
    assert fields(tmp_path, gray(2, 1), gray(1, 2)) == [(2, "dog"), (1, "cat")]


def test_a_color_that_is_none_is_refused(tmp_path):
    (tmp_path / "labelmap.txt").write_text("cat:red::\n")
    with error_line(r"labelmap\.txt: 'cat:red::'"):
        voc_classes.read([tmp_path])


def test_lists_of_names():
    assert voc_classes.NAMES[0] == voc_classes.read([])[1].name
    assert voc_classes.read([])[20] == (20, "tvmonitor")


@pytest.mark.parametrize("kind", ["SegmentationObject", "SegmentationClass"])
def test_without_its_other_label_image(tmp_path, kind):
    """The color around objects is no object, and a mask without a class is counted."""
    pixels = np.zeros((20, 30, 3), np.uint8)
    pixels[2:18, 2:8], pixels[18] = (128, 0, 0), (224, 224, 192)
    (tmp_path / "labelmap.txt").write_text(COLORS)
    for name in (kind, "JPEGImages"):
        (tmp_path / name).mkdir()
        Image.fromarray(pixels).save(tmp_path / name / "a.png")
    found = LabelImageSource(tmp_path / kind, tmp_path / "JPEGImages").listing(ConvertOptions())
    objects = found.images[0].objects(b"")
    is_class = kind == "SegmentationClass"
    named = {"category_id": 1, "category": "cat"} if is_class else {}
    assert objects.extras == [{"label": 128} | named]
    assert objects.notes == {CLASSLESS: int(not is_class)}
