"""The decoder's transformer: prompt tokens and image tokens attend to each other, twice (Segment Anything, `modeling/transformer.py`).

Enters: image embeddings, the code of their positions, each mask's tokens, which image each mask belongs to, and the features of its mask prompt.
Leaves: the tokens and each mask's image tokens. The numbers are SAM's; the order of work is not. Until the first block has updated them, the image
tokens' projections are the image's, plus a linear function of sixteen channels for a mask prompt: computed once an image and gathered. Later, all
projections of the image tokens are one matrix product with the positions' share added, so that one tensor, not three, is kept for backward. Under
autocast the image tokens stay in half precision between the blocks.

Not here: what comes before and after (`model.prompt_encoder`, `model.mask_decoder`); attention with relative position (`model.attention`).
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import cast

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int64
from torch import Tensor, nn

from gigamask.models.configs import SamConfig
from gigamask.models.sam.layers import MLPBlock, layer_norm, no_autocast, working_dtype

Attended = Bool[Tensor, "M N"] | None
"""Which keys are attended to; None where all are."""


@dataclass(frozen=True)
class DensePrompt:
    """Each mask prompt's features, and the projection that makes a dense embedding of them."""

    features: Float[Tensor, "M T c"]
    weight: Float[Tensor, "C c"]
    bias: Float[Tensor, "C"]


class DecoderAttention(nn.Module):
    """Multi-head attention whose inner width may be less than its outer."""

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
        attended: Attended,
    ) -> Float[Tensor, "M Q C"]:
        return self.out_proj(self.mix(self.q_proj(q), self.k_proj(k), self.v_proj(v), attended))

    def mix(
        self,
        q: Float[Tensor, "M Q I"],
        k: Float[Tensor, "M N I"],
        v: Float[Tensor, "M N I"],
        attended: Attended = None,
    ) -> Float[Tensor, "M Q I"]:
        """Returns the attended values of inputs that are projected already."""
        q, k, v = (x.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for x in (q, k, v))
        mask = None if attended is None else attended[:, None, None]
        return F.scaled_dot_product_attention(q, k, v, mask).transpose(1, 2).flatten(2)


