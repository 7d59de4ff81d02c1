"""The index of whole, odd and broken tars; what is refused; and how entries are found again."""

import fcntl
import json
import multiprocessing
import os
import pickle
import resource
import shutil
import signal
import zlib
from pathlib import Path

import numpy as np
import pytest

from gigamask.data import checked_files, image_folder, index_format, tar
from gigamask.data import index as indexes
from gigamask.data import shard_index as parts
from gigamask.data.index import Index, build, extend, find_tars, open_or_build
from gigamask.data.shard_index import index_tar
from gigamask.data.worker_pool import part_of
from gigamask.synthetic import scenes
from tests import broken
from tests.errors import error_line
from tests.servers import FileServer


@pytest.fixture
def two(tmp_path, entry):
    """Two tars of two images each and their index."""
    folder = tmp_path / "tars"
    for number in (0, 1):
        tar.write(
            folder / f"sa_{number:06d}.tar",
            [member for image in (1, 2) for member in entry(10 * number + image)],
        )
    return build(folder, tmp_path / "index")


def test_columns_say_what_the_tars_hold(two):
    assert len(two) == 4
    assert two.images["image_id"].tolist() == [1, 2, 11, 12]
    assert two.images["shard"].tolist() == [0, 0, 1, 1]
    nothing = {
        "without_json": 0,
        "without_jpg": 0,
        "other_members": 0,
        "skipped": [],
        "broken_tars": [],
    }
    assert two.report() == {"images": 4, "masks": 12, "shards": 2} | nothing
    assert all(os.path.isabs(path) for path in two.shard_paths)


@pytest.mark.slow
def test_real_tars(real_data, tmp_path):
    index = build(
        [real_data / "bsds_val", real_data / "coco128", real_data / "sa1b_real"], tmp_path / "index"
    )
    assert len(index) == 100 + 128 + 8
    for folder in ("bsds_val", "coco128"):
        stats = json.loads((real_data / folder / "stats.json").read_text())
        of_folder = np.array([f"/{folder}/" in path for path in index.shard_paths])[
            index.images["shard"]
        ]
        assert (of_folder.sum(), index.images["masks"][of_folder].sum()) == (
            stats["images"],
            stats["masks"],
        )
    row = index.find("coco128_000001.tar:309")
    with open(index.shard_paths[index.images["shard"][row]], "rb") as file:
        stated = json.loads(
            os.pread(
                file.fileno(), index.images["json_bytes"][row], index.images["json_offset"][row]
            )
        )["annotations"]
    assert index.masks["area"][index.mask_rows(row)].tolist() == [each["area"] for each in stated]
    assert index.report()["without_json"] == 8
    assert (index.images["height"][-8:].min(), index.images["width"][-8:].max()) == (1500, 2250)
    assert index.report()["skipped"] == []


def test_broken_entries_are_left_out_and_named(tmp_path, entry, record, masks, jpg):
    wrong = record(masks, 3)
    wrong["annotations"][0]["segmentation"]["counts"] = [5]
    members = [
        *entry(1),
        ("sa_2.jpg", jpg()),
        ("sa_2.json", b"no json"),
        *entry(4),
        ("sa_3.jpg", jpg()),
        ("sa_3.json", json.dumps(wrong).encode()),
        ("sa_5.jpg", jpg()),
        ("sa_5.json", json.dumps(record(masks, 6)).encode()),
        *entry(7),
        ("sa_8.jpg", b"none"),
        *entry(9),
    ]
    tar.write(tmp_path / "a.tar", members)
    index = build(tmp_path / "a.tar", tmp_path / "index")
    assert index.images["image_id"].tolist() == [1, 4, 7, 9]
    assert index.images["first_mask"].tolist() == [0, 3, 6, 9, 12]
    reasons = {each["name"]: each["reason"] for each in index.report()["skipped"]}
    assert list(reasons) == ["a.tar:sa_2", "a.tar:sa_3", "a.tar:sa_5", "a.tar:sa_8"]
    assert "a.tar:sa_2: its json of 7 bytes" in reasons["a.tar:sa_2"]
    assert "a.tar:sa_3: mask 0" in reasons["a.tar:sa_3"]
    assert "'sa_6.jpg'" in reasons["a.tar:sa_5"]
    assert "a.tar:sa_8: the 4 bytes" in reasons["a.tar:sa_8"]


