"""The image encoder: a plain vision transformer with windows, relative positions and a neck.

Follows Li et al. 2022 (ViTDet) and Segment Anything; parameter names and shapes are those of Meta's
`modeling/image_encoder.py`.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import ClassVar, cast

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from gigamask.interfaces import ImageEncoderModule
from gigamask.models.drop_path import DropPath, add_scaled, branch_scale, by_block, is_left_out
from gigamask.models.initial_values import sine_positions
from gigamask.models.layers import MLPBlock, PatchEmbed, smoothing_layers
from gigamask.models.sam.attention import get_rel_pos, rel_pos_attention

POSITION_GAIN, PATCH_GAIN, BRANCH_GAIN = 0.25, 2.0, 0.3
"""Custom initialization: factors of the position embedding, the patch embedding and the residual
branches."""


class EncoderAttention(nn.Module):
    """Self-attention over the whole grid (`window` 0) or within windows, with relative positions.

    The grid is padded to whole windows after the projection, with the projection's bias. This
    equals SAM's zero padding before the projection, with less computation.
    """

    def __init__(
        self, dim: int, heads: int, side: int, window: int, use_rel_pos: bool = True
    ) -> None:
        super().__init__()
        self.num_heads, self.window_size, self.attend = heads, window, rel_pos_attention
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)
        self.rel_pos_h = self.rel_pos_w = None
        if use_rel_pos:
            self.rel_pos_h = nn.Parameter(torch.empty(2 * (window or side) - 1, dim // heads))
            self.rel_pos_w = nn.Parameter(torch.empty(2 * (window or side) - 1, dim // heads))

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

    def forward(self, x: Float[Tensor, "B H W C"]) -> Float[Tensor, "B H W C"]:
        """Return the attended tokens."""
        batch, height, width, dim = x.shape
        # Under tracing, sizes are tensors.
        window_h, window_w = (self.window_size or int(side) for side in (height, width))
        pad_h, pad_w = -height % window_h, -width % window_w
        if pad_h or pad_w:
            projected = F.linear(x, self.qkv.weight)
            projected = F.pad(projected, (0, 0, 0, pad_w, 0, pad_h)) + self.qkv.bias.to(
                projected.dtype
            )
        else:
            projected = self.qkv(x)
        down, across = (height + pad_h) // window_h, (width + pad_w) // window_w
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
        self.drop_rate = drop_rate
        self.norm1 = nn.LayerNorm(embed_dim, eps=1e-6)
        self.attn = EncoderAttention(embed_dim, num_heads, input_size, window_size, use_rel_pos)
        self.norm2 = nn.LayerNorm(embed_dim, eps=1e-6)
        self.mlp = MLPBlock(embed_dim, 4 * embed_dim, nn.GELU)

    def forward(
        self, x: Float[Tensor, "B H W C"], drop_path: DropPath | None
    ) -> Float[Tensor, "B H W C"]:
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

    def attend(
        self, x: Float[Tensor, "B H W C"], scale: float | Float[Tensor, "*any"] | None
    ) -> Float[Tensor, "B H W C"]:
        """Return the tokens after attention.

        Args:
            x: Tokens.
            scale: Factor of the branch, for each image or for all; None means 1.
        """
        return add_scaled(x, self.attn(self.norm1(x)), scale)

    def transform(
        self, x: Float[Tensor, "B H W C"], scale: float | Float[Tensor, "*any"] | None
    ) -> Float[Tensor, "B H W C"]:
        """Return the tokens after the MLP.

        Args:
            x: Tokens.
            scale: Factor of the branch, for each image or for all; None means 1.
        """
        return add_scaled(x, self.mlp(self.norm2(x)), scale)


class ImageEncoderViT(nn.Module, ImageEncoderModule):
    """SAM's image encoder; activation checkpointing and sharding wrap its `blocks`.

    Attributes:
        leaves_out_branches: Whether a branch that all images skip is not computed. Not if it is
            sharded, since all processes must exchange its weights and gradients.
    """

    def __init__(
        self,
        img_size: int = 1024,
        patch_size: int = 16,
        embed_dim: int = 768,
        depth: int = 12,
        num_heads: int = 12,
        out_chans: int = 256,
        window_size: int = 14,
        global_attn_indexes: Sequence[int] = (2, 5, 8, 11),
        drop_path_rate: float = 0.0,
        use_rel_pos: bool = True,
        in_chans: int = 3,
    ) -> None:
        """Build the encoder; the arguments are those of Meta's class, the defaults are ViT-B's.

        Args:
            img_size: Side of the square input in pixels.
            patch_size: Side of a patch in pixels.
            embed_dim: Channels of a token.
            depth: Number of blocks.
            num_heads: Attention heads of each block.
            out_chans: Channels of the embedding.
            window_size: Side of the attention windows in tokens.
            global_attn_indexes: Blocks that attend over the whole image.
            drop_path_rate: Drop path rate of the last block, increasing linearly from 0.
            use_rel_pos: Whether attention has relative positions.
            in_chans: Channels of the input.
        """
        super().__init__()
        self.leaves_out_branches = True
        size = img_size // patch_size
        self.patch_embed = PatchEmbed(patch_size, embed_dim, in_chans)
        self.pos_embed = nn.Parameter(torch.empty(1, size, size, embed_dim))
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
        self, pixels: Float[Tensor, "B N H W"], drop_path: Float[Tensor, "B L 2"] | None
    ) -> Float[Tensor, "B C h w"]:
        """Return the image embedding; see `ImageEncoderModule`.

        Args:
            pixels: Normalized pixels, zero in the padding; a square, or the part of it at the top
                left that `encode_rectangles` selects.
            drop_path: Uniform numbers that decide which branches are skipped; None in evaluation.
        """
        x = self.patch_embed(pixels)
        x = x + self.pos_embed[:, : x.shape[1], : x.shape[2]]
        uniforms = by_block(drop_path, self.leaves_out_branches)
        for index, block in enumerate(self.blocks):
            x = block(x, None if uniforms is None else uniforms[index])
        return self.neck(x.permute(0, 3, 1, 2))
