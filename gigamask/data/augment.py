"""Image augmentation: resizing, cropping, flipping and color jitter."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

from gigamask.errors import GigamaskError, check_range
from gigamask.lazy_numpy import np

if TYPE_CHECKING:
    from jaxtyping import Float, Float32, UInt8

    from gigamask.masks.transforms import ImageTransform, Size

    Planes = UInt8[np.ndarray, "C h w"]

GRAY_WEIGHTS = (0.2989, 0.587, 0.114)
"""Weights of red, green and blue in gray (ITU-R BT.601, as torchvision rounds it)."""


@dataclass(frozen=True)
class Augment(ABC):
    """Base class of augmentations, which resize, crop and flip an image into the input square."""

    whole_images: ClassVar[bool] = False
    """whether the image is shown as a whole, at most mirrored"""

    @abstractmethod
    def get_transform(
        self, original: Size, image_size: int, generator: np.random.Generator
    ) -> ImageTransform:
        """Draw the transform of one image's pixels, masks, points and boxes.

        Args:
            original: Size (H, W) of the stored image.
            image_size: Side of the input square in pixels.
            generator: Random generator.
        """

    def get_transform_with_objects(
        self,
        original: Size,
        image_size: int,
        boxes: Float[np.ndarray, "n 4"],
        generator: np.random.Generator,
    ) -> ImageTransform:
        """Draw the transform of an image with objects; by default they make no difference.

        Args:
            original: Size (H, W) of the stored image.
            image_size: Side of the input square in pixels.
            boxes: Boxes xyxy of the masks that may be trained on, in original pixels.
            generator: Random generator.
        """
        return self.get_transform(original, image_size, generator)


@dataclass(frozen=True)
class NoAugment(Augment):
    """The whole image, its long side resized to the side of the square, as in SAM's training."""

    whole_images: ClassVar[bool] = True

    def get_transform(
        self, original: Size, image_size: int, generator: np.random.Generator
    ) -> ImageTransform:
        """Return the transform of the whole image.

        Args:
            original: Size (H, W) of the stored image.
            image_size: Side of the input square in pixels.
            generator: Not used.
        """
        from gigamask.masks.transforms import ImageTransform

        return ImageTransform.resize_longest_side(original, image_size)


@dataclass(frozen=True)
class HorizontalFlip(Augment):
    """The whole image, flipped left to right at random."""

    probability: float = 0.5
    """probability of a horizontal flip"""
    whole_images: ClassVar[bool] = True

    def __post_init__(self) -> None:
        _check_flip("HorizontalFlip.probability", self.probability)

    def get_transform(
        self, original: Size, image_size: int, generator: np.random.Generator
    ) -> ImageTransform:
        """Draw whether the whole image is flipped.

        Args:
            original: Size (H, W) of the stored image.
            image_size: Side of the input square in pixels.
            generator: Random generator.
        """
        from gigamask.masks.transforms import ImageTransform

        return ImageTransform.resize_longest_side(
            original, image_size, flip=bool(generator.random() < self.probability)
        )


@dataclass(frozen=True)
class LargeScaleJitter(Augment):
    """Large-scale jitter: random scale, random crop if larger than the square, random flip.

    Ghiasi et al. 2021 (arXiv 2012.07177), with the parameters of ViTDet (arXiv 2203.16527) and
    Detectron2's `ResizeScale` with `FixedSizeCrop`. A smaller image is placed in the upper left
    corner and padded.
    """

    low: float = 0.1
    """minimum scale: the image's long side as a multiple of the square's"""
    high: float = 2.0
    """maximum scale; above 1 the square shows a crop"""
    flip: float = 0.5
    """probability of a horizontal flip"""
    multiple: int = 1
    """height and width become multiples of this many input pixels, by cropping; a CPU is faster
    with few different sizes"""

    def __post_init__(self) -> None:
        check_range(f"{type(self).__name__}.multiple", self.multiple, 1)
        _check_scales(type(self).__name__, self.low, self.high)
        _check_flip(f"{type(self).__name__}.flip", self.flip)

    def get_transform(
        self, original: Size, image_size: int, generator: np.random.Generator
    ) -> ImageTransform:
        """Draw a scale, a crop and a flip.

        Args:
            original: Size (H, W) of the stored image.
            image_size: Side of the input square in pixels.
            generator: Random generator.
        """
        scales = self.low, self.high
        return _random_scale(original, image_size, generator, scales, self.flip, self.multiple)


