"""The masked autoencoder: the image encoder learns to see from images alone, by guessing the patches it is not shown (He et al. 2021).

Enters: uint8 images fitted to the input square with the size of their valid part, and a uniform number for each patch. Leaves: a guess of every
patch's pixels, and which patches it was held to. Names and shapes are those of MAE's own pre-training checkpoints (`models_mae.py`).

The encoder is SAM's without what SAM's training adds: attention is global and has no relative position, since most of the grid is missing and
windows would be full of holes. Windows and relative positions, which start at 0, come with SAM's fine-tuning, as in ViTDet (Li et al. 2022).

Not here: how a model starts (`model.start`), the loss (`losses.reconstruction`), what a SAM takes over from it (`model.weights`).
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int64, UInt8
from torch import Tensor, nn

from gigamask.errors import GigamaskError
from gigamask.models.configs import MAEConfig
from gigamask.models.sam.image_encoder import PatchEmbed
from gigamask.models.sam.sam import PIXEL_MEAN, PIXEL_STD, preprocess


class MAEOutput(NamedTuple):
    """What the model makes of a batch: the guessed pixels of every patch, row by row and red, green, blue within a pixel; the normalised pixels
    of the images; and which patches were hidden, those of padding left out."""

    patches: Float[Tensor, "B P D"]
    pixels: Float[Tensor, "B 3 S S"]
    scored: Bool[Tensor, "B P"]


class MAEAttention(nn.Module):
    """Self-attention of all tokens with all."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.num_heads = heads
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x: Float[Tensor, "B N C"]) -> Float[Tensor, "B N C"]:
        q, k, v = self.qkv(x).unflatten(2, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
        return self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class MAEMLP(nn.Module):
    """Two linear layers with GELU between; `model.layers.MLPBlock` under MAE's names."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(dim, 4 * dim)
        self.fc2 = nn.Linear(4 * dim, dim)

    def forward(self, x: Float[Tensor, "B N C"]) -> Float[Tensor, "B N C"]:
        return self.fc2(F.gelu(self.fc1(x)))


class MAEBlock(nn.Module):
    """One transformer block: attention, then an MLP, each added to what came in."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(dim, eps=1e-6)
        self.attn = MAEAttention(dim, heads)
        self.norm2 = nn.LayerNorm(dim, eps=1e-6)
        self.mlp = MAEMLP(dim)

    def forward(self, x: Float[Tensor, "B N C"]) -> Float[Tensor, "B N C"]:
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class MAE(nn.Module):
    """The autoencoder: `blocks` see the visible patches and the class token alone, `decoder_blocks` all of them."""

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
        self.decoder_pred = nn.Linear(config.decoder_dim, 3 * config.patch_size**2)
        self.register_buffer("pixel_mean", torch.tensor(PIXEL_MEAN).view(3, 1, 1), persistent=False)
        self.register_buffer("pixel_std", torch.tensor(PIXEL_STD).view(3, 1, 1), persistent=False)

    def forward(
        self,
        images: UInt8[Tensor, "B 3 S S"],
        input_sizes: Int64[Tensor, "B 2"],
        uniforms: Float[Tensor, "B P"],
    ) -> MAEOutput:
        """Returns a guess of all patches from those with the lowest `uniforms`, the same number in every image.

        A patch wholly in padding is seen only where an image has fewer others than are seen, and is never scored: of a padded image a smaller
        share is hidden. Raises a Fault at another side or another number of patches.
        """
        config = self.config
        if images.shape[-1] != config.image_size:
            side = images.shape[-1]
            raise GigamaskError(
                f"images have side {side}, the model takes {config.image_size}; build it with input_side={side}"
            )
        if uniforms.shape[1] != config.patches:
            raise GigamaskError(
                f"samples carry numbers for {uniforms.shape[1]} patches, the model has {config.patches}; set Chance.patches to that"
            )
        pixels, padding = (
            preprocess(images, input_sizes, self.pixel_mean, self.pixel_std),
            self._padding(input_sizes),
        )
        visible = torch.sort(uniforms + padding, dim=1, stable=True).indices[:, : config.visible]
        hidden = torch.ones_like(padding).scatter(1, visible, False)
        return MAEOutput(
            self.decode(self.encode(pixels, visible), visible), pixels, hidden & ~padding
        )

    def encode(
        self, pixels: Float[Tensor, "B 3 S S"], visible: Int64[Tensor, "B V"]
    ) -> Float[Tensor, "B V1 C"]:
        """Returns the class token and the tokens of the patches `visible`, encoded."""
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
        """Returns the guess of every patch; a hidden one is asked for by the mask token at its position."""
        narrow = self.decoder_embed(encoded)
        blank = self.mask_token.to(narrow.dtype).expand(len(narrow), self.config.patches, -1)
        patches = blank.scatter(
            1, visible[..., None].expand(-1, -1, narrow.shape[2]), narrow[:, 1:]
        )
        x = torch.cat([narrow[:, :1], patches], 1) + self.decoder_pos_embed
        for block in self.decoder_blocks:
            x = block(x)
        return self.decoder_pred(self.decoder_norm(x))[:, 1:]

    def _padding(self, input_sizes: Int64[Tensor, "B 2"]) -> Bool[Tensor, "B P"]:
        """Tells which patches lie wholly in padding."""
        corner = (
            torch.arange(self.config.embedding_size, device=input_sizes.device)
            * self.config.patch_size
        )
        rows, columns = corner < input_sizes[:, :1], corner < input_sizes[:, 1:]
        return ~(rows[:, :, None] & columns[:, None, :]).flatten(1)
