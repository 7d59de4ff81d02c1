"""LabelMe's files: which image they belong to, masks as PNGs, labels that are left out, limits."""

import base64
import io
import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from gigamask.datatools import outlines
from gigamask.datatools.formats import ConvertOptions
from gigamask.datatools.objects import Objects
from gigamask.datatools.outlines import MaskLimitError, crop_mask
from gigamask.plugins.formats import labelme
from gigamask.plugins.formats.polygon_source import PolygonSource

TRIANGLE = [[2, 2], [12, 2], [2, 12]]


def png(mask: np.ndarray) -> str:
    file = io.BytesIO()
    Image.fromarray(mask).save(file, "PNG")
    return base64.b64encode(file.getvalue()).decode()


def photo(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (30, 20)).save(path, "JPEG")


def write(path: Path, *shapes: dict, mark: str = "", **other: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    content = {"imageHeight": 20.0, "imageWidth": 30, "shapes": shapes} | other
    path.write_text(mark + json.dumps(content), encoding="utf-8")


def polygon(**other: object) -> dict:
    return {"label": "cat", "points": TRIANGLE, "shape_type": "polygon"} | other


def read(labels: Path, photos: Path) -> dict[str, str]:
    """Return the image of each file."""
    found = PolygonSource(labels, photos).listing(ConvertOptions())
    return {image.source: image.path.relative_to(photos).as_posix() for image in found.images}


def objects(tmp_path: Path, *shapes: dict, **other: object) -> Objects:
    photo(tmp_path / "a.jpg")
    write(tmp_path / "a.json", *shapes, **other)
    (image,) = PolygonSource(tmp_path, tmp_path).listing(ConvertOptions()).images
    return image.objects(image.path.read_bytes())


@pytest.mark.parametrize(
    "stated, image",
    [
        ("x.jpg", "x.jpg"),
        ("..\\photos\\x.jpg", "x.jpg"),
        ("C:\\Users\\me\\photos\\x.jpg", "x.jpg"),
        ("/home/me/photos/x.jpg", "x.jpg"),
        ("gone.png", "a.jpg"),
        (None, "a.jpg"),
        ("\0", "a.jpg"),
        ("../../secret.jpg", "a.jpg"),
    ],
)
def test_image_path_decides_where_it_names_an_image(tmp_path, stated, image):
    for name in ("photos/a.jpg", "photos/x.jpg", "secret.jpg"):
        photo(tmp_path / name)
    write(tmp_path / "json" / "a.json", polygon(), imagePath=stated)
    assert read(tmp_path / "json", tmp_path / "photos") == {"a.json": image}


def test_image_path_is_relative_to_the_subfolder_of_its_file(tmp_path):
    for name in ("photos/a/x.jpg", "photos/b/x.jpg"):
        photo(tmp_path / name)
    for folder in "ab":
        write(tmp_path / "json" / folder / "1.json", polygon(), imagePath="x.jpg")
    pairs = {"a/1.json": "a/x.jpg", "b/1.json": "b/x.jpg"}
    assert read(tmp_path / "json", tmp_path / "photos") == pairs


def test_a_copy_does_not_take_the_image_of_its_original(tmp_path):
    photo(tmp_path / "a.jpg")
    for name in ("a.json", "a copy.json"):
        write(tmp_path / name, polygon(), imagePath="a.jpg")
    assert read(tmp_path, tmp_path) == {"a.json": "a.jpg"}


def test_lists_of_labels_beside_the_files_are_no_labels_of_yolo(tmp_path):
    photo(tmp_path / "a.jpg")
    write(tmp_path / "a.json", polygon(), imagePath="a.jpg")
    for name in ("label_names.txt", "labels.txt", "my list.txt"):
        (tmp_path / name).write_text("cat\n")
    assert read(tmp_path, tmp_path) == {"a.json": "a.jpg"}


def test_masks_are_pngs_at_a_corner(tmp_path):
    mask = np.array([[1, 0, 1], [1, 1, 1]], bool)
    for x0, y0 in ((4, 5), (27, 18)):
        shape = {"label": "cat", "shape_type": "mask", "mask": png(mask)}
        found = objects(tmp_path, shape | {"points": [[x0, y0], [x0 + 2, y0 + 1]]})
        expected = np.zeros((20, 30), bool)
        expected[y0 : y0 + 2, x0 : x0 + 3] = mask
        np.testing.assert_array_equal(found.masks.to_dense()[0], expected)
        assert found.extras == [{"category": "cat"}]


def test_a_group_of_a_mask_and_a_polygon_is_one_object(tmp_path):
    mask = {"label": "cat", "shape_type": "mask", "mask": png(np.ones((2, 3), bool))}
    mask |= {"points": [[20, 10], [22, 11]], "group_id": 1}
    found = objects(tmp_path, polygon(), mask, polygon(group_id=1.0))
    assert found.masks.boxes().tolist() == [[2, 2, 10, 10], [2, 2, 22, 11]]


@pytest.mark.parametrize(
    "shape, datum",
    [
        ({"mask": png(np.ones((2, 2), bool))}, "2 x 2 pixels, but corners of 2 x 3"),
        ({"mask": "&"}, "not base64"),
        ({"mask": None}, "not a readable image"),
        ({"points": [[28, 4], [30, 5]]}, "not within the image"),
        ({"points": [[4, 4]]}, "two corners"),
        ({"points": [[4, 4], [float("nan"), 5]]}, "two corners"),
        ({"shape_type": "circle"}, "it is a circle"),
        ({"shape_type": "polygon", "points": [*TRIANGLE, [float("nan"), 1]]}, "NaN"),
        ({"shape_type": "polygon", "points": [*TRIANGLE, ["x", 1]]}, "str"),
    ],
)
def test_shapes_that_cannot_be_used_are_named(tmp_path, shape, datum):
    mask = {"label": "cat", "shape_type": "mask", "mask": png(np.ones((2, 3), bool))}
    mask |= {"points": [[4, 5], [6, 6]]}
    found = objects(tmp_path, polygon(), mask | shape)
    assert len(found.masks) == 1
    (left_out,) = found.skipped
    assert left_out.reason.startswith("a.json: shape 1: ")
    assert datum in left_out.reason


@pytest.mark.parametrize("label", ["__ignore__", "_background_"])
def test_labels_that_its_exporters_leave_out(tmp_path, label):
    found = objects(tmp_path, polygon(), polygon(label=label))
    assert ([each.kind for each in found.skipped], len(found.masks)) == (["ignored"], 1)


def test_a_byte_order_mark_is_no_damage(tmp_path):
    found = objects(tmp_path, polygon(label=3), mark="\ufeff", imageHeight=None)
    assert found.extras == [{"category": "3"}]


def test_limits(tmp_path, monkeypatch):
    zigzag = [[x % 30, x % 2 * 100_000] for x in range(40)]
    with pytest.raises(MaskLimitError, match="pixels of outlines"):
        objects(tmp_path, *[polygon(points=zigzag)] * 9)
    monkeypatch.setattr(outlines, "MAX_MASKS", 5)
    with pytest.raises(MaskLimitError, match="6 masks"):
        objects(tmp_path, *[polygon()] * 6)
    assert len(objects(tmp_path, *[polygon(group_id=0)] * 6).masks) == 1
    monkeypatch.setattr(labelme, "MAX_PIXELS_OF_MASKS", 11)
    mask = {"shape_type": "mask", "mask": png(np.ones((2, 3), bool)), "points": [[4, 5], [6, 6]]}
    with pytest.raises(MaskLimitError, match="12 pixels of masks"):
        objects(tmp_path, mask, mask)


@pytest.mark.parametrize("fill", [0, 1])
def test_parts_of_an_image_as_masks(fill):
    crop = np.full((4, 2), fill, bool)
    crop[1] = True
    for corner in ((0, 0), (3, 0), (1, 1), (3, 2)):
        expected = np.zeros((6, 5), bool)
        expected[corner[1] : corner[1] + 4, corner[0] : corner[0] + 2] = crop
        np.testing.assert_array_equal(crop_mask(crop, corner, (6, 5)).to_dense()[0], expected)
