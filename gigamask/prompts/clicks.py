"""Simulated clicks on the target grid: one pixel of each mask, and its label.

Random numbers are arguments. Nothing synchronizes with the device: no shape depends on the content
of a mask.
"""

import numpy as np
import torch
from jaxtyping import Bool, Float, Float32, Float64, Int64
from torch import Tensor
from torch.nn import functional

from gigamask.masks.devices import constant, is_readable, widest
from gigamask.masks.valid_area import inside
from gigamask.types import Masks, PerMask, Targets

MAX_SUMS = 2**24
"""Sums of two squared distances that are in memory at a time, 64 MB."""


def uniform_click(error: Masks, uniforms: Float[Tensor, "M 2"]) -> Int64[Tensor, "M 2"]:
    """Choose one foreground pixel of each mask uniformly.

    The first uniform number chooses the row by inverting the cumulative row sums, the second the
    column: O(HW) without a random number per pixel.

    Args:
        error: Masks to click in.
        uniforms: Two uniform numbers in [0, 1) for each mask.

    Returns:
        A pixel (x, y) of each mask; the last pixel of the grid if a mask has no foreground, which
        happens in `next_click` only if no pixel is valid.
    """
    uniforms = widest(uniforms)
    y = _sample_index(error.sum(2), uniforms[:, 0])
    row = y[:, None, None].expand(-1, -1, error.shape[2])
    x = _sample_index(error.gather(1, row).squeeze(1), uniforms[:, 1])
    return torch.stack([x, y], 1)


def next_click(
    pred_mask: Masks,
    targets: Masks,
    uniforms: Float[Tensor, "M 2"],
    valid: Masks,
    center_click_prob: float = 0.0,
    confirming: Masks | None = None,
) -> tuple[Int64[Tensor, "M 2"], PerMask]:
    """Choose the next click of each mask in its error region (Kirillov et al. 2023, appendix A).

    For the first click, the prediction is empty. Without an error, which the paper does not cover,
    the click confirms the mask: uniform in the target with label 1 or, if the target is empty,
    uniform in the background with label 0.

    Args:
        pred_mask: Predicted masks.
        targets: Ground-truth masks.
        uniforms: Two uniform numbers in [0, 1) for each mask.
        valid: False in the padding.
        center_click_prob: Probability of clicking the pixel farthest from the boundary of the false
            negatives or false positives, as in evaluation; decided by the first uniform number.
        confirming: Where a click confirms the mask (`Targets.clickable`); None computes it.

    Returns:
        A pixel (x, y) of each mask, and its label: 1 for a false negative, 0 for a false positive,
        -1 (no point) if no pixel is valid.
    """
    if confirming is None:
        confirming = fallback_if_empty(targets & valid, valid)
    region = fallback_if_empty((targets ^ pred_mask) & valid, confirming)
    if center_click_prob:
        central = uniforms[:, 0] < center_click_prob
        within = torch.where(
            central,
            uniforms[:, 0] / center_click_prob,
            (uniforms[:, 0] - center_click_prob) / max(1 - center_click_prob, 1e-6),
        )
        region = torch.where(
            central[:, None, None], edt_argmax(region & targets, region & ~targets), region
        )
        uniforms = torch.stack([within.clamp(0, 1 - 2**-24), uniforms[:, 1]], 1)
    return sample_click(region, targets, valid, uniforms)


def sample_fp_fn_clicks(
    pred_mask: Masks, targets: Masks, uniforms: Float[Tensor, "M 2 2"], valid: Masks
) -> tuple[Int64[Tensor, "M 2 2"], Int64[Tensor, "M 2"]]:
    """Choose a click in the false negatives and one in the false positives of each mask.

    Without any error, the first click confirms the mask, as in `next_click`.

    Args:
        pred_mask: Predicted masks.
        targets: Ground-truth masks.
        uniforms: Two uniform numbers in [0, 1) for each click of each mask.
        valid: False in the padding.

    Returns:
        Two pixels (x, y) of each mask with labels 1 and 0; -1 (no point) without that error.
    """
    misses, false_alarms = targets & ~pred_mask & valid, ~targets & pred_mask & valid
    has_false_alarm = false_alarms.flatten(1).any(1)
    positive, label = next_click(pred_mask & targets, targets, uniforms[:, 0], valid)
    label = torch.where(has_false_alarm & ~misses.flatten(1).any(1), -1, label)
    negative = uniform_click(false_alarms, uniforms[:, 1])
    labels = torch.stack([label, has_false_alarm.long() - 1], 1)
    return torch.stack([positive, negative], 1), labels


def sample_click(
    region: Masks, targets: Masks, valid: Masks, uniforms: Float[Tensor, "M 2"]
) -> tuple[Int64[Tensor, "M 2"], PerMask]:
    """Choose one pixel of each region uniformly.

    Args:
        region: Masks to click in.
        targets: Ground-truth masks.
        valid: False in the padding.
        uniforms: Two uniform numbers in [0, 1) for each mask.

    Returns:
        A pixel (x, y) of each mask, and its label: the target's value, or -1 in the padding.
    """
    xy = uniform_click(region, uniforms)
    at = torch.arange(len(targets), device=targets.device), xy[:, 1], xy[:, 0]
    return xy, torch.where(valid[at], targets[at].long(), -1)


def fallback_if_empty(region: Masks, otherwise: Masks) -> Masks:
    """Replace empty regions.

    Args:
        region: A region of each mask.
        otherwise: Used for masks whose region is empty.
    """
    return torch.where(region.any((1, 2), keepdim=True), region, otherwise)


