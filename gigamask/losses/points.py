"""Sampling of points for mask losses, mostly uncertain ones, as in PointRend.

The points follow PointRend's training (Kirillov et al. 2020, section 3.1), but come from a
low-discrepancy sequence (R2, Roberts 2018) instead of random numbers. Each mask shifts the sequence
by its own random numbers (Cranley and Patterson 1976), and each round continues it, so the points
are a function of the arguments. Each point is uniform over the valid part of the square.
"""

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from gigamask.losses.focal_dice import to_sortable_int
from gigamask.types import Targets

PLASTIC = 1.32471795724474602596
"""Root of x^3 = x + 1; R2's steps are its inverse along x and its inverse square along y."""
STEPS = tuple(round(2**32 / PLASTIC**power) for power in (1, 2))
"""R2's steps in units of 2^-32; with integers the points are the same on every device."""

PointValues = Float[Tensor, "M K P"]


class SampledPoints(NamedTuple):
    """Logits and targets at P points per mask and prediction; `valid` is False in the padding."""

    logits: PointValues
    targets: Bool[Tensor, "M K P"] | PointValues
    valid: Bool[Tensor, "M K P"]


def sample_points(
    low_res_logits: Float[Tensor, "M K G G"],
    targets: Targets,
    round_index: int,
    count: int,
    oversample_ratio: float,
    importance_sample_ratio: float,
) -> SampledPoints:
    """Sample points of each mask and prediction.

    For each prediction, the `importance_sample_ratio * count` points with the smallest absolute
    logits are chosen from `oversample_ratio * count` candidates (ties go to the last). The other
    points follow in the sequence and are the same for all predictions.

    Args:
        low_res_logits: K predictions for each of M masks; interpolated bilinearly as in upsampling,
            including padding cells next to the edge.
        targets: Ground truth with `shift`. A bool target is read at the point's cell; a covered
            fraction is interpolated bilinearly between valid cells.
        round_index: Number of the round; each round continues the sequence.
        count: Number of points, P.
        oversample_ratio: Candidates per point.
        importance_sample_ratio: Fraction of the points chosen by uncertainty.
    """
    assert targets.shift is not None
    device, (masks, predictions) = low_res_logits.device, low_res_logits.shape[:2]
    candidates, uncertain = int(count * oversample_ratio), int(count * importance_sample_ratio)
    first = round_index * (candidates + count - uncertain)
    indices = torch.arange(first, first + candidates + count - uncertain, device=device)
    extent = valid_extent(targets.valid)
    points = r2_sequence(indices, targets.shift.float()) * extent[:, None]
    with torch.no_grad():
        candidate_points = points[:, None, :candidates].expand(-1, predictions, -1, -1)
        certainty = to_sortable_int(interpolate_at(low_res_logits.detach(), candidate_points).abs())
        chosen = certainty.topk(uncertain, dim=2, largest=False, sorted=False).indices
    rest = torch.arange(candidates, len(indices), device=device).expand(masks, predictions, -1)
    rows = torch.arange(masks, device=device)[:, None, None]
    points = points[rows, torch.cat([chosen, rest], 2)]
    valid, cell = _cells(targets.valid, points)
    if targets.masks.dtype == torch.bool:
        target_values = targets.masks.flatten(1)[rows, cell]
    else:
        target_values = _coverage_at(targets.masks, points, extent)
    return SampledPoints(interpolate_at(low_res_logits, points), target_values, valid)


def r2_sequence(indices: Int64[Tensor, "C"], shift: Float[Tensor, "M 2"]) -> Float[Tensor, "M C 2"]:
    """Return points of the R2 sequence, shifted and wrapped around for each mask.

    Args:
        indices: Positions in the sequence.
        shift: Shift of each mask in [0, 1).

    Returns:
        Points (x, y) in [0, 1).
    """
    unit = torch.stack([(indices * step & 0xFFFFFFFF) >> 8 for step in STEPS], 1).float() * 2.0**-24
    moved = unit + shift[:, None]
    return moved - moved.floor()


