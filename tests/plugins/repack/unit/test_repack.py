"""Repacking: what is smaller afterwards, what is the same, what is left out, and that work done is
not done again.
"""

import io
import json
import os
import shutil
from codecs import BOM_UTF8
from pathlib import Path

import cv2
import numpy as np
import pytest
from PIL import Image

from gigamask.data import annotation, image, tar
from gigamask.data import index as indexes
from gigamask.data.loader import SampleSource
from gigamask.data.sample_config import SampleConfig
from gigamask.files import exclusive_lock
from gigamask.masks.rle import RLEMasks
from gigamask.masks.transforms import ImageTransform
from gigamask.plugins.repack.repack import RepackConfig, repack
from gigamask.records import SampleRef
from gigamask.synthetic import scenes as synthetic
from gigamask.types import RandomSpec
from tests.errors import error_line
from tests.unit.datatools.test_convert import members

HEIGHT, WIDTH = 60, 80


def jpeg(height: int = HEIGHT, width: int = WIDTH) -> bytes:
    y, x = np.mgrid[:height, :width]
    file = io.BytesIO()
    Image.fromarray(np.stack([y * 3, x * 3, x + y], -1).astype(np.uint8)).save(
        file, "JPEG", quality=95
    )
    return file.getvalue()


def discs(height: int = HEIGHT, width: int = WIDTH) -> RLEMasks:
    """Two discs and one pixel that a grid of half the size does not hit."""
    y, x = np.mgrid[:height, :width]
    pixel = (y == 10) & (x == 10)
    return RLEMasks.from_dense(
        np.stack([(y - 30) ** 2 + (x - 20) ** 2 < 150, pixel, (y - 20) ** 2 + (x - 60) ** 2 < 99])
    )


def entry(
    number: int, height: int = HEIGHT, width: int = WIDTH, **other: object
) -> list[tuple[str, bytes]]:
    scores, points = np.linspace(0.9, 0.99, 3), np.array([[20, 30], [10, 10], [60, 20]])
    masks = discs(height, width)
    record = annotation.image_record(number, masks, range(3), points, scores, scores)
    record["annotations"][0] |= other
    return [
        (f"sa_{number}.jpg", jpeg(height, width)),
        (f"sa_{number}.json", json.dumps(record).encode()),
    ]


def repacked(folder: Path, size: int = 40) -> dict:
    """Repack the tars in `folder/in` into `folder/out`."""
    return repack(folder / "in", folder / "out", RepackConfig(size))


def check_same_tars(one: Path, other: Path) -> None:
    """Check that two folders hold the same tars."""
    one, other = (
        {path.name: path.read_bytes() for path in folder.glob("*.tar")} for folder in (one, other)
    )
    assert one == other


@pytest.fixture(scope="module")
def scenes(tmp_path_factory) -> Path:
    """Two tars of scenes larger than what they are repacked to."""
    folder = tmp_path_factory.mktemp("large")
    synthetic.write(folder, 8, seed=4, shard_images=4, long_side=(500, 640))
    return folder


@pytest.fixture
def source(tmp_path) -> Path:
    """A tar of one sample."""
    tar.write(tmp_path / "in" / "a.tar", entry(1))
    return tmp_path / "in" / "a.tar"


def test_images_masks_and_all_that_is_in_pixels(tmp_path):
    source = tmp_path / "in" / "sa_0.tar"
    given = entry(
        7, note="kept", point_coords=[[20.0, 30.0], [21.5, 29.5]], crop_box=[10, 20, 40.5, 30]
    )
    del (record := json.loads(given[1][1]))["annotations"][2]["crop_box"]
    record |= {"version": 3}
    tar.write(source, [given[0], ("sa_7.json", BOM_UTF8 + json.dumps(record).encode())])
    done = repacked(tmp_path)
    assert (done["images"], done["copied"], done["masks"], done["dropped_masks"]) == (1, 0, 2, 1)
    found = members(tmp_path / "out" / "sa_0.tar")
    assert list(found) == ["sa_7.jpg", "sa_7.json"]
    assert image.size(found["sa_7.jpg"], "x") == (30, 40)
    small = json.loads(found["sa_7.json"])
    assert small["version"] == 3
    assert small["image"] == {"image_id": 7, "width": 40, "height": 30, "file_name": "sa_7.jpg"}
    first, other = small["annotations"]
    halved = discs()[np.array([0, 2])].resample(2 * np.arange(30) + 1, 2 * np.arange(40) + 1)
    assert [each["segmentation"]["counts"].encode() for each in (first, other)] == halved.to_coco()
    assert [each["area"] for each in (first, other)] == halved.areas().tolist()
    x0, y0, x1, y1 = halved.boxes()[0]
    assert first["bbox"] == [x0, y0, x1 - x0, y1 - y0]
    assert first["crop_box"] == [5.0, 10.0, 20.25, 15.0]
    assert first["point_coords"] == [[10.0, 15.0], [10.75, 14.75]]
    assert (first["note"], first["predicted_iou"], other["id"]) == ("kept", 0.9, 2)
    assert list(first) == list(record["annotations"][0])
    assert "crop_box" not in other


