"""A conversion is used again only while every file that it was made of is the same."""

import json
import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from filelock import FileLock, Timeout
from PIL import Image

from gigamask import recipes
from gigamask.datatools.find_source import of_annotations
from gigamask.datatools.formats import ConvertOptions
from gigamask.datatools.sources import file_line
from gigamask.workflows import conversion_cache, own_data
from gigamask.workflows.conversion_cache import DONE, convert_once
from gigamask.workflows.open_data import AnnotationOptions
from tests.errors import error_line

SQUARE = [[2, 3, 12, 3, 12, 9, 2, 9]]


@pytest.fixture
def folder(tmp_path) -> Path:
    """Photographs, with COCO's JSON and label images of each; one is missing."""
    for name in ("photos/a", "photos/b", "labels/a", "labels/b"):
        (tmp_path / name).mkdir(parents=True)
    label = np.zeros((20, 40), np.uint8)
    label[3:9, 2:12] = 1
    names = [f"{part}/{i}" for part in "ab" for i in range(2)]
    for number, name in enumerate(names):
        photograph(tmp_path, name, 40 * number)
        Image.fromarray(label).save(tmp_path / "labels" / f"{name}.png")
    (tmp_path / "photos" / "b" / "1.png").unlink()
    size = {"width": 40, "height": 20}
    images = [{"id": i, "file_name": f"{name}.png", **size} for i, name in enumerate(names)]
    things = [{"id": i, "image_id": i, "segmentation": SQUARE} for i in range(4)]
    (tmp_path / "c.json").write_text(json.dumps({"images": images, "annotations": things}))
    return tmp_path


def photograph(folder: Path, name: str, gray: int) -> None:
    pixels = np.full((20, 40, 3), gray, np.uint8)
    Image.fromarray(pixels).save(folder / "photos" / f"{name}.png")


def opened(folder: Path, source: str, lines: list | None = None, **options) -> Path:
    """The folder of the tars that a command reads."""
    given = AnnotationOptions(images=str(folder / "photos"), **options)
    report = (lambda line: None) if lines is None else lines.append
    (found,) = own_data.own_tars(folder / source, given, report)
    return Path(found)


def counts(found: Path) -> dict:
    return json.loads((found / DONE).read_text())


SOURCES = ("c.json", "labels")


@pytest.mark.parametrize("source", SOURCES)
def test_a_part_is_not_refused_for_what_the_whole_leaves_out(tmp_path, source):
    """Two label images and annotations of no image are less than half of ten, more of one."""
    (tmp_path / "photos").mkdir()
    (tmp_path / "labels").mkdir()
    images = [{"id": i, "file_name": f"{i}.png", "width": 40, "height": 20} for i in range(10)]
    for i in range(12):
        Image.fromarray(np.eye(20, 40, dtype=np.uint8)).save(tmp_path / f"labels/{i}.png")
    for i in range(10):
        photograph(tmp_path, f"{i}", 20 * i)
    things = [{"id": i, "image_id": i, "segmentation": SQUARE} for i in range(12)]
    (tmp_path / "c.json").write_text(json.dumps({"images": images, "annotations": things}))
    found = of_annotations(str(tmp_path / source), tmp_path / "photos")
    parts = convert_once(found, ConvertOptions(), lambda line: None, False, val_split=0.1)
    made = [counts(Path(part)) for part in parts]
    assert [each["images"] for each in made] == [9, 1]
    assert [len(each["skipped_images"] + each["skipped_masks"]) for each in made] == [2, 2]
    for i in range(1, 10):
        (tmp_path / f"labels/{i}.png").unlink()  # of one image nothing is left to train on
    one = of_annotations(str(tmp_path / "labels"), tmp_path / "photos")
    with error_line("of --val-split 0.1, for train: .*labels"):
        convert_once(one, ConvertOptions(), lambda line: None, False, val_split=0.1)


@pytest.mark.parametrize("source", SOURCES)
def test_a_missing_photograph_is_used_once_it_is_there(folder, source):
    first = opened(folder, source)
    assert counts(first)["images"] == 3
    with error_line(r"--strict: 1 of"):
        opened(folder, source, strict=True)
    assert opened(folder, source) == first
    photograph(folder, "b/1", 200)
    second = opened(folder, source, strict=True)
    assert (counts(second)["images"], second == first) == (4, False)
    (folder / "photos" / "b" / "1.png").unlink()
    assert opened(folder, source) == first


@pytest.mark.parametrize("source", SOURCES)
def test_a_replaced_photograph_of_the_same_size_and_time_is_seen(folder, source):
    path = folder / "photos" / "a" / "0.png"
    first, before = opened(folder, source), path.stat()
    photograph(folder, "a/0", 1)
    path.write_bytes(path.read_bytes().ljust(before.st_size, b"\0")[: before.st_size])
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert path.stat().st_mtime_ns == before.st_mtime_ns
    assert opened(folder, source) != first


@pytest.mark.parametrize("moved", ["photos", "labels"])
def test_folders_that_swap_names_are_paired_anew(folder, moved):
    first = opened(folder, "labels")
    root = folder / moved
    for before, after in (("a", "c"), ("b", "a"), ("c", "b")):
        (root / before).rename(root / after)
    assert opened(folder, "labels") != first