def test_a_jpg_without_json_is_read_beyond_its_preview(tmp_path, jpg):
    raw = jpg(40, 50)
    comment = b"\xff\xfe" + (60_000).to_bytes(2, "big") + bytes(59_998)
    tar.write(tmp_path / "a.tar", [("sa_1.jpg", raw[:2] + comment + comment + raw[2:])])
    index = build(tmp_path / "a.tar", tmp_path / "index")
    assert (index.images["height"][0], index.images["width"][0]) == (40, 50)
    assert index.masks["box"].shape == (0, 4)


@pytest.mark.parametrize(
    "members, message",
    [
        ([("sa_1.json", b"{}"), ("b.txt", b"")], r"a.tar: has no image .*among its 2 files"),
        ([], r"a.tar: has no image .*among its 0 files"),
        (
            [("a/sa_1.jpg", b"1"), ("b/sa_1.jpg", b"2")],
            r"a.tar: .* sa_1.jpg \(a/sa_1.jpg, b/sa_1.jpg\)",
        ),
        (
            [("sa_1.jpg", b"1"), ("sa_1.json", b"2"), ("sa_1.json", b"2")],
            "a.tar: two members .* sa_1.json",
        ),
        (
            [("sa_1.jpg", b"1"), ("sa_1.json", b"2")],
            r"a.tar: 1 of its 1 entries .*a.tar:sa_1: its json of 1",
        ),
    ],
)
def test_unusable_tars_are_named(tmp_path, members, message):
    tar.write(tmp_path / "a.tar", members)
    with error_line(message):
        build(tmp_path / "a.tar", tmp_path / "index")
    assert [path.name for path in tmp_path.iterdir()] == ["a.tar"]


def test_paths_are_tars_folders_globs_and_indexes(two, tmp_path, monkeypatch):
    folder = tmp_path / "tars"
    first, second = str(folder / "sa_000000.tar"), str(folder / "sa_000001.tar")
    assert find_tars(first) == [first]
    assert (
        find_tars(folder)
        == find_tars([folder, second])
        == find_tars(tmp_path / "index")
        == find_tars(f"{tmp_path}/**/*.tar")
        == [first, second]
    )
    assert find_tars(f"{folder}/*1.tar") == [second]
    (tmp_path / "very_same").symlink_to(folder)
    assert find_tars([tmp_path / "very_same", folder]) == [first, second]
    monkeypatch.chdir(folder)
    assert find_tars(["sa_000001.tar", f"file://{second}", "../tars/sa_000001.tar", "."]) == [
        first,
        second,
    ]
    (folder / "odd[1].tar").write_bytes(b"")
    assert find_tars("odd[1].tar") == [str(folder / "odd[1].tar")]
    (folder / "manifest.json").write_text('{"made_by": "another program"}')
    assert len(find_tars(folder)) == 3
    shutil.copytree(tmp_path / "index", tmp_path / "run/index-of-it")
    with error_line(r"run: .*an index; give .*run/index-of-it"):
        find_tars(tmp_path / "run")
    shutil.copytree(tmp_path / "index", tmp_path / "photos/index")
    (tmp_path / "photos/a.png").touch()
    assert indexes.find_shards(tmp_path / "photos") == [str(tmp_path / "photos")]


@pytest.mark.parametrize(
    "paths, message",
    [
        ("none", "none: no such path"),
        ("empty", r"empty: .*\(.jpg, .jpeg, .*.png, .*.npy\); .*'.*empty/[*][*]/[*].tar'"),
        ("*.tar", r"\*.tar: the glob matches no file"),
        (None, "no path was given"),
    ],
)
def test_paths_that_lead_nowhere_are_named(tmp_path, paths, message):
    (tmp_path / "empty").mkdir()
    with error_line(message):
        build([] if paths is None else tmp_path / paths, tmp_path / "index")


