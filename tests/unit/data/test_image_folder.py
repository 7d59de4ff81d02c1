"""Folders of images: found, indexed, read, and what is refused."""

import hashlib
import io
import os
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from gigamask.data import image, tar
from gigamask.data import index as indexes
from gigamask.data import shard_index as parts
from gigamask.data.index import Index, build, extend, find_shards, find_tars, open_or_build
from gigamask.data.loader import SampleSource, batches
from gigamask.data.mask_sampling import MaskFilters
from gigamask.data.sample_config import SampleConfig
from gigamask.data.sample_table import open_sample_table
from gigamask.data.shards import ShardReader
from gigamask.datatools import verify
from gigamask.errors import CorruptSampleError
from gigamask.records import SampleRef, StepPlan
from gigamask.types import RandomSpec
from tests.errors import corrupt_sample, error_line


def png(height: int, width: int) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (width, height), (10, 20, 30)).save(file, "PNG")
    return file.getvalue()


@pytest.fixture
def photos(tmp_path, jpg):
    """Two classes, one of them deeper, images at the top, and what is none."""
    root = tmp_path / "photos"
    files = {
        "b_2.jpg": jpg(20, 30, 2),
        "a.JPEG": jpg(10, 40, 1),
        "notes.txt": b"x",
        "._a.jpg": b"mac",
        "stats.json": b"{}",
        "dogs/n02_7.JPEG": jpg(24, 32, 3),
        "dogs/n02_5.jpg": jpg(32, 24, 4),
        "dogs/n02_5.png": png(11, 12),
        "cats/small/9.Jpg": jpg(8, 8, 5),
        "empty/list.csv": b"",
        ".hidden/1.jpg": jpg(9, 9, 6),
    }
    for name, data in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(data)
    return root


@pytest.fixture
def two(tmp_path, entry):
    for number in range(2):
        tar.write(tmp_path / "tars" / f"{number}.tar", entry(number + 1))
    return sorted((tmp_path / "tars").iterdir())


def built(photos: Path) -> Index:
    """Index the folder, beside it."""
    return build(photos, photos.parent / "index")


def test_each_folder_with_images_is_a_shard_whose_files_go_by_name(photos, tmp_path):
    index = built(photos)
    assert index.shard_paths == [str(photos), str(photos / "cats" / "small"), str(photos / "dogs")]
    assert [index.entry_name(row) for row in range(len(index))] == [
        "photos:a.JPEG",
        "photos:b_2.jpg",
        "small:9.Jpg",
        "dogs:n02_5.jpg",
        "dogs:n02_5.png",
        "dogs:n02_7.JPEG",
    ]
    assert index.images["image_id"].tolist() == [-1, 2, 9, 5, 5, 7]
    assert list(
        zip(index.images["height"].tolist(), index.images["width"].tolist(), strict=True)
    ) == [(10, 40), (20, 30), (8, 8), (32, 24), (11, 12), (24, 32)]
    assert index.images["shard"].tolist() == [0, 0, 1, 2, 2, 2]
    assert index.images["masks"].tolist() == [0] * 6
    report = index.report()
    assert (
        report["images"],
        report["masks"],
        report["without_json"],
        report["other_members"],
        report["skipped"],
    ) == (6, 0, 6, 3, [])
    assert index.find("dogs:n02_5.png") == 4
    assert index.find("cats/small:9") == 2


def test_files_are_read_by_name_in_any_order(photos, tmp_path):
    index = built(photos)
    reader = ShardReader(index.shard_paths)
    entries = reader.read_entries(index, [5, 0, 4, 3, 5])
    names = ["dogs/n02_7.JPEG", "a.JPEG", "dogs/n02_5.png", "dogs/n02_5.jpg", "dogs/n02_7.JPEG"]
    assert entries == [((photos / name).read_bytes(), None) for name in names]
    assert reader.read_entry(index, 2) == ((photos / "cats" / "small" / "9.Jpg").read_bytes(), None)
    assert not reader._descriptors


