"""The mask decoder's transformer: prompt tokens and image tokens attend to each other, twice.

Equivalent to `modeling/transformer.py` of Segment Anything, computed in another order. The first
block projects the image tokens once per image and gathers the results; a mask prompt adds a linear
function of its 16 channels. Later, one matrix product computes all projections of the image tokens,
including those of the positions, so that one tensor instead of three is kept for the backward pass.
Under autocast the image tokens stay in half precision between the blocks.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import cast

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int64
from torch import Tensor, nn

from gigamask.models.configs import SamConfig
from gigamask.models.sam.layers import (
    MLPBlock,
    TokenNorm,
    layer_norm,
    no_autocast,
    planless_attention,
    working_dtype,
)

AttentionMask = Bool[Tensor, "M N"] | None
"""Which keys to attend to; None means all."""


@dataclass(frozen=True)
class DensePrompt:
    """Features of mask prompts, and the projection that turns them into dense embeddings."""

    features: Float[Tensor, "M T c"]
    weight: Float[Tensor, "C c"]
    bias: Float[Tensor, "C"]


class DecoderAttention(nn.Module):
    """Multi-head attention whose inner width may be smaller than its outer width."""

    def __init__(self, dim: int, inner: int, heads: int) -> None:
        super().__init__()
        self.num_heads = heads
        self.q_proj = nn.Linear(dim, inner)
        self.k_proj = nn.Linear(dim, inner)
        self.v_proj = nn.Linear(dim, inner)
        self.out_proj = nn.Linear(inner, dim)

    def forward(
        self,
        q: Float[Tensor, "M Q C"],
        k: Float[Tensor, "M N C"],
        v: Float[Tensor, "M N C"],
        attention_mask: AttentionMask,
    ) -> Float[Tensor, "M Q C"]:
        """Return attended values.

        Args:
            q: Queries.
            k: Keys.
            v: Values.
            attention_mask: Which keys to attend to; None means all.
        """
        own, dtype = (q, k, v), working_dtype(q)
        q = q.to(dtype)  # once for all projections of a tensor
        k = q if k is own[0] else k.to(dtype)
        v = q if v is own[0] else v.to(dtype)
        return self.out_proj(
            self.attend(self.q_proj(q), self.k_proj(k), self.v_proj(v), attention_mask)
        )

    def attend(
        self,
        q: Float[Tensor, "M Q I"],
        k: Float[Tensor, "M N I"],
        v: Float[Tensor, "M N I"],
        attention_mask: AttentionMask = None,
    ) -> Float[Tensor, "M Q I"]:
        """Return attended values of projected inputs, without the output projection.

        Args:
            q: Projected queries.
            k: Projected keys.
            v: Projected values.
            attention_mask: Which keys to attend to; None means all.
        """
        q, k, v = (x.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for x in (q, k, v))
        mask = None if attention_mask is None else attention_mask[:, None, None]
        return F.scaled_dot_product_attention(q, k, v, mask).transpose(1, 2).flatten(2)


class TwoWayAttentionBlock(nn.Module):
    """Block of token self-attention, token-to-image attention, MLP and image-to-token attention."""

    def __init__(self, config: SamConfig) -> None:
        super().__init__()
        dim, heads = config.embedding_dim, config.decoder_num_heads
        self.self_attn = DecoderAttention(dim, dim, heads)
        self.norm1 = nn.LayerNorm(dim)
        self.cross_attn_token_to_image = DecoderAttention(dim, dim // 2, heads)
        self.norm2 = nn.LayerNorm(dim)
        self.mlp = MLPBlock(dim, config.decoder_mlp, nn.ReLU)
        self.norm3 = nn.LayerNorm(dim)
        self.norm4 = TokenNorm(dim)
        self.cross_attn_image_to_token = DecoderAttention(dim, dim // 2, heads)

    def image_weights(
        self, positions: Float[Tensor, "T C"]
    ) -> tuple[Float[Tensor, "D C"], Float[Tensor, "T D"]]:
        """Return one weight and bias for the image's keys, values and queries, including
        positions."""
        to_image, to_token = self.cross_attn_token_to_image, self.cross_attn_image_to_token
        return _join_projections(
            (to_image.k_proj, True),
            (to_image.v_proj, False),
            (to_token.q_proj, True),
            positions=positions,
        )

    def update_tokens(
        self,
        tokens: Float[Tensor, "M N C"],
        query_pe: Float[Tensor, "M N C"] | None,
        keys: Float[Tensor, "M T I"],
        values: Float[Tensor, "M T I"],
        attention_mask: AttentionMask,
    ) -> Float[Tensor, "M N C"]:
        """Return the tokens after self-attention, attention to the image, and the MLP.

        Args:
            tokens: Tokens of M prompts.
            query_pe: Initial tokens, which are added to queries and keys; None in the first block,
                where they are `tokens` and self-attention has no residual connection.
            keys: Keys of the image tokens.
            values: Values of the image tokens.
            attention_mask: Which tokens to attend to; None means all.
        """
        if query_pe is None:
            query_pe = tokens
            tokens = self.norm1(self.self_attn(tokens, tokens, tokens, attention_mask))
        else:
            queries = tokens + query_pe
            tokens = self.norm1(tokens + self.self_attn(queries, queries, tokens, attention_mask))
        across = self.cross_attn_token_to_image
        tokens = self.norm2(
            tokens
            + across.out_proj(
                across.attend(across.q_proj(tokens + query_pe).to(keys.dtype), keys, values)
            )
        )
        return self.norm3(tokens + self.mlp(tokens))

    def update_image(
        self,
        tokens: Float[Tensor, "M N C"],
        query_pe: Float[Tensor, "M N C"],
        queries: Float[Tensor, "M T I"],
        attention_mask: AttentionMask,
    ) -> Float[Tensor, "M T C"]:
        """Return the update of the image tokens, before it is added and normalized.

        Args:
            tokens: Tokens of M prompts.
            query_pe: Initial tokens, which are added to the keys.
            queries: Queries of the image tokens.
            attention_mask: Which tokens to attend to; None means all.
        """
        across = self.cross_attn_image_to_token
        keys, values = (
            across.k_proj(tokens + query_pe).to(queries.dtype),
            across.v_proj(tokens).to(queries.dtype),
        )
        return across.out_proj(across.attend(queries, keys, values, attention_mask))


class TwoWayTransformer(nn.Module):
    """Two attention blocks, then a final token-to-image attention."""

    def __init__(self, config: SamConfig) -> None:
        super().__init__()
        self.layers = nn.ModuleList(TwoWayAttentionBlock(config) for _ in range(2))
        self.final_attn_token_to_image = DecoderAttention(
            config.embedding_dim, config.embedding_dim // 2, config.decoder_num_heads
        )
        self.norm_final_attn = nn.LayerNorm(config.embedding_dim)

    def forward(
        self,
        images: Float[Tensor, "B T C"],
        positions: Float[Tensor, "T C"],
        tokens: Float[Tensor, "M N C"],
        mask_image: Int64[Tensor, "M"],
        dense: DensePrompt | None,
        attention_mask: AttentionMask,
    ) -> tuple[Float[Tensor, "M N C"], Float[Tensor, "M T C"]]:
        """Return the tokens and the image tokens of each prompt.

        Args:
            images: Image tokens of B images, T = E x E.
            positions: Position encoding of the image tokens.
            tokens: Tokens of M prompts.
            mask_image: Index of each prompt's image.
            dense: Mask prompts; None if there are none.
            attention_mask: Which tokens to attend to; None means all.
        """
        with planless_attention(images.device):
            first, second = cast(Iterable[TwoWayAttentionBlock], self.layers)
            query_pe, dtype = tokens, working_dtype(images)
            positions = positions.to(working_dtype(positions))
            image = _first_projections(images, first.image_weights(positions), mask_image, dense)
            image_keys, image_values, queries = image.chunk(3, -1)
            tokens = first.update_tokens(tokens, None, image_keys, image_values, attention_mask)
            update = first.update_image(tokens, query_pe, queries, attention_mask)
            keys = layer_norm(_add_image(update, images.to(dtype), mask_image, dense), first.norm4)

            image = _project(keys, second.image_weights(positions))
            image_keys, image_values, queries = image.chunk(3, -1)
            tokens = second.update_tokens(
                tokens, query_pe, image_keys, image_values, attention_mask
            )
            keys = layer_norm(
                second.update_image(tokens, query_pe, queries, attention_mask) + keys, second.norm4
            )

            last = self.final_attn_token_to_image
            image = _project(
                keys,
                _join_projections((last.k_proj, True), (last.v_proj, False), positions=positions),
            )
            out = last.attend(last.q_proj(tokens + query_pe).to(image.dtype), *image.chunk(2, -1))
            return self.norm_final_attn(tokens + last.out_proj(out)), keys


def gather(
    images: Float[Tensor, "B ..."], mask_image: Int64[Tensor, "M"]
) -> Float[Tensor, "M ..."]:
    """Return the image of each prompt.

    For one image this is a view; otherwise a copy whose gradient is summed in a fixed order.

    Args:
        images: Tensors of B images.
        mask_image: Index of each prompt's image.
    """
    return (
        images.expand(mask_image.shape[0], *images.shape[1:])
        if len(images) == 1
        else _Gather.apply(images, mask_image)
    )


class _Gather(torch.autograd.Function):
    """Index select whose backward is a matrix product.

    Unlike index_add, this is deterministic and accumulates half precision in float32.
    """

    @staticmethod
    def forward(ctx, images, mask_image):
        ctx.save_for_backward(mask_image)
        ctx.count = len(images)
        return images.index_select(0, mask_image)

    @staticmethod
    def backward(ctx, *gradients):
        (mask_image,), (gradient,) = ctx.saved_tensors, gradients
        one_hot = (mask_image == torch.arange(ctx.count, device=mask_image.device)[:, None]).to(
            gradient.dtype
        )
        with no_autocast(gradient):
            return (one_hot @ gradient.flatten(1)).view(ctx.count, *gradient.shape[1:]), None


def _join_projections(
    *layers: tuple[nn.Linear, bool], positions: Float[Tensor, "T C"]
) -> tuple[Float[Tensor, "D C"], Float[Tensor, "T D"]]:
    """Join projections into one weight and one bias; True also projects the positions."""
    biases = [
        F.linear(positions, layer.weight, layer.bias)
        if with_positions
        else layer.bias.expand(len(positions), -1)
        for layer, with_positions in layers
    ]
    dtype = biases[0].dtype
    return torch.cat([layer.weight for layer, _ in layers]), torch.cat(
        [bias.to(dtype) for bias in biases], -1
    )


def _project(
    keys: Float[Tensor, "M T C"], weights: tuple[Float[Tensor, "D C"], Float[Tensor, "T D"]]
) -> Float[Tensor, "M T D"]:
    weight, bias = weights
    return F.linear(keys, weight).add_(bias)


def _first_projections(
    images: Float[Tensor, "B T C"],
    weights: tuple[Float[Tensor, "D C"], Float[Tensor, "T D"]],
    mask_image: Int64[Tensor, "M"],
    dense: DensePrompt | None,
) -> Float[Tensor, "M T D"]:
    """Return keys, values and queries of the initial image tokens, for each prompt.

    The projections are computed once per image and gathered; a mask prompt adds a linear function
    of its 16 channels.
    """
    weight, bias = weights
    if dense is None:
        return gather(_project(images, weights), mask_image)
    with no_autocast(images):
        folded, shift = weight @ dense.weight, weight @ dense.bias
    base = _project(images, (weight, bias + shift.to(bias.dtype)))
    return F.linear(dense.features, folded).add_(gather(base, mask_image))


def _add_image(
    update: Float[Tensor, "M T C"],
    images: Float[Tensor, "B T C"],
    mask_image: Int64[Tensor, "M"],
    dense: DensePrompt | None,
) -> Float[Tensor, "M T C"]:
    """Return the update plus the image tokens and the mask prompt."""
    total = update + gather(images, mask_image)
    return (
        total if dense is None else total.add_(F.linear(dense.features, dense.weight, dense.bias))
    )
