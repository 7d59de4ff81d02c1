"""Decoding and encoding of images: JPEG, PNG, WebP, TIFF and NumPy's .npy.

Masks of a tar refer to the stored pixels, so EXIF orientation is not applied here
(`data.orientation` does it for people's files). A JPEG that libjpeg-turbo decodes with a warning
is rejected, although Pillow decodes some of these silently; one that lacks only its end marker is
read. Other formats are decoded by Pillow, colors of 16 bits by OpenCV, arrays by NumPy. Pages of a
TIFF that have the size of the first are channels; an alpha channel is left out unless the model
reads four channels.
The format is detected from the first bytes, because some of ImageNet's .JPEG files are not JPEGs.
"""

import io
import math
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import simplejpeg
from jaxtyping import UInt8
from PIL import Image

from gigamask.errors import CorruptSampleError, first_line
from gigamask.files import write_bytes
from gigamask.pixels import (
    MAX_CHANNELS,
    PREVIEW_PERCENTILES,
    RGB,
    PixelConfig,
    apply_window,
    channel_percentiles,
    to_rgb,
)

MAX_PIXELS = 2**27
"""134 megapixels, 400 MB decoded: the largest cameras and 10,000 x 10,000 px of orthophotos have
100; larger images count as decompression bombs."""
MAX_BYTES = 2**28
"""256 MiB; a JPEG of MAX_PIXELS has half of that at the highest quality."""
MAX_ARRAY_HEADER = 4096
"""Bytes of the header of a .npy."""
OTHER_SIZE = "size differs from its image"
"""Kind of masks and files of masks that were made for an image of another size."""
SUFFIXES = {"PNG": ".png", "TIFF": ".tif", "NPY": ".npy"}
"""File name extensions of formats that a tar keeps."""
_MAGIC = {
    b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR": "PNG",
    b"II*\0": "TIFF",
    b"MM\0*": "TIFF",
    b"II+\0": "TIFF",
    b"MM\0+": "TIFF",
    np.lib.format.MAGIC_PREFIX: "NPY",
}
_HIGH_BIT_DEPTH_MODES = ("I", "F")
"""Prefixes of Pillow's modes with more than 8 bits per channel, all of them gray."""
_DEEP_GRAY_ALPHA = b"\x10\x04"
"""Bits and color type of a gray PNG of 16 bits with alpha, which Pillow opens as colors."""
_BITS_PER_SAMPLE, _PHOTOMETRIC, _SAMPLES, _PLANES, _SAMPLE_FORMAT = 258, 262, 277, 284, 339
"""TIFF's tags."""


def size(raw: bytes, name: str) -> tuple[int, int]:
    """Read the size (H, W) from the header of an image.

    Args:
        raw: The file, or its beginning; for a JPEG, at least up to the frame header.
        name: Name of the image for error messages.

    Raises:
        CorruptSampleError: The header is invalid or states too many pixels.
    """
    return _read_header(raw, name)[:2]


def check_size(
    found: tuple[int, ...], size: tuple[int, int], name: str, other: str = "its image"
) -> None:
    """Check that an image has the size of what belongs to it.

    Args:
        found: Height and width of one of the two in pixels.
        size: Height and width of the other.
        name: What the one is, with which the error message begins.
        other: What the other is.

    Raises:
        CorruptSampleError: The sizes differ.
    """
    if found != size:
        sides = [" x ".join(map(str, each)) for each in (found, size)]
        turned = " (a quarter turn, as of EXIF)" if found == size[::-1] else ""
        raise CorruptSampleError(
            f"{name} has {sides[0]} pixels, but {other} {sides[1]}, height x width{turned}; "
            "correct it or leave it out",
            OTHER_SIZE,
        )


def decode(
    raw: bytes,
    name: str,
    annotated: tuple[int, int] | None = None,
    half: bool = False,
    pixels: PixelConfig = RGB,
) -> UInt8[np.ndarray, "H W C"]:
    """Decode an image as a model sees it.

    Args:
        raw: The file.
        name: Name of the image for error messages.
        annotated: Size (H, W) that the annotation states.
        half: Decode 8-bit images at half the size, rounded up. A JPEG is reduced in the DCT domain,
            which is a quarter faster; PSNR is about 42 dB relative to full decoding and the same
            reduction.
        pixels: Channels of the model, and window of pixels of more than 8 bits.

    Returns:
        Pixels, uint8, [H, W, C].

    Raises:
        CorruptSampleError: The image cannot be decoded, has another size, or is not of a kind that
            the model reads (`PixelFormatError`).
    """
    stored = read_stored(raw, name, annotated, half, pixels.channels, pixels.has_window)
    return pixels.to_uint8(stored, name)