@pytest.mark.slow
def test_build_replaces_an_index_and_nothing_else(two, tmp_path, entry):
    tar.write(tmp_path / "tars" / "sa_000001.tar", entry(5))
    assert len(build(tmp_path / "tars", tmp_path / "index")) == 3
    assert sorted(path.name for path in tmp_path.iterdir()) == ["index", "tars"]
    (tmp_path / "empty").mkdir()
    assert len(build(tmp_path / "tars", tmp_path / "empty")) == 3
    (tmp_path / "empty" / "notes.txt").write_text("mine")
    with error_line("is not an index alone, but holds notes.txt"):
        build(tmp_path / "tars", tmp_path / "empty")
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "manifest.json").write_text('{"made_by": "another program"}')
    for out in (precious, tmp_path / "tars" / "sa_000000.tar"):
        with error_line(f"{out}"):
            build(tmp_path / "tars", out)
    assert len(list(precious.iterdir())) == 1


def test_a_failed_rebuild_keeps_the_index(two, tmp_path):
    (tmp_path / "tars" / "sa_000002.tar").write_bytes(b"x" * 512)
    with error_line(r"sa_000002.tar.*512.*0"):
        build(tmp_path / "tars", tmp_path / "index")
    assert len(Index.open(tmp_path / "index")) == 4
    assert sorted(path.name for path in tmp_path.iterdir()) == ["index", "tars"]


@pytest.mark.slow
def test_open_files_do_not_grow_with_the_tars(tmp_path, entry):
    for number in range(30):
        tar.write(tmp_path / "tars" / f"{number:02d}.tar", entry(number))
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    in_use = max(map(int, os.listdir("/proc/self/fd"))) + 1
    resource.setrlimit(resource.RLIMIT_NOFILE, (in_use + 20, hard))
    try:
        index = build(tmp_path / "tars", tmp_path / "index")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert index.images["image_id"].tolist() == list(range(30))


def test_an_index_is_pickled_as_its_folder(two):
    data = pickle.dumps(two)
    assert len(data) < 300
    again = pickle.loads(data)
    assert (again.images["jpg_offset"] == two.images["jpg_offset"]).all()


def test_large_columns_stay_on_disk(two, monkeypatch):
    monkeypatch.setattr(checked_files, "MAX_READ_BYTES", 0)
    two = pickle.loads(pickle.dumps(two))
    assert all(
        isinstance(column[:].base.base, np.memmap)
        for table in (two.images, two.masks)
        for column in table.values()
    )


def damage(folder, name: str, data: bytes | None) -> None:
    path = folder / name
    if data is None:
        path.unlink()
    else:
        path.write_bytes(data)


@pytest.mark.parametrize(
    "name, change, message",
    [
        (
            "manifest.json",
            lambda raw: None,
            "index: is not an index .*manifest.json.*'gigamask index'",
        ),
        ("manifest.json", lambda raw: b'{"x": 1}', "index: is not an index"),
        (
            "manifest.json",
            lambda raw: raw[:90],
            "index/manifest.json: .*; build it again with 'gigamask index'",
        ),
        (
            "manifest.json",
            lambda raw: raw.replace(b'"parts"', b'"carts"'),
            "index/manifest.json: .*crc32.*build it again",
        ),
        (
            "manifest.json",
            lambda raw: raw.replace(b'_index":5', b'_index":3'),
            "manifest.json: .*schema 3.* 5; build it again",
        ),
        ("images_width.npy", lambda raw: None, "images_width.npy: has 0 bytes.*; build it again"),
        (
            "masks_area.npy",
            lambda raw: raw[:-4],
            r"masks_area.npy: has \d+ bytes, but must have \d+",
        ),
        (
            "masks_area.npy",
            lambda raw: raw.replace(b"(12,)", b"(11,)"),
            r"masks_area.npy: does not hold \(12,\) of <i4",
        ),
        (
            "images_width.npy",
            lambda raw: raw.replace(b"<i4", b"<u4"),
            r"images_width.npy: does not hold \(4,\) of <i4",
        ),
    ],
)
def test_broken_indexes_are_named(two, name, change, message):
    damage(two.folder, name, change((two.folder / name).read_bytes()))
    with error_line(message):
        Index.open(two.folder)


