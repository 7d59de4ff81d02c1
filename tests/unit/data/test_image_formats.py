"""Images of more than 8 bits and of any number of channels, held against what wrote them."""

import io
import struct

import cv2
import numpy as np
import pytest
from PIL import Image

from gigamask.data import image
from gigamask.errors import PixelFormatError
from gigamask.pixels import PixelConfig
from tests.errors import corrupt_sample
from tests.tiffs import tiff
from tests.unit.data.test_image import with_header

CHANCE = np.random.default_rng(0)
DEEP = CHANCE.integers(0, 65536, (12, 17, 4), dtype=np.uint16)
WINDOW = PixelConfig(window=(0.0, 65535.0))


def npy(array: np.ndarray) -> bytes:
    file = io.BytesIO()
    np.save(file, array, allow_pickle=False)
    return file.getvalue()


def saved(*pages: np.ndarray, kind: str = "TIFF", **settings) -> bytes:
    """An image by Pillow; several pages are those of a TIFF."""
    file, images = io.BytesIO(), [Image.fromarray(page) for page in pages]
    more = {"save_all": True, "append_images": images[1:]} if len(images) > 1 else {}
    images[0].save(file, kind, **settings, **more)
    return file.getvalue()


def opencv(extension: str, rgb: np.ndarray) -> bytes:
    order = [2, 1, 0, 3][: rgb.shape[2]]
    return cv2.imencode(extension, np.ascontiguousarray(rgb[..., order]))[1].tobytes()


@pytest.mark.parametrize("kind", ["PNG", "TIFF"])
@pytest.mark.parametrize("compression", [None, "tiff_lzw", "tiff_adobe_deflate"])
def test_gray_of_16_bits(kind, compression):
    settings = {"compression": compression} if compression and kind == "TIFF" else {}
    raw = saved(DEEP[..., 0], kind=kind, **settings)
    assert image.size(raw, "x") == (12, 17)
    stored = image.read_stored(raw, "x", (12, 17))
    assert stored.dtype == np.uint16
    assert (stored[..., 0] == DEEP[..., 0]).all()
    assert (image.decode(raw, "x", pixels=WINDOW) == np.rint(DEEP[..., :1] / 257)).all()
    with pytest.raises(PixelFormatError, match=r"x: .*uint16.*--window"):
        image.decode(raw, "x")
    with corrupt_sample(rf"{kind}.*12 x 17.*17 x 12"):
        image.read_stored(raw, "x", (17, 12))


@pytest.mark.parametrize("extension", [".png", ".tiff"])
@pytest.mark.parametrize("channels", [3, 4])
def test_colors_of_16_bits(extension, channels):
    raw = opencv(extension, DEEP[..., :channels])
    assert (image.read_stored(raw, "x", channels=3) == DEEP[..., :3]).all()
    if channels == 4:
        four = PixelConfig(4, window=(0.0, 65535.0))
        assert (image.decode(raw, "x", pixels=four) == np.rint(DEEP / 257)).all()
    assert (image.decode(raw, "x", pixels=WINDOW) == np.rint(DEEP[..., :3] / 257)).all()
    assert (image.decode(raw, "x") == DEEP[..., :3] >> 8).all(), "as Pillow reads them"


def test_gray_of_16_bits_with_alpha():
    pixels = DEEP[..., :2]
    unfiltered = [cv2.IMWRITE_PNG_FILTER, cv2.IMWRITE_PNG_FILTER_NONE]
    twice_as_wide = cv2.imencode(".png", pixels.reshape(12, 34), unfiltered)[1].tobytes()
    raw = with_header(twice_as_wide, 17, 12, color_type=4)
    for deep_color in (True, False):
        assert (image.read_stored(raw, "x", deep_color=deep_color) == pixels[..., :1]).all()
    with pytest.raises(PixelFormatError, match=r"x: .*uint16.*--window"):
        image.decode(raw, "x")


def test_floats_and_signed_numbers_of_a_tiff():
    floats = CHANCE.normal(size=(5, 6)).astype(np.float32)
    assert (image.read_stored(saved(floats), "x")[..., 0] == floats).all()
    numbers = CHANCE.integers(-1000, 3000, (5, 6), dtype=np.int32)
    assert (image.read_stored(saved(numbers), "x")[..., 0] == numbers).all()
    big_endian = DEEP[..., 0].astype(">u2")
    raw = saved(DEEP[..., 0])
    assert (image.read_stored(npy(big_endian), "x") == image.read_stored(raw, "x")).all()


