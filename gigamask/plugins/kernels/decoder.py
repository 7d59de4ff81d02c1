"""SAM's mask decoder with fused kernels: the transformer and the upscaling.

Within the layers, prompt tokens are computed as in `models.transformer`, from the same joined
weights. Projections of the image tokens are taken to the side of the prompt tokens, of which there
are few; `token_attention` and `image_attention` say how.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, cast

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor, nn

from gigamask.distributed.precision import HALF_DTYPES, Precision
from gigamask.errors import GigamaskError
from gigamask.models.layers import LayerNorm2d, layer_norm, planless_attention, working_dtype
from gigamask.models.mask_decoder import MaskDecoder, upscaling_weights
from gigamask.models.shared_tensors import affine, linear, shared
from gigamask.models.transformer import (
    AttentionMask,
    DecoderAttention,
    DensePrompt,
    JoinedWeights,
    TwoWayAttentionBlock,
    TwoWayTransformer,
)
from gigamask.plugins.kernels.image_attention import ImageAttention
from gigamask.plugins.kernels.image_source import ImageSource, Rows
from gigamask.plugins.kernels.token_attention import TokenAttention
from gigamask.plugins.kernels.upscaling import MAX_MASKS, Upscaling

FLAG = "--kernels triton"
Tokens = Float[Tensor, "M N C"]


def fused_methods(
    model: nn.Module, precision: Precision
) -> list[tuple[nn.Module, str, Callable[..., Any]]]:
    """Return the methods to replace: each module, the method's name, and the method with kernels.

    Args:
        model: The model.
        precision: Precision of the model.

    Raises:
        GigamaskError: The model has another decoder than SAM's, or the device or precision is not
            one of the kernels'.
    """
    decoder: Any = getattr(model, "mask_decoder", None)
    if getattr(type(decoder), "upscaled", None) is not MaskDecoder.upscaled:
        raise GigamaskError(
            f"{FLAG} is for SAM's mask decoder (got {type(decoder).__name__}); leave the flag out"
        )
    activations = [decoder.output_upscaling[index] for index in (2, 4)]
    if any(type(each) is not nn.GELU or each.approximate != "none" for each in activations):
        raise GigamaskError(
            f"{FLAG} computes GELU in the upscaling (got {type(activations[0]).__name__}); leave "
            "the flag out"
        )
    weight = decoder.iou_token.weight
    if weight.device.type == "cuda" and precision not in HALF_DTYPES:
        raise GigamaskError(
            f"{FLAG} is for half precision on a GPU (got --precision {precision}); use bf16"
        )
    transformer = decoder.transformer
    return [
        (decoder, "upscaled", partial(upscaled, decoder)),
        (transformer, "attend", partial(attend, transformer)),
    ]


def upscaled(
    decoder: MaskDecoder,
    image: Float[Tensor, "M T C"],
    heads: Float[Tensor, "M c K"],
    positions: Float[Tensor, "H W C"],
    finer: Any = None,
) -> Float[Tensor, "M K h w"]:
    """Return what `MaskDecoder.upscaled` does.

    Args:
        decoder: The decoder; it computes without kernels if there are finer features or more than
            four masks.
        image: Image tokens.
        heads: Outputs of the hypernetworks.
        positions: Position encoding of the image tokens.
        finer: SAM 2's finer features.
    """
    if finer is not None or heads.shape[-1] > MAX_MASKS:
        return MaskDecoder.upscaled(decoder, image, heads, positions, finer)
    layers = decoder.output_upscaling
    norm, kind = cast(LayerNorm2d, layers[1]), image.dtype
    weights = []
    for index in (0, 3):
        weight, _ = upscaling_weights(layers, index)
        weights.append((weight.to(kind), cast(Tensor, layers[index].bias).to(kind)))
    (w1, b1), (w2, b2) = weights
    gain, shift = norm.weight.to(kind), norm.bias.to(kind)
    width = positions.shape[1]
    weights = w1, b1, gain, shift, w2, b2, heads.to(kind)
    return Upscaling.apply(width, norm.eps, image, *weights)


def attend(
    transformer: TwoWayTransformer,
    images: Float[Tensor, "B T C"],
    positions: Float[Tensor, "T C"],
    tokens: Tokens,
    mask_image: Int64[Tensor, "M"],
    dense: DensePrompt,
    attention_mask: AttentionMask,
    same_images: bool = False,
) -> tuple[Tokens, Float[Tensor, "M T C"]]:
    """Return what `TwoWayTransformer.attend` does.

    Args:
        transformer: The transformer; it computes without kernels if positions are trained.
        images: Image tokens of B images.
        positions: Position encoding of the image tokens.
        tokens: Tokens of M prompts.
        mask_image: Index of each prompt's image.
        dense: What is added to the image tokens.
        attention_mask: Which tokens to attend to; None means all.
        same_images: Whether the images are the same in all rounds of a micro-batch.
    """
    if positions.requires_grad:
        return TwoWayTransformer.attend(
            transformer, images, positions, tokens, mask_image, dense, attention_mask, same_images
        )
    with planless_attention(images.device):
        first, second = transformer._blocks
        images = images.to(working_dtype(images))
        kind = images.dtype
        query_pe = tokens = tokens.to(working_dtype(tokens))
        joined = JoinedWeights(*shared(transformer, "joined", lambda: transformer._join(positions)))
        source = first_source(images, positions.to(kind), mask_image, dense)
        q, k, v = linear(transformer, tokens, (joined.tokens, joined.tokens_bias)).chunk(3, -1)
        attended = first.self_attn.attend(q, k, v, attention_mask)
        tokens, source = update_tokens(
            first, linear(first.self_attn.out_proj, attended), query_pe, source
        )
        dim = tokens.shape[-1]
        inner = first.cross_attn_image_to_token.internal_dim
        keys, queries, own_keys = linear(
            transformer, tokens + query_pe, (joined.queries, joined.queries_bias)
        ).split([inner, dim, dim], -1)
        values, own_values = linear(transformer, tokens, (joined.values, joined.values_bias)).split(
            [inner, dim], -1
        )
        source = update_image(first, keys, values, attention_mask, source)

        attended = second.self_attn.attend(queries, own_keys, own_values, attention_mask)
        tokens, source = update_tokens(
            second, tokens + linear(second.self_attn.out_proj, attended), query_pe, source
        )
        keys, queries = linear(
            transformer, tokens + query_pe, (joined.last, joined.last_bias)
        ).chunk(2, -1)
        values = linear(second.cross_attn_image_to_token.v_proj, tokens)
        source = update_image(second, keys, values, attention_mask, source)

        last = transformer.final_attn_token_to_image
        out, source = attend_to_image(last, queries, source)
        tokens = layer_norm(tokens + linear(last.out_proj, out), transformer.norm_final_attn)
        return tokens, source.x


def first_source(
    images: Float[Tensor, "B T C"],
    positions: Float[Tensor, "T C"],
    mask_image: Int64[Tensor, "M"],
    dense: DensePrompt,
) -> ImageSource:
    """Return the image tokens of masks before the first block.

    Args:
        images: Image tokens of B images.
        positions: Their position encoding.
        mask_image: Index of each mask's image.
        dense: What is added to the image tokens.
    """
    kind, features, weight = images.dtype, dense.features, dense.weight
    x = images + dense.bias.to(kind)
    index = None if len(images) == 1 else mask_image
    if features is None or weight is None:
        return ImageSource(x, positions, index, shared=True)
    return ImageSource(x, positions, index, features.to(kind), weight.to(kind), True)


def update_tokens(
    block: TwoWayAttentionBlock, attended: Tokens, query_pe: Tokens, source: ImageSource
) -> tuple[Tokens, ImageSource]:
    """Return the tokens after attention to the image and the MLP, and the image tokens.

    Args:
        block: The block.
        attended: Tokens of M prompts after self-attention, not normalized.
        query_pe: Initial tokens, which are added to the queries.
        source: The image tokens.
    """
    across, tokens = block.cross_attn_token_to_image, layer_norm(attended, block.norm1)
    out, source = attend_to_image(across, linear(across.q_proj, tokens + query_pe), source)
    tokens = layer_norm(tokens + linear(across.out_proj, out), block.norm2)
    return layer_norm(tokens + block.mlp(tokens), block.norm3), source


def by_head(x: Float[Tensor, "M N I"], heads: int) -> Float[Tensor, "H R d"]:
    """Return the rows of each head, of all masks.

    Args:
        x: Queries, keys or values of all heads.
        heads: Number of heads.
    """
    return x.unflatten(-1, (heads, -1)).permute(2, 0, 1, 3).flatten(1, 2)


def attend_to_image(
    across: DecoderAttention, queries: Float[Tensor, "M N I"], source: ImageSource
) -> tuple[Float[Tensor, "M N I"], ImageSource]:
    """Return attended values before the output projection, and the image tokens.

    Args:
        across: The attention.
        queries: Projected queries.
        source: The image tokens.
    """
    kind, heads, (masks, tokens) = source.x.dtype, across.num_heads, queries.shape[:2]
    (key, key_bias), (value, bias) = (affine(each) for each in (across.k_proj, across.v_proj))
    key, value = (each.to(kind).unflatten(0, (heads, -1)) for each in (key, value))
    rows = (by_head(queries.to(kind), heads) @ key).unflatten(1, (masks, tokens))
    scale = key.shape[1] ** -0.5
    found, x = TokenAttention.apply(rows, key_bias, scale, source.shared, *source[:5])
    attended = found.flatten(1, 2) @ value.transpose(1, 2)
    out = attended.unflatten(1, (masks, tokens)).permute(1, 2, 0, 3).flatten(2) + bias.to(kind)
    return out, source if source.shared else source._replace(x=x)


def update_image(
    block: TwoWayAttentionBlock,
    keys: Float[Tensor, "M N I"],
    values: Float[Tensor, "M N I"],
    attention_mask: Bool[Tensor, "M N"] | None,
    source: ImageSource,
) -> ImageSource:
    """Return the image tokens after their attention to the tokens.

    Args:
        block: The block.
        keys: Keys of the tokens.
        values: Values of the tokens.
        attention_mask: Which tokens to attend to; None means all.
        source: The image tokens before it.
    """
    across, kind = block.cross_attn_image_to_token, source.x.dtype
    heads, (masks, tokens) = across.num_heads, keys.shape[:2]
    (query, query_bias), (out, out_bias) = (
        affine(each) for each in (across.q_proj, across.out_proj)
    )
    query = query.to(kind).unflatten(0, (heads, -1))
    own = by_head(keys.to(kind), heads)
    bias = own @ query_bias.to(kind).view(heads, -1, 1)
    bias = bias.float().view(heads, masks, tokens)
    if attention_mask is not None:
        bias = bias.masked_fill(~attention_mask, -torch.inf)
    projected: list[Rows] = [
        each.unflatten(1, (masks, tokens))
        for each in (
            own @ query,
            by_head(values.to(kind), heads)
            @ out.to(kind).unflatten(1, (heads, -1)).permute(1, 2, 0),
        )
    ]
    norm, scale = block.norm4, query.shape[1] ** -0.5
    weights = (each.to(kind) for each in (out_bias, norm.weight, norm.bias))
    options = scale, norm.eps, source.shared
    x = ImageAttention.apply(*options, *projected, bias, *weights, *source[:5])
    return ImageSource(x, source.positions)
