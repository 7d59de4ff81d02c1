"""The image encoder: a plain vision transformer with windows, relative positions and a neck (Li et al. 2022, ViTDet; Segment Anything).

Enters: normalised pixels of a square image, and the uniforms that decide which residual branches are skipped. Leaves: the image embedding.
Parameter names and shapes are Meta's (`modeling/image_encoder.py`).

Not here: normalising and padding (`model.sam`), the attention itself (`model.attention`), other sides' position tables (`model.weights`),
checkpointing of blocks (`parallel.recompute`), masked pre-training (`model.mae`).
"""

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from gigamask.interfaces import ImageEncoderModule
from gigamask.models.configs import SamConfig
from gigamask.models.sam.attention import attend, relative
from gigamask.models.sam.layers import LayerNorm2d, MLPBlock


class PatchEmbed(nn.Module):
    """Cuts the image into patches and projects each to a token."""

    def __init__(self, patch: int, dim: int) -> None:
        super().__init__()
        self.proj = nn.Conv2d(3, dim, patch, stride=patch)

    def forward(self, pixels: Float[Tensor, "B 3 S S"]) -> Float[Tensor, "B E E C"]:
        return self.proj(pixels).permute(0, 2, 3, 1)


class EncoderAttention(nn.Module):
    """Self-attention with relative position over the whole grid of tokens (`window` 0) or within windows of that side.

    The grid is padded to whole windows after the projection, where a padding token is the projection's bias: the same numbers as padding
    zeros before it, as SAM does, for less work. `attend` may be set to a form of `model.attention`, whatever the device.
    """

    def __init__(self, dim: int, heads: int, side: int, window: int) -> None:
        super().__init__()
        self.num_heads, self.window_size, self.attend = heads, window, attend
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)
        self.rel_pos_h = nn.Parameter(torch.empty(2 * (window or side) - 1, dim // heads))
        self.rel_pos_w = nn.Parameter(torch.empty(2 * (window or side) - 1, dim // heads))

    def forward(self, x: Float[Tensor, "B H W C"]) -> Float[Tensor, "B H W C"]:
        batch, height, width, dim = x.shape
        window = self.window_size or height
        spare_h, spare_w = -height % window, -width % window
        if spare_h or spare_w:
            projected = F.linear(x, self.qkv.weight)
            projected = F.pad(projected, (0, 0, 0, spare_w, 0, spare_h)) + self.qkv.bias.to(
                projected.dtype
            )
        else:
            projected = self.qkv(x)
        down, across = (height + spare_h) // window, (width + spare_w) // window
        windows = projected.view(
            batch, down, window, across, window, 3, self.num_heads, dim // self.num_heads
        ).permute(5, 0, 1, 3, 6, 2, 4, 7)
        q, k, v = windows.reshape(
            3, batch * down * across, self.num_heads, window * window, dim // self.num_heads
        ).unbind(0)
        answer = self.attend(q, k, v, relative(self.rel_pos_h), relative(self.rel_pos_w))
        grid = answer.reshape(
            batch, down, across, self.num_heads, window, window, dim // self.num_heads
        ).permute(0, 1, 4, 2, 5, 3, 6)
        grid = grid.reshape(batch, down * window, across * window, dim)
        return self.proj(grid[:, :height, :width])


class EncoderBlock(nn.Module):
    """One transformer block: attention, then an MLP, each added to what came in unless drop path skips it."""

    def __init__(self, config: SamConfig, index: int) -> None:
        super().__init__()
        window = 0 if index in config.global_attn_indexes else config.window_size
        self.drop_rate = config.drop_path_rate * index / max(1, config.depth - 1)
        self.norm1 = nn.LayerNorm(config.embed_dim, eps=1e-6)
        self.attn = EncoderAttention(
            config.embed_dim, config.num_heads, config.embedding_size, window
        )
        self.norm2 = nn.LayerNorm(config.embed_dim, eps=1e-6)
        self.mlp = MLPBlock(config.embed_dim, 4 * config.embed_dim, nn.GELU)

    def forward(
        self, x: Float[Tensor, "B H W C"], drop_path: Float[Tensor, "B 2"] | None
    ) -> Float[Tensor, "B H W C"]:
        x = x + self._thin(self.attn(self.norm1(x)), drop_path, 0)
        return x + self._thin(self.mlp(self.norm2(x)), drop_path, 1)

    def _thin(
        self, branch: Float[Tensor, "B H W C"], drop_path: Float[Tensor, "B 2"] | None, index: int
    ) -> Float[Tensor, "B H W C"]:
        """Returns the branch with 0 for the images that skip it and the rest scaled up, so that the expectation stays (Huang et al. 2016)."""
        if drop_path is None or self.drop_rate == 0:
            return branch
        kept = (drop_path[:, index] >= self.drop_rate).to(branch.dtype) / (1 - self.drop_rate)
        return branch * kept[:, None, None, None]


class ImageEncoderViT(nn.Module, ImageEncoderModule):
    """SAM's image encoder at any size; `blocks` is what recomputing and sharding wrap."""

    def __init__(self, config: SamConfig) -> None:
        super().__init__()
        self.patch_embed = PatchEmbed(config.patch_size, config.embed_dim)
        self.pos_embed = nn.Parameter(
            torch.empty(1, config.embedding_size, config.embedding_size, config.embed_dim)
        )
        self.blocks = nn.ModuleList(EncoderBlock(config, index) for index in range(config.depth))
        self.neck = nn.Sequential(
            nn.Conv2d(config.embed_dim, config.embedding_dim, 1, bias=False),
            LayerNorm2d(config.embedding_dim),
            nn.Conv2d(config.embedding_dim, config.embedding_dim, 3, padding=1, bias=False),
            LayerNorm2d(config.embedding_dim),
        )

    def forward(
        self, pixels: Float[Tensor, "B 3 S S"], drop_path: Float[Tensor, "B L 2"] | None
    ) -> Float[Tensor, "B C E E"]:
        x = self.patch_embed(pixels) + self.pos_embed
        for index, block in enumerate(self.blocks):
            x = block(x, None if drop_path is None else drop_path[:, index])
        return self.neck(x.permute(0, 3, 1, 2))