def test_a_file_that_is_gone_or_changed_is_named(photos, tmp_path):
    index = built(photos)
    (photos / "a.JPEG").unlink()
    (photos / "dogs" / "n02_7.JPEG").write_bytes(b"longer" * 10_000)
    (photos / "b_2.jpg").write_bytes(b"")
    again, size = Index.open(index.folder), index.images["jpg_bytes"]
    gone, shorter, longer = ShardReader(again.shard_paths).read_entries(again, [0, 1, 5])
    assert str(gone).startswith(f"{photos}/a.JPEG: ")
    assert f"{size[0]} bytes at 0 (No such file or directory)" in str(gone)
    assert str(shorter).startswith(f"{photos}/b_2.jpg: no longer has the {size[1]} bytes")
    assert str(longer).startswith(f"{photos}/dogs/n02_7.JPEG: no longer has the {size[5]} bytes")


def test_broken_images_are_left_out_and_named(photos, tmp_path):
    (photos / "dogs" / "broken.jpg").write_bytes(b"none")
    (photos / "dogs" / "blank.png").write_bytes(b"")
    os.symlink(photos / "nowhere", photos / "dogs" / "dangling.jpg")
    index = built(photos)
    assert len(index) == 6
    assert {
        each["name"]: each["reason"].split(" bytes")[0] for each in index.report()["skipped"]
    } == {"dogs:blank.png": "dogs:blank.png: the 0", "dogs:broken.jpg": "dogs:broken.jpg: the 4"}
    assert index.report()["other_members"] == 4


def test_a_size_beyond_the_head_and_a_file_that_is_too_large(photos, tmp_path, jpg, monkeypatch):
    raw = jpg(40, 50)
    comment = b"\xff\xfe" + (60_000).to_bytes(2, "big") + bytes(59_998)
    (photos / "cats" / "small" / "10.jpg").write_bytes(raw[:2] + comment + comment + raw[2:])
    assert built(photos).images["width"].tolist()[2] == 50
    monkeypatch.setattr(image, "MAX_BYTES", 100_000)
    os.utime(photos / "cats" / "small" / "10.jpg", ns=(1, 1))
    [skipped] = built(photos).report()["skipped"]
    assert skipped["reason"].startswith("small:10.jpg: has 1")
    assert "100000" in skipped["reason"]


def test_a_disk_error_leaves_that_image_out(photos, tmp_path, monkeypatch):
    plain = parts.read_payloads
    bad = CorruptSampleError("dogs: cannot be read (Input/output error)")
    monkeypatch.setattr(
        parts,
        "read_payloads",
        lambda places: (
            bad if each.path.endswith("7.JPEG") else next(plain([each])) for each in places
        ),
    )
    [skipped] = built(photos).report()["skipped"]
    assert skipped == {"name": "dogs:n02_7.JPEG", "reason": str(bad)}


def test_a_folder_of_broken_images_stops_the_build_and_is_named(photos, tmp_path):
    (photos / "cats" / "small" / "9.Jpg").write_bytes(b"none")
    message = r"small: 1 of its 1 entries .*small:9.Jpg: the 4 bytes"
    with error_line(message):
        built(photos)


@pytest.mark.slow
def test_what_changes_is_indexed_again_and_the_rest_is_not(photos, tmp_path, jpg, monkeypatch):
    before = built(photos)
    seen, plain = [], indexes.index_shard
    monkeypatch.setattr(
        indexes,
        "index_shard",
        lambda path, *flags: seen.append(os.path.basename(path)) or plain(path, *flags),
    )
    assert extend(photos, tmp_path / "index").reused == 3
    (photos / "dogs" / "new.jpg").write_bytes(jpg(9, 9))
    again = extend(photos, tmp_path / "index")
    assert (again.scanned, again.reused, seen) == (1, 2, ["dogs"])
    assert len(again.index) == len(before) + 1
    assert again.index.digest != before.digest
    os.utime(photos / "a.JPEG", ns=(1, 1))
    touched = extend(photos, tmp_path / "index")
    assert (seen, touched.index.digest) == (["dogs", "photos"], again.index.digest)


