"""Masked autoencoder (MAE) for pre-training the image encoder (He et al. 2021).

Parameter names and shapes are those of MAE's pre-training checkpoints (`models_mae.py`). The
encoder is SAM's with global attention only and without relative positions, because most of the grid
is hidden. SAM's training adds windows and relative positions, which start at 0, as in ViTDet (Li et
al. 2022).

With `feature_channels`, it is SAMI (Xiong et al. 2023, arXiv 2312.00863): patches are predicted as
features of a teacher, and the decoder leaves the visible ones as the encoder has made them.
"""

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int64, UInt8
from torch import Tensor, nn

from gigamask.errors import GigamaskError
from gigamask.interfaces import PIXEL_MEAN, PIXEL_STD
from gigamask.models.configs import MAEConfig
from gigamask.models.layers import PatchEmbed
from gigamask.models.model import Model
from gigamask.models.promptable import preprocess

PatchTokens = Float[Tensor, "B N C"]


class MAEOutput(NamedTuple):
    """Output of a `MAE`.

    Attributes:
        patches: Predicted pixels of every patch, D = 3 * patch_size ** 2: row by row, with the
            three channels of a pixel together; or its D predicted features.
        pixels: Normalized pixels of the images.
        scored: Patches in the loss: not entirely padding and, for pixels, hidden.
    """

    patches: Float[Tensor, "B P D"]
    pixels: Float[Tensor, "B 3 S S"]
    scored: Bool[Tensor, "B P"]


class MAEAttention(nn.Module):
    """Multi-head self-attention, with MAE's parameter names."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.num_heads = heads
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x: PatchTokens) -> PatchTokens:
        """Return the attended tokens."""
        q, k, v = self.qkv(x).unflatten(2, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
        return self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class MAEMLP(nn.Module):
    """Two linear layers with a GELU in between, with MAE's parameter names."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(dim, 4 * dim)
        self.fc2 = nn.Linear(4 * dim, dim)

    def forward(self, x: PatchTokens) -> PatchTokens:
        """Return the output of the second layer."""
        return self.fc2(F.gelu(self.fc1(x)))


