"""Tars become what they were converted from, to the pixel."""

import json
from codecs import BOM_UTF8

import cv2
import numpy as np
import pytest
from PIL import Image

from gigamask.data import image, tar
from gigamask.datatools.convert import ConvertOptions, convert
from gigamask.plugins.formats.extract import ExtractCommand, extract
from gigamask.serialization import read_json
from tests.errors import error_line
from tests.unit.datatools.test_convert import members


@pytest.fixture
def labels(tmp_path):
    """Return label images of two photographs; EXIF turns the second."""
    rng, found = np.random.default_rng(0), {}
    for name, suffix, values in (("a", ".png", (7, 300)), ("b", ".jpg", (2, 1))):
        pixels = np.zeros((20, 20), np.uint16)
        pixels[2:8, 3:15], pixels[10:18, 5:9] = values
        for folder, stored in (
            ("photos", rng.integers(0, 256, (20, 20, 3), np.uint8)),
            ("labels", pixels),
        ):
            path = tmp_path / folder / name
            path.parent.mkdir(exist_ok=True)
            exif = Image.Exif()
            if folder == "photos" and suffix == ".jpg":
                exif[0x0112] = 6
            end = suffix if folder == "photos" else ".png"
            Image.fromarray(stored).save(path.with_suffix(end), exif=exif)
        found[name] = pixels
    convert(tmp_path / "labels", tmp_path / "photos", tmp_path / "tars", ConvertOptions())
    return found


def test_label_images_of_tars_are_those_they_were_made_of(labels, tmp_path):
    result = extract(tmp_path / "tars", tmp_path / "out", ("labels", "labelme"))
    assert (result["images"], result["masks"], result["skipped"]) == (2, 4, {})
    for name, pixels in labels.items():
        assert (cv2.imread(str(tmp_path / f"out/labels/{name}.png"), -1) == pixels).all()
        content = read_json(tmp_path / f"out/labelme/{name}.json")
        assert (tmp_path / "out/labelme" / content["imagePath"]).resolve().is_file()
    stored = np.asarray(Image.open(tmp_path / "out/images/b.jpg"))
    upright = image.read_stored((tmp_path / "out/images/b.jpg").read_bytes(), "b")
    assert (stored == upright).all()  # no EXIF that turns it once more


def test_two_images_of_one_name_keep_both(labels, tmp_path):
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / f"{name}.tar").hardlink_to(tmp_path / "tars" / "sa_000000.tar")
    result = extract([tmp_path / "one", tmp_path / "two"], tmp_path / "out")
    assert result["images"] == 4
    coco = read_json(tmp_path / "out/coco.json")
    names = [each["file_name"] for each in coco["images"]]
    assert sorted(names) == ["a.jpg", "b.jpg", "two/sa_0.jpg", "two/sa_1.jpg"]
    assert len({each["id"] for each in coco["images"]}) == 4
    assert all((tmp_path / "out/images" / name).is_file() for name in names)
    copy = tmp_path / "three/two.tar"
    copy.parent.mkdir()
    copy.write_bytes((tmp_path / "two/two.tar").read_bytes())
    tars = [tmp_path / name for name in ("one", "two", "three")]
    assert extract(tars, tmp_path / "all", ("coco", "labels"))["images"] == 6
    coco = read_json(tmp_path / "all/coco.json")
    assert "two_2/sa_0.jpg" in {each["file_name"] for each in coco["images"]}
    assert [len({each["id"] for each in coco[kind]}) for kind in ("images", "annotations")] == [
        6,
        12,
    ]


def test_categories_without_a_name_and_masks_without_a_pixel_are_kept_apart(tmp_path):
    (tmp_path / "photos").mkdir()
    Image.new("RGB", (20, 20)).save(tmp_path / "photos/a.jpg")
    box = [2, 2, 9, 2, 9, 9, 2, 9]
    annotations = [
        {"id": number, "image_id": 0, "category_id": number, "segmentation": [box]}
        for number in (7, 2)
    ]
    image_row = {"id": 0, "file_name": "a.jpg", "width": 20, "height": 20}
    categories = [{"id": 2, "name": "cell"}]
    content = {"images": [image_row], "annotations": annotations, "categories": categories}
    (tmp_path / "coco.json").write_text(json.dumps(content))
    convert(tmp_path / "coco.json", tmp_path / "photos", tmp_path / "tars", ConvertOptions())
    result = extract(tmp_path / "tars", tmp_path / "out", ("coco", "labels"))
    assert result["notes"] == ["1 object left out of the label images: others cover all pixels"]
    coco = read_json(tmp_path / "out/coco.json")
    assert {each["id"]: each["name"] for each in coco["categories"]} == {7: "7", 2: "cell"}
    assert [each["category_id"] for each in coco["annotations"]] == [7, 2]
    convert(
        tmp_path / "out/coco.json", tmp_path / "out/images", tmp_path / "again", ConvertOptions()
    )