def decode_preview(raw: bytes, name: str, half: bool = False) -> UInt8[np.ndarray, "H W 3"]:
    """Decode an image of any kind as RGB to look at, by percentiles if it has more than 8 bits.

    Args:
        raw: The file.
        name: Name of the image for error messages.
        half: As for `decode`.
    """
    stored = read_stored(raw, name, half=half)
    if stored.dtype != np.uint8:
        stored = stored[::2, ::2] if half else stored
        stored = apply_window(stored, *channel_percentiles(stored, PREVIEW_PERCENTILES, name))
    return to_rgb(stored)


def read_stored(
    raw: bytes,
    name: str,
    annotated: tuple[int, int] | None = None,
    half: bool = False,
    channels: int | None = None,
    deep_color: bool = True,
    is_check: bool = False,
) -> np.ndarray:
    """Decode an image without a window.

    Args:
        raw: The file.
        name: Name of the image for error messages.
        annotated: Size (H, W) that the annotation states.
        half: As for `decode`.
        channels: Channels of the model that reads it, which decides about alpha and the pages that
            are read; None reads all pages.
        deep_color: Whether to read colors of 16 bits as such, and not their high byte.
        is_check: Whether the pixels are not used: a JPEG is decoded in gray at an eighth of its
            size, which reads all of its bytes and takes two thirds of the time.

    Returns:
        Stored numbers of any type, [H, W, S].

    Raises:
        CorruptSampleError: The image cannot be decoded or has another size.
    """
    height, width, color_space = _read_header(raw, name)
    if annotated is not None:
        check_size((height, width), annotated, f"{name}: the {image_format(raw)}", "its annotation")
    try:
        if color_space is not None:
            factor = 8 if is_check else 2 if half else 1
            is_gray = is_check or (color_space, channels) == ("Gray", 1)
            return _decode_jpeg(raw, factor, "GRAY" if is_gray else "RGB")
        if image_format(raw) == "NPY":
            return _read_array(raw)
        with _open_pillow(raw) as image:
            return _read_pages(image, raw, half, channels, deep_color)
    except Exception as error:  # Pillow and OpenCV have none in common for all that they refuse
        raise CorruptSampleError(
            f"{name}: the {image_format(raw)} of {len(raw)} bytes cannot be decoded "
            f"({first_line(error)}); leave it out, or put the whole file back"
        ) from error


