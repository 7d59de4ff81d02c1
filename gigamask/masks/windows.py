"""Windows of a square image: sampling maps inside of them, and pasting maps back.

A window is a box `x0 y0 x1 y1` of edges: pixel j of a square covers [j, j + 1]. Rows and columns
are resampled by one matrix each, so the gradient is a matrix product, which is deterministic on a
GPU, unlike that of `grid_sample`.
"""

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from gigamask.masks.devices import is_readable, no_autocast

Windows = Float[Tensor, "R 4"]
Matrices = tuple[Float[Tensor, "R n h"], Float[Tensor, "R n w"]]


def sampling_matrices(windows: Windows, size: tuple[int, int], samples: int) -> Matrices:
    """Return the matrices that average a map over `samples` x `samples` parts of each window.

    A part that is smaller than a cell of the map is widened to one cell, which is bilinear
    interpolation. Everything beyond the map counts as 0.

    Args:
        windows: Edges of R windows, in cells of the map.
        size: Height and width of the map.
        samples: Number of samples along each side of a window, n.

    Returns:
        One matrix for rows and one for columns; the sum of a row is the part inside the map.
    """
    first, last = windows.unflatten(1, (2, 2)).unbind(1)
    columns, rows = (
        _overlaps(first[:, axis], last[:, axis], size[1 - axis], samples) for axis in (0, 1)
    )
    return rows, columns


def _overlaps(
    first: Float[Tensor, "R"], last: Float[Tensor, "R"], cells: int, samples: int
) -> Float[Tensor, "R n cells"]:
    step = ((last - first) / samples)[:, None]
    centers = first[:, None] + step * (torch.arange(samples, device=first.device) + 0.5)
    width = step.clamp(min=1)
    starts, ends = (centers - width / 2)[..., None], (centers + width / 2)[..., None]
    edges = torch.arange(cells, device=first.device).to(first.dtype)
    overlap = torch.minimum(ends, edges + 1) - torch.maximum(starts, edges)
    return overlap.clamp(min=0) / width[..., None]


def coverage(matrices: Matrices) -> Float[Tensor, "R n m"]:
    """Return the sum of each sample's weights: the part of it that lies inside."""
    rows, columns = matrices
    return rows.sum(2)[:, :, None] * columns.sum(2)[:, None, :]


def sample_per_image(
    maps: Float[Tensor, "B C h w"], image_index: Int64[Tensor, "R"], matrices: Matrices
) -> Float[Tensor, "R C n n"]:
    """Sample the maps of images in windows.

    Args:
        maps: Maps of B images.
        image_index: Index of each window's image, ascending.
        matrices: Matrices of R windows, from `sampling_matrices`.
    """
    rows, columns = matrices
    images, (channels, height, width) = len(maps), maps.shape[1:]
    flat = maps.transpose(1, 2).reshape(images, height, channels * width)
    samples = rows.shape[1]
    if images == 1:
        sampled = rows.reshape(-1, height) @ flat[0]
    elif is_readable(image_index):
        counts = torch.bincount(image_index, minlength=images).tolist()
        parts = zip(rows.split(counts), flat, strict=True)
        sampled = torch.cat([part.reshape(-1, height) @ image for part, image in parts])
    else:
        # A GPU would wait for the counts: each row is 0 for the other images.
        image = torch.arange(images, device=image_index.device)
        is_of_image = (image_index[:, None] == image).to(rows.dtype)
        spread = rows[:, :, None] * is_of_image[:, None, :, None]
        sampled = spread.reshape(-1, images * height) @ flat.flatten(0, 1)
    sampled = sampled.view(-1, samples * channels, width) @ columns.transpose(1, 2)
    return sampled.unflatten(1, (samples, channels)).transpose(1, 2)


def sample_per_window(
    maps: Float[Tensor, "M h w"], matrices: Matrices, each: int = 1
) -> Float[Tensor, "R n n"]:
    """Sample one map in each window, or in several.

    Args:
        maps: M maps.
        matrices: Matrices of R = M x `each` windows, from `sampling_matrices`.
        each: Windows of each map, in a row.
    """
    rows, columns = matrices
    samples, height = rows.shape[1:]
    grouped = rows.reshape(-1, each * samples, height) @ maps
    return grouped.view(-1, samples, maps.shape[2]) @ columns.transpose(1, 2)


def paste(
    maps: Float[Tensor, "R n n"], windows: Windows, side: int, outside: float
) -> Float[Tensor, "R side side"]:
    """Return maps with each window's values inside of it, interpolated bilinearly.

    Args:
        maps: Values inside R windows.
        windows: Edges of the windows, in cells of the result.
        side: Side of the result in cells.
        outside: Value of cells whose center is outside of the window.
    """
    first, last = windows.unflatten(1, (2, 2)).unbind(1)
    columns, rows = (
        _interpolation(first[:, axis], last[:, axis], side, int(maps.shape[-1])) for axis in (0, 1)
    )
    # Half precision is too coarse for the sums.
    with no_autocast(maps):
        return sample_per_window(maps - outside, (rows, columns)) + outside


def _interpolation(
    first: Float[Tensor, "R"], last: Float[Tensor, "R"], cells: int, samples: int
) -> Float[Tensor, "R cells n"]:
    """Return each cell's weights of the samples, all 0 outside of the window."""
    centers = torch.arange(cells, device=first.device) + 0.5
    position = (centers - first[:, None]) / (last - first).clamp(min=1e-6)[:, None]
    inside = (position >= 0) & (position < 1)
    nearest = (position * samples - 0.5).clamp(0, samples - 1)[..., None]
    index = torch.arange(samples, device=first.device)
    return (1 - (nearest - index).abs()).clamp(min=0) * inside[..., None]
