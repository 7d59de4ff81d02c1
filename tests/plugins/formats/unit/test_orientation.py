"""Masks and pixels agree for photographs that their EXIF turns."""

import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from gigamask.data.orientation import turn
from gigamask.datatools.convert import ConvertOptions, convert
from gigamask.plugins.formats.parquet import ParquetFiles
from tests.unit.datatools.test_convert_orientation import (
    HEIGHT,
    ORIENTATIONS,
    WIDTH,
    check_all_agree,
    converted,
    corners,
    photograph,
    scene,
    write_photographs,
)


def labelme(height: int, stated: bool, orientation: int = 1) -> str:
    shape = {"label": "box", "points": corners(orientation, height), "shape_type": "polygon"}
    stored = (WIDTH, height) if orientation > 4 else (height, WIDTH)
    size = dict(zip(("imageHeight", "imageWidth"), stored, strict=True)) if stated else {}
    return json.dumps({"shapes": [shape], **size})


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "TIFF"])
@pytest.mark.parametrize("height, stated", [(HEIGHT, True), (HEIGHT, False), (WIDTH, True)])
def test_labelme(tmp_path, kind, height, stated):
    photos = write_photographs(tmp_path / "photos", height, kind)
    for orientation in ORIENTATIONS:
        (photos / f"{orientation}.json").write_text(labelme(height, stated))
    counts, ious = converted(photos, photos, tmp_path / "out")
    check_all_agree(counts, ious, 3 if stated and height != WIDTH else 7)


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "TIFF"])
def test_labelme_of_stored_pixels(tmp_path, kind):
    """The stated size says that the corners are those of the stored pixels."""
    photos = write_photographs(tmp_path / "photos", kind=kind)
    for orientation in ORIENTATIONS:
        of_file = orientation if orientation > 4 else 1
        (photos / f"{orientation}.json").write_text(labelme(HEIGHT, True, of_file))
    counts, ious = converted(photos, photos, tmp_path / "out")
    check_all_agree(counts, ious, 3)
    assert [number for text, number in counts["notes"].items() if "as stored" in text] == [4]


def test_labelme_of_another_size_is_left_out(tmp_path):
    photos = write_photographs(tmp_path / "photos")
    for orientation in ORIENTATIONS:
        height = HEIGHT if orientation > 1 else 2 * HEIGHT
        (photos / f"{orientation}.json").write_text(labelme(height, True))
    counts = convert(photos, photos, tmp_path / "out", ConvertOptions())
    assert counts["left_out"]["images"] == {"size differs from its image": 1}
    assert "24 x 16 pixels, but its masks 48 x 16" in counts["skipped_images"][0]["reason"]


@pytest.mark.parametrize("height", [HEIGHT, WIDTH])
def test_yolo(tmp_path, height):
    photos, labels = write_photographs(tmp_path / "photos", height, "JPEG"), tmp_path / "labels"
    labels.mkdir()
    line = " ".join(f"{x / WIDTH} {y / height}" for x, y in corners())
    for orientation in ORIENTATIONS:
        (labels / f"{orientation}.txt").write_text(f"0 {line}\n")
    counts, ious = converted(labels, photos, tmp_path / "out")
    check_all_agree(counts, ious, 7)


@pytest.mark.parametrize("size", [[HEIGHT, WIDTH], [WIDTH, HEIGHT], None])
def test_parquet(tmp_path, size):
    """Run lengths state a size; polygons do not."""
    is_stored = size == [WIDTH, HEIGHT]
    mask = scene()[..., 1] == 0
    dense = turn(mask, 8) if is_stored else mask
    flat = np.r_[0, dense.ravel("F"), 0]
    edges = np.flatnonzero(np.diff(flat))
    runs = np.diff(np.r_[0, edges, dense.size]).tolist()
    polygon = [np.ravel(corners()).tolist()]
    segmentation = polygon if size is None else {"size": size, "counts": runs}
    table = {
        "image": [photograph(6)],
        "annotations": [json.dumps([{"segmentation": segmentation}])],
    }
    pq.write_table(pa.table(table), tmp_path / "a.parquet")
    source = ParquetFiles((str(tmp_path / "a.parquet"),))
    counts, ious = converted(source, None, tmp_path / "out")
    assert min(ious.values()) > 0.9
    assert any("does not decide" in text for text in counts["notes"]) == (size is None)
