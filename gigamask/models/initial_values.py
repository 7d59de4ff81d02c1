"""Random generators of weights, keyed by their names, and initial values of positions."""

import math

import torch
from jaxtyping import Float
from torch import Tensor, nn

from gigamask.rng import make_torch_generator


def weights_generator(seed: int, name: str) -> torch.Generator:
    """Return the random generator of a tensor.

    Args:
        seed: Random seed of the run.
        name: Name of the tensor.
    """
    return make_torch_generator(seed, f"weights {name}")


def orthonormal(rows: int, columns: int, seed: int, name: str) -> Float[Tensor, "{rows} {columns}"]:
    """Return a matrix of orthonormal rows.

    Args:
        rows: Number of rows.
        columns: Number of columns.
        seed: Random seed of the run.
        name: Name of the matrix.
    """
    return nn.init.orthogonal_(torch.empty(rows, columns), generator=weights_generator(seed, name))


def get_2d_sincos_pos_embed(side: int, dim: int) -> Float[Tensor, "1 N C"]:
    """Return MAE's fixed position embedding of a class token and N - 1 patches.

    The class token's embedding is 0. A patch's embedding holds sines and cosines of its column,
    then of its row, with wavelengths from 2 pi to 10000 * 2 pi patches in geometric progression
    (Vaswani et al. 2017).

    Args:
        side: Patches along a side of the image.
        dim: Channels, C.
    """
    count = dim // 4
    angles = torch.arange(side, dtype=torch.float64)[:, None] * 10000.0 ** -(
        torch.arange(count, dtype=torch.float64) / count
    )
    encoding = torch.cat([angles.sin(), angles.cos()], 1)
    grid = torch.cat(
        [encoding[None].expand(side, -1, -1), encoding[:, None].expand(-1, side, -1)], 2
    ).flatten(0, 1)
    return torch.cat([torch.zeros(1, dim), grid.float()])[None]


def sine_positions(side: int, dim: int) -> Float[Tensor, "1 E E C"]:
    """Return a position embedding of sines and cosines of each token's row and column.

    Frequencies range from half a wave across the image to one wave per two tokens, in geometric
    progression.

    Args:
        side: Tokens along a side of the image, E.
        dim: Channels, C; a quarter each for sine and cosine of rows and columns.
    """
    position = (torch.arange(side) + 0.5) / side
    count = dim // 4
    frequencies = 0.5 * side ** (torch.arange(count) / max(1, count - 1))
    angles = 2 * math.pi * position[:, None] * frequencies
    encoding = torch.cat([angles.sin(), angles.cos()], 1)
    down, across = encoding[:, None].expand(-1, side, -1), encoding[None].expand(side, -1, -1)
    return torch.cat([down, across], 2)[None].float()