def edt_argmax(first: Masks, second: Masks) -> Masks:
    """Return the pixels of two regions that are farthest from their region's boundary.

    Args:
        first: A region of each mask.
        second: Another region of each mask, disjoint from the first.

    Returns:
        All pixels with the largest distance; none if both regions are empty.
    """
    distances = torch.maximum(squared_edt(first), squared_edt(second))
    largest = distances.amax((1, 2), keepdim=True)
    return (distances == largest) & (largest > 0)


def squared_edt(region: Masks) -> Float32[Tensor, "M H W"]:
    """Return the exact squared Euclidean distance of each pixel to the nearest one outside.

    The distance is 0 outside the region; everything beyond the grid counts as outside. On a CPU,
    OpenCV computes it.
    """
    if torch.compiler.is_compiling() and region.device.type == "cpu":
        return _squared_edt_op(region)
    if is_readable(region):
        return torch.from_numpy(_squared_edt_opencv(region.numpy()))
    return _squared_edt_torch(region)


@torch.library.custom_op("gigamask::squared_edt", mutates_args=())
def _squared_edt_op(region: Tensor) -> Tensor:
    """Return `squared_edt` as one operator, since a compiler cannot trace OpenCV."""
    return squared_edt(region)


@_squared_edt_op.register_fake
def _(region: Tensor) -> Tensor:
    return torch.empty_like(region, dtype=torch.float32)


def _squared_edt_opencv(region: Bool[np.ndarray, "M H W"]) -> Float32[np.ndarray, "M H W"]:
    """Return what `_squared_edt_torch` does, from the exact transform of each mask's box."""
    from gigamask.masks import boundary

    squared = np.zeros(region.shape, np.float32)
    for mask, found in zip(region, squared, strict=True):
        top, bottom, left, right = boundary.mask_extent(mask)
        if top < bottom:
            # One pixel of outside around the region's box is enough.
            padded = np.pad(mask[top:bottom, left:right].view(np.uint8), 1)
            found[top:bottom, left:right] = boundary.squared_edt(padded)[1:-1, 1:-1]
    return squared


def _squared_edt_torch(region: Masks) -> Float32[Tensor, "M H W"]:
    """Return the squared distances by operations on many masks, without reading a value.

    A pass over columns finds the nearest outside pixel above and below; a pass over rows takes the
    minimum of `d(x')^2 + (x - x')^2` over all x' that are not farther away than the border of the
    grid can be (Saito and Toriwaki 1994).
    """
    masks, height, width = region.shape
    if not region.numel():
        return torch.zeros_like(region, dtype=torch.float32)
    inside = functional.pad(region, (0, 0, 1, 1))
    row = torch.arange(height + 2, device=region.device)[:, None]
    above = torch.where(inside, -1, row).cummax(1).values
    below = torch.where(inside, height + 2, row).flip(1).cummin(1).values.flip(1)
    down = torch.minimum(row - above, below - row)[:, 1:-1].float().square()
    reach = (min(height, width) + 1) // 2
    shift = torch.arange(-reach, reach + 1, dtype=torch.float32, device=region.device).square()
    around = functional.pad(down, (reach, reach)).unfold(2, 2 * reach + 1, 1)
    # A compiler does not store the sums.
    together = masks if torch.compiler.is_compiling() else max(1, MAX_SUMS // around[0].numel())
    return torch.cat([(part + shift).amin(3) for part in around.split(together)])


def cell_to_input(xy: Int64[Tensor, "M *n 2"], targets: Targets) -> Float32[Tensor, "M *n 2"]:
    """Convert cells to the input coordinates of their centers, or of the nearest pixel.

    The center of pixel x of the stored image lies (x + 0.5) * scale input pixels from the left
    edge, and its coordinate is x * scale (`masks.transforms`). So the coordinate of any position is
    its distance from the edge, less half the scale; none is beyond those of the outermost pixels.

    Args:
        xy: Cells (x, y) of the target grid, any number for each mask.
        targets: Ground truth of M masks.
    """
    scale, cell = _scale_and_cell(targets, xy.ndim)
    centers = widest(xy) * cell + (cell - scale) / 2
    return inside(centers, targets.extent, targets.scale_xy).float()


def input_to_cell(xy_input: Float[Tensor, "M *n 2"], targets: Targets) -> Int64[Tensor, "M *n 2"]:
    """Return the cell that contains each point.

    Args:
        xy_input: Points (x, y) in input pixels, any number for each mask.
        targets: Ground truth of M masks.
    """
    scale, cell = _scale_and_cell(targets, xy_input.ndim)
    return ((widest(xy_input) + scale / 2) / cell).floor().long()


def _scale_and_cell(
    targets: Targets, ndim: int
) -> tuple[Float[Tensor, "M ... 2"], float | Float[Tensor, "2"]]:
    """Return the scale in x and y, shaped for points of `ndim` axes, and the size of a cell."""
    width, height = targets.cell_xy
    scale = targets.scale_xy.reshape(-1, *[1] * (ndim - 2), 2)
    if width == height:  # needs no copy to the device
        return scale, width
    return scale, constant(targets.cell_xy, scale.device, scale.dtype)


def _sample_index(
    counts: Int64[Tensor, "M n"] | Bool[Tensor, "M n"], uniforms: Float64[Tensor, "M"]
) -> PerMask:
    """Draw an index in proportion to the counts.

    Computed in float64, so that a uniform number below 1 stays below the total of any grid.
    """
    cumulated = counts.cumsum(1)
    rank = (uniforms * cumulated[:, -1]).long()[:, None]
    index = torch.searchsorted(cumulated, rank, right=True).squeeze(1)
    return index.clamp(max=counts.shape[1] - 1)
