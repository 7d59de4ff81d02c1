"""Stored pixels and what a model sees: the number of channels, and the window of values.

A model sees 8 bits per channel. Pixels of 8 bits are used as they are. Pixels of more bits, or of
floating-point numbers, need a window: the two values that become 0 and 255, with a straight line
between them. It is stated in numbers, or by percentiles of each image or of the training images.

Imports NumPy only in functions, so that `--help` is fast.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from gigamask.errors import CorruptSampleError, GigamaskError, PixelFormatError, check_range
from gigamask.lazy_numpy import np

if TYPE_CHECKING:
    from jaxtyping import Float64, UInt8

MAX_CHANNELS = 256
"""Most channels of an image: 17 times those of Sentinel-2."""
PREVIEW_PERCENTILES = (0.5, 99.5)
"""Percentiles by which images are shown where no model states a window; MedSAM's."""


@dataclass(frozen=True)
class PixelConfig:
    """How a model reads stored pixels; the default is 8-bit RGB."""

    channels: int = 3
    """channels of the input; gray images also fit a model of three channels; also --in-channels"""
    window: tuple[float, ...] = ()
    """values that become 0 and 255 in images of more than 8 bits: LO HI for all channels, or one
    pair for each; also --window"""
    percentiles: tuple[float, ...] = ()
    """the window in percentiles of each channel, such as 0.5 99.5; also --percentiles"""
    percentiles_of: Literal["image", "data"] = "image"
    """what the percentiles are taken over: image, each image by itself; data, a sample of the
    training images, which is measured once and recorded as the window"""

    def __post_init__(self) -> None:
        check_range("PixelConfig.channels", self.channels, 1, MAX_CHANNELS)
        window, percentiles = self.window, self.percentiles
        pairs = list(zip(window[::2], window[1::2], strict=False))
        if (window and len(window) not in (2, 2 * self.channels)) or not all(
            -math.inf < low < high < math.inf for low, high in pairs
        ):
            raise GigamaskError(
                "the window of pixels must be LO HI with LO < HI, or such a pair for each of "
                f"{self.channels} channels (got {' '.join(f'{value:g}' for value in window)})"
            )
        if percentiles and not (
            len(percentiles) == 2 and 0 <= percentiles[0] < percentiles[1] <= 100
        ):
            raise GigamaskError(
                "the percentiles of pixels must be two numbers between 0 and 100, the smaller "
                f"first, such as 0.5 99.5 (got {' '.join(f'{value:g}' for value in percentiles)})"
            )
        if self.percentiles_of == "data" and not percentiles:
            raise GigamaskError("percentiles_of data needs percentiles, such as 0.5 99.5")
        if window and percentiles and self.percentiles_of == "image":
            raise GigamaskError(
                "a window and percentiles of each image cannot be combined; give one of them"
            )

    @property
    def has_window(self) -> bool:
        """Whether pixels of more than 8 bits can be read."""
        return bool(self.window or self.percentiles)

    @property
    def description(self) -> str:
        """What becomes black and white in images of more than 8 bits, for people."""
        numbers = " ".join(f"{value:g}" for value in self.window or self.percentiles)
        return f"window {numbers}" if self.window else f"percentiles {numbers} of each image"

    @property
    def needs_measuring(self) -> bool:
        """Whether the window is to be measured on the training images."""
        return self.percentiles_of == "data" and not self.window

    def to_uint8(self, stored: np.ndarray, name: str) -> UInt8[np.ndarray, "H W C"]:
        """Return the channels that a model sees.

        Args:
            stored: Pixels `(H, W, S)`; S is the number of channels, or 1 for a model of three.
            name: Name of the image for error messages.

        Raises:
            PixelFormatError: The number of channels differs, or there is no window for pixels of
                more than 8 bits.
            CorruptSampleError: There is no finite value to take percentiles of.
        """
        self.check_channels(stored, name)
        levels = stored
        if stored.dtype != np.uint8:
            if not self.has_window or self.needs_measuring:
                raise PixelFormatError(
                    f"{name}: has {stored.dtype} pixels, for which no window is stated; give "
                    "--window LO HI (Sam.set_window), the values that become 0 and 255, or "
                    "--percentiles 0.5 99.5; or images in uint8"
                )
            low, high = (
                np.reshape(self.window, (-1, 2)).T.astype(np.float64)
                if self.window
                else channel_percentiles(stored, self.percentiles, name)
            )
            levels = apply_window(stored, low, high)
        if levels.shape[2] < self.channels:
            levels = np.repeat(levels, self.channels, 2)
        return np.ascontiguousarray(levels)

    def check_channels(self, stored: np.ndarray, name: str) -> None:
        """Check that an image has the channels of the model, or one for a model of three.

        Args:
            stored: Pixels `(H, W, S)`.
            name: Name of the image for error messages.

        Raises:
            PixelFormatError: It has not.
        """
        count = stored.shape[2]
        if count != self.channels and (count, self.channels) != (1, 3):
            act = f"or train a model with --in-channels {count}"
            if stored.shape[0] == self.channels:
                act = "with the channels last: image.transpose(1, 2, 0)"
            raise PixelFormatError(
                f"{name}: has {count} channels, but the model reads {self.channels}; give images "
                f"of {self.channels}, {act}"
            )

    def from_array(self, image: np.ndarray, name: str) -> UInt8[np.ndarray, "H W C"]:
        """Return the channels of an array of any type.

        Args:
            image: Pixels `(H, W)` or `(H, W, S)`.
            name: Name of the image for error messages.

        Raises:
            GigamaskError: As for `to_uint8`, or the array has another shape, or no numbers.
        """
        if not hasattr(image, "ndim"):
            raise GigamaskError(
                f"{name} must be an array of pixels, or the path of an image (got "
                f"{type(image).__name__})"
            )
        if image.ndim not in (2, 3) or not image.size or image.dtype.kind not in "uif":
            shape = " x ".join(map(str, image.shape))
            raise GigamaskError(
                f"{name} must be height x width, or height x width x channels, such as 3 in uint8 "
                f"from PIL's convert('RGB') (got {shape} {image.dtype})"
            )
        return self.to_uint8(image if image.ndim == 3 else image[..., None], name)

    def stated(self, window: tuple[float, ...], percentiles: tuple[float, ...]) -> PixelConfig:
        """Return the configuration with a window that a command gives for weights without one.

        Args:
            window: The window; empty if none is given.
            percentiles: Percentiles of each image; empty if none are given.

        Raises:
            GigamaskError: The weights state another window.
        """
        given = PixelConfig(self.channels, window, percentiles)
        if not given.has_window:
            return self
        stated = self.window or self.percentiles
        if stated and stated != (window if self.window else percentiles):
            kind = "window" if self.window else "percentiles"
            raise GigamaskError(
                f"the weights state the {kind} {' '.join(f'{value:g}' for value in stated)} that "
                "they are used with; leave --window and --percentiles out"
            )
        return self if self.has_window else given


