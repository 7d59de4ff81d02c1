"""Clicks: masks on the truth grid enter, one pixel of each and its label leave; every error pixel is equally likely.

Random numbers are handed in, and nothing waits for the device: shapes never depend on what a mask holds.

Not here: the centre click of evaluation (`policy.CentreClicks`), points drawn from run lengths (`geometry.runs`).
"""

import torch
from jaxtyping import Bool, Float, Float32, Int64
from torch import Tensor


def uniform_click(error: Bool[Tensor, "M H W"], uniforms: Float[Tensor, "M 2"]) -> Int64[Tensor, "M 2"]:
    """Returns one pixel (x, y) of each mask, every foreground pixel equally likely.

    The first uniform inverts the cumulated row sums, the second the chosen row: O(HW) without a random number for each pixel.
    A mask without foreground gives the last pixel of the grid; `next_click` never hands one in unless nothing is valid.
    """
    y = _invert(error.sum(2), uniforms[:, 0])
    x = _invert(error[torch.arange(len(error), device=error.device), y].long(), uniforms[:, 1])
    return torch.stack([x, y], 1)


def next_click(
    guess: Bool[Tensor, "M H W"], truth: Bool[Tensor, "M H W"], uniforms: Float[Tensor, "M 2"], valid: Bool[Tensor, "M H W"]
) -> tuple[Int64[Tensor, "M 2"], Int64[Tensor, "M"]]:
    """Returns a pixel (x, y) uniform in what the guess gets wrong, and its label: 1 in a miss, 0 in a false alarm.

    The first click is that of an empty guess. Where nothing is wrong the click confirms: uniform in the truth with label 1 or, when the truth
    is empty too, uniform in the background with label 0. Where no pixel is valid the label is -1, no point. (Kirillov et al. 2023, appendix A;
    what happens without an error is not stated there.)
    """
    inside = truth & valid
    error = (truth ^ guess) & valid
    region = torch.where(_any(error), error, torch.where(_any(inside), inside, valid))
    xy = uniform_click(region, uniforms)
    at = torch.arange(len(truth), device=truth.device), xy[:, 1], xy[:, 0]
    return xy, torch.where(valid[at], truth[at].long(), -1)


def cell_to_input(xy: Int64[Tensor, "*n 2"], cell_xy: tuple[float, float]) -> Float32[Tensor, "*n 2"]:
    """Returns the centre of each cell in pixel-index coordinates of the input."""
    x, y = ((xy[..., axis] + 0.5) * cell_xy[axis] - 0.5 for axis in (0, 1))
    return torch.stack([x, y], -1)


def input_to_cell(xy_input: Float[Tensor, "*n 2"], cell_xy: tuple[float, float]) -> Int64[Tensor, "*n 2"]:
    """Returns the cell that holds each point; the inverse of `cell_to_input`."""
    x, y = (((xy_input[..., axis].double() + 0.5) / cell_xy[axis]).floor() for axis in (0, 1))
    return torch.stack([x, y], -1).long()


def _any(masks: Bool[Tensor, "M H W"]) -> Bool[Tensor, "M 1 1"]:
    return masks.flatten(1).any(1)[:, None, None]


def _invert(counts: Int64[Tensor, "M n"], uniforms: Float[Tensor, "M"]) -> Int64[Tensor, "M"]:
    """Returns the index drawn in proportion to the counts; float64, so that a uniform below 1 stays below the total of any grid."""
    below = counts.cumsum(1)
    rank = (uniforms.double() * below[:, -1]).long()
    return (below <= rank[:, None]).sum(1).clamp(max=counts.shape[1] - 1)
