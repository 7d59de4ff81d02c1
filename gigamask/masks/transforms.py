"""The transform between an image and the square model input, for pixels, masks, points and boxes.

Coordinates of points and boxes are those of `ResizeLongestSide` in SAM's repository: pixel (x, y),
counted from 0, becomes (x, y) times `scale_xy`, and the prompt encoder adds 0.5. Crops and flips
apply to pixels first, as if the cropped and mirrored image were stored.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import ceil, floor

import cv2
import numpy as np
import torch
from jaxtyping import Bool, Float, Float32, Int, Int64, Num, UInt8
from torch import Tensor
from torch.nn.functional import interpolate

from gigamask.masks.devices import is_readable, no_autocast
from gigamask.masks.rle import RLEMasks

Size = tuple[int, int]
LogitStack = tuple[Int64[np.ndarray, "_"], Float32[Tensor, "_ _ _"], Int64[np.ndarray, "_ 2"]]
"""Indices of masks, their logits in boxes of one size, and each box's first row and column."""
ResizeSteps = list[tuple[float, int]]
"""Factors by which logits are enlarged along an axis, and sizes after each."""
STACK_BYTES = 2**26
"""Bytes of the logits of a stack on a GPU."""


@dataclass(frozen=True)
class ImageTransform:
    """A crop of an image, resized, mirrored and placed at the top left of the model input.

    Attributes:
        original: Size of the image, (H, W).
        crop: y0, x0, y1, x1 in original pixels, half-open.
        resized: Size of the resized crop, (H, W).
        image_size: Side of the model input.
        flip: Whether to mirror the crop left to right.
        stretch: Whether both sides are resized independently, as in SAM 2.
    """

    original: Size
    crop: tuple[int, int, int, int]
    resized: Size
    image_size: int
    flip: bool = False
    stretch: bool = False

    @classmethod
    def resize_longest_side(
        cls, original: Size, image_size: int, flip: bool = False
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
    def crop_size(self) -> Size:
        """Size of the crop in original pixels, (H, W)."""
        y0, x0, y1, x1 = self.crop
        return y1 - y0, x1 - x0

    @property
    def scale_xy(self) -> tuple[float, float]:
        """Input pixels per original pixel, in x and y."""
        (crop_h, crop_w), (h, w) = self.crop_size, self.resized
        return w / crop_w, h / crop_h

    def apply_image(self, pixels: UInt8[np.ndarray, "H W C"]) -> UInt8[Tensor, "C h w"]:
        """Return the resized pixels (antialiased bilinear), without normalization and padding."""
        y0, x0, y1, x1 = self.crop
        cropped = np.require(pixels[y0:y1, x0:x1], requirements=["C", "W"])
        if self.crop_size == self.resized:
            # cv2 takes a seventh of torch's and numpy's time to move the channels to the front.
            planes = np.empty((pixels.shape[2], *self.resized), np.uint8)
            cv2.split(cropped, list(planes))
            image = torch.from_numpy(planes)
        else:
            image = resize(torch.from_numpy(cropped).permute(2, 0, 1)[None], self.resized)[0]
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

    def points_to_input(self, points: Float[np.ndarray, "*n 2"]) -> Float[np.ndarray, "*n 2"]:
        """Convert points xy from original to input pixels."""
        origin, sign = _origin_and_sign(self)
        points = _as_floating(points)
        return ((points - origin) * sign * self.scale_xy).astype(points.dtype)

    def points_to_original(self, points: Float[np.ndarray, "*n 2"]) -> Float[np.ndarray, "*n 2"]:
        """Convert points xy from input to original pixels."""
        origin, sign = _origin_and_sign(self)
        points = _as_floating(points)
        return (points / self.scale_xy * sign + origin).astype(points.dtype)

    def boxes_to_input(self, boxes: Float[np.ndarray, "n 4"]) -> Float[np.ndarray, "n 4"]:
        """Convert boxes xyxy, with inclusive ends, from original to input pixels."""
        corners = self.points_to_input(boxes.reshape(-1, 2, 2))
        return np.concatenate([corners.min(1), corners.max(1)], 1)  # a flip swaps left and right

    def logits_to_original(self, low: Float[Tensor, "n k G G"]) -> Float[Tensor, "n k H W"]:
        """Resize low-resolution logits to the original size, like SAM's `postprocess_masks`.

        Those of a stretched image are resized in one step, as in SAM 2.

        Raises:
            ValueError: The transform crops or mirrors the image.
        """
        if self.flip or self.crop_size != self.original:
            raise ValueError(
                "logits can be resized to the original size only for whole, unmirrored images, "
                f"got crop {self.crop} and flip={self.flip}"
            )
        low, (h, w) = low.float(), self.resized
        if not self.stretch:
            square = self.image_size, self.image_size
            low = interpolate(low, square, mode="bilinear", align_corners=False)[..., :h, :w]
        return interpolate(low, self.original, mode="bilinear", align_corners=False)


def resize(images: Num[Tensor, "B C H W"], size: Size) -> Num[Tensor, "B C h w"]:
    """Resize images, antialiased bilinear.

    Args:
        images: The images.
        size: The new (height, width).
    """
    if size[1] > 1:
        return interpolate(images, size, mode="bilinear", antialias=True)
    # torch 2.13 fills a column of one pixel with the value of its first row, but no row.
    rows = interpolate(images.float().mT, size[::-1], mode="bilinear", antialias=True).mT
    return (rows if images.is_floating_point() else rows.round()).to(images.dtype)


def whole_image(original: Size, image_size: int, stretch: bool = False) -> ImageTransform:
    """Return the transform of a whole image.

    Args:
        original: Size of the image, (H, W).
        image_size: Side of the model input.
        stretch: Whether both sides are resized to it, as in SAM 2; otherwise the longer side.
    """
    if not stretch:
        return ImageTransform.resize_longest_side(original, image_size)
    square = image_size, image_size
    return ImageTransform(original, (0, 0, *original), square, image_size, stretch=True)


def stretched(transform: ImageTransform, original: Size) -> ImageTransform:
    """Return the transform of an image that is first stretched to the square of another transform.

    Args:
        transform: Transform of a square.
        original: Size of the image, (H, W).
    """
    lines = []
    for axis, (length, side) in enumerate(zip(original, transform.original, strict=True)):
        first, last = transform.crop[axis], transform.crop[axis + 2]
        start = min(first * length // side, length - 1)
        lines.append((start, max(last * length // side, start + 1)))
    (y0, y1), (x0, x1) = lines
    return replace(transform, original=original, crop=(y0, x0, y1, x1), stretch=True)


def logit_boxes(
    transform: ImageTransform, low: Float[Tensor, "n G G"], threshold: float
) -> Iterator[tuple[Float32[Tensor, "h w"], tuple[int, int]]]:
    """Yield the parts of `logits_to_original` outside of which no logit exceeds a threshold.

    The logits differ from the whole image's by rounding. NaN counts as background.

    Args:
        transform: The transform.
        low: Low-resolution logits of n masks.
        threshold: At most 0.

    Yields:
        The logits of a mask's box and its first row and column; 0 x 0 logits if all are below.
    """
    low, lines, steps = _lines_above(transform, low, threshold)
    for mask, (rows, columns) in zip(low, lines, strict=True):
        corner = (rows[-1].start, columns[-1].start)
        if not (rows[-1] and columns[-1]):
            yield mask[:0, :0], corner
            continue
        part = mask[rows[0].start : rows[0].stop, columns[0].start : columns[0].stop]
        ranges = list(zip(rows, columns, strict=True))
        for step, (source, target) in enumerate(pairwise(ranges)):
            scale = steps[0][step][0], steps[1][step][0]
            part = _resize_part(part, source, scale, target)
        yield part, corner


def logit_stacks(
    transform: ImageTransform, low: Float[Tensor, "n G G"], threshold: float
) -> Iterator[LogitStack]:
    """Yield the logits of `logit_boxes` in stacks of boxes of one size.

    On a CPU each box is a stack of its own. Elsewhere boxes of similar size are enlarged to one
    size, up to `STACK_BYTES`, and resized in a few operations.

    Args:
        transform: The transform.
        low: Low-resolution logits of n masks.
        threshold: At most 0.
    """
    if is_readable(low):
        for index, (box, corner) in enumerate(logit_boxes(transform, low, threshold)):
            yield np.array([index]), box[None], np.array([corner])
        return
    low, lines, _ = _lines_above(transform, low, threshold)
    starts = np.array([[each[-1].start for each in pair] for pair in lines]).reshape(-1, 2)
    sizes = np.array([[max(len(each[-1]), 1) for each in pair] for pair in lines]).reshape(-1, 2)
    matrices = [_resize_matrix(transform, axis, low) for axis in (0, 1)]
    kinds = np.ceil(np.log2(sizes.max(1, initial=1)))
    for kind in np.unique(kinds):
        alike = np.flatnonzero(kinds == kind)
        size = sizes[alike].max(0)
        count = max(1, STACK_BYTES // int(4 * size.prod()))
        for index in np.split(alike, range(count, len(alike), count)):
            corners = np.minimum(starts[index], np.array(transform.original) - size)
            rows, columns = (
                matrix[_to_device(corners[:, axis, None] + np.arange(size[axis]), low.device)]
                for axis, matrix in enumerate(matrices)
            )
            with no_autocast(low):  # half precision would move borders
                logits = rows @ low[_to_device(index, low.device)] @ columns.mT
            yield index, logits, corners


def masks_of_logits(
    transform: ImageTransform, low: Float[Tensor, "n G G"], threshold: float
) -> Bool[Tensor, "n H W"]:
    """Return which logits at the original size exceed a threshold, resizing the masks' boxes alone.

    Args:
        transform: The transform.
        low: Low-resolution logits of n masks.
        threshold: The threshold.
    """
    masks = torch.zeros(len(low), *transform.original, dtype=torch.bool)
    boxes = logit_boxes(transform, low, min(threshold, 0.0))
    for mask, (part, (top, left)) in zip(masks, boxes, strict=True):
        height, width = part.shape
        mask[top : top + height, left : left + width] = above(part, threshold)
    return masks


def above(logits: Float[Tensor, "*s"], threshold: float) -> Bool[Tensor, "*s"]:
    """Return which logits exceed a threshold; NumPy takes a fifth of torch's time on a CPU.

    Args:
        logits: Logits of any shape.
        threshold: The threshold.
    """
    if is_readable(logits) and logits.dtype == torch.float32:
        return torch.from_numpy(np.asarray(logits.detach().numpy() > threshold))
    return logits > threshold


def count_pixels(masks: Bool[Tensor, "*n H W"]) -> Int64[Tensor, "*n"]:
    """Return the area of each mask, on a CPU by NumPy."""
    if not is_readable(masks):
        return masks.sum((-2, -1))
    counts = [np.count_nonzero(mask) for mask in masks.flatten(0, -3).numpy()]
    return torch.tensor(counts, dtype=torch.int64).view(masks.shape[:-2])


def _resize_steps(transform: ImageTransform, axis: int, mask_size: int) -> ResizeSteps:
    """Return the factors by which logits are enlarged along an axis, and the sizes after each."""
    original, resized = transform.original[axis], transform.resized[axis]
    if transform.stretch:
        return [(original / mask_size, original)]
    return [(transform.image_size / mask_size, resized), (original / resized, original)]


def _lines_above(
    transform: ImageTransform, low: Float[Tensor, "n G G"], threshold: float
) -> tuple[Float32[Tensor, "n G G"], list[tuple[list[range], list[range]]], list[ResizeSteps]]:
    """Return logits without NaN, the `_line_ranges` of each mask, and the steps of both axes."""
    steps = [_resize_steps(transform, axis, low.shape[-1]) for axis in (0, 1)]
    low = low.float().nan_to_num(nan=torch.finfo(torch.float32).min)
    # Cells that only rounding could lift above the threshold belong to the box.
    above = low > threshold - 1e-4 * (1 - threshold)
    rows, columns = (
        [_line_ranges(lines, of_axis) for lines in above.any(2 - axis).cpu().numpy()]
        for axis, of_axis in enumerate(steps)
    )
    return low, list(zip(rows, columns, strict=True)), steps


def _resize_matrix(
    transform: ImageTransform, axis: int, low: Float[Tensor, "n G G"]
) -> Float32[Tensor, "L G"]:
    """Return how all pixels of an axis depend on low-resolution cells, in `logits_to_original`."""
    weights = torch.eye(low.shape[-1], device=low.device)[None]
    if not transform.stretch:
        weights = interpolate(weights, transform.image_size, mode="linear", align_corners=False)
        weights = weights[..., : transform.resized[axis]]
    return interpolate(weights, transform.original[axis], mode="linear", align_corners=False)[0].T


def _to_device(index: Int64[np.ndarray, "*s"], device: torch.device) -> Int64[Tensor, "*s"]:
    return torch.from_numpy(index).to(device, non_blocking=True)


def _line_ranges(above: Bool[np.ndarray, "G"], steps: Sequence[tuple[float, int]]) -> list[range]:
    """Return the pixels of an axis that cells above the threshold reach, and what they depend on.

    Args:
        above: Cells above the threshold.
        steps: See `_resize_steps`.

    Returns:
        Ranges of low-resolution cells, of pixels after each step, and so of original pixels.
    """
    hits = np.flatnonzero(above)
    if not hits.size:
        return [range(0)] * (len(steps) + 1)
    first, stop = int(hits[0]), int(hits[-1]) + 1
    for scale, size in steps:
        first = max(floor((first - 0.5) * scale - 0.5), 0)
        stop = min(ceil((stop + 0.5) * scale - 0.5) + 1, size)
    ranges = [range(first, stop)]
    sources = [len(above), *(size for _, size in steps[:-1])]
    for (scale, _), size in zip(reversed(steps), reversed(sources), strict=True):
        first = max(floor((first + 0.5) / scale - 0.5) - 1, 0)
        stop = min(floor((stop - 0.5) / scale - 0.5) + 3, size)
        ranges.append(range(first, stop))
    return ranges[::-1]


def _resize_part(
    part: Float32[Tensor, "h w"],
    source: tuple[range, range],
    scale: tuple[float, float],
    target: tuple[range, range],
) -> Float32[Tensor, "H W"]:
    """Return rows and columns of a bilinearly resized image, given the part they depend on.

    Weights are those of the whole image, because both axes are counted from its first pixel.
    Whole rows are added in half the time of torch's function, and only those that are wanted.

    Args:
        part: Part of the image.
        source: Rows and columns of the part.
        scale: Factors of height and width.
        target: Rows and columns of the resized image.
    """
    for axis in (1, 0):  # few rows are widened, then all columns at once are heightened
        if scale[axis] == 1:
            start = target[axis].start - source[axis].start
            part = part.narrow(axis, start, len(target[axis]))
            continue
        lines = torch.arange(target[axis].start, target[axis].stop, device=part.device).float()
        position = ((lines + 0.5) * float(np.float32(1 / scale[axis])) - 0.5).clamp(min=0)
        first = position.long()
        weight = (position - first).view(-1, 1) if axis == 0 else position - first
        near = (first - source[axis].start).clamp(max=part.shape[axis] - 1)
        far = (near + 1).clamp(max=part.shape[axis] - 1)
        part = part.index_select(axis, near).lerp_(part.index_select(axis, far), weight)
    return part


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


def _as_floating(points: np.ndarray) -> np.ndarray:
    """Return points whose fractions are kept: whole numbers become float64."""
    return points if np.issubdtype(points.dtype, np.floating) else points.astype(np.float64)


def _origin_and_sign(transform: ImageTransform) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return the original pixel xy at the top left of the input, and the direction of its axes."""
    y0, x0, _, x1 = transform.crop
    return ((x1 - 1, y0), (-1, 1)) if transform.flip else ((x0, y0), (1, 1))
