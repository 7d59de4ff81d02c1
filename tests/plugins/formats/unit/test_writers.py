"""What is written is read back by our own readers, to the pixel."""

from pathlib import Path

import pytest

from gigamask.datatools.convert import ConvertOptions, convert
from gigamask.datatools.export_formats import ExportOptions, write
from tests.unit.datatools import test_export_formats
from tests.unit.datatools.test_export_formats import check_is_read, parsed

photos, images = test_export_formats.photos, test_export_formats.images


@pytest.mark.parametrize("name, source", [("yolo", "yolo/labels"), ("labelme", "labelme")])
def test_polygons_are_read_by_convert(images, photos, tmp_path, name, source):
    check_is_read(images, photos, tmp_path, name, source)


def test_images_of_yolo_lie_beside_their_labels_and_the_folder_is_read_as_it_is(
    images, photos, tmp_path, monkeypatch
):
    write(lambda: images, tmp_path / "out", ExportOptions(("yolo",), images=True))
    folder = tmp_path / "out" / "yolo"
    for each in images:
        assert (folder / "images" / each.name).exists()
        assert (folder / "labels" / each.name).with_suffix(".txt").is_file()
    inner = photos / "train" / "images" / "b.jpg"
    inner.parent.mkdir(parents=True)
    (photos / "more" / "b.jpg").rename(inner)
    nested = test_export_formats.exported(photos, "train/images/b.jpg", 3)
    monkeypatch.setattr(Path, "symlink_to", Path.samefile)  # fails, as on a memory stick
    write(lambda: [nested], tmp_path / "nested", ExportOptions(("yolo",), images=True))
    [image] = (tmp_path / "nested/yolo/images").rglob("*.jpg")
    before, after = str(image).rsplit("/images/", 1)  # as YOLO's trainers find labels
    assert Path(f"{before}/labels/{after}").with_suffix(".txt").read_text()
    assert not image.is_symlink()
    inner.rename(photos / "more" / "b.jpg")
    for number, photographs in enumerate((folder, folder / "images")):
        convert(folder, photographs, tmp_path / f"{number}", ConvertOptions())
        assert len(parsed(tmp_path / f"{number}")) == len(images)
