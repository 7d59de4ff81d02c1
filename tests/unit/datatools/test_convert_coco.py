"""COCO's JSON as other programs write it: ids, names, sizes, rings, panoptic files, limits."""

import json
import unicodedata
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from gigamask.datatools import convert_coco, outlines
from gigamask.datatools.coco_json import canonical_id
from gigamask.datatools.convert_coco import CocoImage, CocoSource
from gigamask.datatools.find_source import of_annotations
from gigamask.datatools.formats import ConvertOptions
from gigamask.datatools.objects import Objects, SourceListing
from tests.errors import error_line
from tests.unit.datatools.test_convert import SQUARE, jpeg


def listing(
    folder: Path,
    images: list[dict],
    annotations: list[dict],
    files: tuple[str, ...] = ("1.jpg",),
    categories: list[dict] | None = None,
) -> SourceListing:
    for name in files:
        path = folder / "photos" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(jpeg())
    content = {"images": images, "annotations": annotations, "categories": categories or []}
    (folder / "coco.json").write_text(json.dumps(content))
    return CocoSource(folder / "coco.json", folder / "photos").listing(ConvertOptions())


def row(number: object = 1, name: str = "1.jpg", **other: object) -> dict:
    return {"id": number, "file_name": name, "width": 30, "height": 20} | other


def mask(number: object = 1, **other: object) -> dict:
    return {"id": 7, "image_id": number, "segmentation": SQUARE} | other


def of_one(folder: Path, annotations: list[dict], **options) -> SourceListing:
    """List the annotations of one image."""
    return listing(folder, [row()], annotations, **options)


def only(found: SourceListing) -> Objects:
    (image,) = found.images
    return image.objects(image.path.read_bytes())


@pytest.mark.parametrize(
    "stated, expected",
    [
        (1, 1),
        ("1.0", 1),
        (" 1", 1),
        ("-3", -3),
        ("007", "007"),
        ("a", "a"),
        (1.5, "1.5"),
        ("9" * 30, "9" * 30),
        (10**30, 10**30),
    ],
)
def test_one_id_however_it_is_written(stated, expected):
    assert canonical_id(stated) == expected


@pytest.mark.parametrize("image_id", [1, 1.0, "1", "1.0"])
@pytest.mark.parametrize("category_id", [3, 3.0, "3"])
def test_ids_match_however_they_are_written(tmp_path, image_id, category_id):
    categories = [{"id": "3", "name": "cat"}, {"id": 4.0, "name": "dog"}]
    things = [mask(image_id, category_id=category_id, id=7.0), mask("1", category_id="4")]
    found = listing(tmp_path, [row(1.0)], things, categories=categories)
    assert [image.number for image in found.images] == [1]
    assert only(found).extras == [
        {"id": 7, "category_id": 3, "category": "cat"},
        {"id": 7, "category_id": 4, "category": "dog"},
    ]


def test_a_category_with_two_names_is_refused(tmp_path):
    """Merging of files leaves them; the masks of both would get the last name."""
    categories = [{"id": 1, "name": "cat"}, {"id": 1, "name": "cat"}, {"id": "1", "name": "dog"}]
    assert of_one(tmp_path, [], categories=categories[:2]).images
    with error_line("category 1 is both 'cat' and 'dog'"):
        of_one(tmp_path, [], categories=categories)


def test_categories_that_are_not_utf_8_are_refused(tmp_path):
    """As Windows' editors save them; the masks would have numbers for classes."""
    of_one(tmp_path, [], categories=[{"id": 1, "name": "cat"}])
    path = tmp_path / "coco.json"
    path.write_bytes(path.read_bytes().replace(b'"cat"', '"löwe"'.encode("cp1252")))
    with error_line("coco.json, in a category: is not UTF-8 text.*; save it as UTF-8"):
        CocoSource(path, tmp_path / "photos").listing(ConvertOptions())


def test_numbers_as_pandas_writes_them(tmp_path):
    things = [mask(area=float("nan"), iscrowd=0.0, category_id=float("nan"))]
    found = listing(tmp_path, [row(width=30.0, height="20")], things)
    assert only(found).masks.size == (20, 30)
    assert only(found).extras == [{"id": 7}]


@pytest.mark.parametrize("stated", [{}, {"width": None, "height": float("nan")}])
def test_a_size_that_is_not_stated_is_that_of_the_image(tmp_path, stated):
    found = listing(tmp_path, [{"id": 1, "file_name": "1.jpg"} | stated], [mask()])
    assert only(found).masks.size == (20, 30)
    assert only(found).masks.areas().tolist() == [60]


