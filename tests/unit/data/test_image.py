"""JPEGs of every color space, at full and half size, and those that are none."""

import io
import struct
import zlib

import numpy as np
import pytest
import simplejpeg
from PIL import Image

from gigamask.data import image, tar
from gigamask.errors import CorruptSampleError
from gigamask.rng import make_rng
from tests.errors import corrupt_sample


def gradient(height: int = 48, width: int = 64) -> Image.Image:
    rows, columns = np.mgrid[:height, :width]
    return Image.fromarray(np.stack([rows * 5, columns * 3, rows * 0 + 90], -1).astype(np.uint8))


def saved(picture: Image.Image, **settings) -> bytes:
    file = io.BytesIO()
    picture.save(file, "JPEG", quality=95, **settings)
    return file.getvalue()


def odd_sampling() -> bytes:
    """A grey JPEG whose luma is sampled 3x1, which libjpeg decodes and TurboJPEG's interface does
    not name."""
    raw = bytearray(
        saved(Image.new("RGB", (48, 48), (128, 128, 128)), subsampling=0, optimize=True)
    )
    raw[raw.index(b"\xff\xc0") + 11] = 0x31
    return bytes(raw)


def test_size_comes_from_the_header_alone():
    raw = saved(gradient(37, 64))
    assert image.size(raw, "x") == (37, 64)
    assert image.size(raw[:700], "x") == (37, 64)
    assert image.size(odd_sampling(), "x") == (48, 48)


@pytest.mark.parametrize("mode", ["RGB", "L", "CMYK"])
def test_any_colours_become_rgb(mode):
    picture = gradient().convert(mode)
    pixels = image.decode(saved(picture), "x", (48, 64))
    assert pixels.shape == (48, 64, 3)
    assert np.abs(pixels.astype(int) - np.array(picture.convert("RGB"))).max() <= 8


def test_odd_chroma_subsampling_is_decoded():
    assert (image.decode(odd_sampling(), "x") == 128).all()
    assert image.decode(odd_sampling(), "x", half=True).shape == (24, 24, 3)


def test_exif_orientation_is_not_applied():
    exif = Image.Exif()
    exif[0x0112] = 6
    plain, turned = saved(gradient()), saved(gradient(), exif=exif)
    assert len(turned) > len(plain)
    assert (image.decode(turned, "x") == image.decode(plain, "x")).all()


def test_decode_is_what_pillow_decodes(real_data):
    path = real_data / "sa1b_real" / "sa1b_images_only_000000.tar"
    members = tar.scan(path)
    raw = path.read_bytes()[members.offsets[0] :][: members.sizes[0]]
    assert (image.decode(raw, "x") == np.array(Image.open(io.BytesIO(raw)))).all()


