"""Encoding of image files of common formats as the images of shards.

JPEGs are kept byte for byte, as is what a JPEG cannot hold: 16 bits, TIFFs and arrays. An image
that is meant upright (`data.orientation`) is turned, so that it agrees with its masks; no member of
a tar has an EXIF orientation that would turn it again.
"""

import io
import os
import warnings
from contextlib import suppress
from pathlib import Path

import numpy as np
from jaxtyping import UInt8
from PIL import Image

from gigamask.data import image, image_folder, jpeg_markers, orientation
from gigamask.data.orientation import Frame
from gigamask.errors import CorruptSampleError, GigamaskError
from gigamask.files import is_foreign
from gigamask.serialization import read_limited

SUFFIXES = (*image_folder.EXTENSIONS, ".bmp")
"""File name extensions of images."""
PIL_FORMATS = ("JPEG", "PNG", "WEBP", "BMP")
"""The formats that are encoded as JPEG, by Pillow's names."""
QUALITY = 95
"""JPEG quality: 42.5 dB PSNR on photographs with full color resolution, a negligible loss."""


def files_of(folder: Path, *suffixes: str) -> list[Path]:
    """Return the files of a folder and its subfolders, sorted, except hidden and foreign ones.

    Links are followed, except to a folder that they lie in.

    Args:
        folder: The folder.
        *suffixes: Suffixes in lower case; without any, all files are listed.

    Raises:
        GigamaskError: A subfolder cannot be read.
    """
    found = []
    for parent, folders, names in os.walk(folder, onerror=_cannot_list, followlinks=True):
        above = {each.resolve() for each in (Path(parent), *Path(parent).absolute().parents)}
        folders[:] = [
            name
            for name in folders
            if not image_folder.is_left_out(name) and Path(parent, name).resolve() not in above
        ]
        paths = (Path(parent, name) for name in names if not is_foreign(name))
        found += [path for path in paths if not suffixes or path.suffix.lower() in suffixes]
    return sorted(path for path in found if path.is_file())


def _cannot_list(error: OSError) -> None:
    raise GigamaskError(
        f"{error.filename}: cannot be read ({error.strerror}); check the folder and its permissions"
    ) from error


def size_of(raw: bytes, name: str) -> tuple[int, int]:
    """Return height and width of an image.

    Args:
        raw: The bytes of the file.
        name: The image's name in error messages.

    Raises:
        CorruptSampleError: The bytes are not an image.
    """
    if image.keeps_its_bytes(raw):
        return image.size(raw, name)
    if is_jpeg(raw):
        with suppress(CorruptSampleError):  # Pillow takes fifteen times as long
            return image.size(raw, name)
    with open_image(raw, PIL_FORMATS, name) as pil_image:
        return pil_image.height, pil_image.width


def read_file(path: Path, name: str) -> bytes:
    """Read an image file.

    Args:
        path: The file.
        name: The image's name in error messages.

    Raises:
        CorruptSampleError: It cannot be read, is not a regular file, or is larger than any image.
    """
    try:
        return read_limited(path, image.MAX_BYTES)
    except GigamaskError as error:
        raise CorruptSampleError(f"{name}: {error}") from None


def fit(raw: bytes, size: tuple[int, int] | None, name: str) -> Frame:
    """Return which way an image is meant, by the size of its masks.

    Args:
        raw: The bytes of the file.
        size: Height and width of its masks in pixels; None if their file states none.
        name: The image's name in error messages.

    Raises:
        CorruptSampleError: The bytes are not an image of this size, as stored or upright.
    """
    frame = orientation.frame_of(raw, size_of(raw, name), size)
    image.check_size(frame.size, size or frame.size, f"{name}: the image", "its masks")
    return frame


def to_member(raw: bytes, frame: Frame, name: str) -> bytes:
    """Convert the bytes of an image file to those of a member of a tar (`image.member_suffix`).

    Args:
        raw: The bytes of the file.
        frame: Which way it is meant.
        name: The image's name in error messages.

    Returns:
        The bytes of a JPEG; a JPEG, and what no JPEG can hold, unchanged if it is meant as stored,
        but for EXIF that says otherwise and a missing end marker. What no JPEG can hold is turned
        into a .npy.

    Raises:
        CorruptSampleError: The bytes are not an image.
    """
    is_as_stored, has_no_turn = frame.turn == 1, frame.orientation == 1
    if image.keeps_its_bytes(raw):
        stored = image.read_stored(raw, name)
        if is_as_stored and has_no_turn:
            return raw
        array = io.BytesIO()
        np.save(array, orientation.turn(stored, frame.turn), allow_pickle=False)
        return array.getvalue()
    if is_jpeg(raw) and is_as_stored:
        image.read_stored(raw, name, is_check=True)
        return jpeg_markers.with_end(raw if has_no_turn else orientation.without_exif(raw))
    pixels = orientation.turn(_decode(raw, name), frame.turn)
    return image.encode_jpeg(pixels, QUALITY, "444")


def read_pixels(path: Path, size: tuple[int, int], name: str) -> UInt8[np.ndarray, "H W 3"]:
    """Read the RGB pixels of an image file.

    Args:
        path: The file.
        size: Height and width of its masks in pixels.
        name: The image's name in error messages.

    Raises:
        CorruptSampleError: The file is not an image of this size.
    """
    raw = read_file(path, name)
    return orientation.turn(_decode(raw, name), fit(raw, size, name).turn)


def is_jpeg(raw: bytes) -> bool:
    """Return whether an image file is a JPEG."""
    return raw.startswith(b"\xff\xd8")


def open_image(raw: bytes, formats: tuple[str, ...], name: str) -> Image.Image:
    """Open an image without decoding it.

    Args:
        raw: The bytes of the file.
        formats: Allowed formats, by Pillow's names.
        name: The image's name in error messages.

    Raises:
        CorruptSampleError: The bytes are not an image of these formats, or it has too many pixels.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # broken EXIF, and bombs: the limit below is lower
            pil_image = Image.open(io.BytesIO(raw), formats=formats)
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise CorruptSampleError(
            f"{name}: its {len(raw)} bytes are not a readable image ({', '.join(formats)});"
            " convert it or leave it out"
        ) from error
    width, height = pil_image.size
    if height * width > image.MAX_PIXELS:
        raise CorruptSampleError(
            f"{name}: the image has {height} x {width} pixels, at most {image.MAX_PIXELS} are"
            " decoded; leave it out or scale it down"
        )
    return pil_image


def _decode(raw: bytes, name: str) -> UInt8[np.ndarray, "H W 3"]:
    """Return the RGB pixels of an image of 8 bits, as stored."""
    if is_jpeg(raw):
        return image.decode(raw, name)
    try:
        with warnings.catch_warnings(), open_image(raw, PIL_FORMATS, name) as pil_image:
            # Pillow warns about broken EXIF and transparent palettes.
            warnings.simplefilter("ignore", UserWarning)
            return np.array(pil_image.convert("RGB"))
    except (OSError, SyntaxError, ValueError) as error:
        if isinstance(error, CorruptSampleError):
            raise
        raise CorruptSampleError(
            f"{name}: the image cannot be decoded ({error}); save it again or leave it out"
        ) from error