@pytest.mark.parametrize("bad", [[5, 5], [5, 5, 6, 6], [5, 5, 6, 6, 7, 7], [], [5, 5] * 3])
def test_a_ring_without_area_costs_no_mask(tmp_path, bad):
    objects = only(of_one(tmp_path, [mask(segmentation=[bad, *SQUARE, bad])]))
    assert (objects.masks.areas().tolist(), objects.skipped) == ([60], [])
    assert objects.notes == {outlines.DROPPED: 2}


def test_a_polygon_that_is_not_in_a_list(tmp_path):
    assert only(of_one(tmp_path, [mask(segmentation=SQUARE[0])])).masks.areas() == [60]


def test_the_first_pixel_is_no_fraction_of_the_image(tmp_path):
    pixel = mask(segmentation=[[0, 0, 1, 0, 1, 1, 0, 1]])
    assert only(of_one(tmp_path, [pixel])).masks.bounds.tolist() == [0, 1]


def test_a_symmetric_bow_tie_has_an_area(tmp_path):
    tie = [2, 2, 12, 12, 12, 2, 2, 12]
    assert only(of_one(tmp_path, [mask(segmentation=[tie])])).masks.areas() > 20


@pytest.mark.parametrize(
    "name, file",
    [
        ("a/1.jpg", "1.jpg"),
        ("a\\1.jpg", "1.jpg"),
        ("..\\photos\\1.jpg", "1.jpg"),
        ("{photos}/a/1.jpg", "a/1.jpg"),
        ("/elsewhere/photos/a/1.jpg", "a/1.jpg"),
        (unicodedata.normalize("NFC", "Fähre.jpg"), unicodedata.normalize("NFD", "Fähre.jpg")),
        ("1.jfif", "1.jfif"),
    ],
)
def test_names_of_files(tmp_path, name, file):
    name = name.format(photos=tmp_path / "photos")
    (image,) = listing(tmp_path, [row(1, name)], [mask()], (file,)).images
    assert (image.path, image.exists()) == (tmp_path / "photos" / file, True)


def test_two_names_that_mean_one_file_are_left_out(tmp_path):
    found = listing(tmp_path, [row(1, "a/1.jpg"), row(2, "b/1.jpg")], [mask()])
    assert found.images == []
    assert {each.kind for each in found.left_out.images} == {"several images of its name"}


@pytest.mark.parametrize(
    "name", ["x" * 300 + ".jpg", "../secret.jpg", "{folder}/secret.jpg", "a\0.jpg", ".."]
)
def test_a_name_that_no_file_can_have_costs_one_image(tmp_path, name):
    (tmp_path / "secret.jpg").write_bytes(jpeg())
    found = listing(tmp_path, [row(1), row(2, name.format(folder=tmp_path))], [mask()])
    assert [image.source for image in found.images if image.exists()] == ["1.jpg"]


@pytest.mark.parametrize(
    "annotation, kind",
    [
        ({"caption": "a cat"}, "captions"),
        ({"keypoints": [1, 1, 2], "num_keypoints": 1}, "keypoints"),
        ({"segments_info": [], "file_name": "1.png"}, "panoptic"),
    ],
)
def test_files_of_other_tasks_say_what_they_are(tmp_path, annotation, kind):
    with error_line(kind):
        of_one(tmp_path, [{"id": 1, "image_id": 1} | annotation])


@pytest.mark.parametrize(
    "text, told",
    [
        ('[{"segmentation": []}]', "holds a list, .*results"),
        ('[{"annotations": [{"result": [{"original_width": 9}]}]}]', "Label Studio; export 'COCO'"),
        ('{"a.jpg9": {"regions": [{"shape_attributes": {}}]}}', "VIA .*'COCO format'"),
        ('\ufeff{"type": "FeatureCollection"}', "GeoJSON"),
        ("<?xml?><annotations/>", "XML, as CVAT .*'COCO 1.0'"),
        ('{"shapes": []}', "give the folder"),
        ("PK\3\4", "unpack it"),
        ('{"images": [{"file_name": "a.jpg", "original_width": 9}], "anno', "not valid JSON"),
    ],
)
def test_files_of_other_programs_say_what_to_export(tmp_path, text, told):
    (tmp_path / "a.json").write_text(text, "utf-8")
    with error_line(rf"a\.json: .*{told}"):
        CocoSource(tmp_path / "a.json", tmp_path).listing(ConvertOptions())


def test_a_json_that_begins_otherwise_is_first_offered_to_other_formats(tmp_path):
    path = tmp_path / "a.json"
    for text, is_claimed in (('{"images": []}', True), ('{"type": "FeatureCollection"}', False)):
        path.write_text(text)
        assert CocoSource.is_format(path, tmp_path) == is_claimed
        assert of_annotations(str(path), tmp_path) == CocoSource(path, tmp_path)


