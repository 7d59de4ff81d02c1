"""SAM's mask decoder with fused kernels: the transformer and the upscaling.

Projections of the image tokens are taken to the side of the prompt tokens, of which there are few;
`token_attention` and `image_attention` say how. So two projections follow each other on that side,
and their weights are multiplied once for all rounds.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, cast

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
    TwoWayAttentionBlock,
    TwoWayTransformer,
)
from gigamask.plugins.kernels.image_attention import ImageAttention
from gigamask.plugins.kernels.image_source import ImageSource
from gigamask.plugins.kernels.token_attention import TokenAttention
from gigamask.plugins.kernels.upscaling import MAX_MASKS, Upscaling

FLAG = "--kernels triton"
Tokens = Float[Tensor, "M N C"]
Affine = tuple[Float[Tensor, "D C"], Float[Tensor, "D"]]


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


class TokenWeights(NamedTuple):
    """Weights and biases of projections of the tokens; those of the second block begin with next.

    Attributes:
        own: Queries, keys and values of the first block's tokens.
        rows: Of tokens with position: to the queries of all heads for the image tokens.
        out: From attended image tokens of all heads to the tokens.
        keys: Of tokens with position: to the keys of all heads for the image tokens, what is added
            to their scores, and the second block's queries and keys.
        values: To the values of all heads for the image tokens, and the second block's values.
        next_rows: As `rows`.
        next_out: As `out`.
        next_keys: As `keys`, but in the end the rows of the last attention.
        next_values: As `values`, without the end.
        last_out: As `out`, of the last attention.
    """

    own: Affine
    rows: Affine
    out: Affine
    keys: Affine
    values: Affine
    next_rows: Affine
    next_out: Affine
    next_keys: Affine
    next_values: Affine
    last_out: Affine


def token_weights(transformer: TwoWayTransformer) -> tuple[Tensor, ...]:
    """Return weight and bias of each projection in `TokenWeights`.

    Args:
        transformer: The transformer.
    """
    first, second = transformer._blocks
    own, next_own, last = first.self_attn, second.self_attn, transformer.final_attn_token_to_image
    to_image, next_to_image = (b.cross_attn_token_to_image for b in (first, second))
    to_tokens, next_to_tokens = (b.cross_attn_image_to_token for b in (first, second))

    def rows(across: DecoderAttention) -> Affine:
        return by_head(across.q_proj, across.k_proj, across.num_heads)[0]

    def keys(across: DecoderAttention) -> tuple[Affine, Affine]:
        return by_head(across.k_proj, across.q_proj, across.num_heads)

    def plain(*layers: nn.Module) -> tuple[Affine, ...]:
        return tuple(affine(layer) for layer in layers)

    groups = (
        plain(own.q_proj, own.k_proj, own.v_proj),
        (rows(to_image),),
        (out_of(to_image),),
        (*keys(to_tokens), *plain(next_own.q_proj, next_own.k_proj)),
        (values_of(to_tokens), *plain(next_own.v_proj)),
        (rows(next_to_image),),
        (out_of(next_to_image),),
        (*keys(next_to_tokens), rows(last)),
        (values_of(next_to_tokens),),
        (out_of(last),),
    )
    return tuple(torch.cat(each) for group in groups for each in zip(*group, strict=True))


def with_bias(layer: nn.Module) -> Float[Tensor, "D C1"]:
    """Return the weight of a layer and, as the last column, its bias."""
    weight, bias = affine(layer)
    return torch.cat([weight, bias[:, None]], 1)


def by_head(tokens: nn.Module, image: nn.Module, heads: int) -> tuple[Affine, Affine]:
    """Return the projection from tokens to rows whose products with image tokens are the scores of
    all heads, and to what is added to the scores.

    Args:
        tokens: Projection of the tokens to all heads.
        image: Projection of the image tokens.
        heads: Number of heads.
    """
    left, right = (with_bias(each).unflatten(0, (heads, -1)) for each in (image, tokens))
    found = left.transpose(1, 2) @ right
    rows, scores = found[:, :-1].flatten(0, 1), found[:, -1]
    return (rows[:, :-1], rows[:, -1]), (scores[:, :-1], scores[:, -1])


def values_of(across: DecoderAttention) -> Affine:
    """Return the projection from tokens to the values of all heads, as wide as image tokens."""
    heads = across.num_heads
    left = affine(across.out_proj)[0].unflatten(1, (heads, -1)).transpose(0, 1)
    found = (left @ with_bias(across.v_proj).unflatten(0, (heads, -1))).flatten(0, 1)
    return found[:, :-1], found[:, -1]


def out_of(across: DecoderAttention) -> Affine:
    """Return the projection from image tokens that each head attends to, to tokens."""
    (value, bias), (out, out_bias) = affine(across.v_proj), affine(across.out_proj)
    left = out.unflatten(1, (across.num_heads, -1)).transpose(0, 1)
    weight = left @ value.unflatten(0, (across.num_heads, -1))
    return weight.transpose(0, 1).flatten(1), torch.nn.functional.linear(bias, out, out_bias)


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
        (places,) = shared(transformer, "positions", lambda: (positions.to(kind),))
        source = first_source(images, places, mask_image, dense)
        flat = shared(transformer, "fused", lambda: token_weights(transformer))
        weights = TokenWeights(*zip(flat[::2], flat[1::2], strict=True))
        heads, dim = transformer.num_heads, tokens.shape[-1]
        width = heads * images.shape[-1]
        q, k, v = linear(transformer, tokens, weights.own).chunk(3, -1)
        attended = linear(first.self_attn.out_proj, first.self_attn.attend(q, k, v, attention_mask))
        pair = weights.rows, weights.out
        tokens, source = update_tokens(first, attended, query_pe, source, pair)
        keys, bias, q, k = linear(transformer, tokens + query_pe, weights.keys).split(
            [width, heads, dim, dim], -1
        )
        values, v = linear(transformer, tokens, weights.values).split([width, dim], -1)
        source = update_image(first, keys, bias, values, attention_mask, source)

        attended = second.self_attn.attend(q, k, v, attention_mask)
        attended = tokens + linear(second.self_attn.out_proj, attended)
        pair = weights.next_rows, weights.next_out
        tokens, source = update_tokens(second, attended, query_pe, source, pair)
        keys, bias, rows = linear(transformer, tokens + query_pe, weights.next_keys).split(
            [width, heads, width], -1
        )
        values = linear(transformer, tokens, weights.next_values)
        source = update_image(second, keys, bias, values, attention_mask, source)

        last = transformer.final_attn_token_to_image
        out, source = attend_to_image(last, rows, weights.last_out, source)
        tokens = layer_norm(tokens + out, transformer.norm_final_attn)
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
    block: TwoWayAttentionBlock,
    attended: Tokens,
    query_pe: Tokens,
    source: ImageSource,
    weights: tuple[Affine, Affine],
) -> tuple[Tokens, ImageSource]:
    """Return the tokens after attention to the image and the MLP, and the image tokens.

    Args:
        block: The block.
        attended: Tokens of M prompts after self-attention, not normalized.
        query_pe: Initial tokens, which are added to the queries.
        source: The image tokens.
        weights: `rows` and `out` of `TokenWeights`.
    """
    across, tokens = block.cross_attn_token_to_image, layer_norm(attended, block.norm1)
    rows = linear(across, tokens + query_pe, weights[0])
    out, source = attend_to_image(across, rows, weights[1], source)
    tokens = layer_norm(tokens + out, block.norm2)
    return layer_norm(tokens + block.mlp(tokens), block.norm3), source


def attend_to_image(
    across: DecoderAttention, rows: Float[Tensor, "M N D"], out: Affine, source: ImageSource
) -> tuple[Tokens, ImageSource]:
    """Return what the image tokens add to the tokens, and the image tokens.

    Args:
        across: The attention.
        rows: Projected queries of all heads.
        out: Projection of attended image tokens.
        source: The image tokens.
    """
    heads = across.num_heads
    scale = (across.internal_dim // heads) ** -0.5
    queries = rows.to(source.x.dtype).unflatten(-1, (heads, -1))
    found, x = TokenAttention.apply(queries, scale, source.shared, *source[:5])
    attended = linear(across, found.flatten(2), out)
    return attended, source if source.shared else source._replace(x=x)


def update_image(
    block: TwoWayAttentionBlock,
    keys: Float[Tensor, "M N D"],
    bias: Float[Tensor, "M N H"],
    values: Float[Tensor, "M N D"],
    attention_mask: Bool[Tensor, "M N"] | None,
    source: ImageSource,
) -> ImageSource:
    """Return the image tokens after their attention to the tokens.

    Args:
        block: The block.
        keys: Projected keys of all heads of the tokens.
        bias: What is added to their scores.
        values: Projected values of the tokens.
        attention_mask: Which tokens to attend to; None means all.
        source: The image tokens before it.
    """
    across, norm, kind = block.cross_attn_image_to_token, block.norm4, source.x.dtype
    if attention_mask is not None:
        bias = bias.masked_fill(~attention_mask[..., None], -torch.inf)
    heads = across.num_heads
    own = (each.to(kind).unflatten(-1, (heads, -1)) for each in (keys, values))
    vectors = (each.to(kind) for each in (affine(across.out_proj)[1], norm.weight, norm.bias))
    options = (across.internal_dim // heads) ** -0.5, norm.eps, source.shared
    x = ImageAttention.apply(*options, *own, bias, *vectors, *source[:5])
    return ImageSource(x, source.positions)
