"""Decoding and encoding of images: JPEG, PNG and WebP.

Masks refer to the stored pixels, so EXIF orientation is not applied. A JPEG that libjpeg-turbo
decodes with a warning is rejected, although Pillow decodes some of these silently. PNG and WebP
are decoded by Pillow, without their transparency. The format is detected from the first bytes,
because some of ImageNet's .JPEG files are not JPEGs.
"""

import io
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import simplejpeg
from jaxtyping import UInt8
from PIL import Image

from gigamask.errors import CorruptSampleError
from gigamask.files import write_bytes

MAX_PIXELS = 2**27
"""134 megapixels, 400 MB decoded: the largest cameras and 10,000 x 10,000 px of orthophotos have
100; larger images count as decompression bombs."""
MAX_BYTES = 2**28
"""256 MiB; a JPEG of MAX_PIXELS has half of that at the highest quality."""
_HIGH_BIT_DEPTH_MODES = ("I", "F")
"""Prefixes of Pillow's modes with more than 8 bits per channel, which Pillow would clip."""


def size(raw: bytes, name: str) -> tuple[int, int]:
    """Read the size (H, W) from the header of an image.

    Args:
        raw: The file, or its beginning; for a JPEG, at least up to the frame header.
        name: Name of the image for error messages.

    Raises:
        CorruptSampleError: The header is invalid or states too many pixels.
    """
    return _read_header(raw, name)[:2]


def check_annotated(
    stored: tuple[int, int], annotated: tuple[int, int], name: str, image_format: str = "JPEG"
) -> None:
    """Check that an image has the size that its annotation states.

    Args:
        stored: Size (H, W) of the image.
        annotated: Size (H, W) in the annotation.
        name: Name of the image for error messages.
        image_format: Format of the image for error messages.

    Raises:
        CorruptSampleError: The sizes differ.
    """
    if annotated != stored:
        raise CorruptSampleError(
            f"{name}: the {image_format} has {stored[0]} x {stored[1]} pixels, but its annotation "
            f"says {annotated[0]} x {annotated[1]}; leave it out"
        )


def decode(
    raw: bytes, name: str, annotated: tuple[int, int] | None = None, half: bool = False
) -> UInt8[np.ndarray, "H W 3"]:
    """Decode an image of any color mode as RGB.

    Args:
        raw: The file.
        name: Name of the image for error messages.
        annotated: Size (H, W) that the annotation states.
        half: Decode at half the size, rounded up. A JPEG is reduced in the DCT domain, which is a
            quarter faster; PSNR is about 42 dB relative to full decoding and the same reduction.

    Returns:
        Pixels, uint8, [H, W, 3].

    Raises:
        CorruptSampleError: The image cannot be decoded or has another size.
    """
    height, width, by_simplejpeg = _read_header(raw, name)
    if annotated is not None:
        check_annotated((height, width), annotated, name, _format(raw))
    try:
        if not by_simplejpeg:
            with _open_pillow(raw) as image:
                return np.array(image.convert("RGB").reduce(2 if half else 1))
        if half:
            # Without min_factor simplejpeg may choose 5/8 or 3/4, which is slower than full size.
            return simplejpeg.decode_jpeg(
                raw, "RGB", min_height=-(-height // 2), min_width=-(-width // 2), min_factor=2
            )
        return simplejpeg.decode_jpeg(raw, "RGB")
    except (ValueError, OSError, SyntaxError) as error:
        raise CorruptSampleError(
            f"{name}: the {_format(raw)} of {len(raw)} bytes cannot be decoded ({error}); leave it "
            "out or download its tar again"
        ) from error


def encode_jpeg(
    pixels: UInt8[np.ndarray, "H W 3"], quality: int, chroma_subsampling: str = "420"
) -> bytes:
    """Encode RGB pixels as a JPEG file without metadata.

    Args:
        pixels: RGB image, uint8, [H, W, 3].
        quality: JPEG quality, 1 to 100.
        chroma_subsampling: "420" stores color at half the resolution, "444" at full resolution.

    Returns:
        The bytes of the file.
    """
    return simplejpeg.encode_jpeg(
        np.ascontiguousarray(pixels),
        quality=quality,
        colorspace="RGB",
        colorsubsampling=chroma_subsampling,
    )


def write_png(path: Path, pixels: UInt8[np.ndarray, "H W 3"]) -> None:
    """Write a PNG file atomically.

    Args:
        path: The file.
        pixels: RGB image, uint8, [H, W, 3].
    """
    encoded = io.BytesIO()
    Image.fromarray(pixels).save(encoded, "png", compress_level=1)
    write_bytes(path, encoded.getvalue())


def _read_header(raw: bytes, name: str) -> tuple[int, int, bool]:
    """Return height, width, and whether simplejpeg can decode the image; if not, Pillow does."""
    by_simplejpeg = True
    try:
        height, width = map(int, simplejpeg.decode_jpeg_header(raw)[:2])
    except (ValueError, KeyError):  # KeyError: 4:4:1, which only libjpeg-turbo supports
        by_simplejpeg = False
        try:
            with _open_pillow(raw) as image:
                (width, height), mode = image.size, image.mode
        except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
            raise CorruptSampleError(
                f"{name}: the {len(raw)} bytes are not a valid {_format(raw)}; leave it out or "
                "download its tar again"
            ) from error
        if mode.startswith(_HIGH_BIT_DEPTH_MODES):
            raise CorruptSampleError(
                f"{name}: the {_format(raw)} has mode {mode}, but must have 8 bits per channel; "
                "convert it"
            ) from None
    if height * width > MAX_PIXELS:
        raise CorruptSampleError(
            f"{name}: the {_format(raw)} states {height} x {width} pixels, more than the limit of "
            f"{MAX_PIXELS}; leave it out"
        )
    return height, width, by_simplejpeg


def _format(raw: bytes) -> str:
    """Detect the format from the first bytes; anything but PNG and WebP counts as a JPEG."""
    if raw.startswith(b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR"):
        return "PNG"
    return "WEBP" if raw[:4] == b"RIFF" and raw[8:12] == b"WEBP" else "JPEG"


@contextmanager
def _open_pillow(raw: bytes) -> Iterator[Image.Image]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # bombs, which MAX_PIXELS excludes; transparent palettes
        with Image.open(io.BytesIO(raw), formats=[_format(raw)]) as image:
            yield image
