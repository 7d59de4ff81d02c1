"""The image encoder: a plain vision transformer with windows, relative positions and a neck.

Follows Li et al. 2022 (ViTDet) and Segment Anything; parameter names and shapes are those of Meta's
`modeling/image_encoder.py`.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import ClassVar, cast

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from gigamask.errors import GigamaskError
from gigamask.interfaces import ImageEncoderModule
from gigamask.models.drop_path import DropPath, add_scaled, branch_scale, by_block, is_left_out
from gigamask.models.layers import MLPBlock, PatchEmbed, smoothing_layers
from gigamask.models.sam.attention import get_rel_pos, rel_pos_attention
from gigamask.models.shared_tensors import is_own, is_plain

Grid = Float[Tensor, "B H W C"]
POSITION_GAIN, PATCH_GAIN, BRANCH_GAIN = 0.25, 2.0, 0.3
"""Custom initialization: factors of the position embedding, the patch embedding and the residual
branches."""


def window_partition(x: Grid, window_size: int) -> tuple[Float[Tensor, "R w w C"], tuple[int, int]]:
    """Return the windows of tokens, padded with zeros, as Meta's function does.

    Args:
        x: Tokens of B images.
        window_size: Side of a window.

    Returns:
        The windows, row by row, and height and width with padding.
    """
    height, width = (side + -side % window_size for side in x.shape[1:3])
    padded = F.pad(x, (0, 0, 0, width - x.shape[2], 0, height - x.shape[1]))
    cells = padded.unflatten(2, (-1, window_size)).unflatten(1, (-1, window_size))
    return cells.transpose(2, 3).flatten(0, 2), (height, width)


def window_unpartition(
    windows: Float[Tensor, "R w w C"],
    window_size: int,
    pad_hw: tuple[int, int],
    hw: tuple[int, int],
) -> Grid:
    """Return the tokens of windows without padding, as Meta's function does.

    Args:
        windows: The windows, as `window_partition` returns them.
        window_size: Side of a window.
        pad_hw: Height and width with padding.
        hw: Height and width without.
    """
    down, across = (side // window_size for side in pad_hw)
    cells = windows.unflatten(0, (-1, down, across)).transpose(2, 3)
    return cells.flatten(3, 4).flatten(1, 2)[:, : hw[0], : hw[1]]


class EncoderAttention(nn.Module):
    """Self-attention over the whole grid (`window` 0) or within windows, with relative positions.

    The grid is padded to whole windows after the projection, with the projection's bias. This
    equals SAM's zero padding before the projection, with less computation. A module of the user's
    in place of `qkv`, or with hooks, is called as in Meta's package: with windows padded by zeros.
    """

    def __init__(
        self, dim: int, heads: int, side: int, window: int, use_rel_pos: bool = True
    ) -> None:
        super().__init__()
        self.num_heads, self.window_size, self.attend = heads, window, rel_pos_attention
        self.scale, self.use_rel_pos = (dim // heads) ** -0.5, use_rel_pos
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)
        self.rel_pos_h = self.rel_pos_w = None
        if use_rel_pos:
            self.rel_pos_h = nn.Parameter(torch.zeros(2 * (window or side) - 1, dim // heads))
            self.rel_pos_w = nn.Parameter(torch.zeros(2 * (window or side) - 1, dim // heads))

    def initial_value(self, name: str, shape: torch.Size, generator: torch.Generator) -> Tensor:
        """Return zeros for relative positions.

        Args:
            name: Its name in the module.
            shape: Its shape.
            generator: Its random generator.
        """
        return torch.zeros(shape)

    def use_attention(self, attend: Callable[..., Tensor]) -> None:
        """Use another implementation of `models.sam.attention`."""
        self.attend = attend

    def forward(self, x: Grid) -> Grid:
        """Return the attended tokens."""
        batch, height, width, dim = x.shape
        # Under tracing, sizes are tensors.
        window_h, window_w = (self.window_size or int(side) for side in (height, width))
        pad_h, pad_w = -height % window_h, -width % window_w
        down, across = (height + pad_h) // window_h, (width + pad_w) // window_w
        if not is_plain(self.qkv):
            projected = self._project_windows(x)
        elif pad_h or pad_w:
            projected = F.linear(x, self.qkv.weight)
            projected = F.pad(projected, (0, 0, 0, pad_w, 0, pad_h)) + self.qkv.bias.to(
                projected.dtype
            )
        else:
            projected = self.qkv(x)
        windows = projected.view(
            batch, down, window_h, across, window_w, 3, self.num_heads, dim // self.num_heads
        ).permute(5, 0, 1, 3, 6, 2, 4, 7)
        q, k, v = windows.reshape(
            3, batch * down * across, self.num_heads, window_h * window_w, dim // self.num_heads
        ).unbind(0)
        if self.rel_pos_h is None or self.rel_pos_w is None:
            out = F.scaled_dot_product_attention(q, k, v)
        else:
            rows = get_rel_pos(self.rel_pos_h, window_h)
            out = self.attend(q, k, v, rows, get_rel_pos(self.rel_pos_w, window_w))
        grid = out.reshape(
            batch, down, across, self.num_heads, window_h, window_w, dim // self.num_heads
        ).permute(0, 1, 4, 2, 5, 3, 6)
        grid = grid.reshape(batch, down * window_h, across * window_w, dim)
        # Cropped by a negative padding, whose gradient is one operation.
        return self.proj(F.pad(grid, (0, 0, 0, -pad_w, 0, -pad_h)) if pad_h or pad_w else grid)

    def _project_windows(self, x: Grid) -> Float[Tensor, "B h w D"]:
        """Return queries, keys and values of tokens padded to whole windows, window by window."""
        if not self.window_size:
            return self.qkv(x)
        windows, padded = window_partition(x, self.window_size)
        return window_unpartition(self.qkv(windows), self.window_size, padded, padded).contiguous()


class EncoderBlock(nn.Module):
    """Transformer block: attention and an MLP, each with a residual connection and drop path.

    Attributes:
        compiled_methods: What --compile compiles: the branches, since which of them are left out
            changes with every image.
    """

    compiled_methods: ClassVar[tuple[str, ...]] = ("attend", "transform")

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        input_size: int,
        window_size: int,
        drop_rate: float,
        use_rel_pos: bool = True,
    ) -> None:
        super().__init__()
        self.drop_rate, self.window_size = drop_rate, window_size
        self.norm1 = nn.LayerNorm(embed_dim, eps=1e-6)
        self.attn = EncoderAttention(embed_dim, num_heads, input_size, window_size, use_rel_pos)
        self.norm2 = nn.LayerNorm(embed_dim, eps=1e-6)
        self.mlp = MLPBlock(embed_dim, 4 * embed_dim, nn.GELU)

    def forward(self, x: Grid, drop_path: DropPath | None = None) -> Grid:
        """Return the tokens after both branches.

        Args:
            x: Tokens.
            drop_path: Uniform numbers that decide which branches are skipped; None in evaluation.
                A branch that all images skip is left out if they are Python numbers.
        """
        for index, branch in enumerate((self.attend, self.transform)):
            if not is_left_out(drop_path, index, self.drop_rate):
                x = branch(x, branch_scale(x, drop_path, index, self.drop_rate))
        return x

    def attend(self, x: Grid, scale: float | Float[Tensor, "*any"] | None) -> Grid:
        """Return the tokens after attention.

        Args:
            x: Tokens.
            scale: Factor of the branch, for each image or for all; None means 1.
        """
        tokens = self.norm1(x)
        if not self.window_size or is_own(self.attn, EncoderAttention):
            return add_scaled(x, self.attn(tokens), scale)
        windows, padded = window_partition(tokens, self.window_size)
        attended = self.attn(windows)
        size = (tokens.shape[1], tokens.shape[2])
        return add_scaled(x, window_unpartition(attended, self.window_size, padded, size), scale)

    def transform(self, x: Grid, scale: float | Float[Tensor, "*any"] | None) -> Grid:
        """Return the tokens after the MLP.

        Args:
            x: Tokens.
            scale: Factor of the branch, for each image or for all; None means 1.
        """
        return add_scaled(x, self.mlp(self.norm2(x)), scale)


class ImageEncoderViT(nn.Module, ImageEncoderModule):
    """SAM's image encoder; activation checkpointing and sharding wrap its `blocks`.

    Attributes:
        takes_parts: Whether images are encoded without their padding.
        leaves_out_branches: Whether a branch that all images skip is not computed. Not if it is
            sharded, since all processes must exchange its weights and gradients.
    """

    def __init__(  # noqa: PLR0913 (Meta's class has these)
        self,
        img_size: int = 1024,
        patch_size: int = 16,
        in_chans: int = 3,
        embed_dim: int = 768,
        depth: int = 12,
        num_heads: int = 12,
        out_chans: int = 256,
        window_size: int = 14,
        global_attn_indexes: Sequence[int] = (2, 5, 8, 11),
        drop_path_rate: float = 0.0,
        use_rel_pos: bool = True,
    ) -> None:
        """Build the encoder; the arguments have the names of Meta's, the defaults are ViT-B's.

        Args:
            img_size: Side of the square input in pixels.
            patch_size: Side of a patch in pixels.
            in_chans: Channels of the input.
            embed_dim: Channels of a token.
            depth: Number of blocks.
            num_heads: Attention heads of each block.
            out_chans: Channels of the embedding.
            window_size: Side of the attention windows in tokens.
            global_attn_indexes: Blocks that attend over the whole image.
            drop_path_rate: Drop path rate of the last block, increasing linearly from 0.
            use_rel_pos: Whether attention has relative positions.
        """
        super().__init__()
        self.leaves_out_branches, self.takes_parts, self.img_size = True, False, img_size
        self.side = size = img_size // patch_size
        self.patch_embed = PatchEmbed(patch_size, embed_dim, in_chans)
        self.pos_embed = nn.Parameter(torch.zeros(1, size, size, embed_dim))
        self.blocks = nn.ModuleList(
            EncoderBlock(
                embed_dim,
                num_heads,
                size,
                0 if index in global_attn_indexes else window_size,
                drop_path_rate * index / max(1, depth - 1),
                use_rel_pos,
            )
            for index in range(depth)
        )
        self.neck = nn.Sequential(
            nn.Conv2d(embed_dim, out_chans, 1, bias=False), *smoothing_layers(out_chans)
        )

    def initial_value(self, name: str, shape: torch.Size, generator: torch.Generator) -> Tensor:
        """Return sines and cosines for absolute positions.

        Args:
            name: Its name in the module.
            shape: Its shape.
            generator: Its random generator.
        """
        return sine_positions(shape[1], shape[3])

    @torch.no_grad()
    def init_color_passthrough(self) -> None:
        """Scale initial weights so that the embedding is a blurred copy of the image's colors."""
        self.pos_embed.mul_(POSITION_GAIN)
        self.patch_embed.proj.weight.mul_(PATCH_GAIN)
        for block in cast(Iterable[EncoderBlock], self.blocks):
            block.attn.proj.weight.mul_(BRANCH_GAIN)
            block.mlp.lin2.weight.mul_(BRANCH_GAIN)

    def forward(
        self, pixels: Float[Tensor, "B N H W"], drop_path: Float[Tensor, "B L 2"] | None = None
    ) -> Float[Tensor, "B C h w"]:
        """Return the image embedding; see `ImageEncoderModule`.

        Args:
            pixels: Normalized pixels, zero in the padding; a square, or the part of it at the top
                left that `encode_rectangles` selects.
            drop_path: Uniform numbers that decide which branches are skipped; None in evaluation.

        Raises:
            GigamaskError: The pixels have another size, and the model is not `rectangular`.
        """
        x = self.patch_embed(pixels)
        is_square = torch.jit.is_tracing() or x.shape[1:3] == (self.side, self.side)
        if not self.takes_parts and not is_square:
            raise GigamaskError(
                f"the image encoder has positions for {self.side} x {self.side} patches (got "
                f"{x.shape[1]} x {x.shape[2]}); gigamask export --image-size resizes them"
            )
        x = x + self.pos_embed[:, : x.shape[1], : x.shape[2]]
        uniforms = by_block(drop_path, self.leaves_out_branches)
        for index, block in enumerate(self.blocks):
            x = block(x) if uniforms is None else block(x, uniforms[index])
        return self.neck(x.permute(0, 3, 1, 2))


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
