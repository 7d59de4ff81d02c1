"""A loss at some points instead of all cells: logits and truth enter, both at the most uncertain places and some others leave.

PointRend's training points (Kirillov et al. 2020, section 3.1), except that places are no random numbers: they are a low-discrepancy sequence (R2,
Roberts 2018) that each mask shifts by numbers of its own (Cranley and Patterson 1976) and each round continues, so they are a function of what is
handed in. Every place is then uniform over the valid part of the square.

Not here: the loss at the points (`mask`, each as a row of cells), which pixels of a whole grid count (`pixels`).
"""

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from gigamask.losses.ohem_pixels import sorted_descending
from gigamask.types import Targets

PLASTIC = 1.32471795724474602596
"""The root of x^3 = x + 1; R2 steps by its inverse along x and by its inverse square along y."""
STEPS = tuple(round(2**32 / PLASTIC**power) for power in (1, 2))
"""R2's steps in units of 2^-32: whole numbers give every device the same places, however far the sequence goes."""


class SampledPoints(NamedTuple):
    """Logits and truth at P places of each mask and answer; `valid` is False where a mask has no place."""

    logits: Float[Tensor, "M K P"]
    targets: Bool[Tensor, "M K P"] | Float[Tensor, "M K P"]
    valid: Bool[Tensor, "M K P"]


def sample_points(
    low: Float[Tensor, "M K G G"],
    targets: Targets,
    index: int,
    count: int,
    oversample_ratio: float,
    importance_sample_ratio: float,
) -> SampledPoints:
    """Returns `count` points of each mask and answer, in the round of that index.

    Of `oversample * count` places the `important * count` of the smallest absolute logit are taken (of equal ones the last), by each answer for
    itself; the others follow in the sequence and are the same for all answers. Logits are bilinear in `low`, as where they are upsampled, also from
    cells of the padding beside the edge. The truth is that of the cell a place lies in where it is hard, and bilinear between valid cells where it
    is shares. `targets.shift` must be there.
    """
    assert targets.shift is not None
    candidates, uncertain = int(count * oversample_ratio), int(count * importance_sample_ratio)
    first = index * (candidates + count - uncertain)
    numbers = torch.arange(first, first + candidates + count - uncertain, device=low.device)
    extent = valid_extent(targets.valid)
    places = spread_points(numbers, targets.shift.float()) * extent[:, None]
    with torch.no_grad():
        doubt = read(
            low.detach(), places[:, None, :candidates].expand(-1, low.shape[1], -1, -1)
        ).abs()
        unsure = (
            sorted_descending(doubt).topk(uncertain, dim=2, largest=False, sorted=False).indices
        )
    rest = torch.arange(candidates, len(numbers), device=low.device).expand(*low.shape[:2], -1)
    masks = torch.arange(len(low), device=low.device)[:, None, None]
    places = places[masks, torch.cat([unsure, rest], 2)]
    valid, cell = _cells(targets.valid, places)
    hard = targets.masks.dtype == torch.bool
    return SampledPoints(
        read(low, places),
        targets.masks.flatten(1)[masks, cell] if hard else _shares(targets.masks, places, extent),
        valid,
    )


def spread_points(
    numbers: Int64[Tensor, "C"], shift: Float[Tensor, "M 2"]
) -> Float[Tensor, "M C 2"]:
    """Returns the places of R2 with these numbers, shifted and wrapped around for each mask, in [0, 1) of width and height."""
    unit = torch.stack([(numbers * step & 0xFFFFFFFF) >> 8 for step in STEPS], 1).float() * 2.0**-24
    moved = unit + shift[:, None]
    return moved - moved.floor()


def valid_extent(valid: Bool[Tensor, "M H W"]) -> Float[Tensor, "M 2"]:
    """Returns the valid share of width and height; what is valid lies at the top left."""
    rows, columns = valid.any(2), valid.any(1)
    return torch.stack([columns.float().mean(1), rows.float().mean(1)], 1)


def read(
    maps: Float[Tensor, "M K h w"], places: Float[Tensor, "M K P 2"]
) -> Float[Tensor, "M K P"]:
    """Returns maps between their cells' centres, bilinear as upsampling without aligned corners, in float32 or float64."""
    return _Read.apply(maps, places)


class _Read(torch.autograd.Function):
    """Keeps the places only. The gradient is summed in whole numbers, whose sum is the same in whatever order a GPU adds them."""

    @staticmethod
    def forward(ctx, maps: Tensor, places: Tensor) -> Float[Tensor, "M K P"]:
        ctx.save_for_backward(places)
        ctx.shape, ctx.dtype = maps.shape, maps.dtype
        rows = maps.to(torch.promote_types(maps.dtype, torch.float32)).flatten(0, 1).unsqueeze(1)
        grid = (places.to(rows.dtype) * 2 - 1).flatten(0, 1).unsqueeze(1)
        return F.grid_sample(rows, grid, padding_mode="border", align_corners=False).view(
            places.shape[:3]
        )

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Float[Tensor, "M K P"]) -> tuple[Tensor | None, ...]:  # pyrefly: ignore[bad-override]
        (places,) = ctx.saved_tensors
        height, width = ctx.shape[2:]
        # A gradient that is not finite makes the unit so too, and with it the whole map.
        unit = grad.double().abs().amax(2, keepdim=True).clamp(min=1e-100) * 2.0**-40
        total = torch.zeros(*ctx.shape[:2], height * width, dtype=torch.int64, device=grad.device)
        x, y = (
            (places[..., axis].double() * size - 0.5).clamp(0, size - 1)
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
    valid: Bool[Tensor, "M H W"], places: Float[Tensor, "M K P 2"]
) -> tuple[Bool[Tensor, "M K P"], Int64[Tensor, "M K P"]]:
    """Returns whether the cell each place lies in is valid, and its number."""
    height, width = valid.shape[1:]
    column, row = (
        (places[..., axis] * size).long().clamp(max=size - 1)
        for axis, size in enumerate((width, height))
    )
    cell = row * width + column
    return valid.flatten(1).gather(1, cell.flatten(1)).view_as(cell), cell


def _shares(
    shares: Float[Tensor, "M H W"], places: Float[Tensor, "M K P 2"], extent: Float[Tensor, "M 2"]
) -> Float[Tensor, "M K P"]:
    """Returns the shares at the places, constant beyond the centres of the outermost valid cells."""
    height, width = shares.shape[1:]
    inside = torch.stack(
        [
            places[..., axis]
            .clamp(min=0.5 / size)
            .minimum((extent[:, axis] - 0.5 / size).clamp(min=0)[:, None, None])
            for axis, size in enumerate((width, height))
        ],
        3,
    )
    return read(shares.unsqueeze(1), inside.flatten(1, 2).unsqueeze(1)).view(places.shape[:3])
