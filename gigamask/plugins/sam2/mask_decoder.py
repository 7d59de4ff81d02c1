"""The mask decoder of SAM 2: SAM's, with an object score and features of the pyramid.

Follows `modeling/sam/mask_decoder.py` of SAM 2. The features of strides 4 and 8 travel as further
channels of the embedding: 4 tokens of the finer grid, or 16 of the finest, in each token.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int64
from torch import Tensor, nn

from gigamask.models.configs import SamConfig
from gigamask.models.layers import MLP, embedding
from gigamask.models.mask_decoder import (
    ALL_MASK_TOKENS,
    MaskDecoder,
    image_tokens,
)
from gigamask.models.prompt_encoder import PADDING_LABEL
from gigamask.models.shared_tensors import shared
from gigamask.models.transformer import DensePrompt
from gigamask.plugins.sam2.configs import Sam2Decoder
from gigamask.types import MaskDecoderOutput, Prompts


class Sam2MaskDecoder(MaskDecoder):
    """SAM's mask decoder with a token for the object score, and with high-resolution features."""

    options: Sam2Decoder

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.dim = self.transformer_dim
        dim = self.dim
        self.obj_score_token = embedding(1, dim)
        self.pred_obj_score_head = MLP(dim, dim, 1)
        self.conv_s0, self.conv_s1 = nn.Conv2d(dim, dim // 8, 1), nn.Conv2d(dim, dim // 4, 1)
        self.no_mem_embed = nn.Parameter(torch.empty(1, 1, dim))
        self.parameter_std = 0.02

    @classmethod
    def from_config(cls, config: SamConfig) -> "Sam2MaskDecoder":
        """Return the mask decoder of a configuration."""
        decoder = cast(Sam2MaskDecoder, super().from_config(config))
        decoder.options = cast(Sam2Decoder, config.decoder)
        return decoder

    def join(self, maps: Sequence[Float[Tensor, "B _ _ _"]]) -> Float[Tensor, "B D E E"]:
        """Return the embedding of images without memory, with the finer maps as channels.

        Args:
            maps: Maps of strides 4, 8 and 16.
        """
        finest, finer, coarse = maps
        coarse = coarse + self.no_mem_embed.view(1, -1, 1, 1)
        twice, four = self.conv_s1(finer), self.conv_s0(finest)
        return torch.cat([coarse, F.pixel_unshuffle(twice, 2), F.pixel_unshuffle(four, 4)], 1)

    def decode(
        self,
        images: Float[Tensor, "B D E E"],
        positions: Float[Tensor, "E E C"],
        prompts: Float[Tensor, "M N C"],
        mask_image: Int64[Tensor, "M"],
        dense: DensePrompt,
        mask_tokens: range,
        token_mask: Bool[Tensor, "M N"] | None = None,
    ) -> MaskDecoderOutput:
        """Return mask logits, predicted IoU, and the logit of the presence of an object.

        In evaluation, the first of the four masks is replaced by the best of the other three if it
        is not stable.

        Args:
            images: Embeddings of B images, as `join` returns them.
            positions: Position encoding of the image tokens.
            prompts: Tokens of M prompts.
            mask_image: Index of each prompt's image.
            dense: What is added to the image tokens.
            mask_tokens: Range of K of the four mask tokens to use.
            token_mask: Which prompt tokens to attend to; None means all.
        """
        coarse = images[:, : self.dim]
        flat, *_ = shared(self, "image tokens", lambda: (image_tokens(coarse),))
        tokens, image = self._attend(flat, positions, prompts, mask_image, dense, token_mask)
        finer = as_tokens(*high_res_maps(images[:, self.dim :]))
        needs_all = self.options.dynamic_multimask and not self.training and mask_tokens.start == 0
        heads, iou, classes = self._heads(
            tokens[:, 1:], ALL_MASK_TOKENS if needs_all else mask_tokens
        )
        parts = [self.upscaled(image, heads, positions, (*finer, mask_image)), iou.sigmoid()]
        parts += [] if classes is None else [classes]
        if needs_all:
            row = torch.arange(iou.shape[0], device=iou.device)
            index = self._stable(*parts[:2])
            parts = [
                torch.cat([part[row, index][:, None], part[:, 1 : mask_tokens.stop]], 1)
                for part in parts
            ]
        output = MaskDecoderOutput(*parts)
        return output._replace(object_score=self.pred_obj_score_head(tokens[:, 0])[:, 0])

    def _own_tokens(self) -> Float[Tensor, "N C"]:
        return torch.cat([self.obj_score_token.weight, super()._own_tokens()])

    def _stable(
        self, logits: Float[Tensor, "M 4 G G"], iou: Float[Tensor, "M 4"]
    ) -> Int64[Tensor, "M"]:
        """Return the index of the single mask if it is stable, else of the best of the others."""
        delta = self.options.stability_delta
        flat = logits[:, 0].flatten(1)
        inside, around = ((flat > offset).sum(1) for offset in (delta, -delta))
        stability = torch.where(around > 0, inside / around.clamp(min=1), 1.0)
        best = 1 + iou[:, 1:].argmax(1)
        return torch.where(stability >= self.options.stability_threshold, 0, best)


def with_padding_token(prompts: Prompts) -> Prompts:
    """Return prompts in which every mask with points or a box has one token without a point.

    SAM adds it to points only, SAM 2 to a box, too.

    Args:
        prompts: The prompts.
    """
    labels = prompts.labels
    count = labels.shape[1]
    if not count:
        return prompts
    present = prompts.token_mask
    given = torch.ones_like(labels, dtype=torch.bool) if present is None else present
    lacks: Bool[Tensor, "M"] = given.any(1) & ~((labels == PADDING_LABEL) & given).any(1)
    return replace(
        prompts,
        points_xy_input=F.pad(prompts.points_xy_input, (0, 0, 0, 1)),
        labels=F.pad(labels, (0, 1), value=PADDING_LABEL),
        token_mask=torch.cat([given, lacks[:, None]], 1),
    )


def high_res_maps(
    channels: Float[Tensor, "B D E E"],
) -> tuple[Float[Tensor, "B c E2 E2"], Float[Tensor, "B d E4 E4"]]:
    """Return the maps at two and four times the embedding's resolution.

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