@pytest.mark.parametrize("height, width", [(48, 64), (37, 51), (1, 1), (16, 1)])
def test_half_size_rounds_up_and_keeps_the_picture(height, width):
    raw = saved(gradient(height, width), subsampling=0)
    half = image.decode(raw, "x", (height, width), half=True)
    assert half.shape == ((height + 1) // 2, (width + 1) // 2, 3)
    expected = np.array(gradient(height, width).reduce(2)).astype(int)
    assert np.abs(half - expected)[: height // 2, : width // 2].max(initial=0) <= 6


def test_half_size_takes_no_longer_than_full_size_factors_allow(monkeypatch):
    seen = {}
    monkeypatch.setattr(
        simplejpeg,
        "decode_jpeg",
        lambda raw, space, **settings: seen.update(settings) or np.zeros((24, 32, 3), np.uint8),
    )
    image.decode(saved(gradient()), "x", half=True)
    assert seen == {"min_height": 24, "min_width": 32, "min_factor": 2}


@pytest.mark.parametrize("raw", [b"", b"text", b"\xff\xd8\xff", saved(gradient())[:100]])
def test_what_is_no_jpeg_is_named(raw):
    for read in (image.size, image.decode):
        with corrupt_sample(rf"a.tar:sa_1.*{len(raw)}.*JPEG"):
            read(raw, "a.tar:sa_1")


def kept(picture: Image.Image, kind: str, **settings) -> bytes:
    file = io.BytesIO()
    picture.save(file, kind, **settings)
    return file.getvalue()


@pytest.mark.parametrize("settings", [("PNG", {}), ("WEBP", {"lossless": True})])
@pytest.mark.parametrize("mode", ["RGB", "RGBA", "L", "P"])
def test_png_and_webp_are_decoded(settings, mode):
    picture, (kind, more) = gradient(37, 51).convert(mode), settings
    raw = kept(picture, kind, **more)
    assert image.size(raw, "x") == (37, 51)
    assert (image.decode(raw, "x", (37, 51)) == np.array(picture.convert("RGB"))).all()
    half = np.array(picture.convert("RGB").reduce(2))
    assert half.shape == (19, 26, 3)
    assert (image.decode(raw, "x", half=True) == half).all()


def test_a_transparent_palette_is_decoded_without_a_word():
    picture = gradient().convert("P")
    raw = kept(picture, "PNG", transparency=bytes(range(200)))
    assert (image.decode(raw, "x") == np.array(picture.convert("RGB"))).all()


@pytest.mark.parametrize("kind", ["PNG", "WEBP"])
def test_damaged_png_and_webp_are_named(kind):
    raw = kept(
        Image.fromarray(np.random.default_rng(0).integers(0, 256, (48, 64, 3), dtype=np.uint8)),
        kind,
    )
    with corrupt_sample(rf"x: .*20.*{kind}"):
        image.size(raw[:20], "x")
    with corrupt_sample(rf"x: .*{kind}"):
        image.decode(raw[: len(raw) // 2], "x")
    with corrupt_sample(rf"{kind}.*48 x 64.*64 x 48"):
        image.decode(raw, "x", (64, 48))


def with_header(png: bytes, width: int, height: int, color_type: int | None = None) -> bytes:
    """Return a PNG that states another size, and another color type if one is given."""
    color = png[25] if color_type is None else color_type
    head = png[12:16] + struct.pack(">IIBB", width, height, png[24], color) + png[26:29]
    return png[:12] + head + struct.pack(">I", zlib.crc32(head)) + png[33:]


@pytest.mark.parametrize("side", [12000, 60000])
def test_a_png_bomb_is_seen_in_the_header(side):
    bomb = with_header(kept(Image.new("RGB", (8, 8)), "PNG"), side, side)
    for read in (image.size, image.decode):
        with corrupt_sample(r"x: .*PNG"):
            read(bomb, "x")


def test_damaged_jpegs_are_named():
    raw = saved(gradient())
    middle = raw.index(b"\xff\xda") + 200
    odd = odd_sampling()
    for broken in (
        raw[:-20],
        raw[:middle] + b"\xff\xd9" + raw[middle + 2 :],
        odd[: odd.index(b"\xff\xda") + 14],
    ):
        with corrupt_sample(rf"a.tar:sa_1.*JPEG.*{len(broken)}"):
            image.decode(broken, "a.tar:sa_1")


@pytest.mark.parametrize("raw", [saved(gradient()), odd_sampling()])
def test_a_bomb_is_seen_in_the_header(raw):
    at = raw.index(b"\xff\xc0") + 5
    bomb = raw[:at] + struct.pack(">HH", 12000, 12000) + raw[at + 4 :]
    for read in (image.size, image.decode):
        with corrupt_sample(r"a.tar:sa_1.*JPEG.*12000 x 12000.*134217728"):
            read(bomb, "a.tar:sa_1")


def test_an_odd_bomb_beyond_pillows_own_limit_is_refused():
    raw = odd_sampling()
    at = raw.index(b"\xff\xc0") + 5
    with corrupt_sample(r"x: .*JPEG"):
        image.size(raw[:at] + struct.pack(">HH", 60000, 60000) + raw[at + 4 :], "x")


def test_another_size_than_the_annotation_says_is_named():
    with corrupt_sample(r"a.tar:sa_1.*JPEG.*48 x 64.*64 x 48"):
        image.decode(saved(gradient()), "a.tar:sa_1", (64, 48))


@pytest.mark.parametrize("chroma, error", [("444", 3.0), ("420", 4.0)])
def test_what_is_encoded_is_decoded_again(chroma, error):
    """Also a view whose rows are not contiguous; a higher quality takes more bytes."""
    pixels = np.array(gradient())[:, ::-1]
    raw = image.encode_jpeg(pixels, 95, chroma)
    assert np.abs(image.decode(raw, "x").astype(int) - pixels).mean() < error
    assert simplejpeg.decode_jpeg_header(raw)[3] == chroma
    assert len(image.encode_jpeg(pixels, 50, chroma)) < len(raw)


def test_a_check_refuses_what_decoding_refuses():
    whole, random = saved(gradient()), make_rng(0, "damage")
    refused = 0
    for _ in range(300):
        damaged = bytearray(whole)
        for place in random.integers(whole.index(b"\xff\xda"), len(whole), 2):
            damaged[place] = random.integers(256)
        damaged = bytes(damaged[: random.integers(len(whole) // 2, 2 * len(whole))])
        found = []
        for is_check in (False, True):
            try:
                image.read_stored(damaged, "x", is_check=is_check)
                found.append("")
            except CorruptSampleError as error:
                found.append(str(error))
        assert found[0] == found[1]
        refused += bool(found[0])
    assert 50 < refused < 300
