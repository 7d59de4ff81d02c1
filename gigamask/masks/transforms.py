"""The transform between an image and the square model input, for pixels, masks, points and boxes.

Coordinates of points and boxes are those of `ResizeLongestSide` in SAM's repository: pixel (x, y),
counted from 0, becomes (x, y) times `scale_xy`, and the prompt encoder adds 0.5. Crops and flips
apply to pixels first, as if the cropped and mirrored image were stored.
"""

from dataclasses import dataclass

import cv2
import numpy as np
import torch
from jaxtyping import Float, Float32, Int, Int64, UInt8
from torch import Tensor
from torch.nn.functional import interpolate

from gigamask.masks.rle import RLEMasks


@dataclass(frozen=True)
class ImageTransform:
    """A crop of an image, resized, mirrored and placed at the top left of the model input.

    Attributes:
        original: Size of the image, (H, W).
        crop: y0, x0, y1, x1 in original pixels, half-open.
        resized: Size of the resized crop, (H, W).
        image_size: Side of the model input.
        flip: Whether to mirror the crop left to right.
    """

    original: tuple[int, int]
    crop: tuple[int, int, int, int]
    resized: tuple[int, int]
    image_size: int
    flip: bool = False

    @classmethod
    def resize_longest_side(
        cls, original: tuple[int, int], image_size: int, flip: bool = False
    ) -> "ImageTransform":
        """Return the transform that fits the whole image into the model input.

        Args:
            original: Size of the image, (H, W).
            image_size: Side of the model input, to which the longer side of the image is resized.
                The other side is rounded to the nearest pixel and is at least 1.
            flip: Whether to mirror the image left to right.
        """
        height, width = original
        scale = image_size / max(height, width)
        resized = (max(int(height * scale + 0.5), 1), max(int(width * scale + 0.5), 1))
        return cls(original, (0, 0, height, width), resized, image_size, flip)

    @property
    def crop_size(self) -> tuple[int, int]:
        """Size of the crop in original pixels, (H, W)."""
        y0, x0, y1, x1 = self.crop
        return y1 - y0, x1 - x0

    @property
    def scale_xy(self) -> tuple[float, float]:
        """Input pixels per original pixel, in x and y."""
        (crop_h, crop_w), (h, w) = self.crop_size, self.resized
        return w / crop_w, h / crop_h

    def apply_image(self, pixels: UInt8[np.ndarray, "H W 3"]) -> UInt8[Tensor, "3 h w"]:
        """Return the resized pixels (antialiased bilinear), without normalization and padding."""
        y0, x0, y1, x1 = self.crop
        cropped = np.require(pixels[y0:y1, x0:x1], requirements=["C", "W"])
        if self.crop_size == self.resized:
            # cv2 takes a seventh of torch's and numpy's time to move the channels to the front.
            planes = np.empty((3, *self.resized), np.uint8)
            cv2.split(cropped, list(planes))
            image = torch.from_numpy(planes)
        else:
            image = interpolate(
                torch.from_numpy(cropped).permute(2, 0, 1)[None],
                self.resized,
                mode="bilinear",
                antialias=True,
            )[0]
        return (image.flip(2) if self.flip else image).contiguous()

    def apply_masks(self, masks: RLEMasks, mask_size: int) -> RLEMasks:
        """Resample masks to a grid over the model input, nearest-neighbor at cell centers.

        Args:
            masks: Masks at original size.
            mask_size: Side of the grid in cells.

        Returns:
            The masks at mask_size x mask_size; the padding is background.
        """
        rows = _source_lines(self, 0, mask_size)
        columns = _source_lines(self, 1, mask_size)
        return masks.resample(rows, columns[::-1].copy() if self.flip else columns, self.flip)

    def apply_soft_masks(
        self, masks: RLEMasks, mask_size: int
    ) -> Float32[np.ndarray, "n mask_size mask_size"]:
        """Return the share of each cell of a grid over the model input that each mask covers.

        Args:
            masks: Masks at original size.
            mask_size: Side of the grid in cells.
        """
        y0, x0, y1, x1 = self.crop
        if self.crop_size != self.original:
            masks = masks.resample(np.arange(y0, y1), np.arange(x0, x1))
        edges = np.arange(mask_size + 1) * (self.image_size / mask_size)
        (crop_h, crop_w), (h, w) = self.crop_size, self.resized
        columns = (w - edges)[::-1] if self.flip else edges
        return masks.average(edges * (crop_h / h), columns * (crop_w / w), self.flip)

    def points_to_input(self, points: Float[np.ndarray, "*n 2"]) -> Float[np.ndarray, "*n 2"]:
        """Convert points xy from original to input pixels."""
        origin, sign = _origin_and_sign(self)
        return ((points - origin) * sign * self.scale_xy).astype(points.dtype)

    def points_to_original(self, points: Float[np.ndarray, "*n 2"]) -> Float[np.ndarray, "*n 2"]:
        """Convert points xy from input to original pixels."""
        origin, sign = _origin_and_sign(self)
        return (points / self.scale_xy * sign + origin).astype(points.dtype)

    def boxes_to_input(self, boxes: Float[np.ndarray, "n 4"]) -> Float[np.ndarray, "n 4"]:
        """Convert boxes xyxy, with inclusive ends, from original to input pixels."""
        corners = self.points_to_input(boxes.reshape(-1, 2, 2))
        return np.concatenate([corners.min(1), corners.max(1)], 1)  # a flip swaps left and right

    def logits_to_original(self, low: Float[Tensor, "n k G G"]) -> Float[Tensor, "n k H W"]:
        """Resize low-resolution logits to the original size, like SAM's `postprocess_masks`.

        Raises:
            ValueError: The transform crops or mirrors the image.
        """
        if self.flip or self.crop_size != self.original:
            raise ValueError(
                "logits can be resized to the original size only for whole, unmirrored images, "
                f"got crop {self.crop} and flip={self.flip}"
            )
        square = interpolate(
            low.float(), (self.image_size, self.image_size), mode="bilinear", align_corners=False
        )
        h, w = self.resized
        return interpolate(square[..., :h, :w], self.original, mode="bilinear", align_corners=False)


