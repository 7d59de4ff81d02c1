"""The one transform between an image's own pixels and the square the encoder sees, for image, masks, points and boxes; points and logits go back.

Enters: pixels, runs, points, boxes in original coordinates. Leaves: the same in the input's coordinates, or points and logits brought back.
Points and boxes are in pixel-index coordinates: 0 is the centre of the first pixel. Resizing is `ResizeLongestSide` of SAM's reference code.

Not here: which crop or flip is taken (`data.augment`), normalising and padding of pixels (`model`), batching (`data.loader`).
"""

from dataclasses import dataclass

import cv2
import numpy as np
import torch
from jaxtyping import Float, Float32, Int64, UInt8
from torch import Tensor
from torch.nn.functional import interpolate

from gigamask.masks.rle import RLEMasks


@dataclass(frozen=True)
class ImageTransform:
    """How an image lies in the input square: its crop is resized to `resized`, mirrored if `flip`, and put into the upper left corner.

    `original`, `resized`: (H, W). `crop`: y0, x0, y1, x1 in original pixels, half-open. `side`: of the square.
    """

    original: tuple[int, int]
    crop: tuple[int, int, int, int]
    resized: tuple[int, int]
    image_size: int
    flip: bool = False

    @classmethod
    def whole(cls, original: tuple[int, int], side: int, flip: bool = False) -> "ImageTransform":
        """Fits the whole image: its long side becomes `side`, the other is rounded to the nearest pixel and is at least 1."""
        height, width = original
        scale = side / max(height, width)
        resized = (max(int(height * scale + 0.5), 1), max(int(width * scale + 0.5), 1))
        return cls(original, (0, 0, height, width), resized, side, flip)

    @property
    def crop_size(self) -> tuple[int, int]:
        y0, x0, y1, x1 = self.crop
        return y1 - y0, x1 - x0

    def image(self, pixels: UInt8[np.ndarray, "H W 3"]) -> UInt8[Tensor, "3 h w"]:
        """Returns the pixels as the encoder will see them, before normalising and padding: antialiased bilinear, in uint8."""
        y0, x0, y1, x1 = self.crop
        cropped = np.require(pixels[y0:y1, x0:x1], requirements=["C", "W"])
        if self.crop_size == self.resized:
            planes = np.empty((3, *self.resized), np.uint8)
            cv2.split(
                cropped, list(planes)
            )  # a seventh of the time that torch and numpy take to move the channels in front
            image = torch.from_numpy(planes)
        else:
            image = interpolate(
                torch.from_numpy(cropped).permute(2, 0, 1)[None],
                self.resized,
                mode="bilinear",
                antialias=True,
            )[0]
        return (image.flip(2) if self.flip else image).contiguous()

    def masks(self, runs: RLEMasks, grid: int) -> RLEMasks:
        """Returns the masks on a grid x grid raster over the input square: nearest at the centres of its cells, background beside the image."""
        rows = _lines(self, 0, grid)
        columns = _lines(self, 1, grid)
        return runs.resample(rows, columns[::-1].copy() if self.flip else columns, self.flip)

    def soft_masks(self, runs: RLEMasks, grid: int) -> Float32[np.ndarray, "n grid grid"]:
        """Returns the share of each cell of a grid x grid raster over the input square that each mask covers."""
        y0, x0, y1, x1 = self.crop
        if self.crop_size != self.original:
            runs = runs.resample(np.arange(y0, y1), np.arange(x0, x1))
        edges = np.arange(grid + 1) * (self.image_size / grid)
        (crop_h, crop_w), (h, w) = self.crop_size, self.resized
        columns = (w - edges)[::-1] if self.flip else edges
        return runs.average(edges * (crop_h / h), columns * (crop_w / w), self.flip)

    def points_to_input(self, points: Float[np.ndarray, "*n 2"]) -> Float[np.ndarray, "*n 2"]:
        """Returns where original points `xy` lie in the input."""
        origin, scale = _affine(self)
        moved = (points + 0.5 - origin) * scale - 0.5
        return _mirror(self, moved).astype(points.dtype)

    def points_to_original(self, points: Float[np.ndarray, "*n 2"]) -> Float[np.ndarray, "*n 2"]:
        """Returns where input points `xy` lie in the original."""
        origin, scale = _affine(self)
        return ((_mirror(self, points.astype(np.float64)) + 0.5) / scale + origin - 0.5).astype(
            points.dtype
        )

    def boxes_to_input(self, boxes: Float[np.ndarray, "n 4"]) -> Float[np.ndarray, "n 4"]:
        """Returns original boxes `xyxy`, ends inclusive, in the input."""
        corners = self.points_to_input(boxes.reshape(-1, 2, 2))
        return np.concatenate([corners.min(1), corners.max(1)], 1)  # a flip swaps left and right

    def logits_to_original(self, low: Float[Tensor, "n k G G"]) -> Float[Tensor, "n k H W"]:
        """Returns low-resolution logits at original size, as SAM's `postprocess_masks`: to the square, padding cut, to the original."""
        if self.flip or self.crop_size != self.original:
            raise ValueError(
                f"logits go back to whole, unmirrored images only, this frame shows crop {self.crop} with flip={self.flip}"
            )
        square = interpolate(
            low.float(), (self.image_size, self.image_size), mode="bilinear", align_corners=False
        )
        h, w = self.resized
        return interpolate(square[..., :h, :w], self.original, mode="bilinear", align_corners=False)


def _lines(frame: ImageTransform, axis: int, grid: int) -> Int64[np.ndarray, "grid"]:
    """Returns the original row (axis 0) or column (axis 1) at the centre of each cell, -1 beside the image.

    Whole numbers throughout, so that every machine and every backend agrees.
    """
    length, crop, start = frame.resized[axis], frame.crop_size[axis], frame.crop[axis]
    centres = (2 * np.arange(grid) + 1) * frame.image_size
    whole = 2 * grid * length
    inside = centres < whole
    if frame.flip and axis == 1:
        centres = whole - centres
    return np.where(inside, start + centres * crop // whole, -1)


def _affine(frame: ImageTransform) -> tuple[np.ndarray, np.ndarray]:
    """Returns the crop's corner `xy` and input pixels per original pixel."""
    (crop_h, crop_w), (h, w) = frame.crop_size, frame.resized
    return np.array([frame.crop[1], frame.crop[0]], np.float64), np.array([w / crop_w, h / crop_h])


def _mirror(frame: ImageTransform, points: np.ndarray) -> np.ndarray:
    """Returns input points mirrored within the resized width, if this frame does so."""
    return points * [-1, 1] + [frame.resized[1] - 1, 0] if frame.flip else points