def test_the_command_states_what_it_left_out_and_refuses_folders_of_images(
    labels, tmp_path, capsys
):
    raw = bytearray((tmp_path / "tars/sa_000000.tar").read_bytes())
    at = raw.index(b"\xff\xd8\xff")
    raw[at : at + 64] = bytes(64)
    (tmp_path / "tars/sa_000000.tar").write_bytes(raw)
    command = ExtractCommand((str(tmp_path / "tars"),), str(tmp_path / "out"), strict=True)
    result = command.run()
    assert (result["images"], result["masks"], [*result["skipped"]]) == (1, 2, ["a.jpg"])
    assert "fault" in result
    assert "1 image with 2 masks" in capsys.readouterr().out
    coco = read_json(tmp_path / "out/coco.json")
    assert [each["file_name"] for each in coco["images"]] == ["b.jpg"]
    with error_line("folder of images"):
        extract(tmp_path / "photos", tmp_path / "no")


def test_categories_keep_their_ids(tmp_path):
    Image.new("RGB", (20, 20)).save(tmp_path / "a.png")
    square = [[2, 2, 9, 2, 9, 9, 2, 9]]
    annotations = [
        {"id": key, "image_id": 1, "category_id": category, "segmentation": square}
        for key, category in ((5, 51), (6, 3))
    ]
    categories = [{"id": 3, "name": "cell"}, {"id": 51, "name": "dirt"}]
    content = {
        "images": [{"id": 1, "file_name": "a.png", "height": 20, "width": 20}],
        "annotations": annotations,
        "categories": categories,
    }
    (tmp_path / "coco.json").write_text(json.dumps(content))
    convert(tmp_path / "coco.json", tmp_path, tmp_path / "tars", ConvertOptions())
    extract(tmp_path / "tars", tmp_path / "out")
    found = read_json(tmp_path / "out/coco.json")
    assert sorted(found["categories"], key=lambda each: each["id"]) == categories
    assert [each["category_id"] for each in found["annotations"]] == [51, 3]


def test_crowds_stay_and_new_ids_of_categories_are_said(tmp_path):
    Image.new("RGB", (20, 20)).save(tmp_path / "a.JPG")
    square = {"image_id": 1, "segmentation": [[2, 2, 9, 2, 9, 9, 2, 9]]}
    content = {
        "images": [{"id": 1, "file_name": "a.JPG", "height": 20, "width": 20}],
        "annotations": [
            {"id": key, "category_id": key, "iscrowd": key - 3, **square} for key in (3, 4)
        ],
        "categories": [{"id": key, "name": "cell"} for key in (3, 4)],
    }
    (tmp_path / "coco.json").write_text(json.dumps(content))
    options = ConvertOptions(keep_crowds=True)
    convert(tmp_path / "coco.json", tmp_path, tmp_path / "tars", options)
    assert "numbered anew" in extract(tmp_path / "tars", tmp_path / "out")["notes"][0]
    found = read_json(tmp_path / "out/coco.json")
    assert [each["iscrowd"] for each in found["annotations"]] == [0, 1]
    assert found["images"][0]["file_name"] == "a.JPG"


@pytest.mark.parametrize("suffix", [".txt", ".json"])
def test_images_of_yolo_and_labelme_keep_their_names(tmp_path, suffix):
    (tmp_path / "photos/train").mkdir(parents=True)
    (tmp_path / "labels/train").mkdir(parents=True)
    Image.new("RGB", (20, 20)).save(tmp_path / "photos/train/7.jpg")
    shape = {"label": "cell", "points": [[2, 2], [9, 2], [9, 9]], "shape_type": "polygon"}
    content = {"shapes": [shape], "imageHeight": 20, "imageWidth": 20, "imagePath": "7.jpg"}
    text = "0 .1 .1 .5 .1 .5 .5" if suffix == ".txt" else json.dumps(content)
    (tmp_path / f"labels/train/7{suffix}").write_text(text)
    convert(tmp_path / "labels", tmp_path / "photos", tmp_path / "tars", ConvertOptions())
    extract(tmp_path / "tars", tmp_path / "out")
    found = read_json(tmp_path / "out/coco.json")
    assert [each["file_name"] for each in found["images"]] == ["train/7.jpg"]


def test_values_beyond_16_bits_are_numbered_anew(tmp_path):
    for folder in ("photos", "labels"):
        (tmp_path / folder).mkdir()
    pixels = np.zeros((20, 20, 3), np.uint8)
    Image.fromarray(pixels).save(tmp_path / "photos/a.png")
    pixels[2:8, 2:8], pixels[10:15, 3:9] = (255, 0, 200), (0, 3, 0)
    Image.fromarray(pixels).save(tmp_path / "labels/a.png")
    convert(tmp_path / "labels", tmp_path / "photos", tmp_path / "tars", ConvertOptions())
    path = tmp_path / "tars/sa_000000.tar"
    given, note = members(path), "values of label images above 65,535 are numbered anew"
    for label in (b"13107455", b"-1", b'"cell"'):
        tar.write(
            path,
            [
                (
                    name,
                    given[name]
                    .replace(b"13107455", label)
                    .replace(b'{"image":', BOM_UTF8 + b'{"image":'),
                )
                for name in given
            ],
        )
        result = extract(path, tmp_path / "out", ("coco", "labels"))
        assert result["notes"] == [note] * label.isdigit()
        found = cv2.imread(str(tmp_path / "out/labels/a.png"), -1)
        assert np.unique(found).tolist() == [0, 1, 2]
        assert ((found > 0) == (pixels > 0).any(2)).all()