def test_tars_that_changed_since_are_named(two):
    path = two.shard_paths[1]
    with open(path, "ab") as file:
        file.write(bytes(512))
    with error_line(r"sa_000001.tar.*\d+ bytes"):
        Index.open(two.folder)
    os.unlink(path)
    with error_line(r"sa_000001.tar.*No such file or directory"):
        Index.open(two.folder)


@pytest.mark.slow
def test_open_or_build_builds_once_and_again_when_a_tar_changes(two, tmp_path, entry, monkeypatch):
    built = []
    monkeypatch.setattr(
        indexes,
        "build",
        lambda *args, build=build, **rest: built.append(args) or build(*args, **rest),
    )
    folder, cache = tmp_path / "tars", tmp_path / "cache"
    assert (
        open_or_build(tmp_path / "index", cache).folder
        == open_or_build([tmp_path / "index"], cache).folder
        == two.folder
    )
    assert not built
    index = open_or_build(folder, cache)
    assert (index.folder.parent, len(built)) == (cache, 1)
    assert open_or_build([f"{folder}/*.tar"], cache).folder == index.folder
    assert len(built) == 1
    assert open_or_build(two.shard_paths[:1], cache).folder != index.folder
    assert len(built) == 2
    os.utime(two.shard_paths[0], ns=(1, 1))
    assert len(open_or_build(folder, cache)) == 4
    assert len(built) == 3
    (index.folder / "masks_area.npy").unlink()
    assert open_or_build(folder, cache).masks["area"].shape == (12,)
    assert len(built) == 4


def test_entries_are_found_by_name_and_by_number(two):
    for row in range(4):
        assert two.find(two.entry_name(row)) == row
    assert two.entry_name(2) == "sa_000001.tar:sa_11"
    assert two.find("sa_000001.tar:12") == 3
    assert two.find(f"{two.shard_paths[1]}:sa_12") == two.find("tars/sa_000001.tar:12") == 3


@pytest.mark.parametrize(
    "name, message",
    [
        ("sa_1", "'sa_1' .*TAR:IMAGE.* sa_000000.tar:sa_1"),
        ("sa_0.tar:sa_1", "'sa_0.tar:sa_1': .*'sa_0.tar'; .*sa_00000[01].tar, sa_00000[01].tar"),
        ("a_000001.tar:sa_11", "'a_000001.tar'"),
        ("sa_000000.tar:sa_11", "'sa_000000.tar:sa_11': .*'sa_11'; .*sa_1, sa_2"),
        ("sa_000000.tar:99", "sa_000000.tar .*'99'"),
    ],
)
def test_what_is_not_found_comes_with_the_nearest(two, name, message):
    with error_line(message):
        two.find(name)


def test_tars_of_one_name_are_distinguished_by_their_folders(tmp_path, entry):
    for folder in ("x", "y"):
        tar.write(tmp_path / folder / "a.tar", entry(1))
    index = build([tmp_path / "x", tmp_path / "y"], tmp_path / "index")
    with error_line(r"'a.tar:sa_1'.*2.*x/a.tar.*y/a.tar"):
        index.find("a.tar:sa_1")
    assert index.find("y/a.tar:sa_1") == 1


@pytest.fixture
def many(tmp_path, entry):
    """A folder of six tars of one to three images."""
    folder = tmp_path / "many"
    for number in range(6):
        images = range(10 * number, 10 * number + 1 + number % 3)
        tar.write(folder / f"{number}.tar", [member for image in images for member in entry(image)])
    return folder