def halve(stored: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    """Return the means of 2 x 2 pixels; the last row and column are repeated if they are odd.

    Args:
        stored: Pixels `(H, W, S)`, or what `read_stored` has halved already.
        size: (H, W) of the image.
    """
    if stored.shape[:2] != size:
        return stored
    odd = [(0, side % 2) for side in size]
    even = np.pad(stored, (*odd, (0, 0)), "edge") if any(map(max, odd)) else stored
    total = even[::2, ::2].astype(np.float32 if stored.dtype.itemsize <= 2 else np.float64)
    for rows, columns in ((0, 1), (1, 0), (1, 1)):
        total += even[rows::2, columns::2]
    total /= 4
    return (total if stored.dtype.kind == "f" else np.rint(total)).astype(stored.dtype)


def _decode_jpeg(raw: bytes, factor: int, color_space: str) -> UInt8[np.ndarray, "H W S"]:
    """Decode a JPEG strictly, with its end marker if it lacks only that."""
    try:
        return _decode_complete_jpeg(raw, factor, color_space)
    except ValueError:
        from gigamask.data import jpeg_markers  # few need it

        ended = jpeg_markers.with_end(raw)
        if ended == raw:
            raise
        return _decode_complete_jpeg(ended, factor, color_space)


def _decode_complete_jpeg(raw: bytes, factor: int, color_space: str) -> UInt8[np.ndarray, "H W S"]:
    if factor == 1:
        return simplejpeg.decode_jpeg(raw, color_space)
    height, width = map(int, simplejpeg.decode_jpeg_header(raw)[:2])
    # Without min_factor simplejpeg may choose 5/8 or 3/4, which is slower than full size.
    least = {"min_height": -(-height // factor), "min_width": -(-width // factor)}
    return simplejpeg.decode_jpeg(raw, color_space, **least, min_factor=factor)


def _read_pages(
    image: Image.Image, raw: bytes, half: bool, channels: int | None, deep_color: bool
) -> np.ndarray:
    """Return the pages of a TIFF that have the size of the first, or the only page, as channels."""
    if image.format == "PNG" and raw[24:26] == _DEEP_GRAY_ALPHA:
        return _deep_page(image, raw, keep_alpha=False)[..., :1]
    is_color = not image.mode.startswith(_HIGH_BIT_DEPTH_MODES)
    is_deep = is_color and bits_of(image, raw) > 8
    if is_deep and _tags(image).get(_PLANES) == 2:  # which neither Pillow nor OpenCV reads
        raise ValueError("its colors of 16 bits are in separate planes; write them interleaved")
    is_deep &= deep_color
    pages, first, count = [], image.size, 0
    for number in range(MAX_CHANNELS + 1 if image.format == "TIFF" else 1):
        try:
            image.seek(number)
        except EOFError:
            break
        if image.size != first:
            continue
        count += 1
        if count * math.prod(first) > 3 * MAX_PIXELS:
            raise ValueError(f"{count} pages of {first[1]} x {first[0]}, more than are read")
        if is_deep and count > 1:
            raise ValueError("its colors of 16 bits are on several pages; write a .npy")
        if is_deep:
            pages.append(_deep_page(image, raw, channels == 4))
        elif channels is None or count <= channels:
            pages.append(_page(image, half, channels == 4))
    if len(pages) < count:  # the model reads fewer, which it reports
        return np.broadcast_to(pages[0][..., :1], (*pages[0].shape[:2], count))
    if len({page.dtype for page in pages}) > 1:
        raise ValueError("its pages have pixels of different types")
    return pages[0] if len(pages) == 1 else np.concatenate(pages, 2)


def _deep_page(image: Image.Image, raw: bytes, keep_alpha: bool) -> np.ndarray:
    """Return colors of 16 bits, which Pillow reduces."""
    image.load()  # reports damage better than OpenCV
    bgr = cv2.imdecode(np.frombuffer(raw, np.uint8), cv2.IMREAD_UNCHANGED)
    if bgr is None:
        raise ValueError("OpenCV cannot read it")
    return np.concatenate([bgr[..., 2::-1], bgr[..., 3 : 3 + keep_alpha]], 2)


def _page(image: Image.Image, half: bool, keep_alpha: bool) -> np.ndarray:
    """Return the pixels of one page; palettes and other color spaces become RGB."""
    if image.mode.startswith(("L", *_HIGH_BIT_DEPTH_MODES)):
        stored = as_stated(np.array(image), image)
        if stored.dtype != np.uint8:
            return stored[..., None]
    if (samples := _tags(image).get(_SAMPLES, 1)) > 4:  # Pillow reads three, and alpha
        raise ValueError(f"it has {samples} channels in one page; write a page for each, or a .npy")
    mode = "L" if image.mode in ("1", "L", "LA") else "RGB"
    if keep_alpha and image.mode == "RGBA":
        mode = "RGBA"
    stored = np.array(image.convert(mode).reduce(2 if half else 1))
    return stored.reshape(*stored.shape[:2], -1)


def as_stated(pixels: np.ndarray, image: Image.Image) -> np.ndarray:
    """Return pixels in the type that a TIFF states, where Pillow knows no such mode.

    Args:
        pixels: Pixels as Pillow has decoded them.
        image: The image that Pillow has opened.
    """
    pixels = pixels.astype(pixels.dtype.newbyteorder("="), copy=False)
    tags = _tags(image)
    is_signed = 2 in tags.get(_SAMPLE_FORMAT, ())
    if image.mode == "L" and is_signed:
        return pixels.view(np.int8)
    if image.mode == "I" and not is_signed and 32 in tags.get(_BITS_PER_SAMPLE, ()):
        return pixels.view(np.uint32)
    return pixels


def is_inverted(image: Image.Image) -> bool:
    """Return whether an image is a TIFF whose 0 is white, which Pillow inverts.

    Args:
        image: The image that Pillow has opened.
    """
    return _tags(image).get(_PHOTOMETRIC) == 0


def _tags(image: Image.Image) -> Mapping[int, Any]:
    return getattr(image, "tag_v2", {})


def bits_of(image: Image.Image, raw: bytes) -> int:
    """Return the most bits that a channel of a PNG or a TIFF has.

    Args:
        image: The image as Pillow has opened it; others have 8 bits.
        raw: The file.
    """
    if image.format == "PNG":
        return raw[24]
    return max(_tags(image).get(_BITS_PER_SAMPLE, (8,)))


def _read_array(raw: bytes) -> np.ndarray:
    """Return the array of a .npy file."""
    shape, is_fortran, dtype, offset = _array_header(raw)
    if len(raw) - offset != math.prod(shape) * dtype.itemsize:
        raise ValueError(f"its header states {shape} {dtype}, which is not what follows")
    flat = np.frombuffer(raw, dtype, offset=offset)
    stored = np.array(flat.reshape(shape, order="F" if is_fortran else "C"), order="C")
    stored = stored.astype(dtype.newbyteorder("="), copy=False)
    return stored if stored.ndim == 3 else stored[..., None]


def _array_header(raw: bytes) -> tuple[tuple[int, ...], bool, np.dtype, int]:
    """Return shape, order, type and offset of the array of a .npy file; raise if it is no image."""
    file, formats = io.BytesIO(raw), np.lib.format
    version = formats.read_magic(file)
    read = formats.read_array_header_1_0 if version == (1, 0) else formats.read_array_header_2_0
    shape, is_fortran, dtype = read(file, max_header_size=MAX_ARRAY_HEADER)
    if dtype.kind not in "uif" or dtype.itemsize > 8 or len(shape) not in (2, 3) or 0 in shape:
        raise ValueError(
            f"an image is height x width, or height x width x channels, of integers or floats, but "
            f"the array is {shape} {dtype}"
        )
    if math.prod(shape) > 3 * MAX_PIXELS:
        raise ValueError(f"{shape} values, more than the limit of {3 * MAX_PIXELS}")
    return shape, is_fortran, dtype, file.tell()


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


def _read_header(raw: bytes, name: str) -> tuple[int, int, str | None]:
    """Return height, width, and the color space of a JPEG that simplejpeg can decode."""
    color_space = None
    try:
        stated = simplejpeg.decode_jpeg_header(raw)
        (height, width), color_space = map(int, stated[:2]), stated[2]
    except (ValueError, KeyError):  # KeyError: 4:4:1, which only libjpeg-turbo supports
        try:
            if image_format(raw) == "NPY":
                height, width = _array_header(raw)[0][:2]
            else:
                with _open_pillow(raw) as image:
                    width, height = image.size
        except Exception as error:  # Pillow has none in common for all that it refuses
            raise CorruptSampleError(
                f"{name}: the {len(raw)} bytes are not a valid {image_format(raw)}"
                f"{_hint(raw, error)}; leave it out, or put the whole file back"
            ) from error
    if height * width > MAX_PIXELS:
        raise CorruptSampleError(
            f"{name}: the {image_format(raw)} states {height} x {width} pixels, more than the limit"
            f" of {MAX_PIXELS}; leave it out"
        )
    return height, width, color_space


def _hint(raw: bytes, error: Exception) -> str:
    """Return what else may be wrong with an array, or with a TIFF whose header is read."""
    if image_format(raw) == "NPY":
        return f" ({first_line(error)})"
    if image_format(raw) == "TIFF":
        return (
            ", or of a kind that is not read, such as one page of five channels: give each "
            "channel a page, or write a .npy"
        )
    return ""


def image_format(raw: bytes) -> str:
    """Detect the format from the first bytes, by Pillow's name; anything unknown is a JPEG."""
    if raw[:4] == b"RIFF" and raw[8:12] == b"WEBP":
        return "WEBP"
    return next((known for magic, known in _MAGIC.items() if raw.startswith(magic)), "JPEG")


def keeps_its_bytes(raw: bytes) -> bool:
    """Return whether an image is one that a JPEG cannot hold: a TIFF, an array, or of 16 bits."""
    kind = image_format(raw)
    return kind in ("TIFF", "NPY") or (kind == "PNG" and raw[24:25] > b"\x08")


def member_suffix(raw: bytes) -> str:
    """Return the extension of an image in a tar: that of its format where it keeps its bytes."""
    return SUFFIXES[image_format(raw)] if keeps_its_bytes(raw) else ".jpg"


@contextmanager
def _open_pillow(raw: bytes) -> Iterator[Image.Image]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # bombs, which MAX_PIXELS excludes; transparent palettes
        with Image.open(io.BytesIO(raw), formats=[image_format(raw)]) as image:
            yield image
