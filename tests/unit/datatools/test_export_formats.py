"""What is written is read back by pycocotools and by our own readers, to the pixel."""

import csv
import io
import json
import os
import tarfile
import zlib
from dataclasses import replace
from functools import partial
from pathlib import Path

import cv2
import numpy as np
import pytest
from PIL import Image
from pycocotools.coco import COCO

from gigamask import files, plugin
from gigamask.data import annotation, image
from gigamask.data.orientation import turn
from gigamask.datatools import export_formats
from gigamask.datatools.convert import ConvertOptions, convert
from gigamask.datatools.export_formats import ExportedImage, ExportOptions, remove_export, write
from gigamask.datatools.formats import writers
from gigamask.datatools.image_files import read_file
from gigamask.errors import GigamaskError
from gigamask.masks.rle import RLEMasks
from tests.errors import error_line

SIZE = (40, 50)


@pytest.fixture
def photos(tmp_path):
    """Return two photographs; EXIF turns the second, whose masks are upright."""
    folder = tmp_path / "photos"
    (folder / "more").mkdir(parents=True)
    rng = np.random.default_rng(0)
    Image.fromarray(rng.integers(0, 256, (*SIZE, 3), np.uint8)).save(folder / "a.png")
    exif = Image.Exif()
    exif[0x0112] = 3
    blocks = np.kron(rng.integers(0, 256, (5, 5, 3)), np.ones((8, 10, 1)))
    Image.fromarray(blocks.astype(np.uint8)).save(folder / "more" / "b.jpg", exif=exif, quality=95)
    return folder


def exported(photos, name, seed, classes=("disc", "ring", "")):
    """Return an image with a disc, a ring, and one mask of several parts that touch at corners."""
    ys, xs = np.mgrid[: SIZE[0], : SIZE[1]]
    distance = np.hypot(ys - 18, xs - 15 - seed)
    noise = np.random.default_rng(seed).random(SIZE) < 0.5
    dense = [distance < 5, (distance > 8) & (distance < 12), noise & (xs > 35)]
    objects = [
        {"id": key, "category": category, "score": 0.5, "origin": "drawn", "model": None}
        for key, category in zip((2, 5, 7), classes, strict=True)
    ]
    masks = RLEMasks.from_dense(np.stack(dense))
    file = photos / name
    return ExportedImage(name, masks, objects, partial(read_file, file, name), file)


@pytest.fixture
def images(photos):
    return [exported(photos, "a.png", 0), exported(photos, "more/b.jpg", 3)]


def parsed(folder):
    """Return the annotations of shards, their JSONs, and all members, by the name of the JSON."""
    found = {}
    for path in folder.glob("*.tar"):
        with tarfile.open(path) as opened:
            raw = {each.name: opened.extractfile(each).read() for each in opened}
        for name in raw:
            if name.endswith(".json"):
                found[name] = annotation.parse(raw[name], name), json.loads(raw[name]), raw
    return found


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # pycocotools'
@pytest.mark.parametrize("polygons", [False, True])
def test_coco_is_read_by_pycocotools(images, tmp_path, polygons, capsys):
    write(lambda: images, tmp_path / "out", ExportOptions(("coco",), polygons))
    read = COCO(tmp_path / "out" / "coco.json")
    for each in images:
        assert read.imgs[each.number]["file_name"] == each.name
        for i, told in enumerate(each.objects):
            entry = read.anns[each.annotation_id(told["id"])]
            dense = each.masks[i : i + 1].to_dense()[0]
            assert (read.annToMask(entry) == dense).all()
            assert read.cats[entry["category_id"]]["name"] == (told["category"] or "object")
            assert entry["area"] == dense.sum()
            assert entry["origin"] == "drawn"
            assert isinstance(entry["segmentation"], list) == (polygons and i == 0)
            assert "model" not in entry


def check_is_read(images, photos, folder, name, source):
    """Write in a format, convert that, and compare."""
    write(lambda: images, folder / "out", ExportOptions((name,), polygons=True))
    convert(folder / "out" / source, photos, folder / "tars", ConvertOptions())
    found = sorted(parsed(folder / "tars").values(), key=lambda each: each[1]["image"]["source"])
    assert len(found) == len(images)
    for (read, _, _), each in zip(found, images, strict=True):
        assert (read.masks.to_dense() == each.masks.to_dense()).all()
        if name != "labels":
            assert read.categories == ("disc", "ring", "object")


def test_coco_and_label_images_are_read_by_convert(images, photos, tmp_path):
    """Overlaps are cut from the larger mask in label images only; these masks have none."""
    check_is_read(images, photos, tmp_path, "coco", "coco.json")
    check_is_read(images[:1], photos, tmp_path / "other", "labels", "labels")


