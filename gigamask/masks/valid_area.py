"""Which cells of a grid over the padded square show a part of the image, which is at its top left.

Every prompt, target and click asks here where the image ends.
"""

import torch
from jaxtyping import Bool, Float
from torch import Tensor


def covered_parts(
    extent_xy: Float[Tensor, "M 2"], grid: tuple[int, int], cell_xy: tuple[float, float]
) -> tuple[Float[Tensor, "M H 1"], Float[Tensor, "M 1 W"]]:
    """Return the share of each row and column of a grid that lies in the image.

    Args:
        extent_xy: Width and height of the images without padding, in input pixels.
        grid: Rows and columns of the grid.
        cell_xy: Width and height of a cell in input pixels.
    """
    width, height = extent_xy.float().unbind(1)
    rows, columns = (
        ((end / cell)[:, None] - torch.arange(count, device=end.device)).clamp(0, 1)
        for end, count, cell in ((height, grid[0], cell_xy[1]), (width, grid[1], cell_xy[0]))
    )
    return rows[:, :, None], columns[:, None]


def valid_cells(
    extent_xy: Float[Tensor, "M 2"],
    grid: tuple[int, int],
    cell_xy: tuple[float, float],
    by_center: bool = True,
) -> Bool[Tensor, "M H W"]:
    """Return the cells of a grid that lie in the image.

    Args:
        extent_xy: Width and height of the images without padding, in input pixels.
        grid: Rows and columns of the grid.
        cell_xy: Width and height of a cell in input pixels.
        by_center: Whether a cell counts by its center, as for masks sampled there; otherwise any
            part of it in the image is enough.
    """
    offset = 0.5 if by_center else 0.0
    width, height = extent_xy.unbind(1)
    rows, columns = (
        (torch.arange(count, device=end.device) + offset) * cell < end[:, None]
        for end, count, cell in ((height, grid[0], cell_xy[1]), (width, grid[1], cell_xy[0]))
    )
    return rows[:, :, None] & columns[:, None]


def inside(
    xy_input: Float[Tensor, "M *n 2"],
    extent_xy: Float[Tensor, "M 2"],
    scale_xy: Float[Tensor, "M 2"],
) -> Float[Tensor, "M *n 2"]:
    """Return points moved into the image: to the centers of its outermost pixels at most.

    Args:
        xy_input: Points in input pixels.
        extent_xy: Width and height of the images without padding, in input pixels.
        scale_xy: Input pixels per pixel of the stored image, in x and y.
    """
    shape = -1, *[1] * (xy_input.ndim - 2), 2
    return xy_input.clamp(min=0).minimum((extent_xy - scale_xy).clamp(min=0).view(shape))
