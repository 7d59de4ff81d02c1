"""The image encoder of SAM 2: Hiera (Ryali et al. 2023) with a feature pyramid.

Follows `modeling/backbones` of SAM 2; parameter names are Meta's, except those of the MLPs.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import cast

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from gigamask.errors import GigamaskError
from gigamask.interfaces import ImageEncoderModule
from gigamask.models.drop_path import (
    DropPath,
    add_scaled,
    branch_scale,
    by_block,
    is_left_out,
)
from gigamask.models.layers import MLPBlock

POOL = 2
"""Factor by which the first block of a stage lowers the resolution."""


@dataclass(frozen=True)
class HieraSizes:
    """Sizes of Hiera; see `models.encoder_configs.Hiera`."""

    embed_dim: int
    num_heads: int
    depths: Sequence[int]
    global_attn_indexes: Sequence[int]
    window_sizes: Sequence[int]
    position_size: int


class OverlappingPatchEmbed(nn.Module):
    """A convolution of stride 4 with overlapping patches."""

    def __init__(self, dim: int, in_chans: int) -> None:
        super().__init__()
        self.proj = nn.Conv2d(in_chans, dim, 7, stride=4, padding=3)

    def forward(self, pixels: Float[Tensor, "B N S S"]) -> Float[Tensor, "B h w C"]:
        """Return the tokens."""
        return self.proj(pixels).permute(0, 2, 3, 1)


class HieraAttention(nn.Module):
    """Self-attention within windows; with `pooled`, queries have half the resolution."""

    def __init__(self, dim: int, out: int, heads: int, pooled: bool) -> None:
        super().__init__()
        self.num_heads, self.pooled = heads, pooled
        self.qkv = nn.Linear(dim, 3 * out)
        self.proj = nn.Linear(out, out)

    def forward(self, x: Float[Tensor, "W h w C"]) -> Float[Tensor, "W h2 w2 D"]:
        """Return the attended tokens of each window."""
        height, width = x.shape[1:3]
        q, k, v = self.qkv(x).flatten(1, 2).chunk(3, -1)
        if self.pooled:
            q = _pool(q.unflatten(1, (height, width)))
            height, width = q.shape[1:3]
            q = q.flatten(1, 2)
        q, k, v = (each.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for each in (q, k, v))
        out = F.scaled_dot_product_attention(q, k, v).transpose(1, 2)
        return self.proj(out.unflatten(1, (height, width)).flatten(3))


class HieraBlock(nn.Module):
    """Attention and an MLP, each with a residual connection and drop path.

    Args:
        dim: Channels of the input.
        out: Channels of the result.
        heads: Attention heads.
        window: Side of the attention windows in tokens; 0 attends over the whole image.
        pooled: Whether the resolution is halved.
        drop_rate: Probability of skipping a branch.
    """

    def __init__(
        self, dim: int, out: int, heads: int, window: int, pooled: bool, drop_rate: float
    ) -> None:
        super().__init__()
        self.window, self.pooled, self.drop_rate = window, pooled, drop_rate
        self.norm1 = nn.LayerNorm(dim, eps=1e-6)
        self.attn = HieraAttention(dim, out, heads, pooled)
        self.norm2 = nn.LayerNorm(out, eps=1e-6)
        self.mlp = MLPBlock(out, 4 * out, nn.GELU)
        if dim != out:
            self.proj = nn.Linear(dim, out)

    def forward(
        self, x: Float[Tensor, "B H W C"], drop_path: DropPath | None
    ) -> Float[Tensor, "B H2 W2 D"]:
        """Return the tokens after both branches.

        Args:
            x: Tokens.
            drop_path: Uniform numbers that decide which branches are skipped; None in evaluation.
        """
        normal = self.norm1(x)
        if hasattr(self, "proj"):
            x = self.proj(normal)
            x = _pool(x) if self.pooled else x
        if not is_left_out(drop_path, 0, self.drop_rate):
            x = self._add(x, self._attend(normal), drop_path, 0)
        if not is_left_out(drop_path, 1, self.drop_rate):
            x = self._add(x, self.mlp(self.norm2(x)), drop_path, 1)
        return x

    def _add(self, x: Tensor, branch: Tensor, drop_path: DropPath | None, index: int) -> Tensor:
        return add_scaled(x, branch, branch_scale(x, drop_path, index, self.drop_rate))

    def _attend(self, x: Float[Tensor, "B H W C"]) -> Float[Tensor, "B H2 W2 D"]:
        """Return the attended tokens; the grid is padded with zeros to whole windows."""
        if not self.window:
            return self.attn(x)
        height, width = x.shape[1:3]
        window = self.window
        x = F.pad(x, (0, 0, 0, -width % window, 0, -height % window))
        down, across = x.shape[1] // window, x.shape[2] // window
        windows = x.unflatten(2, (across, window)).unflatten(1, (down, window)).transpose(2, 3)
        out = self.attn(windows.flatten(0, 2))
        grid = out.unflatten(0, (-1, down, across)).transpose(2, 3).flatten(3, 4).flatten(1, 2)
        factor = POOL if self.pooled else 1
        return grid[:, : height // factor, : width // factor]


def _pool(x: Float[Tensor, "B H W C"]) -> Float[Tensor, "B H2 W2 C"]:
    return F.max_pool2d(x.permute(0, 3, 1, 2), POOL).permute(0, 2, 3, 1)


class HieraTrunk(nn.Module):
    """Four stages at strides 4, 8, 16 and 32."""

    def __init__(self, config: HieraSizes, drop_path_rate: float, in_chans: int) -> None:
        super().__init__()
        dim, heads, window = config.embed_dim, config.num_heads, config.window_sizes[0]
        self.patch_embed = OverlappingPatchEmbed(dim, in_chans)
        side = config.position_size
        self.pos_embed = nn.Parameter(torch.empty(1, dim, side, side))
        self.pos_embed_window = nn.Parameter(torch.empty(1, dim, window, window))
        self.parameter_std = 0.02
        self.ends = [end - 1 for end in accumulate(config.depths)]
        self.blocks = nn.ModuleList()
        count = sum(config.depths)
        for stage, depth in enumerate(config.depths):
            for index in range(depth):
                # The first block of a stage still attends within the windows of the last one.
                is_first = stage > 0 and index == 0
                number, width = len(self.blocks), dim * 2 if is_first else dim
                window = config.window_sizes[stage - is_first]
                heads = heads * 2 if is_first else heads
                self.blocks.append(
                    HieraBlock(
                        dim,
                        width,
                        heads,
                        0 if number in config.global_attn_indexes else window,
                        is_first,
                        drop_path_rate * number / max(1, count - 1),
                    )
                )
                dim = width

    def forward(
        self, pixels: Float[Tensor, "B N S S"], uniforms: Sequence[DropPath] | None
    ) -> list[Float[Tensor, "B _ _ _"]]:
        """Return the feature maps of the four stages.

        Args:
            pixels: Normalized pixels.
            uniforms: Uniform numbers of each block; None in evaluation.
        """
        x = self.patch_embed(pixels)
        x, maps = x + self._positions(x.shape[1], x.shape[2]), []
        for index, block in enumerate(self.blocks):
            x = block(x, None if uniforms is None else uniforms[index])
            if index in self.ends:
                maps.append(x.permute(0, 3, 1, 2))
        return maps

    def _positions(self, height: int, width: int) -> Float[Tensor, "1 H W C"]:
        """Return the interpolated positions, plus those within each window."""
        coarse = F.interpolate(self.pos_embed, (height, width), mode="bicubic")
        window = self.pos_embed_window
        side = int(window.shape[-1])
        tiled = window.repeat(1, 1, -(-height // side), -(-width // side))
        return (coarse + tiled[:, :, :height, :width]).permute(0, 2, 3, 1)


class Lateral(nn.Module):
    """The projection of a feature map in the neck."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(inputs, outputs, 1)

    def forward(self, x: Float[Tensor, "B C h w"]) -> Float[Tensor, "B D h w"]:
        """Return the projected map."""
        return self.conv(x)


