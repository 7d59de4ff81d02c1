"""Which way an image is meant: the one rule of EXIF orientation, for every format and command.

A camera stores the pixels as the sensor has them, and in EXIF how to turn them upright. Browsers,
annotation tools, OpenCV's `imread` and trainers that use it turn them; Pillow does not unless it is
asked to. Coordinates can mean either. If a file states the size of its image, that decides; if the
size is the same both ways, or none is stated, the image is upright. Members of a tar are as stored.

Decoders turn a TIFF themselves, so its decoded pixels are upright.
"""

import io
import warnings
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path

import numpy as np
from jaxtyping import Shaped, UInt8
from PIL import ExifTags, Image

from gigamask.data import image, jpeg_markers
from gigamask.pixels import RGB, PixelConfig
from gigamask.serialization import read_limited

_SWAPS_SIDES = (5, 6, 7, 8)
_INVERSE = {6: 8, 8: 6}
"""Orientations that another one undoes; the others undo themselves."""
_APP1, _EXIF_SEGMENT = 0xE1, b"Exif\0\0"


@dataclass(frozen=True)
class Frame:
    """The pixels that coordinates refer to.

    Attributes:
        size: Their (H, W).
        turn: The EXIF orientation by which `turn` makes them of the decoded pixels; 1 is as they
            are.
        orientation: The EXIF orientation in the file.
        is_upright: Whether they are upright.
        is_assumed: Whether no size decides: the image is upright because tools show it so.
    """

    size: tuple[int, int]
    turn: int
    orientation: int
    is_upright: bool = True
    is_assumed: bool = False


def read_orientation(raw: bytes) -> int:
    """Return the EXIF orientation of an image file, 1 to 8; 1 if it states none that is valid."""
    kind = image.image_format(raw)
    if kind == "NPY" or (kind == "JPEG" and not _exif(raw)):
        return 1
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # broken EXIF, and bombs: nothing is decoded
            with Image.open(io.BytesIO(raw), formats=[kind]) as opened:
                opened.info.pop("xmp", None)  # which Pillow reads, but no browser
                opened.info.pop("XML:com.adobe.xmp", None)
                found = opened.getexif().get(ExifTags.Base.Orientation, 1)
    except Exception:  # Pillow has none in common for broken EXIF, without which the image is read
        return 1
    return found if isinstance(found, int) and 1 <= found <= 8 else 1


def _exif(raw: bytes) -> list[bytes]:
    """Return the EXIF segments of a JPEG, which lie before its first scan."""
    header = takewhile(lambda each: each[0] != jpeg_markers.SCAN, jpeg_markers.segments(raw))
    return [each for marker, each in header if marker == _APP1 and each.startswith(_EXIF_SEGMENT)]


def frame_of(raw: bytes, size: tuple[int, int], stated: tuple[int, int] | None) -> Frame:
    """Return which way an image is meant.

    Args:
        raw: The image file.
        size: (H, W) of its decoded pixels.
        stated: (H, W) that the masks' file states; None if it states none.
    """
    orientation = read_orientation(raw)
    swapped = size[::-1] if orientation in _SWAPS_SIDES else size
    is_tiff = image.image_format(raw) == "TIFF"
    upright, stored = (size, swapped) if is_tiff else (swapped, size)
    is_assumed = orientation != 1 and (stated is None or upright == stored)
    if stated == stored != upright:
        undo = _INVERSE.get(orientation, orientation)
        return Frame(stored, undo if is_tiff else 1, orientation, is_upright=False)
    return Frame(upright, 1 if is_tiff else orientation, orientation, True, is_assumed)


def as_stored(raw: bytes, size: tuple[int, int]) -> Frame:
    """Return that an image of a tar is as it is stored, whatever its EXIF says.

    Args:
        raw: The image file.
        size: (H, W) of its decoded pixels.
    """
    return Frame(size, 1, read_orientation(raw), is_upright=False)


def turn(pixels: Shaped[np.ndarray, "H W *C"], orientation: int) -> Shaped[np.ndarray, "h w *C"]:
    """Return pixels turned as an EXIF orientation says.

    Args:
        pixels: Pixels, or masks.
        orientation: 1 to 8.
    """
    if orientation in _SWAPS_SIDES:
        pixels = np.swapaxes(pixels, 0, 1)
    if orientation in (2, 3, 6, 7):
        pixels = pixels[:, ::-1]
    if orientation in (3, 4, 7, 8):
        pixels = pixels[::-1]
    return np.ascontiguousarray(pixels)


def turn_upright(pixels: Shaped[np.ndarray, "H W *C"], raw: bytes) -> Shaped[np.ndarray, "h w *C"]:
    """Return the decoded pixels of an image file upright.

    Args:
        pixels: Pixels, which may be smaller than the image.
        raw: The image file.
    """
    return turn(pixels, frame_of(raw, (0, 0), None).turn)


def decode_upright(raw: bytes, name: str, pixels: PixelConfig = RGB) -> UInt8[np.ndarray, "H W C"]:
    """Decode an image file, and return it upright as a model sees it; see `image.decode`.

    Args:
        raw: The file.
        name: Name of the image for error messages.
        pixels: Channels and window of the model.

    Raises:
        CorruptSampleError: The image cannot be decoded, or is not of a kind that the model reads.
    """
    return turn_upright(image.decode(raw, name, pixels=pixels), raw)


def upright_pixels(
    given: np.ndarray | str | Path, name: str, pixels: PixelConfig = RGB
) -> UInt8[np.ndarray, "H W C"]:
    """Return an image as a model sees it.

    Args:
        given: Pixels of any type, or the path of an image file, which is read upright.
        name: Name of pixels for error messages; files have their path.
        pixels: Channels and window of the model.

    Raises:
        GigamaskError: The file cannot be read, or the model does not read such pixels.
    """
    if not isinstance(given, str | Path):
        return pixels.from_array(given, name)
    path = Path(given).expanduser()
    return decode_upright(read_limited(path, image.MAX_BYTES), str(path), pixels)


def without_exif(raw: bytes) -> bytes:
    """Return a JPEG without its EXIF; its pixels are the same bytes."""
    for segment in _exif(raw):
        size = (len(segment) + 2).to_bytes(2)
        raw = raw.replace(b"\xff" + bytes([_APP1]) + size + segment, b"", 1)
    return raw
