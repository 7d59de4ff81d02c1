"""Features of the pixels at two and four times the embedding's resolution.

As in SAM 2 and SAM-HQ, they join the upscaling of the mask decoder. There they come from a pyramid
of the encoder; a ViT has none, so a small convolutional stem computes them from the pixels, once
per image. They travel as further channels of the embedding: 4 tokens of the finer grid, or 16 of
the finest, in each token.
"""

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from gigamask.models.configs import SamConfig
from gigamask.models.sam.layers import LayerNorm2d


class HighResStem(nn.Module):
    """Convolutions on the pixels; their last layers start at 0, so that they change nothing yet."""

    def __init__(self, config: SamConfig) -> None:
        super().__init__()
        wide, narrow = high_res_widths(config.embedding_dim)
        stride = config.patch_size // 4
        self.four = nn.Sequential(
            nn.Conv2d(config.in_channels, narrow, stride + 2, stride, padding=1),
            LayerNorm2d(narrow),
            nn.GELU(),
            nn.Conv2d(narrow, narrow, 3, padding=1),
            LayerNorm2d(narrow),
            nn.GELU(),
        )
        self.twice = nn.Sequential(
            nn.Conv2d(narrow, wide, 2, stride=2),
            LayerNorm2d(wide),
            nn.GELU(),
            nn.Conv2d(wide, wide, 3, padding=1),
            LayerNorm2d(wide),
            nn.GELU(),
        )
        self.twice_out, self.four_out = nn.Conv2d(wide, wide, 1), nn.Conv2d(narrow, narrow, 1)
        for layer in (self.twice_out, self.four_out):
            layer.parameter_std = 0.0  # pyrefly: ignore

    def forward(self, pixels: Float[Tensor, "B N S S"]) -> Float[Tensor, "B D E E"]:
        """Return the features as channels of the embedding.

        Args:
            pixels: Normalized pixels, zero in the padding.

        Returns:
            D = 3 C channels: those at twice the resolution, then those at four times.
        """
        four = self.four(pixels)
        twice = self.twice_out(self.twice(four))
        return torch.cat(
            [F.pixel_unshuffle(twice, 2), F.pixel_unshuffle(self.four_out(four), 4)], 1
        )


def high_res_widths(dim: int) -> tuple[int, int]:
    """Return the channels at two and four times the resolution of an embedding of `dim` channels,
    which are those of SAM's upscaling."""
    return dim // 4, dim // 8


def high_res_maps(
    channels: Float[Tensor, "B D E E"],
) -> tuple[Float[Tensor, "B c E2 E2"], Float[Tensor, "B d E4 E4"]]:
    """Return the maps that `HighResStem` made channels of.

    Args:
        channels: The channels of the embedding after the encoder's.
    """
    dim = channels.shape[1] // 3
    return F.pixel_shuffle(channels[:, :dim], 2), F.pixel_shuffle(channels[:, dim:], 4)


def as_tokens(
    twice: Float[Tensor, "B c E2 E2"], four: Float[Tensor, "B d E4 E4"]
) -> tuple[Float[Tensor, "B T 4 c"], Float[Tensor, "B P d"]]:
    """Return maps in the order of the tokens of the mask decoder's upscaling.

    Args:
        twice: Map at two times the embedding's resolution.
        four: Map at four times the embedding's resolution.

    Returns:
        Four features in each of T tokens, and P = 16 T features: those of the first token's first
        quarter, of its second quarter, and so on.
    """
    coarse = twice.unflatten(3, (-1, 2)).unflatten(2, (-1, 2)).permute(0, 2, 4, 3, 5, 1)
    fine = four.unflatten(3, (-1, 2, 2)).unflatten(2, (-1, 2, 2)).permute(0, 2, 5, 3, 6, 4, 7, 1)
    return coarse.flatten(3, 4).flatten(1, 2), fine.flatten(1, 6)