class MAEBlock(nn.Module):
    """Transformer block: attention and an MLP, each with a residual connection."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(dim, eps=1e-6)
        self.attn = MAEAttention(dim, heads)
        self.norm2 = nn.LayerNorm(dim, eps=1e-6)
        self.mlp = MAEMLP(dim)

    def forward(self, x: PatchTokens) -> PatchTokens:
        """Return the tokens after both branches."""
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class MAE(Model):
    """Masked autoencoder whose encoder sees only the visible patches and the class token.

    Initial values follow its authors' code (`models_mae.py`).
    """

    kind = "MAE"
    pixel_mean: Tensor
    pixel_std: Tensor

    def __init__(self, config: MAEConfig) -> None:
        super().__init__()
        self.config = config
        self.patch_embed = PatchEmbed(config.patch_size, config.embed_dim)
        self.cls_token = nn.Parameter(torch.empty(1, 1, config.embed_dim))
        self.pos_embed = nn.Parameter(
            torch.empty(1, 1 + config.patches, config.embed_dim), requires_grad=False
        )
        self.blocks = nn.ModuleList(
            MAEBlock(config.embed_dim, config.num_heads) for _ in range(config.depth)
        )
        self.norm = nn.LayerNorm(config.embed_dim, eps=1e-6)
        self.decoder_embed = nn.Linear(config.embed_dim, config.decoder_dim)
        self.mask_token = nn.Parameter(torch.empty(1, 1, config.decoder_dim))
        self.decoder_pos_embed = nn.Parameter(
            torch.empty(1, 1 + config.patches, config.decoder_dim), requires_grad=False
        )
        self.decoder_blocks = nn.ModuleList(
            MAEBlock(config.decoder_dim, config.decoder_num_heads)
            for _ in range(config.decoder_depth)
        )
        self.decoder_norm = nn.LayerNorm(config.decoder_dim, eps=1e-6)
        predicted = config.feature_channels or 3 * config.patch_size**2
        self.decoder_pred = nn.Linear(config.decoder_dim, predicted)
        self.register_buffer("pixel_mean", torch.tensor(PIXEL_MEAN).view(3, 1, 1), persistent=False)
        self.register_buffer("pixel_std", torch.tensor(PIXEL_STD).view(3, 1, 1), persistent=False)

    @staticmethod
    def initial_matrix(shape: torch.Size, generator: torch.Generator, fan_in: int) -> Tensor:
        """Return uniform values with variance 2 / (fan-in + fan-out) (Glorot and Bengio 2010).

        The patch embedding's kernel counts as one matrix over all pixels of a patch.

        Args:
            shape: Its shape.
            generator: Its random generator.
            fan_in: Inputs of each output.
        """
        matrix = torch.empty(shape[0], fan_in)
        return nn.init.xavier_uniform_(matrix, generator=generator).view(shape)

    def initial_value(self, name: str, shape: torch.Size, generator: torch.Generator) -> Tensor:
        """Return the initial value of a token, of positions or of a pixel constant.

        Args:
            name: Its name in the module.
            shape: Its shape.
            generator: Its random generator.
        """
        if name in ("cls_token", "mask_token"):
            return 0.02 * torch.randn(shape, generator=generator)
        if name in ("pos_embed", "decoder_pos_embed"):
            return get_2d_sincos_pos_embed(math.isqrt(shape[1] - 1), shape[2])
        return torch.tensor(PIXEL_MEAN if name == "pixel_mean" else PIXEL_STD).view(3, 1, 1)

    def forward(
        self,
        images: UInt8[Tensor, "B 3 S S"],
        input_sizes: Int64[Tensor, "B 2"],
        uniforms: Float[Tensor, "B P"],
    ) -> MAEOutput:
        """Predict all patches from the visible ones, which have the lowest `uniforms`.

        Patches entirely in the padding are hidden first but never scored, so a smaller fraction of
        a padded image is scored.

        Args:
            images: RGB in 0..255.
            input_sizes: Height and width of each image without padding, at the top left.
            uniforms: Uniform random numbers in [0, 1) that rank the patches.

        Raises:
            GigamaskError: The size of the images or the number of `uniforms` is wrong.
        """
        config = self.config
        if images.shape[-1] != config.image_size:
            side = images.shape[-1]
            raise GigamaskError(
                f"images must be {config.image_size} pixels wide and high (got {side}); "
                f"resize them, or build the model with image_size={side}"
            )
        if uniforms.shape[1] != config.patches:
            raise GigamaskError(
                f"RandomSpec.patches must be {config.patches}, the model's number of patches "
                f"(got {uniforms.shape[1]})"
            )
        pixels, padding = (
            preprocess(images, input_sizes, self.pixel_mean, self.pixel_std),
            self._padding(input_sizes),
        )
        visible = torch.sort(uniforms + padding, dim=1, stable=True).indices[:, : config.visible]
        hidden = torch.ones_like(padding).scatter(1, visible, False)
        scored = ~padding if config.feature_channels else hidden & ~padding
        return MAEOutput(self.decode(self.encode(pixels, visible), visible), pixels, scored)

    def encode(
        self, pixels: Float[Tensor, "B 3 S S"], visible: Int64[Tensor, "B V"]
    ) -> Float[Tensor, "B V1 C"]:
        """Return the encoded class token and visible patches.

        Args:
            pixels: Normalized pixels.
            visible: Indices of the visible patches.
        """
        tokens = self.patch_embed(pixels).flatten(1, 2) + self.pos_embed[:, 1:]
        tokens = tokens.gather(1, visible[..., None].expand(-1, -1, tokens.shape[2]))
        x = torch.cat(
            [
                (self.cls_token + self.pos_embed[:, :1])
                .to(tokens.dtype)
                .expand(len(tokens), -1, -1),
                tokens,
            ],
            1,
        )
        for block in self.blocks:
            x = block(x)
        return self.norm(x)

    def decode(
        self, encoded: Float[Tensor, "B V1 C"], visible: Int64[Tensor, "B V"]
    ) -> Float[Tensor, "B P D"]:
        """Predict every patch; mask tokens stand in for the hidden ones.

        To predict features, blocks change only the tokens of hidden patches, which attend to all.

        Args:
            encoded: Encoded class token and visible patches.
            visible: Indices of the visible patches.
        """
        tokens = self.decoder_embed(encoded)
        hidden = self.mask_token.to(tokens.dtype).expand(len(tokens), self.config.patches, -1)
        patches = hidden.scatter(
            1, visible[..., None].expand(-1, -1, tokens.shape[2]), tokens[:, 1:]
        )
        x = torch.cat([tokens[:, :1], patches], 1) + self.decoder_pos_embed
        kept = None
        if self.config.feature_channels:
            kept = torch.zeros_like(x[..., :1], dtype=torch.bool)
            kept = kept.scatter(1, 1 + visible[..., None], True)
            kept[:, 0] = True
        for block in self.decoder_blocks:
            x = block(x) if kept is None else torch.where(kept, x, block(x))
        return self.decoder_pred(self.decoder_norm(x))[:, 1:]

    def _padding(self, input_sizes: Int64[Tensor, "B 2"]) -> Bool[Tensor, "B P"]:
        """Return which patches lie entirely in the padding."""
        corner = (
            torch.arange(self.config.embedding_size, device=input_sizes.device)
            * self.config.patch_size
        )
        rows, columns = corner < input_sizes[:, :1], corner < input_sizes[:, 1:]
        return ~(rows[:, :, None] & columns[:, None, :]).flatten(1)


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