@pytest.mark.parametrize("name", ["labelmap.txt", "photos/labelmap.txt", "labels/class_names.txt"])
def test_class_names_of_label_images_are_watched(folder, name):
    first = opened(folder, "labels")
    (folder / name).write_text("cat:1,0,0::\n")
    assert opened(folder, "labels") != first


def test_options_and_only_files_that_are_read_make_another_conversion(folder):
    first = opened(folder, "c.json")
    for path in ("photos/new.png", "photos/note.txt", "other.json", "photos/.hidden"):
        (folder / path).write_bytes(b"x")
    assert opened(folder, "c.json") == first
    assert opened(folder, "c.json", keep_crowds=True) != first
    labels = opened(folder, "labels")
    Image.new("RGB", (40, 20)).save(folder / "photos" / "a" / "unlabeled.png")
    lines: list[str] = []
    assert opened(folder, "labels", lines) == labels
    assert any("images without label: 2" in line for line in lines)
    assert opened(folder, "labels", ignore=(2,)) != labels


def test_a_moved_data_set_keeps_its_conversion(folder, tmp_path_factory):
    first = opened(folder, "labels")
    there = tmp_path_factory.mktemp("moved") / "there"
    folder.rename(there)
    second = opened(there, "labels")
    assert second.relative_to(there) == first.relative_to(folder)
    shutil.move(there, folder)


def test_an_inode_says_nothing_because_some_disks_number_files_anew(monkeypatch):
    stat = SimpleNamespace(st_size=1, st_mtime_ns=2, st_ctime_ns=3)
    with monkeypatch.context() as patch:
        patch.setattr(os, "stat", lambda path: stat)
        line = file_line(Path("a"), Path())
    assert line == "a 1 2 3"


def test_label_images_are_evaluated_with_the_images_of_the_training(folder):
    labels, photos = str(folder / "labels"), str(folder / "photos")
    config = recipes.tiny().with_(data=labels, images=photos, evaluation__data=(labels,))
    found = own_data.use_own_data(config, lambda line: None)
    assert found.evaluation.data == found.data


@pytest.mark.parametrize(
    "content",
    [b"{}", b"", b'{"images": 1', b'{"images": "x", "tar_files": []}', b"[]", b"\xff\xfe", b"null"],
)
def test_a_damaged_list_is_made_again_and_said(folder, content):
    found = opened(folder, "c.json")
    before = counts(found)
    (found / DONE).write_bytes(content)
    lines: list[str] = []
    assert opened(folder, "c.json", lines) == found
    assert [line for line in lines if f"{DONE} is damaged" in line] == lines[:1]
    assert counts(found)["masks"] == before["masks"]
    opened(folder, "c.json", again := [])
    assert not any("converted again" in line for line in again)


@pytest.mark.parametrize("change", ["missing", "cut", "flipped", "another"])
def test_damaged_tars_are_made_again_and_said(folder, change):
    found = opened(folder, "c.json")
    (path,) = found.glob("*.tar")
    raw = path.read_bytes()
    if change == "missing":
        path.unlink()
    elif change == "another":
        (found / "z.tar").write_bytes(raw)
    else:
        path.write_bytes(raw[:-512] if change == "cut" else raw[:700] + b"?" + raw[701:])
    lines: list[str] = []
    assert opened(folder, "c.json", lines) == found
    assert "converted again" in lines[0]
    assert [each.read_bytes() for each in found.glob("*.tar")] == [raw]
    path.touch()  # a copy has other times
    opened(folder, "c.json", again := [])
    assert "converted again" not in again[0]


def test_an_unfinished_conversion_is_made_again(folder):
    found = opened(folder, "c.json")
    (found / DONE).unlink()
    (found / "sa_000009.tar").write_bytes(b"half")
    assert opened(folder, "c.json") == found
    assert [path.name for path in found.glob("*.tar")] == ["sa_000000.tar"]


def test_a_folder_that_cannot_be_written(folder, monkeypatch):
    """A whole conversion is read without a lock; a new one says what to do."""
    found = opened(folder, "c.json")

    def refuse(*args, **kwargs):
        raise PermissionError(13, "Permission denied", "lock")

    monkeypatch.setattr(conversion_cache, "FileLock", refuse)
    assert opened(folder, "c.json") == found
    (folder / "labels").rename(folder / "my labels")
    with error_line(r"cannot be written.*gigamask convert '.*my labels' .*--out SHARDS"):
        opened(folder, "my labels")


def test_one_job_converts_while_others_wait_and_then_read(tmp_path):
    out, made = tmp_path / "digest" / "all", []

    def make():
        with pytest.raises(Timeout):
            FileLock(out.parent / "lock", timeout=0).acquire()
        made.append(1)
        out.mkdir(parents=True, exist_ok=True)
        return {"tars": [], "masks": 3}

    for _ in range(2):
        found = conversion_cache.reuse_or_make(out, make, "", print)
        assert found == {"tars": [], "masks": 3}
    assert made == [1]