@dataclass(frozen=True)
class ScaleJitter(LargeScaleJitter):
    """Large-scale jitter within the narrow range of the mixed_prompts recipe."""

    low: float = 0.8
    """minimum scale: the image's long side as a multiple of the square's"""
    high: float = 1.2
    """maximum scale; above 1 the square shows a crop"""


@dataclass(frozen=True)
class RandomCrop(Augment):
    """A random crop at the stored scale, flipped at random, for small objects of large images.

    It contains the center of a randomly chosen mask, and is placed like an image of its own, so
    that prediction by tiles of the same side sees objects as in training. Where the image is
    smaller, the crop is as high or as wide as the image.
    """

    side: int = 1024
    """side of the crop in stored pixels"""
    flip: float = 0.5
    """probability of a horizontal flip"""

    def __post_init__(self) -> None:
        check_range("RandomCrop.side", self.side, 1)
        _check_flip("RandomCrop.flip", self.flip)

    def get_transform(
        self, original: Size, image_size: int, generator: np.random.Generator
    ) -> ImageTransform:
        """Draw a crop anywhere in the image, and a flip.

        Args:
            original: Size (H, W) of the stored image.
            image_size: Side of the input square in pixels.
            generator: Random generator.
        """
        no_boxes = np.zeros((0, 4))
        return self.get_transform_with_objects(original, image_size, no_boxes, generator)

    def get_transform_with_objects(
        self,
        original: Size,
        image_size: int,
        boxes: Float[np.ndarray, "n 4"],
        generator: np.random.Generator,
    ) -> ImageTransform:
        """Draw a crop that contains the center of one of the boxes, and a flip.

        Args:
            original: Size (H, W) of the stored image.
            image_size: Side of the input square in pixels.
            boxes: Boxes xyxy of the masks that may be trained on, in original pixels.
            generator: Random generator.
        """
        from gigamask.masks.transforms import ImageTransform

        chosen, mirror, *place = generator.random(4).tolist()
        lines = []
        for axis, (length, u) in enumerate(zip(original, place, strict=True)):
            side = min(self.side, length)
            first, last = 0, length - side
            if len(boxes):
                box = boxes[int(chosen * len(boxes))]
                center = int(box[1 - axis] + box[3 - axis]) // 2
                first, last = max(first, center - side + 1), min(last, center)
            start = first + int(u * (last - first + 1))
            lines.append((start, start + side))
        (y0, y1), (x0, x1) = lines
        alone = ImageTransform.resize_longest_side(
            (y1 - y0, x1 - x0), image_size, mirror < self.flip
        )
        return replace(alone, original=original, crop=(y0, x0, y1, x1))