@pytest.fixture
def scans(monkeypatch):
    """The names of the tars scanned so far."""
    seen = []
    monkeypatch.setattr(
        indexes,
        "index_shard",
        lambda path, *flags: seen.append(os.path.basename(path)) or index_tar(path, *flags),
    )
    return seen


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def content(index: Index) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in index.folder.iterdir()}


@pytest.mark.slow
@pytest.mark.usefixtures("forked_workers")
def test_an_index_does_not_depend_on_order_or_processes(many, tmp_path):
    paths = sorted(map(str, many.iterdir()))
    whole = content(build(many, tmp_path / "whole"))
    seen = []
    again = extend(
        [paths[4], many, *paths[::-1]],
        tmp_path / "again",
        2,
        lambda done, total: seen.append((done, total)),
    )
    assert content(again.index) == whole
    assert (again.scanned, again.reused, seen) == (6, 0, [(done, 6) for done in range(1, 7)])


@pytest.mark.slow
def test_an_index_is_extended_without_another_scan(many, tmp_path, scans):
    whole = content(build(many, tmp_path / "whole"))
    build([f"{many}/[0-2].tar"], tmp_path / "left")
    scans.clear()
    extended = extend([many], tmp_path / "left")
    assert (extended.scanned, extended.reused, scans) == (3, 3, ["3.tar", "4.tar", "5.tar"])
    assert content(extended.index) == whole
    fewer = extend(f"{many}/[12].tar", tmp_path / "left")
    assert (fewer.scanned, fewer.reused, fewer.index.shard_paths) == (
        0,
        2,
        [str(many / "1.tar"), str(many / "2.tar")],
    )
    assert content(fewer.index) == content(build(f"{many}/[12].tar", tmp_path / "new"))
    assert names_in(tmp_path) == ["left", "many", "new", "whole"]


def test_parts_join_no_index_of_other_data(many, tmp_path):
    for tars in (many, many / "5.tar"):
        for number in (0, 1):
            with pytest.raises(SystemExit):
                extend(tars, tmp_path / "out", part_of(f"{number}/2@{tmp_path}/parts"))
    joined = extend(many / "5.tar", tmp_path / "out", part_of(f"join/2@{tmp_path}/parts"))
    assert joined.index.shard_paths == [str(many / "5.tar")]


@pytest.mark.slow
def test_what_was_left_out_stays_with_its_tar(many, tmp_path, entry):
    tar.write(
        many / "3.tar",
        [*entry(1), ("sa_2.jpg", b"none"), ("sa_3.json", b""), ("text", b""), *entry(4)],
    )
    whole = build(many, tmp_path / "whole")
    assert len(whole.report()["skipped"]) == 1
    for number in range(6):
        build(many / f"{number}.tar", tmp_path / f"part{number}")
    parts = [tmp_path / f"part{number}" for number in (5, 3, 0, 1, 4, 2)]
    assert build(parts, tmp_path / "joined").report() == whole.report()
    assert content(build(parts, tmp_path / "joined")) == content(whole)


@pytest.mark.slow
def test_changed_tars_are_scanned_again(many, tmp_path, scans, entry):
    build(many, tmp_path / "index")
    tar.write(many / "2.tar", entry(77))
    os.utime(many / "4.tar", ns=(1, 1))
    scans.clear()
    seen = []
    again = extend(
        many, tmp_path / "index", progress=lambda done, total: seen.append((done, total))
    )
    assert (again.scanned, again.reused, scans, seen) == (
        2,
        4,
        ["2.tar", "4.tar"],
        [(4, 6), (5, 6), (6, 6)],
    )
    assert again.index.find("2.tar:77") > 0
    (many / "2.tar").unlink()
    with error_line(r"2.tar.*No such file or directory"):
        extend(tmp_path / "index", tmp_path / "other")


