"""SAM's mask decoder with fused kernels: the transformer and the upscaling.

Projections of the image tokens are taken to the side of the prompt tokens, of which there are few;
`token_attention` and `image_attention` say how. So two projections follow each other on that side,
and their weights are multiplied once for all rounds.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, cast

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor, nn

from gigamask.distributed.precision import HALF_DTYPES, Precision
from gigamask.errors import GigamaskError
from gigamask.models.layers import LayerNorm2d, layer_norm, planless_attention, working_dtype
from gigamask.models.mask_decoder import MaskDecoder, upscaling_weights
from gigamask.models.shared_tensors import ATTRIBUTE, affine, linear, shared
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
from gigamask.plugins.kernels.token_blocks import Shared, TokensAfterImage, TokensAfterTokens
from gigamask.plugins.kernels.token_layers import SLOTS
from gigamask.plugins.kernels.upscaling import MAX_MASKS, Upscaling

FLAG = "--kernels triton"
AFTER_TOKENS, AFTER_IMAGE = 5, 12
"""Weights of `TokensAfterTokens` and of `TokensAfterImage`."""
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


def token_weights(transformer: TwoWayTransformer, kind: torch.dtype) -> tuple[Tensor, ...]:
    """Return weights and biases, and norms as kernels read them.

    Those of queries, keys and values of the first block; in each block, of the output projection,
    the norm and the queries of all heads for the image tokens, then of the output projection of
    attended image tokens, the norm, the MLP, the norm, and two projections. One, of tokens with
    position, has the keys of all heads for the image tokens, what is added to their scores, and the
    next block's queries and keys, or in the end the rows of the last attention; one the values of
    all heads, and the next block's values. Those of the last output.

    Args:
        transformer: The transformer.
        kind: Dtype of all but the norms.
    """
    first, second = transformer._blocks
    own, next_own, last = first.self_attn, second.self_attn, transformer.final_attn_token_to_image
    norms = [getattr(block, f"norm{number}") for block in (first, second) for number in (1, 2, 3)]
    vectors = torch.stack([each for norm in norms for each in (norm.weight, norm.bias)])
    wide = vectors.to(torch.promote_types(vectors.dtype, torch.float32)).unflatten(0, (-1, 2))
    slots = iter(wide[:, None].expand(-1, SLOTS, -1, -1).unbind())

    def block(
        block: TwoWayAttentionBlock, keys: Sequence[Affine], values: Sequence[Affine]
    ) -> Iterator[Tensor]:
        across = block.cross_attn_token_to_image
        to_tokens, heads = block.cross_attn_image_to_token, transformer.num_heads
        yield from affine(block.self_attn.out_proj)
        yield next(slots)
        yield from by_head(across.q_proj, across.k_proj, heads)[0]
        yield from out_of(across)
        yield next(slots)
        yield from (*affine(block.mlp.lin1), *affine(block.mlp.lin2))
        yield next(slots)
        yield from joined(*by_head(to_tokens.k_proj, to_tokens.q_proj, heads), *keys)
        yield from joined(values_of(to_tokens), *values)

    queries = affine(next_own.q_proj), affine(next_own.k_proj)
    found = (
        *joined(*map(affine, (own.q_proj, own.k_proj, own.v_proj))),
        *block(first, queries, [affine(next_own.v_proj)]),
        *block(second, [by_head(last.q_proj, last.k_proj, last.num_heads)[0]], []),
        *out_of(last),
    )
    return tuple(each if each.ndim == 3 else each.to(kind).contiguous() for each in found)


def joined(*pairs: Affine) -> Affine:
    """Return weights and biases, one below the other."""
    weights, biases = zip(*pairs, strict=True)
    return torch.cat(weights), torch.cat(biases)


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
    blocks = transformer._blocks
    if positions.requires_grad or any(type(block.mlp.act) is not nn.ReLU for block in blocks):
        return TwoWayTransformer.attend(
            transformer, images, positions, tokens, mask_image, dense, attention_mask, same_images
        )
    images = images.to(working_dtype(images))
    kind, shape = images.dtype, tokens.shape[:2]
    query_pe = tokens.to(working_dtype(tokens)).flatten(0, 1)
    (places,) = shared(transformer, "positions", lambda: (positions.to(kind),))
    source = first_source(images, places, mask_image, dense)
    first, bias, *weights, last, last_bias = shared(
        transformer, "fused", lambda: token_weights(transformer, kind)
    )
    tensors, added = getattr(transformer, ATTRIBUTE, None), cast(Any, None)
    rest = linear(transformer, query_pe, (first, bias))
    for block, start in zip(blocks, (0, AFTER_TOKENS + AFTER_IMAGE), strict=True):
        middle = start + AFTER_TOKENS
        options = Shared(tensors, transformer.num_heads, block.norm1.eps)
        with planless_attention(images.device):
            q, k, v = rest.view(*shape, -1).chunk(3, -1)
            attended = block.self_attn.attend(q, k, v, attention_mask)
        rows, added, query_pe = TokensAfterTokens.apply(
            options, attended.flatten(0, 1), added, query_pe, *weights[start:middle]
        )
        found, source = attend_to_image(
            block.cross_attn_token_to_image, rows.view(*shape, -1), source
        )
        keys, bias, values, rest, added, *more = TokensAfterImage.apply(
            options, found, added, query_pe, *weights[middle : middle + AFTER_IMAGE]
        )
        query_pe = more[0] if more else None
        keys, bias, values = (each.view(*shape, -1) for each in (keys, bias, values))
        source = update_image(block, keys, bias, values, attention_mask, source)
    across = transformer.final_attn_token_to_image
    found, source = attend_to_image(across, rest.view(*shape, -1), source)
    tokens = added + linear(transformer, found, (last, last_bias))
    return layer_norm(tokens, transformer.norm_final_attn).unflatten(0, shape), source.x


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


def attend_to_image(
    across: DecoderAttention, rows: Float[Tensor, "M N D"], source: ImageSource
) -> tuple[Float[Tensor, "R D"], ImageSource]:
    """Return what tokens attend to in the image, and the image tokens.

    Args:
        across: The attention.
        rows: Projected queries of all heads.
        source: The image tokens.
    """
    heads = across.num_heads
    scale = (across.internal_dim // heads) ** -0.5
    queries = rows.to(source.x.dtype).unflatten(-1, (heads, -1))
    found, x = TokenAttention.apply(queries, scale, source.shared, *source[:5])
    found = found.flatten(2).flatten(0, 1)
    return found, source if source.shared else source._replace(x=x)


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