def valid_extent(valid: Bool[Tensor, "M H W"]) -> Float[Tensor, "M 2"]:
    """Return the valid fraction of width and height; the valid part is at the top left."""
    rows, columns = valid.any(2), valid.any(1)
    return torch.stack([columns.float().mean(1), rows.float().mean(1)], 1)


def interpolate_at(maps: Float[Tensor, "M K h w"], points: Float[Tensor, "M K P 2"]) -> PointValues:
    """Interpolate maps at points, bilinearly as in upsampling with `align_corners=False`.

    Args:
        maps: Maps of M masks and K predictions.
        points: Points (x, y) in [0, 1].

    Returns:
        Values in float32 or float64.
    """
    return _InterpolateAt.apply(maps, points)


class _InterpolateAt(torch.autograd.Function):
    """Interpolation that saves only the points and sums gradients as integers, in any order."""

    @staticmethod
    def forward(ctx, maps: Tensor, points: Tensor) -> PointValues:
        ctx.save_for_backward(points)
        ctx.shape, ctx.dtype = maps.shape, maps.dtype
        rows = maps.to(torch.promote_types(maps.dtype, torch.float32)).flatten(0, 1).unsqueeze(1)
        grid = (points.to(rows.dtype) * 2 - 1).flatten(0, 1).unsqueeze(1)
        return F.grid_sample(rows, grid, padding_mode="border", align_corners=False).view(
            points.shape[:3]
        )

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: PointValues) -> tuple[Tensor | None, ...]:  # pyrefly: ignore[bad-override]
        (points,) = ctx.saved_tensors
        height, width = ctx.shape[2:]
        # A non-finite gradient makes the unit, and thereby the whole map, non-finite.
        unit = grad.double().abs().amax(2, keepdim=True).clamp(min=1e-100) * 2.0**-40
        total = torch.zeros(*ctx.shape[:2], height * width, dtype=torch.int64, device=grad.device)
        x, y = (
            (points[..., axis].double() * size - 0.5).clamp(0, size - 1)
            for axis, size in enumerate((width, height))
        )
        left, top = x.floor(), y.floor()
        for column, by_x in ((left, 1 - (x - left)), ((left + 1).clamp(max=width - 1), x - left)):
            for row, by_y in ((top, 1 - (y - top)), ((top + 1).clamp(max=height - 1), y - top)):
                total.scatter_add_(
                    2, (row * width + column).long(), (grad / unit * by_x * by_y).round().long()
                )
        return (total * unit).view(ctx.shape).to(ctx.dtype), None


def _cells(
    valid: Bool[Tensor, "M H W"], points: Float[Tensor, "M K P 2"]
) -> tuple[Bool[Tensor, "M K P"], Int64[Tensor, "M K P"]]:
    """Return whether each point's cell is valid, and the cell's index."""
    height, width = valid.shape[1:]
    column, row = (
        (points[..., axis] * size).long().clamp(max=size - 1)
        for axis, size in enumerate((width, height))
    )
    cell = row * width + column
    return valid.flatten(1).gather(1, cell.flatten(1)).view_as(cell), cell


def _coverage_at(
    coverage: Float[Tensor, "M H W"], points: Float[Tensor, "M K P 2"], extent: Float[Tensor, "M 2"]
) -> PointValues:
    """Interpolate the coverage, constant beyond the centers of the outermost valid cells."""
    height, width = coverage.shape[1:]
    inside = torch.stack(
        [
            points[..., axis]
            .clamp(min=0.5 / size)
            .minimum((extent[:, axis] - 0.5 / size).clamp(min=0)[:, None, None])
            for axis, size in enumerate((width, height))
        ],
        3,
    )
    values = interpolate_at(coverage.unsqueeze(1), inside.flatten(1, 2).unsqueeze(1))
    return values.view(points.shape[:3])