class FeaturePyramid(nn.Module):
    """Projections of the four maps; the coarsest is added to that of stride 16."""

    def __init__(self, widths: Sequence[int], out: int) -> None:
        super().__init__()
        self.convs = nn.ModuleList(Lateral(width, out) for width in reversed(widths))

    def forward(self, maps: Sequence[Float[Tensor, "B _ _ _"]]) -> list[Float[Tensor, "B _ _ _"]]:
        """Return maps of strides 4, 8 and 16."""
        coarsest, *finer = (
            conv(each) for conv, each in zip(self.convs, reversed(maps), strict=True)
        )
        above = F.interpolate(coarsest, scale_factor=2.0, mode="nearest")
        return [finer[2], finer[1], finer[0] + above]


class HieraEncoder(nn.Module, ImageEncoderModule):
    """Hiera and its feature pyramid.

    Args:
        config: Sizes of Hiera.
        sizes: Side of the input, and stride of the embedding, in pixels.
        out_chans: Channels of the embedding.
        drop_path_rate: Drop path rate of the last block, increasing linearly from 0.
        in_chans: Channels of the input.

    Attributes:
        leaves_out_branches: Whether a branch that all images skip is not computed.

    Raises:
        GigamaskError: The stride or the input does not fit.
    """

    def __init__(
        self,
        config: HieraSizes,
        sizes: tuple[int, int],
        out_chans: int,
        drop_path_rate: float,
        in_chans: int = 3,
    ) -> None:
        super().__init__()
        image_size, patch_size = sizes
        if patch_size != 16 or image_size % 32:
            raise GigamaskError(
                "--model.encoder hiera needs --model.patch-size 16 and a --model.image-size that "
                f"is a multiple of 32 (got {patch_size} and {image_size})"
            )
        self.leaves_out_branches = True
        self.trunk = HieraTrunk(config, drop_path_rate, in_chans)
        self.neck = FeaturePyramid([config.embed_dim * 2**stage for stage in range(4)], out_chans)

    def forward(
        self, pixels: Float[Tensor, "B N S S"], drop_path: Float[Tensor, "B L 2"] | None = None
    ) -> Float[Tensor, "B C E E"]:
        """Return the map of stride 16; see `ImageEncoderModule`.

        Args:
            pixels: Normalized pixels, zero in the padding.
            drop_path: Uniform numbers that decide which branches are skipped; None in evaluation.
        """
        return self.pyramid(pixels, drop_path)[-1]

    def pyramid(
        self, pixels: Float[Tensor, "B N S S"], drop_path: Float[Tensor, "B L 2"] | None
    ) -> list[Float[Tensor, "B _ _ _"]]:
        """Return the maps of strides 4, 8 and 16.

        Args:
            pixels: Normalized pixels, zero in the padding.
            drop_path: Uniform numbers that decide which branches are skipped; None in evaluation.
        """
        uniforms = by_block(drop_path, self.leaves_out_branches)
        return self.neck(cast(HieraTrunk, self.trunk)(pixels, uniforms))
