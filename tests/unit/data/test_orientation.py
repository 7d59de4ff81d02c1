"""Which way an image is meant, for all eight orientations of EXIF and every format that has it."""

import io

import numpy as np
import pytest
from PIL import Image, ImageOps

from gigamask.data import image
from gigamask.data.orientation import decode_upright, frame_of, read_orientation, turn, without_exif

ORIENTATIONS = range(1, 9)


def encoded(pixels: np.ndarray, kind: str, orientation: int, **options) -> bytes:
    exif, file = Image.Exif(), io.BytesIO()
    exif[0x0112] = orientation
    options |= {"lossless": True} if kind == "WEBP" else {}
    Image.fromarray(pixels).save(file, kind, exif=exif, **options)
    return file.getvalue()


def noise(height: int, width: int) -> np.ndarray:
    return np.random.default_rng(3).integers(0, 255, (height, width, 3), np.uint8)


@pytest.mark.parametrize("kind", ["PNG", "WEBP", "TIFF"])
@pytest.mark.parametrize("orientation", ORIENTATIONS)
@pytest.mark.parametrize("size", [(8, 12), (8, 8)])
def test_images_are_decoded_upright(kind, orientation, size):
    raw = encoded(pixels := noise(*size), kind, orientation)
    assert read_orientation(raw) == orientation
    found = decode_upright(raw, "x")
    assert (found == turn(pixels, orientation)).all()
    assert (found == ImageOps.exif_transpose(Image.open(io.BytesIO(raw)))).all()


@pytest.mark.parametrize("kind", ["JPEG", "TIFF"])
@pytest.mark.parametrize("orientation", ORIENTATIONS)
@pytest.mark.parametrize("size", [(8, 16), (8, 8)])
def test_the_stated_size_decides_and_otherwise_the_image_is_upright(kind, orientation, size):
    raw = encoded(noise(*size), kind, orientation)
    decoded = image.size(raw, "x")
    upright = size[::-1] if orientation > 4 else size
    as_decoded = image.decode(raw, "x")
    meant_upright = decode_upright(raw, "x")
    for stated in (None, upright):
        frame = frame_of(raw, decoded, stated)
        assert frame.size == upright
        assert (turn(as_decoded, frame.turn) == meant_upright).all()
        assert frame.is_upright
        unknown = stated is None or upright == size
        assert frame.is_assumed == (orientation != 1 and unknown)
    frame = frame_of(raw, decoded, size)
    if upright != size:
        assert (frame.size, frame.is_upright, frame.is_assumed) == (size, False, False)
        if kind == "TIFF":  # decoded upright, so it is turned back
            assert (turn(as_decoded, frame.turn) == noise(*size)).all()
        else:
            assert frame.turn == 1


@pytest.mark.parametrize("orientation", [0, 9, 60000])
def test_an_invalid_orientation_is_none(orientation):
    assert read_orientation(encoded(noise(8, 8), "PNG", orientation)) == 1
    assert read_orientation(b"no image") == 1


def test_a_jpeg_loses_its_exif_and_nothing_else():
    raw = encoded(noise(8, 16), "JPEG", 6, comment=b"kept")
    bare = without_exif(raw)
    assert (read_orientation(bare), b"kept" in bare) == (1, True)
    assert (image.decode(bare, "x") == image.decode(raw, "x")).all()
    assert without_exif(bare) == bare
    for cut in range(len(raw)):
        without_exif(raw[:cut])
