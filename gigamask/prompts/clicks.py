"""Clicks: masks on the truth grid enter, one pixel of each and its label leave; every error pixel is equally likely.

Random numbers are handed in. But for `depth`, nothing waits for the device: shapes never depend on what a mask holds.

Not here: which clicks a round adds (`policy`, `mixed`, `two_sided`), the centre click of evaluation (`policy.CenterClicks`), points drawn from
run lengths (`geometry.runs`).
"""

import math

import torch
from jaxtyping import Bool, Float, Float32, Int64
from torch import Tensor
from torch.nn import functional


def uniform_click(
    error: Bool[Tensor, "M H W"], uniforms: Float[Tensor, "M 2"]
) -> Int64[Tensor, "M 2"]:
    """Returns one pixel (x, y) of each mask, every foreground pixel equally likely.

    The first uniform inverts the cumulated row sums, the second the chosen row: O(HW) without a random number for each pixel.
    A mask without foreground gives the last pixel of the grid; `next_click` never hands one in unless nothing is valid.
    """
    y = _invert(error.sum(2), uniforms[:, 0])
    x = _invert(error[torch.arange(len(error), device=error.device), y].long(), uniforms[:, 1])
    return torch.stack([x, y], 1)


def next_click(
    pred_mask: Bool[Tensor, "M H W"],
    targets: Bool[Tensor, "M H W"],
    uniforms: Float[Tensor, "M 2"],
    valid: Bool[Tensor, "M H W"],
    center_click_prob: float = 0.0,
) -> tuple[Int64[Tensor, "M 2"], Int64[Tensor, "M"]]:
    """Returns a pixel (x, y) uniform in what the guess gets wrong, and its label: 1 in a miss, 0 in a false alarm.

    The first click is that of an empty guess. Where nothing is wrong the click confirms: uniform in the truth with label 1 or, when the truth
    is empty too, uniform in the background with label 0. Where no pixel is valid the label is -1, no point. (Kirillov et al. 2023, appendix A;
    what happens without an error is not stated there.) A mask whose first uniform is below `central_share` is clicked at a pixel deepest in
    its misses or its false alarms instead, as in evaluation.
    """
    inside = targets & valid
    error = (targets ^ pred_mask) & valid
    region = region_or(error, region_or(inside, valid))
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
    pred_mask: Bool[Tensor, "M H W"],
    targets: Bool[Tensor, "M H W"],
    uniforms: Float[Tensor, "M 2 2"],
    valid: Bool[Tensor, "M H W"],
) -> tuple[Int64[Tensor, "M 2 2"], Int64[Tensor, "M 2"]]:
    """Returns a pixel (x, y) uniform in the misses, with label 1, and one uniform in the false alarms, with label 0.

    A side without an error has no point, label -1; where neither side has one, the first click confirms as that of `next_click` does.
    """
    misses, alarms = targets & ~pred_mask & valid, ~targets & pred_mask & valid
    alarmed = alarms.flatten(1).any(1)
    positive, label = next_click(pred_mask & targets, targets, uniforms[:, 0], valid)
    label = torch.where(alarmed & ~misses.flatten(1).any(1), -1, label)
    negative = uniform_click(alarms, uniforms[:, 1])
    return torch.stack([positive, negative], 1), torch.stack([label, alarmed.long() - 1], 1)


def sample_click(
    region: Bool[Tensor, "M H W"],
    targets: Bool[Tensor, "M H W"],
    valid: Bool[Tensor, "M H W"],
    uniforms: Float[Tensor, "M 2"],
) -> tuple[Int64[Tensor, "M 2"], Int64[Tensor, "M"]]:
    """Returns a pixel (x, y) uniform in the region, and its label: the truth's where the pixel is valid, else -1."""
    xy = uniform_click(region, uniforms)
    at = torch.arange(len(targets), device=targets.device), xy[:, 1], xy[:, 0]
    return xy, torch.where(valid[at], targets[at].long(), -1)


def region_or(
    region: Bool[Tensor, "M H W"], otherwise: Bool[Tensor, "M H W"]
) -> Bool[Tensor, "M H W"]:
    """Returns each mask's region, or `otherwise` where it is empty."""
    return torch.where(region.flatten(1).any(1)[:, None, None], region, otherwise)


def edt_argmax(
    first: Bool[Tensor, "M H W"], second: Bool[Tensor, "M H W"]
) -> Bool[Tensor, "M H W"]:
    """Returns the pixels farthest from the boundary of either of two regions of a mask, ties all; none where both are empty."""
    depths = torch.maximum(squared_edt(first), squared_edt(second))
    most = depths.amax((1, 2), keepdim=True)
    return (depths == most) & (most > 0)


def squared_edt(region: Bool[Tensor, "M H W"]) -> Float32[Tensor, "M H W"]:
    """Returns each pixel's squared distance to the nearest one outside the region, 0 outside; what is beyond the grid counts as outside. Exact.

    Down the columns by the nearest pixel outside above and below, then along the rows by the least of `d(x')^2 + (x - x')^2` over all x'
    (Saito and Toriwaki 1994), one shift after the other, up to the farthest that can still be nearer than what a column says.
    """
    height, width = region.shape[1:]
    inside = functional.pad(region, (1, 1, 1, 1))
    row = torch.arange(height + 2, device=region.device)[:, None]
    above = torch.where(inside, -1, row).cummax(1).values
    below = torch.where(inside, height + 2, row).flip(1).cummin(1).values.flip(1)
    down = torch.minimum(row - above, below - row)[:, 1:-1].float().square()
    least = down.clone()
    farthest = math.isqrt(int(down.max())) if down.numel() else 0
    for shift in range(1, min(width, farthest) + 1):
        least[:, :, shift:] = torch.minimum(least[:, :, shift:], down[:, :, :-shift] + shift**2)
        least[:, :, :-shift] = torch.minimum(least[:, :, :-shift], down[:, :, shift:] + shift**2)
    return least[:, :, 1:-1]


def cell_to_input(
    xy: Int64[Tensor, "*n 2"], cell_xy: tuple[float, float]
) -> Float32[Tensor, "*n 2"]:
    """Returns the centre of each cell in pixel-index coordinates of the input."""
    x, y = ((xy[..., axis] + 0.5) * cell_xy[axis] - 0.5 for axis in (0, 1))
    return torch.stack([x, y], -1)


def input_to_cell(
    xy_input: Float[Tensor, "*n 2"], cell_xy: tuple[float, float]
) -> Int64[Tensor, "*n 2"]:
    """Returns the cell that holds each point; the inverse of `cell_to_input`."""
    x, y = (((xy_input[..., axis].double() + 0.5) / cell_xy[axis]).floor() for axis in (0, 1))
    return torch.stack([x, y], -1).long()


def _invert(counts: Int64[Tensor, "M n"], uniforms: Float[Tensor, "M"]) -> Int64[Tensor, "M"]:
    """Returns the index drawn in proportion to the counts; float64, so that a uniform below 1 stays below the total of any grid."""
    below = counts.cumsum(1)
    rank = (uniforms.double() * below[:, -1]).long()
    return (below <= rank[:, None]).sum(1).clamp(max=counts.shape[1] - 1)