def killed(point: str, folder: Path, out: Path, log: Path) -> None:
    """Builds an index and is killed in the middle."""

    def die(*_, **__):
        os.kill(os.getpid(), signal.SIGKILL)

    def scan(path, *flags):
        with open(log, "a") as file:
            file.write(os.path.basename(path) + "\n")
        if log.read_text().count("\n") == 4:
            if point == "scan":
                die()
            elif point == "save":
                # The columns are written, the summary is not.
                parts.encode_json = die
        return index_tar(path, *flags)

    indexes.index_shard = scan
    if point == "merge":
        index_format.encode_json = die
    if point == "swap":
        rename = Path.rename
        Path.rename = lambda self, target: (
            die()
            if self.name == "index" and self.parent.name.startswith(".")
            else rename(self, target)
        )
    build(folder, out)


@pytest.mark.slow
@pytest.mark.parametrize("point, finished", [("scan", 3), ("save", 3), ("merge", 6), ("swap", 6)])
def test_a_killed_build_repeats_no_finished_tar(many, tmp_path, scans, point, finished):
    whole = content(build(many, tmp_path / "whole"))
    if point == "swap":
        build(f"{many}/0.tar", tmp_path / "index")
        finished -= 1
    log = tmp_path / "log"
    process = multiprocessing.get_context("fork").Process(
        target=killed, args=(point, many, tmp_path / "index", log)
    )
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    assert (tmp_path / ".index.parts").is_dir()
    first = log.read_text().split()
    assert len(first) == finished + (point in ("scan", "save"))
    scans.clear()
    again = extend(many, tmp_path / "index")
    assert not set(scans) & set(first[:finished])
    assert again[1:] == ((3, 3) if finished == 3 else (0, 6))
    assert content(again.index) == whole
    assert names_in(tmp_path) == ["index", "log", "many", "whole"]


@pytest.mark.slow
def test_finished_tars_outlive_a_broken_one(many, tmp_path, scans):
    good = (many / "4.tar").read_bytes()
    (many / "4.tar").write_bytes(good[:2048])
    with error_line(r"4.tar"):
        build(many, tmp_path / "index")
    assert names_in(tmp_path) == [".index.parts", "many"]
    (tmp_path / ".index.parts" / "1-of-an-older-version").mkdir()
    (many / "4.tar").write_bytes(good)
    scans.clear()
    assert extend(many, tmp_path / "index")[1:] == (1, 5)
    assert scans == ["4.tar"]
    assert names_in(tmp_path) == ["index", "many"]


@pytest.mark.slow
def test_two_builds_of_one_index_do_not_meet(many, tmp_path):
    with indexes._only_writer(tmp_path / "index"):
        with error_line(r"another process.*--out"):
            build(many, tmp_path / "index")
        assert len(build(many, tmp_path / "other")) == 12
    assert len(build(many, tmp_path / "index")) == 12
    assert names_in(tmp_path) == ["index", "many", "other"]


@pytest.mark.slow
def test_a_lock_that_was_just_removed_is_taken_anew(tmp_path, monkeypatch):
    """By its last holder, between this process's open and its lock: the folder alone, then another
    file is in its place."""
    work, flock = tmp_path / ".index.parts", fcntl.flock
    removed = []

    def once_removed(file, operation):
        if operation & fcntl.LOCK_EX and len(removed) < 2:
            removed.append(shutil.rmtree(work))
            if len(removed) == 2:
                work.mkdir()
                (work / "lock").touch()
        return flock(file, operation)

    monkeypatch.setattr(fcntl, "flock", once_removed)
    with indexes._only_writer(tmp_path / "index"):
        assert (work / "lock").exists()
        with error_line(r"another process"), indexes._only_writer(tmp_path / "index"):
            pass
    assert len(removed) == 2
    assert not work.exists()


