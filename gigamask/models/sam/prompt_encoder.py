"""SAM's prompt encoder: points, box corners and mask logits become embeddings.

After `modeling/prompt_encoder.py` of Segment Anything: coordinates are moved to pixel centers
(+ 0.5), divided by the side of the model input on both axes, and encoded by a fixed Gaussian
matrix. Embeddings are selected by arithmetic and not by index, so nothing waits for the device and
every embedding takes part in every step.
"""

import math
from collections.abc import Iterable
from typing import cast

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int64
from torch import Tensor, nn

from gigamask.models.configs import SamConfig
from gigamask.models.sam.layers import LayerNorm2d, layer_norm, no_autocast


class PositionEmbeddingRandom(nn.Module):
    """Encode positions by sines and cosines of random projections (Tancik et al. 2020).

    The Gaussian matrix is drawn once and saved with the weights.
    """

    positional_encoding_gaussian_matrix: Tensor

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.register_buffer("positional_encoding_gaussian_matrix", torch.empty(2, dim // 2))

    def forward(self, xy: Float[Tensor, "... 2"]) -> Float[Tensor, "... C"]:
        """Return the encoding of positions in [0, 1].

        It is computed in at least float32, since half precision cannot separate neighboring pixels.
        """
        matrix = self.positional_encoding_gaussian_matrix
        wide = torch.promote_types(matrix.dtype, torch.float32)
        with no_autocast(xy):
            angles = 2 * math.pi * ((2 * xy.to(wide) - 1) @ matrix.to(wide))
        return torch.cat([angles.sin(), angles.cos()], -1).to(matrix.dtype)


class PromptEncoder(nn.Module):
    """SAM's prompt encoder; a box is given as two corner points."""

    def __init__(self, config: SamConfig) -> None:
        super().__init__()
        self.image_size, self.embedding_size = config.image_size, config.embedding_size
        self.pe_layer = PositionEmbeddingRandom(config.embedding_dim)
        self.point_embeddings = nn.ModuleList(
            nn.Embedding(1, config.embedding_dim) for _ in range(4)
        )
        self.not_a_point_embed = nn.Embedding(1, config.embedding_dim)
        self.no_mask_embed = nn.Embedding(1, config.embedding_dim)
        self.mask_downscaling = nn.Sequential(
            nn.Conv2d(1, 4, 2, stride=2),
            LayerNorm2d(4),
            nn.GELU(),
            nn.Conv2d(4, 16, 2, stride=2),
            LayerNorm2d(16),
            nn.GELU(),
            nn.Conv2d(16, config.embedding_dim, 1),
        )

    def points(
        self, points_xy_input: Float[Tensor, "M N 2"], labels: Int64[Tensor, "M N"]
    ) -> Float[Tensor, "M N C"]:
        """Return a token for each point.

        Args:
            points_xy_input: Points, xy in input pixels.
            labels: 1 foreground, 0 background, 2 and 3 the corners of a box, -1 no point, which has
                its own token without a position.
        """
        code = self.pe_layer((points_xy_input + 0.5) / self.image_size)
        kinds = torch.cat(
            [
                kind.weight
                for kind in (
                    self.not_a_point_embed,
                    *cast(Iterable[nn.Embedding], self.point_embeddings),
                )
            ]
        )
        chosen = (labels[..., None] == torch.arange(-1, 4, device=labels.device)).to(kinds.dtype)
        with no_autocast(labels):
            return torch.where((labels >= 0)[..., None], code, 0) + chosen @ kinds

    def get_dense_pe(self) -> Float[Tensor, "E E C"]:
        """Return the encoding of the center of each token of the image embedding."""
        centers = (
            torch.arange(self.embedding_size, device=self.no_mask_embed.weight.device) + 0.5
        ) / self.embedding_size
        return self.pe_layer(
            torch.stack(
                [centers.expand(len(centers), -1), centers[:, None].expand(-1, len(centers))], -1
            )
        )

    def mask_features(self, masks: Float[Tensor, "M G G"]) -> Float[Tensor, "M T c"]:
        """Return the 16 channels of T = E x E tokens before the last layer of `mask_downscaling`.

        The last layer, a 1 x 1 convolution, is part of the mask decoder's projections. The other
        convolutions do not overlap, so they are matrix products over 2 x 2 cells.
        """
        first, second = (cast(nn.Conv2d, self.mask_downscaling[index]) for index in (0, 3))
        norm, last_norm = (cast(LayerNorm2d, self.mask_downscaling[index]) for index in (1, 4))
        side = self.embedding_size
        cells = (
            masks.to(first.weight.dtype)
            .view(-1, side, 2, 2, side, 2, 2)
            .permute(0, 1, 4, 2, 5, 3, 6)
            .reshape(-1, side * side, 4, 4)
        )
        half = F.linear(cells, first.weight.flatten(1), first.bias)
        half = F.gelu(layer_norm(half, norm))
        weight = second.weight.permute(0, 2, 3, 1).flatten(1)
        quarter = F.linear(half.flatten(2), weight, second.bias)
        return F.gelu(layer_norm(quarter, last_norm))

    def mask_projection(self) -> tuple[Float[Tensor, "C c"], Float[Tensor, "C"]]:
        """Return the weight and bias that turn `mask_features` into the dense embedding."""
        last = cast(nn.Conv2d, self.mask_downscaling[6])
        return last.weight.flatten(1), cast(Tensor, last.bias)

    def mixed_features(
        self, masks: Float[Tensor, "M G G"], has_mask_prompt: Bool[Tensor, "M"]
    ) -> tuple[Float[Tensor, "M T c"], Float[Tensor, "C c"], Float[Tensor, "C"]]:
        """Return dense embeddings, some of them of mask prompts and the others `no_mask_embed`.

        Two additional channels select the bias of the masks' projection or `no_mask_embed`; the
        other 16 are zero without a mask prompt.

        Args:
            masks: Logits of mask prompts, ignored where there is none.
            has_mask_prompt: Which masks have a mask prompt.

        Returns:
            Features, and the weight and bias that turn them into dense embeddings.
        """
        given = has_mask_prompt[:, None, None]
        features = torch.where(given, self.mask_features(torch.where(given, masks, 0)), 0)
        kinds = torch.cat([given, ~given], -1).to(features.dtype).expand(-1, features.shape[1], -1)
        weight, bias = self.mask_projection()
        columns = torch.cat([weight, bias[:, None], self.no_mask_embed.weight.T], 1)
        return torch.cat([features, kinds], -1), columns, torch.zeros_like(bias)
