"""How a photograph is laid into the input square: one `ImageTransform` for image, masks, points and boxes.

In: the original size, the square's side, a generator. Out: a frame.

Not here: what a frame does (`geometry.frame`), colours (`data.colour`).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gigamask.errors import GigamaskError

if TYPE_CHECKING:
    import numpy as np

    from gigamask.masks.transforms import ImageTransform


@dataclass(frozen=True)
class Augment(ABC):
    """Says how an image is laid into the input square."""

    @abstractmethod
    def frame(
        self, original: tuple[int, int], side: int, generator: np.random.Generator
    ) -> ImageTransform:
        """Returns the frame of an image of size `original`."""


@dataclass(frozen=True)
class NoAugment(Augment):
    """The whole image, its long side as long as the square's: SAM's own, which trains without augmentation."""

    def frame(
        self, original: tuple[int, int], side: int, generator: np.random.Generator
    ) -> ImageTransform:
        from gigamask.masks.transforms import ImageTransform

        return ImageTransform.whole(original, side)


@dataclass(frozen=True)
class HorizontalFlip(Augment):
    """The whole image, sometimes mirrored left to right."""

    probability: float = 0.5
    """share of the visits that are mirrored"""

    def __post_init__(self) -> None:
        _check_flip(self.probability)

    def frame(
        self, original: tuple[int, int], side: int, generator: np.random.Generator
    ) -> ImageTransform:
        from gigamask.masks.transforms import ImageTransform

        return ImageTransform.whole(
            original, side, flip=bool(generator.random() < self.probability)
        )


@dataclass(frozen=True)
class LargeScaleJitter(Augment):
    """The image scaled at random, sometimes mirrored; what is larger than the square is cropped at a random place.

    Ghiasi et al. 2021 (arXiv 2012.07177), numbers of ViTDet (arXiv 2203.16527) and Detectron2's `ResizeScale` with `FixedSizeCrop`.
    A smaller image stays in the upper left corner and is padded.
    """

    low: float = 0.1
    """smallest scale: the image's long side over the square's"""
    high: float = 2.0
    """largest scale; above 1 the square shows a crop"""
    flip: float = 0.5
    """share of the visits that are mirrored"""

    def __post_init__(self) -> None:
        _check_scales(self.low, self.high)
        _check_flip(self.flip)

    def frame(
        self, original: tuple[int, int], side: int, generator: np.random.Generator
    ) -> ImageTransform:
        return _scaled(original, side, generator, (self.low, self.high), self.flip)


@dataclass(frozen=True)
class ScaleJitter(Augment):
    """A little closer or further away, sometimes mirrored: large-scale jitter within the narrow range of the mixed_prompts recipe."""

    low: float = 0.8
    """smallest scale: the image's long side over the square's"""
    high: float = 1.2
    """largest scale; above 1 the square shows a crop"""
    flip: float = 0.5
    """share of the visits that are mirrored"""

    def __post_init__(self) -> None:
        _check_scales(self.low, self.high)
        _check_flip(self.flip)

    def frame(
        self, original: tuple[int, int], side: int, generator: np.random.Generator
    ) -> ImageTransform:
        return _scaled(original, side, generator, (self.low, self.high), self.flip)


@dataclass(frozen=True)
class RandomResizedCrop(Augment):
    """A random part of the image, stretched to fill the square, sometimes mirrored: the augmentation of masked pre-training.

    Szegedy et al. 2015 in the numbers of MAE (`main_pretrain.py`). Area and aspect are drawn until such a part fits in the image, ten
    times at most, then it is the largest of a permitted aspect in the middle, as in torchvision. Stretching changes shapes: not for masks' sake.
    """

    area: tuple[float, float] = (0.2, 1.0)
    """smallest and largest share of the image's area"""
    aspect: tuple[float, float] = (3 / 4, 4 / 3)
    """smallest and largest width over height of the part, even in the logarithm"""
    flip: float = 0.5
    """share of the visits that are mirrored"""

    def __post_init__(self) -> None:
        if not 0 < self.area[0] <= self.area[1] <= 1:
            raise GigamaskError(
                f"areas from {self.area[0]} to {self.area[1]}: they lie in (0, 1] and the first is not the larger one; give such"
            )
        if not 0 < self.aspect[0] <= self.aspect[1] < float("inf"):
            raise GigamaskError(
                f"aspects from {self.aspect[0]} to {self.aspect[1]}: they are above 0 and the first is not the larger one; give such"
            )
        _check_flip(self.flip)

    def frame(
        self, original: tuple[int, int], side: int, generator: np.random.Generator
    ) -> ImageTransform:
        from gigamask.masks.transforms import ImageTransform

        tries, (down, along, mirrored) = (
            generator.random((10, 2)).tolist(),
            generator.random(3).tolist(),
        )
        fitting = (
            size
            for share, shape in tries
            if (size := self._size(original, share, shape)) is not None
        )
        found = next(fitting, None)
        crop_h, crop_w = found or self._largest(original)
        if found is None:
            down = along = 0.5
        y0, x0 = int(down * (original[0] - crop_h + 1)), int(along * (original[1] - crop_w + 1))
        return ImageTransform(
            original, (y0, x0, y0 + crop_h, x0 + crop_w), (side, side), side, mirrored < self.flip
        )

    def _size(
        self, original: tuple[int, int], share: float, shape: float
    ) -> tuple[int, int] | None:
        """Returns height and width of the part that two uniform numbers choose, None where it has no pixel or does not fit."""
        area = original[0] * original[1] * (self.area[0] + share * (self.area[1] - self.area[0]))
        aspect = self.aspect[0] * (self.aspect[1] / self.aspect[0]) ** shape
        height, width = round(math.sqrt(area / aspect)), round(math.sqrt(area * aspect))
        return (height, width) if 0 < height <= original[0] and 0 < width <= original[1] else None

    def _largest(self, original: tuple[int, int]) -> tuple[int, int]:
        """Returns the size of the largest part that has a permitted aspect, to whole pixels."""
        height, width = original
        tall, wide = (
            max(int(width / self.aspect[0] + 0.5), 1),
            max(int(height * self.aspect[1] + 0.5), 1),
        )
        return min(height, tall), min(width, wide)


