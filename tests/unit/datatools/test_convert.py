"""Converting COCO's json and label images: what becomes a mask, what is left out, and what stops it
all.
"""

import io
import json
import re
import tarfile
import zlib
from pathlib import Path

import cv2
import numpy as np
import pytest
import simplejpeg
from PIL import Image

from gigamask.data import annotation, image
from gigamask.data import index as indexes
from gigamask.datatools.convert import NAMELESS, PARTIAL, ConvertOptions, convert, listed
from gigamask.datatools.convert_labels import BLACK, MANY_AREAS, MAYBE_VOID, decode_labels
from gigamask.files import lock_folder
from gigamask.masks.rle import RLEMasks
from tests.errors import error_line
from tests.tiffs import tiff

SQUARE = [[4, 4, 14, 4, 14, 10, 4, 10]]


def pixels(height: int = 20, width: int = 30, seed: int = 0) -> np.ndarray:
    """A smooth colorful picture, which JPEG hardly changes."""
    y, x = np.mgrid[:height, :width]
    return np.stack([y * 200 // height + seed, x * 200 // width, (x + y) * 2], -1).astype(np.uint8)


def jpeg(**options) -> bytes:
    file = io.BytesIO()
    Image.fromarray(pixels(**options.pop("pixels", {}))).save(file, "JPEG", quality=95, **options)
    return file.getvalue()


def members(path: str | Path) -> dict[str, bytes]:
    with tarfile.open(path) as archive:
        return {member.name: archive.extractfile(member).read() for member in archive}


def parsed(out: Path) -> list[dict]:
    """The JSONs in the tars of a folder."""
    return [
        json.loads(raw)
        for path in sorted(out.glob("*.tar"))
        for name, raw in members(path).items()
        if name.endswith(".json")
    ]


def row(number: int | str = 1, name: str | None = None, size: tuple[int, int] = (20, 30)) -> dict:
    named = {"id": number, "file_name": name or f"{number}.jpg", "license": 3}
    return named | {"height": size[0], "width": size[1]}


def thing(number: int | str = 1, segmentation: object = SQUARE, **other: object) -> dict:
    return {"id": 5, "image_id": number, "segmentation": segmentation, "bbox": [0, 0, 1, 1]} | other


class Case:
    """A folder with a json and pictures, and what converting it gives."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.pictures, self.out = folder, folder / "pictures", folder / "out"
        self.pictures.mkdir()
        self.categories: list[dict] = []

    def put(self, name: str = "1.jpg", raw: bytes | None = None) -> Path:
        path = self.pictures / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(jpeg() if raw is None else raw)
        return path

    def coco(
        self,
        images: list | None = None,
        annotations: list | None = None,
        shard_images: int = 500,
        **options,
    ) -> dict:
        """Convert COCO's JSON, of one image with one mask unless told otherwise."""
        source = self.folder / "instances.json"
        content = {
            "images": [row()] if images is None else images,
            "annotations": [thing()] if annotations is None else annotations,
            "categories": self.categories,
        }
        source.write_text(json.dumps(content))
        return convert(source, self.pictures, self.out, ConvertOptions(**options), shard_images)

    def labels(self, **options) -> dict:
        return convert(self.folder / "labels", self.pictures, self.out, ConvertOptions(**options))

    def label(self, name: str, values: np.ndarray | Image.Image) -> None:
        path = self.folder / "labels" / name
        path.parent.mkdir(exist_ok=True, parents=True)
        (values if isinstance(values, Image.Image) else Image.fromarray(values)).save(path)

    def told(self, number: int) -> dict:
        return json.loads(self.members()[f"sa_{number}.json"])

    def members(self) -> dict[str, bytes]:
        return {
            name: raw
            for path in sorted(self.out.glob("*.tar"))
            for name, raw in members(path).items()
        }


@pytest.fixture
def case(tmp_path):
    return Case(tmp_path)


def reason(done: dict, what: str = "masks") -> str:
    assert len(done[f"skipped_{what}"]) == 1, done[f"skipped_{what}"]
    return done[f"skipped_{what}"][0]["reason"]


def test_lvis_states_urls_of_two_folders(case):
    case.put("val2017/1.jpg")
    case.put("2.jpg")  # the folder itself may be that of the URL
    images = [
        {name: value for name, value in row(number).items() if name != "file_name"}
        for number in (1, 2, 3)
    ]
    for each in images[:2]:
        each["coco_url"] = f"http://images.cocodataset.org/val2017/{each['id']}.jpg"
    done = case.coco(images, [thing(1), thing(2), thing(3)])
    assert (done["images"], done["masks"]) == (2, 2)
    assert "needs file_name, or LVIS's coco_url" in done["skipped_images"][0]["reason"]


def test_an_image_as_sa1b_has_it(case):
    """A JPEG's bytes stay, and the json says what SA-1B's says."""
    raw = jpeg()
    case.put("a/9.jpg", raw)
    done = case.coco([row(9, "a/9.jpg")], [thing(9, id=77, category_id=18)])
    assert (done["images"], done["masks"], done["renumbered"]) == (1, 1, False)
    assert done["tars"] == [str(case.out / "sa_000000.tar")]
    assert [path.name for path in case.out.iterdir()] == ["sa_000000.tar"]
    assert case.members()["sa_9.jpg"] == raw
    told = case.told(9)
    named = {"file_name": "sa_9.jpg", "source": "a/9.jpg"}
    assert told["image"] == {"image_id": 9, "width": 30, "height": 20, **named}
    (only,) = told["annotations"]
    fields = "bbox area segmentation predicted_iou point_coords crop_box id stability_score"
    assert list(only) == [*fields.split(), "category_id"]
    [[x, y]] = only.pop("point_coords")
    counts = only.pop("segmentation")["counts"]
    assert RLEMasks.from_coco([counts], (20, 30)).to_dense()[0, int(y), int(x)]
    whole = {"crop_box": [0, 0, 30, 20], "predicted_iou": 1, "stability_score": 1}
    assert only == whole | {"bbox": [4, 4, 9, 5], "area": 60, "id": 77, "category_id": 18}


def test_names_of_coco_categories(case):
    """A category without a name keeps its id; one that is damaged has no name."""
    case.put("9.jpg")
    case.categories = [{"id": 18, "name": "dog"}, {"id": 2}, {"id": "x", "name": "cat"}]
    case.coco([row(9)], [*(thing(9, category_id=each) for each in (18, 2, "x")), thing(9)])
    kept = [(each.get("category_id"), each.get("category")) for each in case.told(9)["annotations"]]
    assert kept == [(18, "dog"), (2, None), (None, "cat"), (None, None)]
    built = indexes.build(case.out, case.folder / "index")
    assert built.manifest.categories == {"2": 1, "cat": 1, "dog": 1}


@pytest.mark.slow
@pytest.mark.usefixtures("forked_workers")
def test_the_same_bytes_every_time(case, tmp_path):
    for number in range(5):
        case.put(f"{number}.png", jpeg(pixels={"seed": number}))
    arguments = ([row(n, f"{n}.png") for n in range(5)], [thing(n) for n in range(5)], 2)
    done = case.coco(*arguments)
    assert [len(members(path)) for path in done["tars"]] == [4, 4, 2]
    before = [Path(path).read_bytes() for path in done["tars"]]
    given = (tmp_path / "instances.json", case.pictures, tmp_path / "again", ConvertOptions(), 2)
    again = convert(*given, workers=2)
    assert [Path(path).read_bytes() for path in again["tars"]] == before


def test_crowds_are_left_out_unless_kept(case):
    case.put()
    counts = {"size": [20, 30], "counts": [100, 50, 450]}
    given = [row()], [thing(), thing(segmentation=counts, iscrowd=1)]
    done = case.coco(*given)
    assert (done["masks"], done["left_out"]) == (1, {"images": {}, "masks": {"crowd": 1}})
    case.out = case.out.with_name("kept")
    assert case.coco(*given, keep_crowds=True)["masks"] == 2
    assert [each.get("iscrowd") for each in case.told(1)["annotations"]] == [None, 1]
    assert case.told(1)["annotations"][1]["area"] == 50


@pytest.mark.parametrize(
    "segmentation, message",
    [
        ([[1, 1, 5, 5]], "polygon 0 has 4 numbers.* 6"),
        ([SQUARE[0], [1, 1, 5, 5, 9, 9, 7]], "polygon 1 has 7 numbers"),
        ([[1, 1, 5, 5, 1e7, 9]], r"polygon 0 has a coordinate of 1e\+07, at most 131070 px"),
        ([[0, 0, 9, 131070, 30, 0] * 50], "its outline is 13108500 px long, at most 4194304"),
        ([], "it has no polygon"),
        ([1, 2, 3, 4, 5, 6], "polygon 0 is a line"),
        ([1, 2, [3, 4, 5, 6]], "mixes polygons and numbers"),
        ([[1, 1, 5, 5, float("nan"), 9]], "a coordinate that is NaN"),
        ([[0, 0, 1, 0, 1, 1], [0.2, 0.1, 0.9, 0.1, 0.5, 0.8]], "as fractions of the image's size"),
        ([["1", "x"]], "got `str`"),
        (None, "no polygon; a box alone"),
        ([[2.1, 2.1, 2.2, 2.1, 2.2, 2.2]], "it covers no pixel of the image"),
        ([[0.2, 0.2, 0.5, 0.2, 0.5, 0.4]], "as fractions of the image's size"),
        ({"size": [30, 20], "counts": [600]}, "30 x 20 pixels, but its image 20 x 30"),
        ({"size": [20, 30], "counts": [100, 50]}, "run lengths sum to 150"),
        ({"size": [20, 30], "counts": [100, -50, 550]}, "is negative"),
        ({"size": [20, 30], "counts": [600]}, "it covers no pixel"),
        ({"size": [20, 30], "counts": "zzz"}, "mask 0"),
        ({"counts": [600]}, "missing required field `size`"),
    ],
)
def test_a_broken_annotation_is_left_out_and_named(case, segmentation, message):
    case.put()
    done = case.coco([row()], [thing(), thing(segmentation=segmentation, id=44)])
    assert done["masks"] == 1
    assert re.search(message, reason(done)), reason(done)
    assert reason(done).startswith("1.jpg: its annotation 1")


def test_annotations_that_belong_to_no_image(case):
    case.put()
    done = case.coco([row()], [thing(), thing(), thing(2)])
    assert "annotation 2 of instances.json: its image_id 2" in reason(done)
    case.out = case.out.with_name("more")
    done = case.coco([row()], [thing(), {"segmentation": SQUARE}])
    assert "`image_id`" in reason(done)


def test_more_broken_than_sound_masks_stop_it_and_leave_nothing(case):
    case.put()
    with error_line(r"instances.json.*2 of its 3 masks.*1.jpg"):
        case.coco([row()], [thing(), thing(segmentation=[]), thing(segmentation=[])])
    assert list(case.out.iterdir()) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    "bad, message",
    [
        (row(2) | {"width": "wide"}, r"image 1: .*`str`.*width"),
        (row(2, "2.jpg", (0, 30)), "2.jpg .id 2.: .* 0 x 30 pixels"),
        (row(2, "2.jpg", (65535, 65535)), "65535 and pixels at most 134217728"),
        (row(1), "1.jpg .id 1.: id 1 "),
        (row(2, "2.jpg"), r"2.jpg: .*2.jpg .*--images"),
        (row(2, "small.jpg"), "small.jpg: the image has 10 x 12 pixels, but its masks 20 x 30"),
        (row(2, "cut.jpg"), "cut.jpg: the JPEG of .* cannot be decoded"),
        (row(2, "text.png"), "text.png: its 9 bytes"),
        (row(2, "cut.png"), "cut.png: the image cannot be decoded"),
        (row(2, "large.png"), "large.png: the image has 12000 x 12000 pixels, at most 134217728"),
    ],
)
def test_an_unusable_image_is_left_out_and_named(case, bad, message):
    case.put()
    case.put("small.jpg", jpeg(pixels={"height": 10, "width": 12}))
    case.put("cut.jpg", jpeg()[:-40])
    case.put("text.png", b"no pixels")
    Image.fromarray(pixels()).save(case.pictures / "cut.png")
    case.put("cut.png", (case.pictures / "cut.png").read_bytes()[:-60])
    Image.new("1", (12000, 12000)).save(case.pictures / "large.png")
    done = case.coco([row(), bad], [thing()])
    assert (done["images"], done["masks"]) == (1, 1)
    assert re.search(message, reason(done, "images")), reason(done, "images")


@pytest.mark.parametrize(
    "name", ["1.png", "1.webp", "1.bmp", "palette.png", "grey.png", "clear.png"]
)
def test_other_formats_are_encoded_with_all_their_colour(case, name):
    picture = Image.fromarray(pixels())
    options = {"lossless": True} if name.endswith("webp") else {}
    if name == "palette.png":
        picture, options = picture.quantize(64), {"transparency": bytes(range(64))}
    if name == "grey.png":
        picture = picture.convert("L")
    if name == "clear.png":
        picture = picture.convert("RGBA")
    picture.save(case.pictures / name, **options)
    case.coco([row(1, name)], [thing()])
    raw = case.members()["sa_1.jpg"]
    assert simplejpeg.decode_jpeg_header(raw)[2:] == ("YCbCr", "444")
    expected = np.array(picture.convert("RGBA").convert("RGB")).astype(int)
    assert np.abs(image.decode(raw, "x") - expected).mean() < (4 if name == "palette.png" else 1.5)


def test_ids_that_are_no_numbers(case):
    """Numbers written as text are numbers; other names, and names that clash as numbers, give way
    to places."""
    for name in ("7", "08", "street", "8"):
        case.put(f"{name}.jpg")
    assert not case.coco([row("7"), row("08")], [thing(7), thing("08")])["renumbered"]
    assert list(case.members()) == ["sa_7.jpg", "sa_7.json", "sa_8.jpg", "sa_8.json"]
    case.out = case.out.with_name("text")
    done = case.coco([row("7"), row("street")], [thing("street", id="s1"), thing(7)])
    assert done["renumbered"]
    expected = {"image_id": 1, "file_name": "sa_1.jpg", "source": "street.jpg"}
    assert expected.items() <= case.told(1)["image"].items()
    assert case.told(1)["annotations"][0]["id"] == 10_000
    case.out = case.out.with_name("clash")
    assert case.coco([row("8"), row("08")], [thing("8"), thing("08")])["renumbered"]


def test_one_id_for_two_images(case):
    """A repetition is dropped; when the two differ, it is unknown to which the masks belong."""
    for name in ("1", "2", "3"):
        case.put(f"{name}.jpg")
    done = case.coco([row(1), row(2), row(3), row(2, "1.jpg")], [thing(1), thing(2), thing(3)])
    assert [each["name"] for each in done["skipped_images"]] == ["1.jpg (id 2)", "2.jpg (id 2)"]
    assert "another image" in done["skipped_images"][1]["reason"]
    assert (done["images"], len(done["skipped_masks"])) == (2, 1)


def test_images_without_masks_stay_and_are_counted(case):
    case.put()
    case.put("2.jpg")
    assert case.coco([row(1), row(2)], [thing(2)])["images_without_masks"] == 1
    assert case.told(1)["annotations"] == []
    assert indexes.build(case.out, case.folder / "index").images["masks"].tolist() == [0, 1]


def test_a_shard_whose_images_are_all_broken_is_not_written(case):
    for number in range(1, 4):
        case.put(f"{number}.jpg", jpeg() if number != 2 else b"\xff\xd8 broken")
    done = case.coco([row(n) for n in (1, 2, 3)], [thing(1), thing(3)], shard_images=1)
    assert [Path(path).name for path in done["tars"]] == ["sa_000000.tar", "sa_000001.tar"]
    assert "9 bytes" in reason(done, "images")


def labels() -> np.ndarray:
    """Two instances, one of two pieces that touch at a corner with a third apart."""
    values = np.zeros((20, 30), np.uint8)
    values[2:5, 2:6], values[5:9, 6:9], values[12:18, 20:30] = 3, 3, 3
    values[10:20, 0:5] = 200
    return values


@pytest.mark.parametrize("kind", ["grey", "deep", "palette", "coloured", "opaque", "LA"])
def test_label_images(case, kind):
    values = labels()
    case.put("a.jpg")
    shown: np.ndarray | Image.Image = values
    if kind == "deep":
        shown = values.astype(np.uint16) * 300
    if kind == "palette":
        shown = Image.frombytes("P", (30, 20), values.tobytes())
        shown.putpalette([7] * 768)
    if kind in ("coloured", "opaque"):
        opaque = [np.full_like(values, 255)] * (kind == "opaque")
        shown = np.stack([values * 0, values, values // 3, *opaque], -1)
    if kind == "LA":
        shown = Image.fromarray(values).convert("LA")
    case.label("a.png", shown)
    done = case.labels()
    assert (done["images"], done["masks"], done["renumbered"]) == (1, 2, True)
    entry = annotation.parse(case.members()["sa_0.json"], "x")
    assert np.array_equal(entry.masks.to_dense(), [values == 3, values == 200])
    found = [each["label"] for each in case.told(0)["annotations"]]
    colored = [3 * 256 + 65536, 200 * 256 + 66 * 65536]
    numbers = {"deep": [900, 60000], "coloured": colored, "opaque": colored}
    assert found == numbers.get(kind, [3, 200])
    assert [each["id"] for each in case.told(0)["annotations"]] == [0, 1]


@pytest.mark.parametrize("bits", [2, 4])
def test_gray_of_few_bits_has_the_values_that_are_written(case, bits):
    """Pillow spreads them to 0..255."""
    values = np.uint8([[0, 1, 3, 3]] * 4)
    rows = np.unpackbits(values[..., None], axis=2)[..., -bits:].reshape(4, -1)
    header = b"IHDR\0\0\0\4\0\0\0\4" + bytes([bits, 0, 0, 0, 0])
    packed = zlib.compress(np.pad(np.packbits(rows, 1), [(0, 0), (1, 0)]).tobytes())
    raw = b"\x89PNG\r\n\x1a\n"
    for chunk in (header, b"IDAT" + packed, b"IEND"):
        raw += (len(chunk) - 4).to_bytes(4) + chunk + zlib.crc32(chunk).to_bytes(4)
    assert np.array_equal(decode_labels(raw, "x"), values)


def test_negative_values_are_background(case):
    case.put("a.jpg")
    case.label("a.tif", Image.fromarray(labels().astype(np.int32) - 1))
    assert case.labels()["masks"] == 2
    assert [each["label"] for each in case.told(0)["annotations"]] == [2, 199]


def test_zero_is_background_also_where_it_is_white():
    values = labels().astype(np.uint8)
    for photometric in (0, 1):
        assert (decode_labels(tiff(values, photometric=photometric), "x") == values).all()
        Image.fromarray(values > 0).save(file := io.BytesIO(), "TIFF", tiffinfo={262: photometric})
        # Of one bit, which Pillow writes inverted where 0 is white.
        assert (decode_labels(file.getvalue(), "x") == ((values > 0) == photometric)).all()


def test_values_beyond_32_bits_are_refused():
    values = np.uint32([[0, 7, 2**31]])
    assert decode_labels(tiff(values[:, :2]), "x").tolist() == [[0, 7]]
    with error_line("x: .*2147483648.*number the objects"):
        decode_labels(tiff(values), "x")


@pytest.mark.parametrize("kind", ["colors", "gray as colors", "gray"])
def test_one_mask_from_a_threshold_of_the_brightest_channel(case, kind):
    drawn = np.zeros((10, 15, 3), np.uint8)
    drawn[1:5, 1:5], drawn[6:9, 1:9], drawn[1:5, 9:13] = (255, 0, 0), (0, 250, 40), 255
    drawn = np.array(Image.fromarray(drawn).resize((30, 20), Image.Resampling.BICUBIC))
    brightest = drawn.max(2)
    case.put("a.jpg")
    case.label(
        "a.png", {"colors": drawn, "gray": brightest}.get(kind, np.stack([brightest] * 3, -1))
    )
    assert case.labels(binary=128)["masks"] == 1
    (dense,) = annotation.parse(case.members()["sa_0.json"], "x").masks.to_dense()
    assert (dense == (brightest >= 128)).all()
    with error_line("--binary must be at least 1 .got 0"):
        ConvertOptions(binary=0)


def test_photographs_among_label_images_are_not_taken_for_missing_ones(case):
    Image.new("RGB", (30, 20)).save(file := io.BytesIO(), "PNG")
    case.put("a.png", file.getvalue())
    with error_line("a.png: .*this file is read as annotations; give .* such as .*/pictures/masks"):
        convert(case.pictures, case.pictures, case.out, ConvertOptions())


def test_relative_and_absolute_paths_of_one_folder(case, monkeypatch):
    monkeypatch.chdir(case.folder)
    case.put()
    case.label("../pictures/labels/1.png", labels())
    for source in ("pictures/labels", case.pictures / "labels"):
        for pictures in ("pictures", case.pictures):
            out = case.folder / f"{Path(source).is_absolute()} {Path(pictures).is_absolute()}"
            done = convert(Path(source), Path(pictures), out, ConvertOptions())
            assert (done["images"], done["images_without_label"]) == (1, 0)


@pytest.mark.parametrize("name, number", [("1" * 14, int("1" * 14)), ("1" * 15, 0)])
def test_ids_of_masks_have_at_most_64_bits(case, name, number):
    case.put(f"{name}.jpg")
    case.label(f"{name}.png", labels())
    assert case.labels()["renumbered"] == (number == 0)
    last = case.told(number)["annotations"][-1]["id"]
    assert (last, last < 2**63) == (number * annotation.MAX_MASKS + 1, True)


def test_folders_may_be_links(case):
    """One to a folder that it lies in is left out."""
    case.put("a.jpg")
    case.label("a.png", labels())
    for name in ("labels", "pictures"):
        given = case.folder / f"given_{name}"
        given.mkdir()
        (given / "part").symlink_to(case.folder / name)
        (case.folder / name / "again").symlink_to(given)
    given = case.folder / "given_labels", case.folder / "given_pictures"
    done = convert(*given, case.out, ConvertOptions())
    assert (done["images"], done["skipped_images"]) == (1, [])
    assert case.told(0)["image"]["source"] == "part/a.png"


def test_pieces_and_values_to_ignore(case):
    values = labels()
    case.put("sub/012.png", b"")
    Image.fromarray(pixels()).save(case.pictures / "sub" / "012.png")
    case.put("spare.jpg")
    case.label("sub/012.png", values)
    done = case.labels(split_components=True, ignore=(200,))
    assert (done["masks"], done["images_without_label"]) == (2, 1)
    dense = annotation.parse(case.members()["sa_12.json"], "x").masks.to_dense()
    y = np.arange(20)[:, None]
    assert np.array_equal(dense, [(values == 3) & (y < 10), (values == 3) & (y > 10)])
    assert [each["label"] for each in case.told(12)["annotations"]] == [3, 3]
    assert case.told(12)["image"]["source"] == "sub/012.png"


def test_pictures_and_labels_in_one_folder(case):
    """A label image is never taken for the picture."""
    case.pictures = case.folder / "labels"
    case.label("1.png", labels())
    case.put()
    assert case.labels()["masks"] == 2
    (case.pictures / "1.jpg").unlink()
    case.out = case.out.with_name("none")
    with error_line(r"1 of its 1 images.*\.jpg"):
        case.labels()


def test_label_images_may_be_named_as_such(case):
    case.pictures = case.folder / "labels"
    for name in ("a_mask", "b-Label", "b", "c_mask_2", "d_cp_masks"):
        case.label(f"{name}.png", labels())
    for name in ("a", "b", "d"):
        case.put(f"{name}.jpg")
    done = case.labels()
    assert [each["name"] for each in done["skipped_images"]] == ["b-Label.png", "c_mask_2.png"]
    assert [each["image"]["source"] for each in parsed(case.out)] == [
        "a_mask.png",
        "b.png",
        "d_cp_masks.png",
    ]


def test_unusable_label_images_are_left_out_and_named(case):
    for number in range(12):
        case.put(f"{number}.jpg")
    case.put("7.bmp", b"")
    for number in (0, 1, 2, 3, 4, 11):
        case.label(f"{number}.png", labels())
    case.label("5.png", Image.new("RGBA", (30, 20)))
    deep = cv2.imencode(".png", np.zeros((20, 30, 3), np.uint16))[1]
    (case.folder / "labels" / "10.png").write_bytes(deep)
    case.label("6.png", labels()[:10])
    case.label("7.png", labels())
    case.label("8.png", np.arange(20_000, dtype=np.uint16).reshape(100, 200))
    page = Image.fromarray(labels())
    page.save(case.folder / "labels" / "9.tif", save_all=True, append_images=[page])
    done = case.labels()
    assert done["images"] == 6
    reasons = " | ".join(each["reason"] for each in done["skipped_images"])
    assert "5.png: the label image is 1 page of 8-bit RGBA pixels" in reasons
    assert "10.png: the label image is 1 page of 16-bit RGB pixels" in reasons
    assert "9.tif: the label image is 2 pages of 8-bit L pixels" in reasons
    assert "20 x 30 pixels, but its masks 10 x 30" in reasons
    assert "7.png: 2 files have its name" in reasons
    assert "19,999 values" in reasons


@pytest.mark.parametrize(
    "value, second, options, note",
    [
        (1, 1, {}, MANY_AREAS),
        (1, 1, {"split_components": True}, None),
        (1, 2, {}, None),
        (1, 255, {}, MAYBE_VOID),
        (254, 255, {}, None),
        (255, 0, {}, None),
    ],
)
def test_values_that_may_be_several_objects_or_none_are_counted(case, value, second, options, note):
    values = np.zeros((20, 30), np.uint8)
    values[2:8, 2:8], values[12:18, 12:18] = value, second
    case.put()
    case.label("1.png", values)
    assert case.labels(**options)["notes"] == ({note: 1} if note else {})


@pytest.mark.parametrize("shown, counted", [("WB", 1), ("WR", 0), ("BW", 0), ("WRB", 0)])
def test_black_that_is_an_object_of_a_palette_is_counted(case, shown, counted):
    """Programs that reduce colors number them in any order."""
    values = np.ones((20, 30), np.uint8)
    values[2:8, 2:8] = 0
    image = Image.frombytes("P", (30, 20), values.tobytes())
    colors = {"W": [255] * 3, "R": [255, 0, 0], "B": [0] * 3}
    image.putpalette([channel for color in shown for channel in colors[color]])
    case.put()
    case.label("1.png", image)
    assert case.labels()["notes"] == ({BLACK: 1} if counted else {})


def test_label_images_that_cannot_be_decoded(case):
    for number in range(4):
        case.put(f"{number}.jpg")
        case.label(f"{number}.png", np.random.default_rng(0).integers(0, 9, (20, 30), np.uint8))
    path = case.folder / "labels" / "2.png"
    path.write_bytes(path.read_bytes()[:-60])
    Image.new("1", (70_000, 1)).save(case.folder / "labels" / "3.png")
    reasons = [each["reason"] for each in case.labels()["skipped_images"]]
    assert re.search("2.png: its label image cannot be decoded", reasons[0])
    assert "1 x 70000" in reasons[1]


def test_a_picture_that_vanishes(case, monkeypatch):
    """It was there when the work began."""
    case.put()
    case.put("2.jpg")
    monkeypatch.setattr("os.path.isfile", lambda path: True)
    (case.pictures / "2.jpg").unlink()
    assert "No such file" in reason(case.coco([row(1), row(2)], [thing(1)]), "images")


def test_errors(case, monkeypatch):
    case.put()
    with error_line("--shard-images must be at least 1 .got 0"):
        case.coco(shard_images=0)
    with error_line(r"--images .*nowhere"):
        convert(case.folder / "instances.json", case.folder / "nowhere", case.out, ConvertOptions())
    with error_line(r"instances.json"):
        case.coco([], [])
    with error_line(r"2 of its 3 images.*2.jpg"):
        case.coco([row(), row(2), row(3)], [thing()])
    with error_line(r"--split-components.*--ignore"):
        case.coco(split_components=True)
    with error_line("crowds"):
        convert(case.pictures, case.pictures, case.out, ConvertOptions(keep_crowds=True))
    with error_line(r"pictures.*\.png"):
        convert(case.pictures, case.pictures, case.out, ConvertOptions())
    with error_line(r"no.json.*No such file"):
        convert(case.folder / "no.json", case.pictures, case.out, ConvertOptions())
    for text in ("[]", '{"images": []}', "\xff"):
        (case.folder / "no.json").write_text(text)
        with error_line(r"no.json.*COCO.*'images'.*'annotations'"):
            convert(case.folder / "no.json", case.pictures, case.out, ConvertOptions())
    with error_line(r"holds 1\.jpg"):
        convert(case.folder / "instances.json", case.pictures, case.pictures, ConvertOptions())
    case.coco()
    for done in (case.out, case.out / "sa_000000.tar"):
        with error_line("gigamask stats"):
            convert(done, case.pictures, case.folder / "again", ConvertOptions())
    with tarfile.open(case.out / "sa_000000.tar") as archive:
        archive.extractall(case.folder / "unpacked", filter="data")
    for unpacked in (case.folder / "unpacked", case.folder / "unpacked" / "sa_1.json"):
        with error_line(r"tar cf shard.tar -C .*/unpacked \."):
            convert(unpacked, None, case.folder / "again", ConvertOptions())
    with error_line(r"--out.*1.*sa_000000.tar"):
        case.coco()
    case.out = case.put("file", b"") / "out"
    with error_line(r"file/out.*Not a directory"):
        case.coco()
    case.out = case.folder / "full"

    def full(path, given):
        list(given)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("gigamask.data.tar.write", full)
    with error_line(r"000000.tar.*No space left on device"):
        case.coco()


def test_a_second_convert_into_the_folder_is_refused(case):
    case.put("deep/1.jpg")
    images = [row(name="deep/1.jpg")]
    with lock_folder(case.out, PARTIAL), error_line(r"another process"):
        case.coco(images)
    case.out = case.pictures
    with error_line("pictures: is the folder of images"):
        case.coco(images)


def test_categories_without_a_name_are_counted(case):
    case.put()
    case.categories = [{"id": 1, "name": 5}, {"id": 2, "name": None}]
    things = [thing(category_id=number) for number in (1, 2, 3)]
    assert case.coco([row()], things)["notes"] == {NAMELESS: 2}
    assert [each.get("category") for each in case.told(1)["annotations"]] == ["5", None, None]


def test_a_list_of_names_with_spaces(tmp_path):
    path = tmp_path / "names.txt"
    path.write_text("a b\n\n c \n")
    names = ["a b.jpg", "c.png", "d.png", "c.jpg"]
    assert listed(path)(names) == {"a b.jpg", "c.png", "c.jpg"}, "both of one name"
