"""Photographs: a JPEG's bytes, or a PNG's or WebP's, enter, its size or its RGB pixels leave, both in stored order.

Masks lie on the stored pixels, so an EXIF orientation is not applied. What libjpeg-turbo decodes with a complaint is refused: a damaged file
is no picture, though Pillow decodes some without a word. PNG and WebP are left to Pillow; their transparency is dropped. What a file is, its first
bytes say, for some of ImageNet's .JPEG are none.

Not here: cropping and scaling to the input square (`geometry.frame`).
"""

import io
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import simplejpeg
from jaxtyping import UInt8
from PIL import Image

from gigamask.errors import CorruptSampleError

MAX_PIXELS = 2**26
"""67 megapixels, 20 times SA-1B's largest: above it a header is taken for a decompression bomb."""
MAX_BYTES = 2**28
"""256 MiB; a JPEG of as many pixels has a quarter of that at the highest quality."""
_DEEP = ("I", "F")
"""Pillow's modes of more than 8 bits, which it would clip."""


def size(raw: bytes, name: str) -> tuple[int, int]:
    """Returns (H, W) from the header of an image, of which the beginning is enough, a JPEG's up to its frame header."""
    return _header(raw, name)[:2]


def check_annotated(
    found: tuple[int, int], annotated: tuple[int, int], name: str, what: str = "JPEG"
) -> None:
    """Raises CorruptSampleError when an image's size (H, W) is not the one that its annotation states."""
    if annotated != found:
        raise CorruptSampleError(
            f"{name}: the {what} has {found[0]} x {found[1]} pixels, its annotation says {annotated[0]} x {annotated[1]}; leave it out"
        )


def decode(
    raw: bytes, name: str, annotated: tuple[int, int] | None = None, half: bool = False
) -> UInt8[np.ndarray, "H W 3"]:
    """Returns the pixels as RGB, whatever the image's own colours are.

    `annotated` is the size (H, W) that the annotation states; another one raises CorruptSampleError. `half` decodes at half the size (rounded up), of a JPEG
    in the DCT domain: a quarter faster, about 42 dB from the full decode followed by the same reduction.
    """
    height, width, usual = _header(raw, name)
    if annotated is not None:
        check_annotated((height, width), annotated, name, _format(raw))
    try:
        if not usual:
            with _opened(raw) as image:
                return np.array(image.convert("RGB").reduce(2 if half else 1))
        if (
            half
        ):  # without min_factor simplejpeg may choose 5/8 or 3/4, which take longer than full size
            return simplejpeg.decode_jpeg(
                raw, "RGB", min_height=-(-height // 2), min_width=-(-width // 2), min_factor=2
            )
        return simplejpeg.decode_jpeg(raw, "RGB")
    except (ValueError, OSError, SyntaxError) as error:
        raise CorruptSampleError(
            f"{name}: the {_format(raw)} of {len(raw)} bytes cannot be decoded ({error}); leave it out or fetch its tar again"
        ) from error


def encode_jpeg(
    pixels: UInt8[np.ndarray, "H W 3"], quality: int, chroma_subsampling: str = "420"
) -> bytes:
    """Encodes RGB pixels as a JPEG file without metadata.

    Args:
        pixels: RGB image, uint8, [H, W, 3].
        quality: JPEG quality, 1 to 100.
        chroma_subsampling: "420" stores colour at half the resolution, "444" at the full one.

    Returns:
        The bytes of the file.
    """
    return simplejpeg.encode_jpeg(
        np.ascontiguousarray(pixels),
        quality=quality,
        colorspace="RGB",
        colorsubsampling=chroma_subsampling,
    )


def _header(raw: bytes, name: str) -> tuple[int, int, bool]:
    """Returns height, width, and whether libjpeg-turbo's interface knows the format and chroma subsampling; the rest, like 3x1, is left to Pillow."""
    usual = True
    try:
        height, width = map(int, simplejpeg.decode_jpeg_header(raw)[:2])
    except (
        ValueError,
        KeyError,
    ):  # a KeyError for 4:4:1, which libjpeg-turbo knows and simplejpeg has no name for
        usual = False
        try:
            with _opened(raw) as image:
                (width, height), mode = image.size, image.mode
        except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
            raise CorruptSampleError(
                f"{name}: the {len(raw)} bytes are no {_format(raw)} that can be read; leave it out or fetch its tar again"
            ) from error
        if mode.startswith(_DEEP):
            raise CorruptSampleError(
                f"{name}: the {_format(raw)} has {mode} pixels, known are those of 8 bits; convert it to 8 bits a channel"
            ) from None
    if height * width > MAX_PIXELS:
        raise CorruptSampleError(
            f"{name}: the {_format(raw)} states {height} x {width} pixels, at most {MAX_PIXELS} are decoded; leave it out"
        )
    return height, width, usual


def _format(raw: bytes) -> str:
    """Returns what an image is by its first bytes; what is neither PNG nor WebP should be a JPEG."""
    if raw.startswith(b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR"):
        return "PNG"
    return "WEBP" if raw[:4] == b"RIFF" and raw[8:12] == b"WEBP" else "JPEG"


@contextmanager
def _opened(raw: bytes) -> Iterator[Image.Image]:
    """Opens an image with Pillow."""
    with warnings.catch_warnings():
        warnings.simplefilter(
            "ignore"
        )  # of bombs, the limit here is lower; of transparent palettes
        with Image.open(io.BytesIO(raw), formats=[_format(raw)]) as image:
            yield image