@pytest.mark.slow
def test_a_place_that_cannot_be_written_is_one_line(many, tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    with error_line(r"file/index.*Not a directory"):
        build(many, tmp_path / "file" / "index")

    def full(*_):
        raise OSError(28, "No space left on device", "column")

    monkeypatch.setattr(index_format, "write_array", full)
    with error_line(r"index.*No space left on device"):
        build(many, tmp_path / "index")
    monkeypatch.undo()
    assert extend(many, tmp_path / "index")[1:] == (0, 6)


@pytest.mark.slow
def test_an_unsound_index_gives_no_rows(many, tmp_path):
    build(many, tmp_path / "index")
    (tmp_path / "index" / "masks_area.npy").write_bytes(b"")
    assert extend(many, tmp_path / "index")[1:] == (6, 0)
    (tmp_path / "index" / "masks_area.npy").write_bytes(b"")
    with error_line(r"masks_area.npy"):
        extend(tmp_path / "index", tmp_path / "other")


@pytest.mark.slow
def test_remote_tars_are_indexed_like_local_ones(many, tmp_path, monkeypatch):
    here = build(many, tmp_path / "here")
    with FileServer(many) as server:
        there = build(f"{server.url}/*.tar", tmp_path / "there")
        assert there.shard_paths == [f"{server.url}/{number}.tar" for number in range(6)]
        server.forget()
        assert Index.open(tmp_path / "there").report() == here.report()
        assert server.requests == 0
        assert extend(server.url, tmp_path / "there")[1:] == (0, 6)
        assert (
            open_or_build([server.url], tmp_path / "cache").folder
            == open_or_build([f"{server.url}/"], tmp_path / "cache").folder
        )
        with open(many / "3.tar", "ab") as file:
            file.write(bytes(512))
        assert extend(server.url, tmp_path / "there")[1:] == (1, 5)
    for table in ("images", "masks"):
        for name, column in getattr(here, table).items():
            assert column.tobytes() == getattr(there, table)[name].tobytes()
    assert there.entry_name(3) == here.entry_name(3)
    assert there.find(there.entry_name(3)) == 3
    mixed = extend([tmp_path / "here", many], tmp_path / "mixed")
    assert (mixed.scanned, mixed.reused) == (1, 5)
    gone = "http://127.0.0.1:9/0.tar"
    with error_line(rf"{gone}.*5 tries"):
        extend(gone, tmp_path / "gone")
    assert not (tmp_path / ".gone.parts").exists()


@pytest.mark.slow
def test_a_signed_address_names_its_entries_without_the_signature(many, tmp_path):
    with FileServer(many) as server:
        index = build([f"{server.url}/1.tar?sign=a/b.tar"], tmp_path / "index")
    assert index.entry_name(0) == "1.tar:sa_10"
    assert index.find("1.tar:10") == 0
    with error_line(r"'2.tar'.* 1.tar"):
        index.find("2.tar:10")


def cut(path: Path, files: int) -> None:
    """Cuts a tar short within the payload of the file after so many."""
    members = tar.scan(path)
    os.truncate(path, int(members.offsets[files]) + 1)


@pytest.mark.slow
def test_samples_before_a_break_are_kept_if_requested(tmp_path):
    whole, broken = (
        scenes.write(tmp_path / name, 4, seed=seed)[0]
        for name, seed in (("whole", 1), ("broken", 2))
    )
    whole.rename(tmp_path / "a.tar")
    broken.rename(tmp_path / "b.tar")
    cut(tmp_path / "b.tar", 5)
    with error_line(r"member 6.*--salvage.*5 files"):
        indexes.build(tmp_path / "*.tar", tmp_path / "index")
    built, scanned, reused = indexes.extend(tmp_path / "*.tar", tmp_path / "index", salvage=True)
    assert (len(built), scanned, reused) == (
        7,
        1,
        1,
    )  # two whole entries, and a jpg whose json is gone
    assert built.report()["without_json"] == 1
    assert [reason.split(": ")[0] for reason in built.report()["broken_tars"]] == [
        str(tmp_path / "b.tar")
    ]
    with error_line("cut short"):  # a broken tar is not taken over without being asked for either
        indexes.build([tmp_path / "index"], tmp_path / "again")


@pytest.mark.slow
def test_all_broken_tars_are_named_at_once(tmp_path):
    for name in ("a", "b", "c"):
        scenes.write(tmp_path / name, 2, seed=1)[0].rename(tmp_path / f"{name}.tar")
    for name in ("a", "c"):
        cut(tmp_path / f"{name}.tar", 1)
    with error_line(r"^2 of 3.*a.tar.*member 2.*c.tar"):
        indexes.build(tmp_path / "*.tar", tmp_path / "index")
    assert indexes.extend(tmp_path / "b.tar", tmp_path / "index").reused == 1


@pytest.mark.slow
def test_checksums_are_recorded_and_kept(tmp_path, entry):
    members = [*entry(1), *entry(2), ("sa_3.jpg", entry(3)[0][1])]
    broken.write_plain(tmp_path / "a.tar", members)
    tar.write(tmp_path / "b.tar", entry(4))
    crcs = [zlib.crc32(payload) for name, payload in members if name.endswith(".jpg")]
    jsons = [zlib.crc32(payload) for name, payload in members if name.endswith(".json")]
    plain = build(tmp_path / "*.tar", tmp_path / "plain")
    assert [part.checksums for part in plain.manifest.parts] == [False, True]
    assert plain.images["json_crc32"].tolist()[:3] == [*jsons, 0]
    shutil.copytree(tmp_path / "plain", tmp_path / "index")
    result = extend(tmp_path / "*.tar", tmp_path / "index", checksums=True)
    assert (result.scanned, result.reused) == (1, 1)  # b.tar states its own
    whole = build(tmp_path / "*.tar", tmp_path / "whole", checksums=True)
    for found in (result.index, whole):
        assert [part.checksums for part in found.manifest.parts] == [True, True]
        assert found.images["jpg_crc32"].tolist() == [*crcs, zlib.crc32(entry(4)[0][1])]
        assert found.images["json_crc32"].tolist()[:3] == [*jsons, 0]
    for paths in (tmp_path / "*.tar", [tmp_path / "whole", tmp_path / "plain"]):
        kept = extend(paths, tmp_path / "index")
        assert (kept.reused, kept.index.manifest.parts[0].checksums) == (2, True)


def test_checksums_are_recorded_after_an_interrupted_build_without(tmp_path, entry):
    broken.write_plain(tmp_path / "a.tar", entry(1))
    (tmp_path / "b.tar").write_bytes(b"x")
    with error_line(r"b\.tar"):
        build(tmp_path / "*.tar", tmp_path / "index")
    built, scanned, _ = extend(tmp_path / "a.tar", tmp_path / "index", checksums=True)
    assert (scanned, built.images["jpg_crc32"].tolist()) == (1, [zlib.crc32(entry(1)[0][1])])


def test_checksums_leave_out_what_cannot_be_read(tmp_path, entry, monkeypatch):
    broken.write_plain(tmp_path / "a.tar", [*entry(1), *entry(2)])
    at, read = tar.scan(tmp_path / "a.tar").offsets[2], os.pread

    def failing(descriptor: int, count: int, offset: int) -> bytes:
        if offset == at:
            raise OSError(5, "Input/output error")
        return read(descriptor, count, offset)

    monkeypatch.setattr(os, "pread", failing)
    built = build(tmp_path / "a.tar", tmp_path / "index", checksums=True)
    assert (built.images["name"].tolist(), built.manifest.parts[0].checksums) == ([b"sa_1"], True)
    assert "Input/output error" in built.report()["skipped"][0]["reason"]


def test_checksums_of_an_image_folder_are_refused(tmp_path, entry):
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "a.jpg").write_bytes(entry(1)[0][1])
    with error_line(r"photos: is a folder .*--checksums"):
        build(tmp_path / "photos", tmp_path / "index", checksums=True)


def test_a_command_that_reads_images_alone_says_that_a_folder_has_tars(tmp_path):
    (tmp_path / "a.tar").touch()
    with error_line(r"contains tars, but no image file; unpack them"):
        image_folder.find_folders(str(tmp_path))
