"""JPEGs without their end marker are read if nothing else is missing."""

import io

import numpy as np
import pytest
from PIL import Image

from gigamask.data import image
from gigamask.data.jpeg_markers import with_end
from tests.errors import corrupt_sample


def jpeg(progressive: bool) -> bytes:
    noise = np.random.default_rng(0).integers(0, 255, (4, 6, 3), np.uint8)
    file = io.BytesIO()
    picture = Image.fromarray(np.kron(noise, np.ones((8, 8, 1), np.uint8)))
    picture.save(file, "JPEG", quality=90, progressive=progressive)
    return file.getvalue()


@pytest.mark.parametrize("progressive", [False, True])
def test_only_the_end_marker_may_be_missing(progressive):
    raw = jpeg(progressive)
    whole = image.decode(raw, "whole")
    for cut in (*range(1, 40), *range(40, len(raw) - 700, 40)):
        part = raw[:-cut]
        if cut <= 2:
            assert with_end(part) == raw
            np.testing.assert_array_equal(image.decode(part, "part"), whole)
            assert image.decode(part, "part", half=True).shape == (16, 24, 3)
        else:
            with corrupt_sample("cannot be decoded"):
                image.decode(part, "part")


@pytest.mark.parametrize(
    "raw", [b"", b"\xff\xd8", b"\xff\xd8\xff", b"\xff\xd8\xff\xda\0\x04", b"GIF"]
)
def test_what_is_no_whole_jpeg_is_unchanged(raw):
    assert with_end(raw) == raw


@pytest.mark.parametrize("progressive", [False, True])
def test_whole_jpegs_are_unchanged(progressive):
    raw = jpeg(progressive)
    assert with_end(raw) == raw
    assert with_end(raw + b"appended") == raw + b"appended"
