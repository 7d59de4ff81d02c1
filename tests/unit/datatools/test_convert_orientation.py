"""Masks and pixels agree for photographs that their EXIF turns, in every format of annotations."""

import io
import json
from pathlib import Path

import numpy as np
import pytest
from PIL import ExifTags, Image

from gigamask.data import image
from gigamask.data.annotation import parse
from gigamask.data.orientation import read_orientation, turn
from gigamask.datatools.convert import ConvertOptions, convert
from tests.unit.datatools.test_convert import members

HEIGHT, WIDTH = 24, 16
"""Size of the photographs, upright."""
BOX = (3, 4, 11, 12)
"""x0, y0, x1, y1 of the red object in an upright photograph, ends exclusive."""
ORIENTATIONS = range(1, 9)
UNDO = {6: 8, 8: 6}


def scene(height: int = HEIGHT) -> np.ndarray:
    """A gray image with a red object, upright."""
    pixels = np.full((height, WIDTH, 3), 90, np.uint8)
    x0, y0, x1, y1 = BOX
    pixels[y0:y1, x0:x1] = (250, 0, 0)
    return pixels


def photograph(orientation: int, height: int = HEIGHT, kind: str = "PNG") -> bytes:
    """The scene as a camera stores it, with the EXIF that turns it upright."""
    exif, file = Image.Exif(), io.BytesIO()
    exif[0x0112] = orientation
    stored = turn(scene(height), UNDO.get(orientation, orientation))
    options = {"JPEG": {"quality": 100, "subsampling": 0}, "WEBP": {"lossless": True}}
    Image.fromarray(stored).save(file, kind, exif=exif, **options.get(kind, {}))
    return file.getvalue()


def corners(orientation: int = 1, height: int = HEIGHT) -> list[list[float]]:
    """Corners of the object in the upright image, or, of an orientation, in the stored one."""
    mask = turn(scene(height)[..., 1] == 0, UNDO.get(orientation, orientation))
    ys, xs = np.nonzero(mask)
    x0, y0, x1, y1 = xs.min(), ys.min(), xs.max() + 1, ys.max() + 1
    return [[float(x), float(y)] for x, y in ((x0, y0), (x1, y0), (x1, y1), (x0, y1))]


def write_photographs(folder: Path, height: int = HEIGHT, kind: str = "PNG") -> Path:
    folder.mkdir()
    for orientation in ORIENTATIONS:
        (folder / f"{orientation}.{kind.lower()}").write_bytes(
            photograph(orientation, height, kind)
        )
    return folder


def converted(source: Path, photos: Path, out: Path, **options) -> tuple[dict, dict[str, float]]:
    """The counts; and the IoU of each mask with what is red in its image, by the image's source."""
    counts = convert(source, photos, out, ConvertOptions(**options))
    found = {}
    files = members(out / "sa_000000.tar")
    for name, raw in files.items():
        if not name.endswith(".json"):
            continue
        (member,) = (
            files[f"{name[:-5]}{each}"]
            for each in (".jpg", ".npy", ".tif", ".png")
            if f"{name[:-5]}{each}" in files
        )
        assert read_orientation(member) == 1
        pixels = image.decode(member, name).astype(int)
        red = (pixels[..., 0] > 170) & (pixels[..., 1] < 80)
        entry = parse(raw, name)
        assert entry.size == red.shape
        (mask,) = entry.masks.to_dense()
        source_name = json.loads(raw)["image"]["source"]
        found[source_name] = (mask & red).sum() / (mask | red).sum()
    return counts, found


def check_all_agree(counts: dict, ious: dict[str, float], assumed: int) -> None:
    assert counts["images"] == len(ORIENTATIONS)
    assert min(ious.values()) > 0.9, ious
    notes = {text: number for text, number in counts["notes"].items() if "does not decide" in text}
    assert list(notes.values()) == ([assumed] if assumed else [])


@pytest.mark.parametrize("kind", ["JPEG", "TIFF"])
@pytest.mark.parametrize("height, is_stored", [(HEIGHT, False), (HEIGHT, True), (WIDTH, False)])
def test_coco(tmp_path, kind, height, is_stored):
    photos, source = write_photographs(tmp_path / "photos", height, kind), tmp_path / "c.json"
    images, annotations = [], []
    for number in ORIENTATIONS:
        of_file = number if is_stored and number > 4 else 1
        size = (WIDTH, height) if of_file > 4 else (height, WIDTH)
        images.append(
            {"id": number, "file_name": f"{number}.{kind.lower()}"}
            | dict(zip(("height", "width"), size, strict=True))
        )
        ring = np.ravel(corners(of_file, height)).tolist()
        annotations.append({"id": number, "image_id": number, "segmentation": [ring]})
    source.write_text(json.dumps({"images": images, "annotations": annotations}))
    counts, ious = converted(source, photos, tmp_path / "out")
    check_all_agree(counts, ious, 3 if height != WIDTH else 7)


@pytest.mark.parametrize("has_exif", [False, True])
@pytest.mark.parametrize("height, is_stored", [(HEIGHT, False), (HEIGHT, True), (WIDTH, False)])
def test_label_images(tmp_path, height, is_stored, has_exif):
    """EXIF of a label image, as of one made of its photograph, turns it as it turns that."""
    photos, labels = write_photographs(tmp_path / "photos", height), tmp_path / "labels"
    labels.mkdir()
    label = (scene(height)[..., 1] == 0).astype(np.uint8)
    for number in ORIENTATIONS:
        of_file = number if has_exif or (is_stored and number > 4) else 1
        turned, exif = turn(label, UNDO.get(of_file, of_file)), Image.Exif()
        exif[ExifTags.Base.Orientation] = number if has_exif else 1
        Image.fromarray(turned).save(labels / f"{number}.png", exif=exif)
    counts, ious = converted(labels, photos, tmp_path / "out")
    check_all_agree(counts, ious, 3 if height != WIDTH else 7)


def test_sixteen_bits_are_turned_without_loss(tmp_path):
    """A PNG of 16 bits that is meant upright becomes an array of the same numbers."""
    photos, labels = tmp_path / "photos", tmp_path / "labels"
    photos.mkdir(), labels.mkdir()
    deep = np.arange(HEIGHT * WIDTH, dtype=np.uint16).reshape(HEIGHT, WIDTH) * 100
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.fromarray(turn(deep, 8)).save(photos / "1.png", exif=exif)
    Image.fromarray((scene()[..., 1] == 0).astype(np.uint8)).save(labels / "1.png")
    convert(labels, photos, tmp_path / "out", ConvertOptions())
    raw = members(tmp_path / "out" / "sa_000000.tar")["sa_1.npy"]
    assert (image.read_stored(raw, "x")[..., 0] == deep).all()