@pytest.mark.slow
def test_the_grid_is_the_frames(scenes, tmp_path):
    """Masks are those that the transform of training gives at this size, cut beside the image."""
    repack(scenes, tmp_path / "out", RepackConfig(256))
    for name in ("sa_000000.tar", "sa_000001.tar"):
        before, after = members(scenes / name), members(tmp_path / "out" / name)
        for json_name in [each for each in before if each.endswith(".json")]:
            large, small = (annotation.parse(each[json_name], "x") for each in (before, after))
            transform = ImageTransform.resize_longest_side(large.size, 256)
            assert small.size == transform.resized
            dense = transform.apply_masks(large.masks, 256).to_dense()
            height, width = small.size
            assert np.array_equal(small.masks.to_dense(), dense[dense.any((1, 2)), :height, :width])


@pytest.mark.slow
def test_training_sees_nearly_the_same(tmp_path):
    """Samples of repacked shards at their size: the same names, boxes within 3 pixels, mean IoU
    above .97, images as JPEG leaves them."""
    synthetic.write(tmp_path / "in", 6, seed=4, long_side=(1000, 1200))
    repacked(tmp_path, 512)
    indices = [indexes.build(tmp_path / name, tmp_path / f"{name}.index") for name in ("in", "out")]
    for column in ("image_id", "name"):
        assert np.array_equal(*(each.images[column] for each in indices))
    sources = [
        SampleSource(str(each.folder), SampleConfig(512, 128, 1000), RandomSpec(0, 1, 1))
        for each in indices
    ]
    overlaps, decibels = [], []
    for row in range(6):
        large, small = (source.sample(SampleRef(0, row, row)) for source in sources)
        assert large.name == small.name
        assert large.image.shape == small.image.shape
        overlaps += np.diag(large.masks.iou(small.masks)).tolist()
        assert np.abs(large.boxes_input - small.boxes_input).max() < 3
        error = (large.image.float() - small.image.float()).square().mean()
        decibels.append(float(10 * (255**2 / error).log10()))
    assert np.mean(overlaps) > 0.97
    assert min(overlaps) > 0.9
    assert min(decibels) > 30


def test_small_images_are_copied_byte_for_byte(tmp_path):
    raw = entry(1)
    pixels = np.arange(5000).reshape(100, 50)
    gray, deep = (cv2.imencode(".png", pixels.astype(kind))[1].tobytes() for kind in ("u1", "u2"))
    others = [("sa_2.jpg", jpeg()), ("sa_3.png", gray), ("sa_4.png", deep)]
    odd = [("notes.txt", b""), ("sa_9.json", b"{}")]
    tar.write(tmp_path / "in" / "a.tar", [*raw, *others, *odd])
    done = repacked(tmp_path, 80)
    expected = {"tars": 1, "images": 4, "copied": 3, "masks": 3, "dropped_masks": 0}
    assert expected.items() <= done.items()
    assert done["other_files"] == 2
    found = members(tmp_path / "out" / "a.tar")
    assert list(found) == ["sa_1.jpg", "sa_1.json", "sa_2.jpg", "sa_3.jpg", "sa_4.png"]
    assert dict(raw).items() <= found.items()
    assert (found["sa_2.jpg"], found["sa_4.png"]) == (jpeg(), deep)
    assert image.size(found["sa_3.jpg"], "x") == (80, 40)


