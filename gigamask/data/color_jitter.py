"""Colours that vary from visit to visit: pixels enter and leave as uint8.

Brightness, contrast and saturation as torchvision's `ColorJitter` defines them (torchvision/transforms/_functional_tensor.py: `adjust_brightness`,
`adjust_contrast`, `adjust_saturation`): a blend with black, with the mean grey, with the image's own greys, in random order. Values are rounded
to the nearest where torchvision cuts them, so that the mean brightness does not sink.

Not here: where pixels lie (`data.augment`), normalising (`model`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from gigamask.errors import GigamaskError

if TYPE_CHECKING:
    from jaxtyping import Float32, UInt8

GREY = (0.2989, 0.587, 0.114)
"""How much red, green and blue count towards grey (ITU-R BT.601, as torchvision rounds it)."""


@dataclass(frozen=True)
class ColorJitter:
    """Blends each image by factors drawn from [max(0, 1 - amount), 1 + amount]; amounts of 0 leave it as it is."""

    brightness: float = 0.0
    """how much the brightness may change; 0.2 is usual, 0 is off"""
    contrast: float = 0.0
    """how much the contrast may change; 0.2 is usual, 0 is off"""
    saturation: float = 0.0
    """how much the saturation may change; 0.2 is usual, 0 is off"""

    def __post_init__(self) -> None:
        for name in ("brightness", "contrast", "saturation"):
            amount = getattr(self, name)
            if not 0 <= amount < float("inf"):
                raise GigamaskError(
                    f"the colour's {name} may change by {amount}, amounts are 0 (off) or more; give such"
                )

    def adjust(
        self, pixels: UInt8[np.ndarray, "3 h w"], generator: np.random.Generator
    ) -> UInt8[np.ndarray, "3 h w"]:
        """Returns the pixels in other colours."""
        steps = ((self.brightness, brighten), (self.contrast, stretch), (self.saturation, saturate))
        shares = generator.random(len(steps))
        for step in generator.permutation(len(steps)):
            amount, change = steps[step]
            if amount:
                low = max(0.0, 1 - amount)
                pixels = change(pixels, float(low + (1 + amount - low) * shares[step]))
        return pixels


def brighten(pixels: UInt8[np.ndarray, "3 h w"], factor: float) -> UInt8[np.ndarray, "3 h w"]:
    """Returns the pixels blended with black: a factor of 0 is black, 1 changes nothing."""
    return np.take(_to_bytes(np.arange(256, dtype=np.float32) * factor), pixels)


def stretch(pixels: UInt8[np.ndarray, "3 h w"], factor: float) -> UInt8[np.ndarray, "3 h w"]:
    """Returns the pixels blended with their mean grey: a factor of 0 is that grey, 1 changes nothing."""
    # Sums of whole numbers: the same on every machine, with any number of threads.
    sums = pixels.reshape(3, -1).sum(1, dtype=np.int64)
    mean = float(np.dot(GREY, sums)) / (pixels.size // 3)
    return np.take(
        _to_bytes(np.arange(256, dtype=np.float32) * factor + (1 - factor) * mean), pixels
    )


def saturate(pixels: UInt8[np.ndarray, "3 h w"], factor: float) -> UInt8[np.ndarray, "3 h w"]:
    """Returns the pixels blended with their own greys: a factor of 0 is grey, 1 changes nothing."""
    red, green, blue = (
        np.float32((1 - factor) * weight) * plane
        for weight, plane in zip(GREY, pixels, strict=True)
    )
    grey, changed = red + green + blue, np.empty_like(pixels)
    # One colour at a time stays in the cache: a quarter of the time.
    for plane, into in zip(pixels, changed, strict=True):
        into[:] = _to_bytes(np.float32(factor) * plane + grey)
    return changed


def _to_bytes(values: Float32[np.ndarray, "*shape"]) -> UInt8[np.ndarray, "*shape"]:
    return np.clip(np.rint(values, out=values), 0, 255, out=values).astype(np.uint8)