def test_shards_hold_upright_images_and_what_is_known_of_each_mask(images, tmp_path):
    write(lambda: images, tmp_path / "out", ExportOptions(("shards",)))
    found = parsed(tmp_path / "out" / "shards")
    for each in images:
        read, record, raw = found[f"sa_{each.number}.json"]
        assert (read.masks.to_dense() == each.masks.to_dense()).all()
        assert record["image"]["source"] == each.name
        assert {entry["origin"] for entry in record["annotations"]} == {"drawn"}
        member = Image.open(io.BytesIO(raw[f"sa_{each.number}.jpg"]))
        assert member.getexif().get(0x0112, 1) == 1
        upright = cv2.imread(str(each.file))[..., ::-1]  # which applies EXIF
        assert np.abs(np.array(member).astype(int) - upright).mean() < 12


def test_images_agree_with_masks_also_where_exif_is_ignored(images, tmp_path, monkeypatch):
    for links in ("a.png", ""):
        write(lambda: images, tmp_path / f"out{links}", ExportOptions(("coco",), images=True))
        for each in images:
            path = tmp_path / f"out{links}" / "images" / each.name
            assert path.is_symlink() == (each.name == links)
            pixels = np.array(Image.open(path)).astype(int)
            assert np.abs(pixels - cv2.imread(str(each.file))[..., ::-1]).mean() < 4
        monkeypatch.setattr(Path, "symlink_to", Path.samefile)  # fails, as on a memory stick


@pytest.mark.parametrize("orientation", [1, 3, 6])
@pytest.mark.parametrize("name", ["8.png", "16.png", "rgb16.png", "8.webp", "8.tif", "16.tif"])
def test_images_that_exif_turns_are_written_upright_in_their_own_format(
    tmp_path, name, orientation
):
    stored = np.random.default_rng(0).integers(0, 2**16, (9, 14, 3), np.uint16)
    stored = stored if "16" in name else (stored >> 8).astype(np.uint8)
    stored = stored[..., 0] if name.startswith("16") else stored
    file, exif = tmp_path / name, Image.Exif()
    exif[0x0112] = orientation
    if name == "rgb16.png":
        raw = cv2.imencode(".png", stored[..., ::-1])[1].tobytes()
        block = b"eXIf" + exif.tobytes()[6:]
        chunk = (len(block) - 4).to_bytes(4) + block + zlib.crc32(block).to_bytes(4)
        file.write_bytes(raw[:33] + chunk + raw[33:])
    else:
        Image.fromarray(stored).save(file, exif=exif, lossless=True)
    upright = turn(stored, orientation)
    masks = RLEMasks.from_dense(np.ones((1, *upright.shape[:2]), bool))
    told = [{"id": 1, "category": "", "score": None}]
    each = ExportedImage(name, masks, told, partial(read_file, file, name), file)
    options = ExportOptions(images=True)
    write(lambda: [each], tmp_path / "out", options)
    assert options.skipped == {}
    written = tmp_path / "out/images" / name
    assert image.image_format(written.read_bytes()) == image.image_format(file.read_bytes())
    found = image.read_stored(written.read_bytes(), name)
    assert found.dtype == stored.dtype
    assert (found == np.atleast_3d(upright)).all()


def test_the_table_states_what_regionprops_does(images, tmp_path):
    table = tmp_path / "tables" / "regions.csv"
    assert write(lambda: images, tmp_path / "out", ExportOptions((), table=table)) == [table]
    rows = list(csv.DictReader(table.read_text().splitlines()))
    assert len(rows) == 6
    for row, (each, i) in zip(rows, [(each, i) for each in images for i in range(3)], strict=True):
        dense = each.masks[i : i + 1].to_dense()[0]
        ys, xs = np.nonzero(dense)
        pixels = cv2.imread(str(each.file)).astype(float).mean(2)
        expected = {"label": each.objects[i]["id"], "area": dense.sum()}
        expected |= {"centroid-0": ys.mean(), "centroid-1": xs.mean(), "score": 0.5}
        expected |= {"bbox-0": ys.min(), "bbox-1": xs.min()}
        expected |= {"bbox-2": ys.max() + 1, "bbox-3": xs.max() + 1}
        for name, value in expected.items():
            assert float(row[name]) == pytest.approx(value), name
        assert float(row["mean_intensity"]) == pytest.approx(pixels[dense].mean(), abs=0.5)
        assert (row["image"], row["class"]) == (each.name, each.objects[i]["category"])


def test_ids_stay_when_an_image_is_added(photos, images, tmp_path):
    numbers = [each.number for each in images]
    other = exported(photos, "A first.png", 1)
    assert other.number not in numbers
    assert [each.number for each in images] == numbers
    ids = [each.annotation_id(told["id"]) for each in (other, *images) for told in each.objects]
    assert len(set(ids)) == 9
    assert max(ids) < 2**53  # JavaScript's numbers
    assert exported(photos, "000000000139.jpg", 0).number == 139