@pytest.mark.parametrize("deep_color", [True, False])
def test_colors_of_16_bits_in_separate_planes_are_refused(deep_color):
    rgb = DEEP[..., :3]
    stored = image.read_stored(tiff(rgb, photometric=2), "x", deep_color=deep_color)
    assert (stored == (rgb if deep_color else rgb >> 8)).all()
    with corrupt_sample(r"x: .*separate planes"):
        image.read_stored(tiff(rgb, 2, photometric=2), "x", deep_color=deep_color)
    small = (rgb >> 8).astype(np.uint8)
    assert (image.read_stored(tiff(small, 2, photometric=2), "x") == small).all()


def test_more_channels_than_are_read_are_refused():
    five = np.zeros((6, 8, 5), np.uint8)
    with corrupt_sample(r"5 channels in one page"):
        image.read_stored(tiff(five, photometric=2), "x")
    assert image.read_stored(tiff(five[..., :4], photometric=2), "x").shape == (6, 8, 3)


def test_several_pages_of_colors_of_16_bits_are_refused():
    pages = [np.ascontiguousarray(DEEP[..., order]) for order in ([0, 1, 2], [3, 1, 0])]
    raw = cv2.imencodemulti(".tiff", pages)[1].tobytes()
    with corrupt_sample(r"x: .*several pages"):
        image.read_stored(raw, "x")


@pytest.mark.parametrize("kind, sample_format", [("u4", 1), ("i4", 2), ("i1", 2), ("u1", 1)])
def test_whole_numbers_have_the_sign_that_is_stated(kind, sample_format):
    numbers = CHANCE.integers(0, 256, (12, 17 * np.dtype(kind).itemsize), np.uint8).view(kind)
    stored = image.read_stored(tiff(numbers, sample_format=sample_format), "x")
    assert (stored.dtype, (stored[..., 0] == numbers).all()) == (np.dtype(kind), True)
    if kind == "i1":
        signed = PixelConfig(1, window=(-128.0, 127.0))
        shown = image.decode(tiff(numbers, sample_format=2), "x", pixels=signed)
        assert (shown[..., 0] == numbers.astype(int) + 128).all()


def test_pages_are_channels():
    pages = [DEEP[..., channel] for channel in range(4)]
    raw = saved(*pages, compression="tiff_lzw")
    assert (image.read_stored(raw, "x") == DEEP).all()
    seen = image.decode(raw, "x", pixels=PixelConfig(4, window=(0.0, 65535.0)))
    assert (seen == np.rint(DEEP / 257)).all()
    with pytest.raises(PixelFormatError, match=r"has 4 channels.* 3"):
        image.decode(raw, "x", pixels=WINDOW)
    with pytest.raises(PixelFormatError, match=r"has 4 channels.* 2"):
        image.decode(raw, "x", pixels=PixelConfig(2, window=(0.0, 65535.0)))
    smaller = saved(pages[0], pages[1][:6], pages[2][:3])  # a pyramid, or thumbnails
    assert image.read_stored(smaller, "x").shape == (12, 17, 1)
    eight_bit = saved(*(page.astype(np.uint8) for page in pages[:3]))
    assert (image.decode(eight_bit, "x") == DEEP[..., :3].astype(np.uint8)).all()
    with corrupt_sample("types"):
        image.read_stored(saved(pages[0], pages[1].astype(np.uint8)), "x")


@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("dtype", ["uint8", "uint16", "int16", "float32", "float64", ">u2"])
def test_arrays_of_numpy(order, dtype):
    array = np.array(DEEP.astype(dtype), order=order)
    raw = npy(array)
    assert image.size(raw[:200], "x") == (12, 17)
    stored = image.read_stored(raw, "x", channels=4)
    assert (stored == array).all()
    assert stored.dtype.isnative
    assert (image.read_stored(npy(array[..., 0]), "x") == array[..., :1]).all()


@pytest.mark.parametrize(
    "array, named",
    [
        (np.zeros((4, 5), bool), "bool"),
        (np.zeros((4, 5), complex), "complex"),
        (np.zeros(20), "20"),
        (np.zeros((1, 2, 3, 4)), "1, 2, 3, 4"),
        (np.zeros((0, 5)), "0, 5"),
        (np.zeros((4, 5), [("a", "f4")]), "a"),
        (np.zeros((2, 2), "U3"), "U3"),
    ],
)
def test_arrays_that_are_no_images_are_named(array, named):
    for read in (image.size, image.decode):
        with corrupt_sample(rf"x: .*NPY.*{named}"):
            read(npy(array), "x")


