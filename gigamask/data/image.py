"""Photographs: a JPEG's bytes enter, its size or its RGB pixels leave, both in stored order.

Masks lie on the stored pixels, so an EXIF orientation is not applied. What libjpeg-turbo decodes with a complaint is refused: a damaged file
is no picture, though Pillow decodes some without a word.

Not here: cropping and scaling to the input square (`geometry.frame`).
"""

import io

import numpy as np
import simplejpeg
from jaxtyping import UInt8
from PIL import Image

from gigamask.faults import BadSample

MAX_PIXELS = 2**26
"""67 megapixels, 20 times SA-1B's largest: above it a header is taken for a decompression bomb."""
MAX_BYTES = 2**28
"""256 MiB; a JPEG of as many pixels has a quarter of that at the highest quality."""


def size(raw: bytes, name: str) -> tuple[int, int]:
    """Returns (H, W) from the header of a JPEG, of which the beginning up to its frame header is enough."""
    return _header(raw, name)[:2]


def check_annotated(found: tuple[int, int], annotated: tuple[int, int], name: str) -> None:
    """Raises BadSample when a JPEG's size (H, W) is not the one that its annotation states."""
    if annotated != found:
        raise BadSample(f"{name}: the JPEG has {found[0]} x {found[1]} pixels, its annotation says {annotated[0]} x {annotated[1]}; leave it out")


def decode(raw: bytes, name: str, annotated: tuple[int, int] | None = None, half: bool = False) -> UInt8[np.ndarray, "H W 3"]:
    """Returns the pixels as RGB, whatever the JPEG's own colours are.

    `annotated` is the size (H, W) that the annotation states; another one raises BadSample. `half` decodes at half the size (rounded up) in the
    DCT domain: a quarter faster, about 42 dB from the full decode followed by the same reduction.
    """
    height, width, usual = _header(raw, name)
    if annotated is not None:
        check_annotated((height, width), annotated, name)
    try:
        if not usual:
            with Image.open(io.BytesIO(raw), formats=["JPEG"]) as image:
                return np.array(image.convert("RGB").reduce(2 if half else 1))
        if half:  # without min_factor simplejpeg may choose 5/8 or 3/4, which take longer than full size
            return simplejpeg.decode_jpeg(raw, "RGB", min_height=-(-height // 2), min_width=-(-width // 2), min_factor=2)
        return simplejpeg.decode_jpeg(raw, "RGB")
    except (ValueError, OSError) as error:
        raise BadSample(f"{name}: the JPEG of {len(raw)} bytes cannot be decoded ({error}); leave it out or fetch its tar again") from error


def _header(raw: bytes, name: str) -> tuple[int, int, bool]:
    """Returns height, width, and whether libjpeg-turbo's interface knows the chroma subsampling; the rest, like 3x1, is left to Pillow."""
    usual = True
    try:
        height, width = map(int, simplejpeg.decode_jpeg_header(raw)[:2])
    except (ValueError, KeyError):  # a KeyError for 4:4:1, which libjpeg-turbo knows and simplejpeg has no name for
        usual = False
        try:
            with Image.open(io.BytesIO(raw), formats=["JPEG"]) as image:
                width, height = image.size
        except (OSError, Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
            raise BadSample(f"{name}: the {len(raw)} bytes are no JPEG that can be read; leave it out or fetch its tar again") from error
    if height * width > MAX_PIXELS:
        raise BadSample(f"{name}: the JPEG states {height} x {width} pixels, at most {MAX_PIXELS} are decoded; leave it out")
    return height, width, usual