def test_an_export_replaces_the_last_one_only_when_it_is_whole(images, tmp_path):
    out = tmp_path / "out"
    write(lambda: images, out, ExportOptions(("coco", "labels")))
    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}

    def stop():
        raise GigamaskError("stopped")

    with error_line("stopped"):
        write(lambda: images[:1], out, ExportOptions(tuple(writers()), check=stop))
    assert {path: path.read_bytes() for path in out.rglob("*") if path.is_file()} == before
    (out / "labels" / "more" / "mine.png").write_bytes(b"drawn by hand")
    write(lambda: images[:1], out, ExportOptions(("labels",), owned=True))
    assert {path.name for path in (out / "labels").rglob("*.png")} == {"a.png", "mine.png"}
    (out / "labels" / "more" / "b.png").write_bytes(b"drawn by hand")
    with error_line("b.png: would be replaced"):
        write(lambda: images, out, ExportOptions(("labels",), owned=True))
    remove_export(out, "labels")
    assert {path.name for path in (out / "labels").rglob("*.png")} == {"b.png", "mine.png"}


def test_files_of_one_name_and_unknown_formats_are_refused(photos, images, tmp_path, monkeypatch):
    twin = exported(photos, "a.jpg", 0)
    with error_line(r"a\.png and a\.jpg"):
        write(lambda: [images[0], twin], tmp_path / "out", ExportOptions(("labels",)))
    monkeypatch.setattr(export_formats, "_digest", lambda text, size: 7)
    write(lambda: images[:1], tmp_path / "ids", ExportOptions())
    read = json.loads((tmp_path / "ids" / "coco.json").read_text())
    assert [each["id"] for each in read["annotations"]] == [8, 9, 10]
    monkeypatch.undo()
    same = [exported(photos, f"photos/IMG_{number}.jpg", 0) for number in (695614, 839957)]
    with error_line("IMG_695614.jpg and photos/IMG_839957.jpg: .* same id"):
        write(lambda: same, tmp_path / "out", ExportOptions())
    with error_line("--table .*: is a folder"):
        ExportOptions(table=photos)
    with error_line("--to voc"):
        write(lambda: images, tmp_path / "out", ExportOptions(("voc",)))
    monkeypatch.setattr(plugin, "installed", lambda: ())
    with error_line("--to yolo: needs gigamask's plugin formats"):
        write(lambda: images, tmp_path / "out", ExportOptions(("yolo",)))


def test_an_image_that_cannot_be_read_is_left_out_with_the_reason(photos, images, tmp_path):
    (photos / "a.png").unlink()
    options = ExportOptions(("shards", "coco"), table=tmp_path / "regions.csv")
    write(lambda: images, tmp_path / "out", options)
    assert list(options.skipped) == ["a.png"]
    assert len(parsed(tmp_path / "out" / "shards")) == 1


def test_an_object_that_others_cover_in_a_label_image_is_said(images, tmp_path):
    dense = images[0].masks.to_dense()
    dense[2] = dense[0] | dense[1]
    options = ExportOptions(("labels", "coco"))
    write(lambda: [replace(images[0], masks=RLEMasks.from_dense(dense))], tmp_path, options)
    [line] = options.notes
    assert line.startswith("1 object left out of the label images")
    assert not options.skipped


def test_only_files_of_earlier_exports_are_replaced(images, tmp_path):
    options = ExportOptions(("coco", "labels"))
    written = write(lambda: images, tmp_path, options)
    assert write(lambda: images, tmp_path, options) == written
    with error_line(r"other image such as more/b.jpg"):
        write(lambda: images[:1], tmp_path, options)
    corrected, stated = tmp_path / "labels" / "a.png", tmp_path / "coco.json"
    corrected.write_bytes(corrected.read_bytes() + b"corrected by hand")
    os.utime(corrected, (0, 0))  # as of a copy
    stated.touch()
    with error_line("labels/a.png: would be replaced, but .*changed since"):
        write(lambda: images, tmp_path, options)
    write(lambda: images, tmp_path, ExportOptions())
    assert corrected.read_bytes().endswith(b"by hand")
    with files.folder_lock(tmp_path, ""), error_line("another process exports to it"):
        write(lambda: images, tmp_path, options)
    own = tmp_path / "mine" / "labels" / "a.png"
    own.parent.mkdir(parents=True)
    own.write_bytes(b"drawn by hand")
    with error_line("labels: would be replaced, but no export wrote it"):
        write(lambda: images, tmp_path / "mine", options)
    assert own.read_bytes() == b"drawn by hand"
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["labels"]