@pytest.mark.slow
def test_digest_depends_on_file_names_and_sizes_but_not_on_the_location(photos, tmp_path):
    before = built(photos).digest
    (photos / "a.JPEG").rename(photos / "c.JPEG")
    renamed = built(photos).digest
    assert renamed != before
    first, second = (photos / "c.JPEG").read_bytes(), (photos / "b_2.jpg").read_bytes()
    (photos / "c.JPEG").write_bytes(second)
    (photos / "b_2.jpg").write_bytes(first)
    swapped = built(photos).digest
    assert swapped not in (renamed, before)
    (tmp_path / "moved").mkdir()
    photos.rename(tmp_path / "moved" / "photos")
    assert build(tmp_path / "moved" / "photos", tmp_path / "index").digest == swapped
    with error_line(r"photos: no such path"):
        built(photos)


def test_the_digest_of_tars_is_what_it_was_before_folders(two, tmp_path):
    told = "\n".join(f"{path.name} {path.stat().st_size} 1 3" for path in two)
    assert (
        build(two, tmp_path / "index").digest
        == hashlib.blake2b(told.encode(), digest_size=16).hexdigest()
    )


@pytest.mark.slow
def test_an_index_in_passing_is_kept_until_something_changes(photos, tmp_path):
    index = open_or_build([photos], tmp_path / "kept")
    made = (index.folder / "manifest.json").stat().st_mtime_ns
    again = open_or_build([photos], tmp_path / "kept")
    assert (again.folder, (again.folder / "manifest.json").stat().st_mtime_ns) == (
        index.folder,
        made,
    )
    (photos / "b_2.jpg").rename(photos / "b_3.jpg")
    changed = open_or_build([photos], tmp_path / "kept")
    assert changed.entry_name(1) == "photos:b_3.jpg"


def test_tars_and_folders_go_together(photos, tmp_path, entry):
    tar.write(
        tmp_path / "tars" / "a.tar", [member for number in (1, 2) for member in entry(number)]
    )
    index = build([photos, tmp_path / "tars"], tmp_path / "index")
    assert [os.path.basename(path) for path in index.shard_paths] == [
        "photos",
        "small",
        "dogs",
        "a.tar",
    ]
    assert index.images["masks"].tolist() == [0] * 6 + [3, 3]
    entries = ShardReader(index.shard_paths).read_entries(index, [7, 4, 6])
    assert [json is None for _, json in entries] == [False, True, False]
    assert entries[0][0] == entry(2)[0][1]
    assert open_sample_table(index, MaskFilters()).rows_or_offsets.tolist() == [6, 7]
    assert open_sample_table(
        index, MaskFilters(), with_masks=False
    ).rows_or_offsets.tolist() == list(range(8))


def test_tars_at_the_top_are_what_is_meant(photos, tmp_path, entry):
    tar.write(photos / "a.tar", entry(1))
    assert find_shards(photos) == find_tars(photos) == [str(photos / "a.tar")]
    (photos / "a.tar").rename(photos / "dogs" / "a.tar")
    message = r"photos/dogs/a.tar: "
    with error_line(message):
        find_shards(photos)
    assert find_shards(photos / "cats") == [str(photos / "cats" / "small")]


def test_links_are_followed_but_not_in_circles(photos):
    os.symlink(photos, photos / "cats" / "back")
    os.symlink(photos / "dogs", photos / "wolves")
    assert [os.path.relpath(path, photos) for path in find_shards(photos)] == [
        ".",
        "cats/small",
        "dogs",
        "wolves",
    ]


