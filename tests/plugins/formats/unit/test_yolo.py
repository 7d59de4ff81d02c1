"""YOLO's text: byte order marks, other tasks, files that are no labels, limits."""

from pathlib import Path

import pytest
from PIL import Image

from gigamask.datatools import outlines
from gigamask.datatools.formats import ConvertOptions
from gigamask.datatools.objects import Objects, SourceListing
from gigamask.datatools.outlines import MaskLimitError
from gigamask.errors import CorruptSampleError
from gigamask.plugins.formats import yolo
from gigamask.plugins.formats.polygon_source import PolygonSource
from tests.errors import error_line

TRIANGLE = "0.1 0.1 0.5 0.1 0.1 0.5"
TURNED = "0.5 0.2 0.8 0.5 0.5 0.8 0.2 0.5"
UPRIGHT = "0.2 0.2 0.6 0.2 0.6 0.6 0.2 0.6"
UNEVEN = "0.2 0.2 0.6 0.25 0.7 0.6 0.2 0.6"


def listing(folder: Path, text: str | bytes) -> SourceListing:
    (folder / "labels").mkdir(exist_ok=True)
    (folder / "photos").mkdir(exist_ok=True)
    Image.new("RGB", (30, 20)).save(folder / "photos" / "a.jpg")
    raw = text if isinstance(text, bytes) else text.encode()
    (folder / "labels" / "a.txt").write_bytes(raw)
    return PolygonSource(folder / "labels", folder / "photos").listing(ConvertOptions())


def objects(folder: Path, text: str | bytes) -> Objects:
    (image,) = listing(folder, text).images
    return image.objects(image.path.read_bytes())


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16"])
def test_text_of_windows(tmp_path, encoding):
    (tmp_path / "labels").mkdir()
    (tmp_path / "labels" / "classes.txt").write_bytes("cat\r\nFähre\r\n".encode(encoding))
    found = objects(tmp_path, f"0 {TRIANGLE}\r\n1.0 {TRIANGLE}\r\n".encode(encoding))
    assert [each["category"] for each in found.extras] == ["cat", "Fähre"]
    assert found.skipped == []


def test_text_of_another_encoding_costs_the_image(tmp_path):
    with pytest.raises(CorruptSampleError, match=r"a\.txt: .*UTF-8"):
        objects(tmp_path, f"0 {TRIANGLE} # Fähre\n".encode("latin-1"))


@pytest.mark.parametrize(
    "line, datum",
    [
        ("0 0.5 0.5 0.2 0.2 0.93", "it is a box"),
        ("0", "0 numbers"),
        (f"0 {TRIANGLE} 0.93", "7 numbers"),
        (f"-1 {TRIANGLE}", "not a class"),
        (f"0.5 {TRIANGLE}", "not a class"),
        (f"0 {TRIANGLE} nan 0.1", "NaN"),
        (f"0 {TRIANGLE} inf 0.1", "coordinate"),
        ("0 0.5 0.5 0.2 0.2 0.4 0.4 2 0.6 0.6 2", "fractions"),
    ],
)
def test_lines_that_are_no_polygon_are_named(tmp_path, line, datum):
    (left_out,) = objects(tmp_path, f"0 {TRIANGLE}\n{line}\n").skipped
    assert left_out.reason.startswith("a.txt: line 2: ")
    assert datum in left_out.reason


def test_oriented_boxes_are_no_masks(tmp_path):
    lines = f"0 {TURNED}\n1 {UPRIGHT}\n"
    with error_line(r"labels: holds oriented boxes .*2 of 2"):
        listing(tmp_path, lines)
    assert len(objects(tmp_path, f"0 {UPRIGHT}\n1 {UPRIGHT}\n").masks) == 2
    assert len(objects(tmp_path, f"0 {UNEVEN}\n1 {TURNED}\n2 {TRIANGLE}\n").masks) == 3


def test_keypoints_are_no_masks(tmp_path):
    (tmp_path / "data.yaml").write_text("names: [cat]\nkpt_shape: [17, 3]\n")
    with error_line("keypoints"):
        listing(tmp_path, f"0 {TRIANGLE}\n")


def test_other_text_files_are_no_labels(tmp_path):
    (tmp_path / "labels").mkdir()
    for name in ("README.roboflow.txt", "train.txt", "obj_train_data.txt", "._a.txt"):
        (tmp_path / "labels" / name).write_text("{}")
    found = listing(tmp_path, f"0 {TRIANGLE}\n")
    assert ([each.source for each in found.images], found.left_out.images) == (["a.txt"], [])


@pytest.mark.parametrize(
    "text, datum",
    [
        (f"0 {TRIANGLE}\n" * 4, "4 masks"),
        ("0 " + "0.1 0.2 " * 50, "101 numbers"),
    ],
)
def test_limits(tmp_path, monkeypatch, text, datum):
    monkeypatch.setattr(outlines, "MAX_MASKS", 3)
    monkeypatch.setattr(yolo, "MAX_NUMBERS", 100)
    with pytest.raises(MaskLimitError, match=f"a.txt: has .*{datum}"):
        objects(tmp_path, text)