@pytest.mark.slow
def test_done_is_done(scenes, tmp_path, monkeypatch):
    """A finished tar is kept until its source or the tar itself are others; copying or moving it
    changes nothing, and one of other settings is not replaced."""
    out = tmp_path / "out"

    def kept(size: int = 128, quality: int = 90) -> int:
        return repack(source, out, RepackConfig(size, quality))["existing"]

    def contents() -> dict[Path, bytes]:
        return {path: path.read_bytes() for path in (first, second)}

    source = shutil.copytree(scenes, tmp_path / "in")
    first, second = out / "sa_000000.tar", out / "sa_000001.tar"
    assert kept() == 0
    before = contents()
    times = [path.stat().st_mtime_ns for path in (first, second)]
    assert kept() == 2
    assert [path.stat().st_mtime_ns for path in (first, second)] == times
    os.utime(first)
    assert kept() == 2
    broken = bytearray(before[first])
    broken[2000] ^= 1
    first.write_bytes(broken)
    second.unlink()
    assert kept() == 0
    assert contents() == before
    (out / "repack" / "sa_000001.tar.json").write_text("{}")
    assert kept() == 1
    for config in (RepackConfig(128, 80), RepackConfig(100)):
        with error_line(rf"^{first}: .*give another --out"):
            repack(source, out, config)
    assert contents() == before
    for path in before:
        path.unlink()
    assert kept(size=100, quality=80) == 0
    os.utime(source / "sa_000000.tar")
    assert kept(size=100, quality=80) == 1
    changed = source / "sa_000001.tar"
    head, status = bytearray(changed.read_bytes()), changed.stat()
    synthetic.write(tmp_path / "other", 4, seed=9, first=4, shard_images=4, long_side=(500, 640))
    head[: 2**16] = (tmp_path / "other" / changed.name).read_bytes()[: 2**16]
    changed.write_bytes(head)
    os.utime(changed, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert repack(source / "sa_000000.tar", out, RepackConfig(100, 80))["existing"] == 1
    assert kept(size=100, quality=80) == 1


@pytest.mark.slow
def test_killed_halfway(scenes, tmp_path, monkeypatch):
    """Whatever moment it ends at, the same command leaves what one run leaves, and no remains."""
    repack(scenes, tmp_path / "whole", RepackConfig(64))
    out = tmp_path / "out"
    replace = os.replace

    def killed(source, target):
        if str(target).endswith("out/sa_000001.tar"):
            raise KeyboardInterrupt
        replace(source, target)

    monkeypatch.setattr(os, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        repack(scenes, out, RepackConfig(64))
    monkeypatch.undo()
    (out / "repack" / "..sa_000001.tar.x1y2").write_bytes(b"what a killed process left")
    [done] = out.glob("*.tar")
    assert done.name == "sa_000000.tar"
    assert repack(scenes, out, RepackConfig(64))["existing"] == 1
    assert {path.name for path in (out / "repack").glob("*.json")} == {
        "sa_000000.tar.json",
        "sa_000001.tar.json",
    }
    check_same_tars(out, tmp_path / "whole")


@pytest.mark.slow
@pytest.mark.usefixtures("forked_workers")
def test_processes_leave_the_same(scenes, tmp_path):
    seen, config = [], RepackConfig(64)
    one = repack(scenes, tmp_path / "one", config, progress=lambda *done: seen.append(done))
    two = repack(scenes, tmp_path / "two", config, workers=2)
    assert seen == [(1, 2), (2, 2)]
    assert one == two
    check_same_tars(tmp_path / "one", tmp_path / "two")


def test_broken_samples_are_left_out_and_named(tmp_path):
    (_, jpg), cut = entry(4)
    files = [*entry(1), *entry(2), *entry(3), ("sa_4.jpg", jpg[:-50]), cut]
    files += [*entry(5, point_coords="here"), ("sa_6.jpg", jpeg()), entry(6, 50, 50)[1]]
    files.append(("sa_7.jpg", jpeg()))
    tar.write(tmp_path / "in" / "a.tar", [*files, ("sa_7.json", b"{"), *entry(8)])
    done = repacked(tmp_path)
    assert done["images"] == 4
    reasons = {each["name"]: each["reason"] for each in done["skipped"]}
    assert list(reasons) == ["a.tar:sa_7", "a.tar:sa_4", "a.tar:sa_5", "a.tar:sa_6"]
    assert "cannot be decoded" in reasons["a.tar:sa_4"]
    assert "Expected `array`, got `str`" in reasons["a.tar:sa_5"]
    assert "50 x 50" in reasons["a.tar:sa_6"]
    assert repacked(tmp_path)["skipped"] == done["skipped"]


def test_unusable_tars_are_named_and_the_others_done(source, tmp_path):
    source.with_name("b.tar").write_bytes(b"no tar")
    cut = [(f"sa_{number}.jpg", jpeg()[:-50]) for number in (2, 3)]
    tar.write(source.with_name("c.tar"), [*entry(1), *cut])
    done = repacked(tmp_path)
    assert (done["tars"], done["images"]) == (1, 1)
    assert "b.tar" in done["failed"][0]
    assert "c.tar: 2 of its 3 images" in done["failed"][1]
    assert [path.name for path in tmp_path.glob("out/*.tar")] == ["a.tar"]


@pytest.mark.slow
def test_a_salvaged_index_is_repacked_as_far_as_it_goes(scenes, tmp_path):
    cut, out = tmp_path / "in" / "sa_000000.tar", tmp_path / "out"
    cut.parent.mkdir()
    whole = (scenes / cut.name).read_bytes()
    cut.write_bytes(whole[: len(whole) * 3 // 4])
    salvaged = indexes.extend(cut, tmp_path / "index", salvage=True).index
    assert 0 < len(salvaged) < 4
    done = repack(tmp_path / "index", out, RepackConfig(128))
    assert (done["images"], done["failed"]) == (len(salvaged), [])
    assert "it was cut short" in done["broken_tars"][0]
    assert len(indexes.build(out, tmp_path / "small")) == len(salvaged)
    again = repack(tmp_path / "index", out, RepackConfig(128))
    assert (again["existing"], again["broken_tars"]) == (1, done["broken_tars"])
    [reason] = repack(cut, out, RepackConfig(128))["failed"]  # nobody allowed it
    assert "'gigamask index --salvage'" in reason


def test_what_reads_back_differently_is_not_kept(source, tmp_path, monkeypatch):
    write, place = tar.write, b"0.9,"

    def write_one_bit_wrong(path, given):
        write(path, given)
        raw = bytearray(path.read_bytes())
        raw[raw.index(place)] ^= 1
        path.write_bytes(raw)

    monkeypatch.setattr(tar, "write", write_one_bit_wrong)
    with error_line(r"a.tar.*other bytes"):
        repacked(tmp_path)
    place = b"ustar"
    with error_line(r"a.tar.*checksum"):
        repacked(tmp_path)
    assert [path.name for path in tmp_path.glob("out/**/*")] == ["repack", "lock"]


def test_errors(source, tmp_path, monkeypatch):
    out = tmp_path / "out"
    tar.write(tmp_path / "more" / "a.tar", entry(1))
    with error_line(r"--size.*32.*31"):
        repack(source, out, RepackConfig(31))
    with error_line(r"--quality.*1 to 100.*101"):
        repack(source, out, RepackConfig(64, 101))
    indexes.build(source, tmp_path / "index")
    more, photos = tmp_path / "more", tmp_path / "photos"
    photos.mkdir()
    (photos / "1.jpg").write_bytes(jpeg())
    for line, given, place in (
        (r"--out .*in.*a.tar", source, more / ".." / "in"),
        (r"--out .*index", source, tmp_path / "index"),
        (r"more/a.tar.*in/a.tar", [source, more], out),
        (r"^\S*a.tar", source, more),
        (r"a.tar.*Not a directory", source, source),
        (r"photos: is a folder of images where tars are expected", photos, out),
        (r"photos: is not a folder of tars, but holds 1.jpg", source, photos),
    ):
        with error_line(line):
            repack(given, place, RepackConfig(64))

    lock = exclusive_lock(out / "repack" / "lock", "busy")
    with lock, error_line(r"out: another process"):
        repacked(tmp_path)

    def full(path, given):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(tar, "write", full)
    with error_line(r"out/a.tar.*No space left on device"):
        repacked(tmp_path)
