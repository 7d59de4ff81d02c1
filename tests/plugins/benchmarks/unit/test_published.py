"""Readers of published benchmarks, on archives in their layouts."""

import shutil
import sys

import numpy as np
import pytest

from gigamask.data.index import build
from gigamask.datatools.convert import ConvertOptions, convert, listed
from gigamask.errors import CorruptSampleError
from gigamask.plugins.benchmarks import published
from gigamask.plugins.benchmarks.published import ARCHIVES, open_archive, open_masks
from tests.errors import error_line
from tests.plugins.benchmarks.archives import write_archive


@pytest.mark.parametrize("name", ARCHIVES)
@pytest.mark.parametrize("nested", [False, True])
def test_reads_masks_and_ignored_pixels_of_each_layout(name, nested, tmp_path):
    inside = (ARCHIVES[name].inside or (ARCHIVES[name].title,))[-1]
    labels = write_archive(name, tmp_path / inside if nested else tmp_path)
    images = open_archive(name, tmp_path)
    assert (len(images), list(images.missing)) == (2, [])
    for (pixels, annotation), expected in zip(images, labels, strict=True):
        assert pixels.shape[:2] == annotation.size == expected.shape
        masks = annotation.masks.to_dense()
        assert len(masks) == expected.max()
        for value, mask in enumerate(masks, 1):
            np.testing.assert_array_equal(mask, expected == value)
        ignored = annotation.ignore.to_dense()[0] if annotation.ignore else np.zeros_like(masks[0])
        np.testing.assert_array_equal(ignored, expected == -1)
        assert (annotation.ignore is not None) == (name in ("grabcut", "berkeley", "pascalvoc"))


def test_masks_find_their_photographs_in_shards(tmp_path, scenes):
    labels = write_archive("grabcut", tmp_path / "GrabCut")
    masks = tmp_path / "GrabCut/boundary_GT"
    photographs = build([tmp_path / "GrabCut/data_GT"], tmp_path / "index")
    images = open_masks("grabcut", masks, photographs)
    assert len(images) == 2
    np.testing.assert_array_equal(images[1].annotation.masks.to_dense()[0], labels[1] == 1)
    (masks / "2008_000000.bmp").rename(masks / "elsewhere.bmp")
    images = open_masks("grabcut", masks, photographs)
    assert (len(images), list(images.missing)) == (1, ["elsewhere"])
    (masks / "scribbles").mkdir()
    (masks / "scribbles" / "elsewhere.png").touch()
    with error_line(r"elsewhere.bmp and scribbles/elsewhere.png have the"):
        open_masks("grabcut", masks, photographs)
    (masks / "scribbles" / "elsewhere.png").unlink()
    shutil.copytree(tmp_path / "GrabCut/data_GT", tmp_path / "again")
    twice = build([tmp_path / "GrabCut/data_GT", tmp_path / "again"], tmp_path / "twice")
    with error_line("data_GT:.* and again:.* have the same name"):
        open_masks("grabcut", masks, twice)
    with error_line(r"no file has the name of an image.*GrabCut\.zip"):
        open_masks("grabcut", masks, build(scenes, tmp_path / "other"))


def test_another_layout_is_named_with_the_right_one(tmp_path):
    with error_line(r"no such folder.*data_GT.*GrabCut\.zip"):
        open_archive("grabcut", tmp_path / "nothing")
    with error_line(r"Berkeley as it unpacks.*images.*Berkeley\.zip"):
        open_archive("berkeley", tmp_path)
    write_archive("sbd", tmp_path)
    (tmp_path / "val.txt").unlink()
    with error_line(r"there is no .*val\.txt"):
        open_archive("sbd", tmp_path)


def test_damaged_files_are_errors_of_one_image(tmp_path, monkeypatch):
    write_archive("sbd", tmp_path / "sbd")
    write_archive("davis", tmp_path / "davis")
    (tmp_path / "sbd/inst/2008_000000.mat").write_bytes(b"MATLAB 5.0 MAT-file" + bytes(200))
    raw = (tmp_path / "davis/gt/2008_000000.png").read_bytes()
    (tmp_path / "davis/gt/2008_000000.png").write_bytes(raw[:-30])
    for name, message in (("sbd", "GTinst"), ("davis", "2008_000000")):
        images = open_archive(name, tmp_path / name)
        with pytest.raises(CorruptSampleError, match=message):
            images[0]
        assert len(images[1].annotation.masks) > 0
    monkeypatch.setitem(sys.modules, "scipy.io", None)
    with error_line(r"pip install 'gigamask\[benchmarks\]'"):
        open_archive("sbd", tmp_path / "sbd")[1]


def test_listed_images_of_sbd_become_shards_of_the_same_masks(tmp_path):
    labels = write_archive("sbd", tmp_path, count=3)
    train = tmp_path / "train.txt"
    train.write_text("2008_000000\n2008_000002\n")
    folders = tmp_path / "inst", tmp_path / "img", tmp_path / "out"
    counts = convert(*folders, ConvertOptions(), select=listed(train))
    assert (counts["images"], counts["masks"]) == (2, labels[0].max() + labels[2].max())
    train.write_text("2008_000000\n2008_000009\n")
    with error_line(r"--list .*1 of them unknown, such as 2008_000009"):
        convert(*folders[:2], tmp_path / "none", ConvertOptions(), select=listed(train))
    assert not (tmp_path / "none").exists()
    assert published.ARCHIVES["sbd"].num_masks == 6671