def _scaled(
    original: tuple[int, int],
    side: int,
    generator: np.random.Generator,
    scales: tuple[float, float],
    flip: float,
) -> ImageTransform:
    """Returns the frame of an image whose long side becomes `scale * side`, cropped to whole pixels.

    The crop holds the pixels that fit as a whole; what that leaves of the square, less than one of them, is padding.
    """
    from gigamask.masks.transforms import ImageTransform

    low, high = scales
    how_large, down, along, mirrored = generator.random(4).tolist()
    scale = low + (high - low) * how_large
    window = max(int(max(original) / scale), 1)
    crop_h, crop_w = (min(length, window) for length in original)
    y0, x0 = int(down * (original[0] - crop_h + 1)), int(along * (original[1] - crop_w + 1))
    zoom = side * scale / max(original)
    resized = (_fitted(crop_h * zoom, side), _fitted(crop_w * zoom, side))
    return ImageTransform(
        original, (y0, x0, y0 + crop_h, x0 + crop_w), resized, side, mirrored < flip
    )


def _fitted(length: float, side: int) -> int:
    return min(max(int(length + 0.5), 1), side)


def _check_scales(low: float, high: float) -> None:
    if not 0 < low <= high < float("inf"):
        raise GigamaskError(
            f"scales from {low} to {high}: they are above 0 and the first is not the larger one; give such"
        )


def _check_flip(probability: float) -> None:
    if not 0 <= probability <= 1:
        raise GigamaskError(
            f"the flip's probability is {probability}, it lies in [0, 1]; give such"
        )