@dataclass(frozen=True)
class RandomResizedCrop(Augment):
    """A random crop stretched to fill the square, flipped at random: MAE's augmentation.

    Szegedy et al. 2015 with the parameters of MAE (`main_pretrain.py`). Area and aspect ratio are
    drawn up to ten times until the crop fits in the image; otherwise the largest central crop of a
    permitted aspect ratio is used, as in torchvision. Stretching distorts shapes, so it is meant
    for pre-training without masks.
    """

    area: tuple[float, float] = (0.2, 1.0)
    """minimum and maximum area of the crop as a share of the image"""
    aspect: tuple[float, float] = (3 / 4, 4 / 3)
    """minimum and maximum width / height of the crop, drawn log-uniformly"""
    flip: float = 0.5
    """probability of a horizontal flip"""

    def __post_init__(self) -> None:
        if not 0 < self.area[0] <= self.area[1] <= 1:
            raise GigamaskError(
                f"RandomResizedCrop.area must hold two ascending shares in (0, 1] (got {self.area})"
            )
        if not 0 < self.aspect[0] <= self.aspect[1] < float("inf"):
            raise GigamaskError(
                "RandomResizedCrop.aspect must hold two ascending numbers above 0 "
                f"(got {self.aspect})"
            )
        _check_flip("RandomResizedCrop.flip", self.flip)

    def get_transform(
        self, original: Size, image_size: int, generator: np.random.Generator
    ) -> ImageTransform:
        """Draw a crop and a flip.

        Args:
            original: Size (H, W) of the stored image.
            image_size: Side of the input square in pixels.
            generator: Random generator.
        """
        from gigamask.masks.transforms import ImageTransform

        tries, (y, x, mirror) = generator.random((10, 2)).tolist(), generator.random(3).tolist()
        crops = (self._crop_size(original, area, aspect) for area, aspect in tries)
        crop = next((size for size in crops if size is not None), None)
        if crop is None:
            crop, y, x = self._largest_crop(original), 0.5, 0.5
        crop_h, crop_w = crop
        y0, x0 = int(y * (original[0] - crop_h + 1)), int(x * (original[1] - crop_w + 1))
        return ImageTransform(
            original,
            (y0, x0, y0 + crop_h, x0 + crop_w),
            (image_size, image_size),
            image_size,
            mirror < self.flip,
        )

    def _crop_size(self, original: Size, area_u: float, aspect_u: float) -> Size | None:
        """Return the crop size (H, W) for two uniform numbers; None if empty or too large."""
        area = original[0] * original[1] * (self.area[0] + area_u * (self.area[1] - self.area[0]))
        aspect = self.aspect[0] * (self.aspect[1] / self.aspect[0]) ** aspect_u
        height, width = round(math.sqrt(area / aspect)), round(math.sqrt(area * aspect))
        return (height, width) if 0 < height <= original[0] and 0 < width <= original[1] else None

    def _largest_crop(self, original: Size) -> Size:
        """Return the largest crop size (H, W) of a permitted aspect ratio, in whole pixels."""
        height, width = original
        max_height = max(int(width / self.aspect[0] + 0.5), 1)
        max_width = max(int(height * self.aspect[1] + 0.5), 1)
        return min(height, max_height), min(width, max_width)


@dataclass(frozen=True)
class ColorJitter:
    """Random brightness, contrast and saturation, as in torchvision's `ColorJitter`.

    Each blends the image with black, its mean gray or its grayscale version, in random order, by a
    factor drawn from [max(0, 1 - amount), 1 + amount]. Values are rounded to the nearest integer;
    torchvision truncates them, which lowers the mean brightness.
    """

    brightness: float = 0.0
    """maximum change of brightness; 0.2 is typical, 0 disables"""
    contrast: float = 0.0
    """maximum change of contrast; 0.2 is typical, 0 disables"""
    saturation: float = 0.0
    """maximum change of saturation; 0.2 is typical, 0 disables"""

    def __post_init__(self) -> None:
        for name in ("brightness", "contrast", "saturation"):
            amount = getattr(self, name)
            if not 0 <= amount < float("inf"):
                raise GigamaskError(f"ColorJitter.{name} must be >= 0 and finite (got {amount})")

    def adjust(self, pixels: Planes, generator: np.random.Generator) -> Planes:
        """Return the pixels with random changes of color.

        Args:
            pixels: RGB image, uint8, [3, h, w].
            generator: Random generator.
        """
        steps = (
            (self.brightness, adjust_brightness),
            (self.contrast, adjust_contrast),
            (self.saturation, adjust_saturation),
        )
        if not any(amount for amount, _ in steps):
            return pixels
        uniforms = generator.random(len(steps))
        for step in generator.permutation(len(steps)):
            amount, change = steps[step]
            if amount:
                low = max(0.0, 1 - amount)
                pixels = change(pixels, float(low + (1 + amount - low) * uniforms[step]))
        return pixels