class TwoWayAttentionBlock(nn.Module):
    """One block: tokens among themselves, tokens to image, MLP, image to tokens."""

    def __init__(self, config: SamConfig) -> None:
        super().__init__()
        dim, heads = config.embedding_dim, config.decoder_num_heads
        self.self_attn = DecoderAttention(dim, dim, heads)
        self.norm1 = nn.LayerNorm(dim)
        self.cross_attn_token_to_image = DecoderAttention(dim, dim // 2, heads)
        self.norm2 = nn.LayerNorm(dim)
        self.mlp = MLPBlock(dim, config.decoder_mlp, nn.ReLU)
        self.norm3 = nn.LayerNorm(dim)
        self.norm4 = nn.LayerNorm(dim)
        self.cross_attn_image_to_token = DecoderAttention(dim, dim // 2, heads)

    def image_weights(
        self, positions: Float[Tensor, "T C"]
    ) -> tuple[Float[Tensor, "D C"], Float[Tensor, "T D"]]:
        """Returns what makes the image's keys, values and queries, side by side: one weight, and the biases with the positions' share."""
        to_image, to_token = self.cross_attn_token_to_image, self.cross_attn_image_to_token
        return _joined(
            (to_image.k_proj, True),
            (to_image.v_proj, False),
            (to_token.q_proj, True),
            positions=positions,
        )

    def update_tokens(
        self,
        tokens: Float[Tensor, "M N C"],
        code: Float[Tensor, "M N C"] | None,
        image: Float[Tensor, "M T D"],
        attended: Attended,
    ) -> Float[Tensor, "M N C"]:
        """Returns the tokens after attending to themselves and to the image. `code` is added to queries and keys; None in the first block,
        whose tokens are their own code, and whose self-attention has no residual."""
        if code is None:
            code = tokens
            tokens = self.norm1(self.self_attn(tokens, tokens, tokens, attended))
        else:
            coded = tokens + code
            tokens = self.norm1(tokens + self.self_attn(coded, coded, tokens, attended))
        across = self.cross_attn_token_to_image
        keys, values, _ = image.chunk(3, -1)
        tokens = self.norm2(
            tokens
            + across.out_proj(across.mix(across.q_proj(tokens + code).to(keys.dtype), keys, values))
        )
        return self.norm3(tokens + self.mlp(tokens))

    def update_image(
        self,
        tokens: Float[Tensor, "M N C"],
        code: Float[Tensor, "M N C"],
        image: Float[Tensor, "M T D"],
        attended: Attended,
    ) -> Float[Tensor, "M T C"]:
        """Returns what the image tokens gain by attending to the prompt's, before it is added and normalised."""
        across = self.cross_attn_image_to_token
        queries = image.chunk(3, -1)[2]
        keys, values = (
            across.k_proj(tokens + code).to(queries.dtype),
            across.v_proj(tokens).to(queries.dtype),
        )
        return across.out_proj(across.mix(queries, keys, values, attended))


class TwoWayTransformer(nn.Module):
    """Two blocks, then the tokens look at the image once more."""

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
        attended: Attended,
    ) -> tuple[Float[Tensor, "M N C"], Float[Tensor, "M T C"]]:
        first, second = cast(Iterable[TwoWayAttentionBlock], self.layers)
        code, dtype = tokens, working_dtype(images)
        image = _first_projections(images, first.image_weights(positions), mask_image, dense)
        tokens = first.update_tokens(tokens, None, image, attended)
        gained = first.update_image(tokens, code, image, attended)
        keys = layer_norm(_add_image(gained, images.to(dtype), mask_image, dense), first.norm4)

        image = _project(keys, second.image_weights(positions))
        tokens = second.update_tokens(tokens, code, image, attended)
        keys = layer_norm(second.update_image(tokens, code, image, attended) + keys, second.norm4)

        last = self.final_attn_token_to_image
        image = _project(
            keys, _joined((last.k_proj, True), (last.v_proj, False), positions=positions)
        )
        answer = last.mix(last.q_proj(tokens + code).to(image.dtype), *image.chunk(2, -1))
        return self.norm_final_attn(tokens + last.out_proj(answer)), keys


def gather(
    images: Float[Tensor, "B ..."], mask_image: Int64[Tensor, "M"]
) -> Float[Tensor, "M ..."]:
    """Returns each mask's image: a view where there is one image only, else a copy whose gradient is summed in a fixed order."""
    return (
        images.expand(len(mask_image), *images.shape[1:])
        if len(images) == 1
        else _Gather.apply(images, mask_image)
    )


class _Gather(torch.autograd.Function):
    """Picks rows by index; backward adds up by a matrix product, which is deterministic and accumulates halves in float32, as index_add does not."""

    @staticmethod
    def forward(ctx, images, mask_image):
        ctx.save_for_backward(mask_image)
        ctx.count = len(images)
        return images.index_select(0, mask_image)

    @staticmethod
    def backward(ctx, *gradients):
        (mask_image,), (gradient,) = ctx.saved_tensors, gradients
        chosen = (mask_image == torch.arange(ctx.count, device=mask_image.device)[:, None]).to(
            gradient.dtype
        )
        with no_autocast(gradient):
            return (chosen @ gradient.flatten(1)).view(ctx.count, *gradient.shape[1:]), None


def _joined(
    *layers: tuple[nn.Linear, bool], positions: Float[Tensor, "T C"]
) -> tuple[Float[Tensor, "D C"], Float[Tensor, "T D"]]:
    """Returns several projections as one weight and one offset; a layer marked True also projects the positions."""
    offsets = [
        F.linear(positions, layer.weight, layer.bias)
        if coded
        else layer.bias.expand(len(positions), -1)
        for layer, coded in layers
    ]
    dtype = offsets[0].dtype
    return torch.cat([layer.weight for layer, _ in layers]), torch.cat(
        [offset.to(dtype) for offset in offsets], -1
    )


def _project(
    keys: Float[Tensor, "M T C"], weights: tuple[Float[Tensor, "D C"], Float[Tensor, "T D"]]
) -> Float[Tensor, "M T D"]:
    weight, offset = weights
    return F.linear(keys, weight).add_(offset)


def _first_projections(
    images: Float[Tensor, "B T C"],
    weights: tuple[Float[Tensor, "D C"], Float[Tensor, "T D"]],
    mask_image: Int64[Tensor, "M"],
    dense: DensePrompt | None,
) -> Float[Tensor, "M T D"]:
    """Returns each mask's keys, values and queries of the untouched image tokens."""
    weight, offset = weights
    if dense is None:
        return gather(_project(images, weights), mask_image)
    with no_autocast(images):
        folded, shift = weight @ dense.weight, weight @ dense.bias
    base = _project(images, (weight, offset + shift.to(offset.dtype)))
    return F.linear(dense.features, folded).add_(gather(base, mask_image))


def _add_image(
    gained: Float[Tensor, "M T C"],
    images: Float[Tensor, "B T C"],
    mask_image: Int64[Tensor, "M"],
    dense: DensePrompt | None,
) -> Float[Tensor, "M T C"]:
    """Returns what was gained plus the image tokens and the dense prompt."""
    total = gained + gather(images, mask_image)
    return (
        total if dense is None else total.add_(F.linear(dense.features, dense.weight, dense.bias))
    )