RGB = PixelConfig()
"""8-bit RGB."""


@dataclass(frozen=True, kw_only=True)
class WindowOptions:
    """The window of a command, for weights that state none."""

    window: tuple[float, ...] = ()
    """values that become 0 and 255 in images of more than 8 bits, LO HI, if the weights state no
    window"""
    percentiles: tuple[float, ...] = ()
    """percentiles of each image that become 0 and 255, such as 0.5 99.5, if the weights state no
    window"""

    @property
    def flags(self) -> str:
        """The flags as they are written; empty if neither is given."""
        given = {"--window": self.window, "--percentiles": self.percentiles}
        return " ".join(
            f"{flag} {' '.join(f'{value:g}' for value in values)}"
            for flag, values in given.items()
            if values
        )


def channel_percentiles(
    stored: np.ndarray, percentiles: tuple[float, ...], name: str
) -> Float64[np.ndarray, "2 S"]:
    """Return two percentiles of the finite values of each channel.

    Args:
        stored: Pixels `(H, W, S)`.
        percentiles: The two percentiles.
        name: Name of the image for error messages.

    Raises:
        CorruptSampleError: A channel has no finite value.
    """
    if stored.dtype.kind != "f":
        return np.percentile(stored, percentiles, axis=(0, 1))
    finite = np.isfinite(stored)
    if not finite.any((0, 1)).all():
        raise CorruptSampleError(f"{name}: a channel has no finite value; leave it out")
    return np.nanpercentile(np.where(finite, stored, np.nan), percentiles, axis=(0, 1)).astype(
        np.float64
    )


def apply_window(
    stored: np.ndarray, low: Float64[np.ndarray, "C"], high: Float64[np.ndarray, "C"]
) -> UInt8[np.ndarray, "H W D"]:
    """Map values linearly, and round them: `low` becomes 0, `high` 255; NaN becomes 0.

    Args:
        stored: Pixels `(H, W, S)`.
        low: Value that becomes 0, one for all channels or one for each.
        high: Value that becomes 255; a channel without contrast becomes 0.
    """
    precise = np.float32 if stored.dtype.itemsize <= 2 else np.float64
    width = high - low
    scale = np.where(width > 0, 255 / np.where(width > 0, width, 1), 0)
    with np.errstate(invalid="ignore"):  # infinity times 0
        values = (stored.astype(precise) - low.astype(precise)) * scale.astype(precise)
    if stored.dtype.kind == "f":
        values = np.nan_to_num(values, copy=False, nan=0.0, posinf=255.0, neginf=0.0)
    return np.clip(np.rint(values, out=values), 0, 255, out=values).astype(np.uint8)


def to_rgb(pixels: UInt8[np.ndarray, "H W C"]) -> UInt8[np.ndarray, "H W 3"]:
    """Return the first three channels as red, green and blue, for pictures; one channel as gray.

    Args:
        pixels: The channels.
    """
    count = pixels.shape[2]
    if count == 3:
        return pixels
    if count == 2:
        return np.concatenate([pixels, np.zeros_like(pixels[..., :1])], 2)
    return np.ascontiguousarray(pixels[..., :3] if count > 3 else np.repeat(pixels, 3, 2))