def adjust_brightness(pixels: Planes, factor: float) -> Planes:
    """Blend an image with black.

    Args:
        pixels: RGB image, uint8, [3, h, w].
        factor: 0 gives black, 1 leaves the image unchanged.
    """
    return np.take(_to_uint8(np.arange(256, dtype=np.float32) * factor), pixels)


def adjust_contrast(pixels: Planes, factor: float) -> Planes:
    """Blend an image with its mean gray.

    Args:
        pixels: RGB image, uint8, [3, h, w].
        factor: 0 gives the mean gray, 1 leaves the image unchanged.
    """
    # Integer sums are the same on every machine, with any number of threads.
    channels = len(pixels)
    sums = pixels.reshape(channels, -1).sum(1, dtype=np.int64)
    weights = GRAY_WEIGHTS if channels == 3 else np.full(channels, 1 / channels)
    mean = float(np.dot(weights, sums)) / (pixels.size // channels)
    return np.take(
        _to_uint8(np.arange(256, dtype=np.float32) * factor + (1 - factor) * mean), pixels
    )


def adjust_saturation(pixels: Planes, factor: float) -> Planes:
    """Blend an image with its grayscale version.

    Args:
        pixels: RGB image, uint8, [3, h, w].
        factor: 0 gives the grayscale image, 1 leaves the image unchanged.
    """
    red, green, blue = (
        np.float32((1 - factor) * weight) * plane
        for weight, plane in zip(GRAY_WEIGHTS, pixels, strict=True)
    )
    gray, changed = red + green + blue, np.empty_like(pixels)
    # One channel at a time fits the cache, which takes a quarter of the time.
    for plane, out in zip(pixels, changed, strict=True):
        out[:] = _to_uint8(np.float32(factor) * plane + gray)
    return changed


def _to_uint8(values: Float32[np.ndarray, "*shape"]) -> UInt8[np.ndarray, "*shape"]:
    return np.clip(np.rint(values, out=values), 0, 255, out=values).astype(np.uint8)


def _random_scale(
    original: Size,
    image_size: int,
    generator: np.random.Generator,
    scales: tuple[float, float],
    flip: float,
    multiple: int,
) -> ImageTransform:
    """Draw the transform of an image whose long side becomes `scale * image_size`.

    The crop holds only pixels that fit completely; the rest of the square, less than one pixel, is
    padding. Height and width that are larger than `multiple` become multiples of it.
    """
    from gigamask.masks.transforms import ImageTransform

    low, high = scales
    scale_u, y, x, mirror = generator.random(4).tolist()
    scale = low + (high - low) * scale_u
    window = max(int(max(original) / scale), 1)
    zoom = image_size * scale / max(original)
    lengths = []
    for length in original:
        crop = min(length, window)
        resized = min(max(int(crop * zoom + 0.5), 1), image_size)
        if resized > multiple and resized % multiple:
            resized -= resized % multiple
            crop = max(int(resized / zoom), 1)
        lengths.append((crop, resized))
    (crop_h, height), (crop_w, width) = lengths
    y0, x0 = int(y * (original[0] - crop_h + 1)), int(x * (original[1] - crop_w + 1))
    return ImageTransform(
        original, (y0, x0, y0 + crop_h, x0 + crop_w), (height, width), image_size, mirror < flip
    )


def _check_scales(name: str, low: float, high: float) -> None:
    if not 0 < low <= high < float("inf"):
        raise GigamaskError(f"{name} needs finite scales with 0 < low <= high (got {low}, {high})")


def _check_flip(name: str, probability: float) -> None:
    if not 0 <= probability <= 1:
        raise GigamaskError(f"{name} must be a probability in [0, 1] (got {probability})")
