"""Picture files of any usual format become the JPEGs that shards hold: a path and the size its masks have enter, bytes leave.

A JPEG is kept byte for byte. Masks that lie on the picture as its EXIF orientation turns it, which their size tells, get the turned picture.

Not here: decoding what shards hold (`data.image`).
"""

import io
import warnings
from pathlib import Path

import numpy as np
from jaxtyping import UInt8
from PIL import ExifTags, Image, ImageOps

from gigamask.data import image
from gigamask.errors import CorruptSampleError

FORMATS = {".jpg": "JPEG", ".jpeg": "JPEG", ".png": "PNG", ".webp": "WEBP", ".bmp": "BMP"}
QUALITY = 95
"""With full colour resolution, 42.5 dB on photographs: what is encoded anew loses next to nothing."""
_DEEP = ("I", "F")
_TURNED = (5, 6, 7, 8)


def as_jpeg(path: Path, size: tuple[int, int], name: str) -> bytes:
    """Returns the picture as a JPEG of `size`, (H, W); raises CorruptSampleError, with `name` in front, where it cannot be one."""
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise CorruptSampleError(
            f"{name}: {path} cannot be read ({error.strerror}); put the picture there"
        ) from error
    return to_jpeg(raw, size, name)


def to_jpeg(raw: bytes, size: tuple[int, int], name: str) -> bytes:
    """Returns a picture file's bytes as those of a JPEG of `size`, (H, W); raises CorruptSampleError where they cannot be."""
    if raw.startswith(b"\xff\xd8") and image.size(raw, name) == size:
        image.decode(raw, name)
        return raw
    with (
        warnings.catch_warnings(),
        opened(raw, tuple(dict.fromkeys(FORMATS.values())), name) as picture,
    ):
        warnings.simplefilter(
            "ignore", UserWarning
        )  # Pillow's, of broken EXIF and transparent palettes
        return image.encode_jpeg(_pixels(picture, size, name), QUALITY, "444")


def opened(raw: bytes, formats: tuple[str, ...], name: str) -> Image.Image:
    """Opens a picture without decoding it; raises CorruptSampleError for what is none, or one that is too large."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of bombs, the limit below is lower; of broken EXIF
            picture = Image.open(io.BytesIO(raw), formats=formats)
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise CorruptSampleError(
            f"{name}: its {len(raw)} bytes are no picture that can be read ({', '.join(formats)}); convert it or leave it out"
        ) from error
    width, height = picture.size
    if height * width > image.MAX_PIXELS:
        raise CorruptSampleError(
            f"{name}: the picture has {height} x {width} pixels, at most {image.MAX_PIXELS} are decoded; leave it out or scale it down"
        )
    return picture


def _pixels(picture: Image.Image, size: tuple[int, int], name: str) -> UInt8[np.ndarray, "H W 3"]:
    """Returns the picture's pixels as RGB, turned as its EXIF orientation says where only that gives it `size`."""
    height, width = size
    if picture.mode.startswith(_DEEP):
        raise CorruptSampleError(
            f"{name}: the picture has {picture.mode} pixels, known are those of 8 bits; convert it to 8 bits a channel"
        )
    try:
        if (
            picture.size == (height, width) != (width, height)
            and picture.getexif().get(ExifTags.Base.Orientation) in _TURNED
        ):
            picture = ImageOps.exif_transpose(picture)
        if picture.size != (width, height):
            stored = f"{picture.height} x {picture.width}"
            raise CorruptSampleError(
                f"{name}: the picture has {stored} pixels, its masks lie on {height} x {width}; give the picture they were made for"
            )
        return np.array(picture.convert("RGB"))
    except (OSError, SyntaxError, ValueError) as error:
        if isinstance(error, CorruptSampleError):
            raise
        raise CorruptSampleError(
            f"{name}: the picture cannot be decoded ({error}); save it again or leave it out"
        ) from error