def test_panoptic_segments(tmp_path):
    colors = np.zeros((20, 30, 3), np.uint8)
    colors[2:6, 2:6] = (1, 1, 0)  # id 257
    colors[8:12, 8:12] = (2, 0, 0)
    colors[14:18, 14:18] = (3, 0, 0)
    (tmp_path / "coco").mkdir()
    Image.fromarray(colors).save(tmp_path / "coco" / "1.png")
    segments = [
        {"id": 257.0, "category_id": "3", "iscrowd": 0, "area": 16, "bbox": [2, 2, 4, 4]},
        {"id": 2, "category_id": 4, "iscrowd": 1},
        {"id": 9, "category_id": 4},
    ]
    annotation = {"image_id": 1, "file_name": "1.png", "segments_info": segments}
    found = of_one(tmp_path, [annotation], categories=[{"id": 3, "name": "cat"}])
    objects = only(found)
    assert objects.masks.boxes().tolist() == [[2, 2, 5, 5]]
    assert objects.extras == [{"id": 257, "category_id": 3, "category": "cat"}]
    kinds = ["crowd", "no pixel in its image", "not in segments_info"]
    assert [each.kind for each in objects.skipped] == kinds
    written_on_windows = annotation | {"file_name": "coco\\1.png"}
    assert len(only(of_one(tmp_path, [written_on_windows])).masks) == 1
    (tmp_path / "coco" / "a").mkdir()
    Image.fromarray(colors[::-1]).save(tmp_path / "coco" / "a" / "1.png")
    found = of_one(tmp_path, [annotation | {"file_name": "a/1.png"}])
    assert only(found).masks.boxes().tolist() == [[2, 14, 5, 17]]
    with error_line("2 panoptic annotations"):
        only(of_one(tmp_path, [annotation, annotation]))


def test_a_folder_of_coco_is_refused_with_its_file(tmp_path):
    of_one(tmp_path, [mask()])
    with error_line(r"give the file .*coco\.json"):
        of_annotations(str(tmp_path), tmp_path / "photos")
    (tmp_path / "1.png").touch()
    assert not isinstance(of_annotations(str(tmp_path), tmp_path / "photos"), CocoSource)


@pytest.mark.parametrize(
    "annotations, datum",
    [
        ([mask()] * 10_001, "10,001 masks"),
        ([mask(segmentation=[[1, 2] * 50_000])], "numbers"),
        ([mask(segmentation=[[0, 0, 9, 20_000, 20, 0] * 70])] * 12, "33,616,800 pixels"),
        ([mask(segmentation={"size": [20, 30], "counts": "0" * (2**23 + 1)})], "bytes of run"),
    ],
)
def test_limits_of_an_image(tmp_path, monkeypatch, annotations, datum):
    monkeypatch.setattr(convert_coco, "MAX_NUMBERS", 90_000)

    def draw(*_):
        raise AssertionError("drawn beyond the limits")

    monkeypatch.setattr(outlines.mask_api_new_cpp, "frPoly", draw)
    with pytest.raises(outlines.MaskLimitError, match=datum):
        only(of_one(tmp_path, annotations))


@pytest.mark.parametrize("limit, groups", [(1, 3), (2**20, 1)])
def test_an_image_that_fails_costs_no_other_of_its_group(tmp_path, monkeypatch, limit, groups):
    monkeypatch.setattr(convert_coco, "GROUP_BYTES", limit)
    monkeypatch.setattr(convert_coco, "MAX_NUMBERS", 50)
    names = ("0.jpg", "1.jpg", "2.jpg")
    annotations = [mask(0), mask(1, segmentation=[[1, 2] * 50]), mask(2)]
    images = listing(tmp_path, list(map(row, range(3), names)), annotations, names).images
    found = list(CocoImage.all_objects(CocoImage.read_all(images)))
    assert len(found) == groups
    kinds = [type(objects) for group in found for *_, objects in group]
    assert kinds == [Objects, outlines.MaskLimitError, Objects]


def test_masks_that_are_drawn_in_parts_keep_their_order(tmp_path, monkeypatch):
    monkeypatch.setattr(outlines, "MAX_OUTLINE", 40)
    shapes = [
        [[1, 1, 3, 1, 3, 3]],
        {"size": [20, 30], "counts": [0, 5, 595]},
        [*SQUARE, [20, 2, 22, 2, 22, 4]],
        [[20, 10, 25, 10, 25, 15]],
    ]
    objects = only(of_one(tmp_path, [mask(segmentation=each) for each in shapes]))
    assert objects.masks.boxes()[:, 0].tolist() == [2, 0, 4, 21]
    assert objects.skipped == []