def test_what_leads_nowhere_is_named(photos, tmp_path, monkeypatch):
    with error_line(r"photos/empty.*\.jpg"):
        find_shards(photos / "empty")
    for path in (photos / "a.JPEG", f"{photos}/dogs/*.png"):
        with error_line(r"\.(JPEG|png)"):
            find_shards(path)
    index = build(photos / "dogs", tmp_path / "index")
    for path in (photos / "dogs").iterdir():
        path.unlink()
    with error_line(r"dogs"):
        build(index.folder, tmp_path / "other")
    (photos / "dogs").rmdir()
    with error_line(r"dogs.*No such file or directory"):
        Index.open(index.folder)


def test_a_folder_that_cannot_be_listed_is_named(photos, tmp_path, monkeypatch):
    def refuse(path, real=os.scandir):
        if os.path.basename(path) == "dogs":
            raise PermissionError(13, "Permission denied", path)
        return real(path)

    monkeypatch.setattr(os, "scandir", refuse)
    message = r"dogs: .*\(Permission denied\)"
    with error_line(message):
        find_shards(photos)
    with error_line(message):
        parts.index_folder(str(photos / "dogs"))


def test_what_needs_tars_says_so(photos, tmp_path):
    index = built(photos)
    message = r"photos: is a folder of images where tars are expected.*'gigamask index'"
    for path in (photos, index.folder):
        with error_line(message):
            verify.verify(path)
    assert verify.check_index(index.folder) == []
    (photos / "a.JPEG").write_bytes(b"x")
    [stale] = verify.check_index(index.folder)
    assert "photos had" in stale


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 1])
def test_samples_come_from_files(photos, tmp_path, workers):
    index = built(photos)
    (photos / "b_2.jpg").write_bytes(bytes(int(index.images["jpg_bytes"][1])))
    source = SampleSource(
        str(index.folder),
        SampleConfig(image_size=64, mask_size=16, with_masks=False),
        RandomSpec(1, 2, 2, 16),
    )
    sample_refs = tuple(SampleRef(0, row, row) for row in range(6))
    [(batch,)] = batches(source, [StepPlan((sample_refs,), 0, 6)], workers=workers)
    assert batch.names == tuple(index.entry_name(row) for row in (0, 2, 3, 4, 5))
    [skipped] = batch.skipped
    assert skipped.reason.startswith("photos:b_2.jpg: the ")
    assert batch.random_inputs.patches.shape == (5, 16)
    assert np.unique(batch.images[3][:, :50, :64].numpy().reshape(3, -1), axis=1).tolist() == [
        [10],
        [20],
        [30],
    ]


def test_parquet_is_to_be_converted(tmp_path):
    file, parent = tmp_path / "my set/data/train-0.parquet", tmp_path / "my set"
    file.parent.mkdir(parents=True)
    file.write_bytes(b"PAR1")
    done = file.with_name("train-0.parquet.gigamask") / "all/sa_000000.tar"  # of a training
    done.parent.mkdir(parents=True)
    done.touch()
    for path in (parent, file):
        with error_line(rf"is parquet.*gigamask convert '{path}' --out"):
            find_shards(str(path))
    for path in ("hf://us/cells/a.parquet", "https://localhost/a.parquet?key=1"):
        with error_line(r"is parquet.*gigamask convert '?[hf]"):
            find_shards(path)


@pytest.mark.parametrize("path", ["coco.json", "s3://bucket/coco.json"])
def test_annotations_are_not_data_without_their_images(path):
    with error_line(r"coco\.json: annotations need .*--images"):
        find_shards(path)


def test_images_of_kinds_that_are_not_read_are_named(photos, tmp_path):
    for name in ("phone.HEIC", "._phone.HEIC"):
        (photos / name).write_bytes(b"x")
    (photos / "notes.txt").write_bytes(b"x")
    skipped = built(photos).manifest.left_out.skipped
    assert [each.name for each in skipped] == ["phone.HEIC"]
    with corrupt_sample("HEIC is not read"):
        build(photos / "phone.HEIC", tmp_path / "other")