def boxes_on_grid(
    transform: ImageTransform, boxes: Int[np.ndarray, "n 4"], masks: RLEMasks
) -> Float32[np.ndarray, "n 4"]:
    """Convert boxes to input pixels, without parts of masks that a grid does not show.

    Boxes end at the first cell centers outside of the mask on the grid.

    Args:
        transform: The transform.
        boxes: Boxes xyxy of the visible parts of masks, with inclusive ends in original pixels.
        masks: The same masks on a grid over the model input, none of them empty.
    """
    cell, cells = transform.image_size / masks.size[0], masks.boxes().astype(np.float64)
    low, high = np.split(transform.boxes_to_input(boxes.astype(np.float64)), 2, 1)
    low = np.maximum(low, (cells[:, :2] - 0.5) * cell)
    high = np.minimum(high, (cells[:, 2:] + 1.5) * cell - np.array(transform.scale_xy))
    return np.concatenate([low, high], 1).astype(np.float32)


def _source_lines(
    transform: ImageTransform, axis: int, mask_size: int
) -> Int64[np.ndarray, "mask_size"]:
    """Return the original row (axis 0) or column (axis 1) at each cell's center, -1 in the padding.

    All arithmetic is in integers, so that every machine and every backend agrees.
    """
    length, crop = transform.resized[axis], transform.crop_size[axis]
    centers = (2 * np.arange(mask_size) + 1) * transform.image_size
    end = 2 * mask_size * length
    inside = centers < end
    if transform.flip and axis == 1:
        centers = end - centers
    return np.where(inside, transform.crop[axis] + centers * crop // end, -1)


def _origin_and_sign(transform: ImageTransform) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return the original pixel xy at the top left of the input, and the direction of its axes."""
    y0, x0, _, x1 = transform.crop
    return ((x1 - 1, y0), (-1, 1)) if transform.flip else ((x0, y0), (1, 1))