def header(shape: str) -> bytes:
    text = f"{{'descr': '<u2', 'fortran_order': False, 'shape': {shape}}}".ljust(117) + "\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text.encode()


@pytest.mark.parametrize("shape", ["(60000, 60000)", "(8192, 8192, 9)", "(4, 5", "(-4, 5)", "[]*9"])
def test_hostile_arrays_are_refused_by_their_header(shape):
    with corrupt_sample(r"^x: "):
        image.decode(header(shape), "x")


def test_damaged_files_are_named():
    whole = {
        "PNG": saved(DEEP[..., 0], kind="PNG"),
        "TIFF": saved(DEEP[..., 0], compression="tiff_lzw"),
        "NPY": npy(DEEP),
    }
    deep = {"PNG": opencv(".png", DEEP[..., :3]), "TIFF": opencv(".tiff", DEEP[..., :3])}
    for kind, raw in [*whole.items(), *deep.items()]:
        for length in (60, len(raw) // 2):
            with corrupt_sample(rf"^x: .*{kind}"):
                image.decode(raw[:length], "x", pixels=WINDOW)
    with corrupt_sample("NPY"):
        image.decode(whole["NPY"] + b"0", "x", pixels=WINDOW)


def test_bombs_are_seen_in_the_header():
    with corrupt_sample("60000"):
        image.decode(header("(60000, 60000)"), "x", pixels=WINDOW)
    tiff = bytearray(saved(DEEP[..., 0]))
    start = struct.unpack("<I", tiff[4:8])[0] + 2
    for entry in range(start, start + 24, 12):  # width and height
        tiff[entry + 2 : entry + 12] = struct.pack("<HII", 4, 1, 60_000)
    with corrupt_sample("TIFF"):
        image.decode(bytes(tiff), "x", pixels=WINDOW)


def test_pages_that_repeat_for_ever_end(monkeypatch):
    raw = bytearray(saved(DEEP[..., 0], DEEP[..., 1]))
    first = struct.unpack("<I", raw[4:8])[0]
    count = struct.unpack("<H", raw[first : first + 2])[0]
    raw[first + 2 + 12 * count : first + 6 + 12 * count] = raw[4:8]
    assert image.read_stored(bytes(raw), "x").shape[2] in (1, 2)
    monkeypatch.setattr(image, "MAX_PIXELS", 12 * 17)
    with corrupt_sample("4 pages"):
        image.read_stored(saved(*[DEEP[..., 0]] * 4), "x")


def test_a_gray_jpeg_fits_one_channel():
    raw = saved(DEEP[..., 0].astype(np.uint8), kind="JPEG")
    one = image.decode(raw, "x", pixels=PixelConfig(1))
    assert one.shape == (12, 17, 1)
    assert (one == image.decode(raw, "x")[..., :1]).all()
    assert image.decode(raw, "x", half=True, pixels=PixelConfig(1)).shape == (6, 9, 1)
    gray_png = saved(DEEP[..., 0].astype(np.uint8), kind="PNG")
    assert image.decode(gray_png, "x", pixels=PixelConfig(1)).shape == (12, 17, 1)
    rgba = saved(DEEP.astype(np.uint8), kind="PNG")
    assert (image.decode(rgba, "x", pixels=PixelConfig(4)) == DEEP.astype(np.uint8)).all()
    assert (image.decode(rgba, "x") == DEEP[..., :3].astype(np.uint8)).all()


def test_previews_of_any_image_are_rgb():
    for array in (DEEP[..., 0], DEEP[..., :2], DEEP, DEEP.astype(np.float32), DEEP.astype("u1")):
        preview = image.decode_preview(npy(array), "x")
        assert (preview.dtype, preview.shape) == (np.uint8, (12, 17, 3))
        assert preview.max() > 250


def test_what_a_jpeg_cannot_hold_is_known():
    kept = [saved(DEEP[..., 0], kind="PNG"), saved(DEEP[..., 0].astype("u1")), npy(DEEP)]
    assert list(map(image.member_suffix, kept)) == [".png", ".tif", ".npy"]
    others = [saved(DEEP[..., 0].astype("u1"), kind=kind) for kind in ("PNG", "JPEG", "WEBP")]
    assert {image.member_suffix(raw) for raw in others} == {".jpg"}
