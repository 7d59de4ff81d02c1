"""SAM's mask decoder with fused kernels: the transformer and the upscaling.

Projections of the image tokens are taken to the side of the prompt tokens, of which there are few;
`token_attention` and `image_attention` say how. So two projections follow each other on that side,
and their weights are multiplied once for all rounds.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, cast

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor, nn

from gigamask.distributed.precision import HALF_DTYPES, Precision
from gigamask.errors import GigamaskError
from gigamask.masks.devices import no_autocast
from gigamask.models.layers import LayerNorm2d, layer_norm, planless_attention, working_dtype
from gigamask.models.mask_decoder import MaskDecoder, upscaling_weights
from gigamask.models.prompt_encoder import PADDING_LABEL, PromptEncoder
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
from gigamask.plugins.kernels.mask_features import are_gelus, features
from gigamask.plugins.kernels.token_attention import TokenAttention
from gigamask.plugins.kernels.token_blocks import Shared, TokensAfterImage, TokensAfterTokens
from gigamask.plugins.kernels.token_layers import SLOTS
from gigamask.plugins.kernels.upscaling import MAX_MASKS, Upscaling

FLAG = "--kernels triton"
AFTER_TOKENS, AFTER_IMAGE, OF_IMAGE = 5, 12, 3
"""Weights of `TokensAfterTokens`, of `TokensAfterImage`, and of `ImageAttention`."""
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
    if not are_gelus(*activations):
        raise GigamaskError(
            f"{FLAG} computes GELU in the upscaling (got {type(activations[0]).__name__}); leave "
            "the flag out"
        )
    weight = decoder.iou_token.weight
    if weight.device.type == "cuda" and precision not in HALF_DTYPES:
        raise GigamaskError(
            f"{FLAG} is for half precision on a GPU (got --precision {precision}); use bf16"
        )
    transformer, encoder = decoder.transformer, cast(PromptEncoder, model.prompt_encoder)
    return [
        (decoder, "upscaled", partial(upscaled, decoder)),
        (decoder, "_heads", partial(predict_heads, decoder)),
        (transformer, "attend", partial(attend, transformer)),
        (encoder, "points", partial(points, encoder)),
        (encoder, "mask_features", partial(features, encoder)),
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


def points(
    encoder: PromptEncoder, points_xy_input: Float[Tensor, "M N 2"], labels: Int64[Tensor, "M N"]
) -> Float[Tensor, "M N C"]:
    """Return what `PromptEncoder.points` does; angles are one product, and sines those of cosines.

    Args:
        encoder: The encoder.
        points_xy_input: Points, xy in input pixels.
        labels: Their labels.
    """
    matrix = encoder.pe_layer.positional_encoding_gaussian_matrix
    embeddings = [encoder.not_a_point_embed, *cast(Any, encoder.point_embeddings)]
    height, width = encoder.input_image_size

    def tables() -> tuple[Tensor, ...]:
        x, y = matrix.float() * (2 * math.pi)
        shift, across = x * (1 / width - 1) + y * (1 / height - 1), x * (2 / width)
        scale = torch.stack([across, y * (2 / height)]).repeat(1, 2)
        numbers = torch.arange(PADDING_LABEL, len(embeddings) - 1, device=labels.device)
        kinds = torch.cat([each.weight for each in embeddings])
        return kinds, numbers, scale, torch.cat([shift, shift + math.pi / 2])

    kinds, numbers, scale, shift = shared(encoder, "points", tables)
    flat = labels.reshape(-1, 1)
    with no_autocast(labels):
        code = torch.addmm(shift, points_xy_input.flatten(0, 1).float(), scale).sin()
        code = torch.where(flat >= 0, code.to(kinds.dtype), 0)
        found = torch.addmm(code, (flat == numbers).to(kinds.dtype), kinds)
    return found.unflatten(0, labels.shape)


def predict_heads(
    decoder: MaskDecoder, tokens: Tokens, mask_tokens: range
) -> tuple[Float[Tensor, "M c K"], Float[Tensor, "M K"], Float[Tensor, "M K n"] | None]:
    """Return what `MaskDecoder._heads` does, all heads as one whose weights are blocks.

    Args:
        decoder: The decoder.
        tokens: The tokens.
        mask_tokens: Which mask tokens to use.
    """
    count, first = len(mask_tokens), 1 + mask_tokens.start

    def weights() -> Iterator[Tensor]:
        masks = [decoder.output_hypernetworks_mlps[index] for index in mask_tokens]
        heads = [decoder.iou_prediction_head, *masks]
        for number, layers in enumerate(zip(*(head.layers for head in heads), strict=True)):
            (weight, bias), *others = map(affine, layers)
            used = slice(mask_tokens.start, mask_tokens.stop) if number == 2 else slice(None)
            blocks, biases = zip((weight[used], bias[used]), *others, strict=True)
            yield from (torch.block_diag(*blocks), torch.cat(biases))

    flat = shared(decoder, f"heads {mask_tokens}", lambda: tuple(weights()))
    own = tokens[:, first : first + count]
    x = torch.cat([tokens[:, :1], own], 1) if first > 1 else tokens[:, : 1 + count]
    x = x.flatten(1)
    for start in (0, 2):
        x = torch.relu(linear(decoder, x, (flat[start], flat[start + 1])))
    x = linear(decoder, x, (flat[4], flat[5]))
    iou, found = x.split([count, x.shape[1] - count], 1)
    classes = None if decoder.class_head is None else decoder.class_head(own)
    return found.unflatten(1, (count, -1)).transpose(1, 2), iou, classes


def token_weights(transformer: TwoWayTransformer, kind: torch.dtype) -> tuple[Tensor, ...]:
    """Return weights and biases, and norms as kernels read them.

    Those of queries, keys and values of the first block; in each block, of the output projection,
    the norm and the queries of all heads for the image tokens, then of the output projection of
    attended image tokens, the norm, the MLP, the norm, and two projections. One, of tokens with
    position, has the keys of all heads for the image tokens, what is added to their scores, and the
    next block's queries and keys, or in the end the rows of the last attention; one the values of
    all heads, and the next block's values; and the vectors of the image tokens' sum and norm. Those
    of the last output.

    Args:
        transformer: The transformer.
        kind: Dtype of all but the norms.
    """
    first, second = transformer._blocks
    own, next_own, last = first.self_attn, second.self_attn, transformer.final_attn_token_to_image

    def narrowed(*pairs: Affine) -> Iterator[Tensor]:
        return (each.to(kind).contiguous() for pair in pairs for each in pair)

    to_image = [*(block.cross_attn_token_to_image for block in transformer._blocks), last]
    to_tokens = [block.cross_attn_image_to_token for block in transformer._blocks]
    *rows, (last_rows, _), first_keys, second_keys = by_heads(
        *((each.q_proj, each.k_proj) for each in to_image),
        *((each.k_proj, each.q_proj) for each in to_tokens),
        heads=transformer.num_heads,
    )

    def block(number: int, keys: list[Affine], values: list[Affine]) -> Iterator[Tensor]:
        block, across = transformer._blocks[number], to_tokens[number]
        norms = block.norm1, block.norm2, block.norm3, block.norm4
        vectors = [each for norm in norms for each in (norm.weight, norm.bias)]
        wide = torch.stack([*vectors, affine(across.out_proj)[1]]).float()
        slots = wide[:6].unflatten(0, (3, 2))[:, None].expand(-1, SLOTS, -1, -1)
        yield from narrowed(affine(block.self_attn.out_proj))
        yield slots[0]
        yield from narrowed(rows[number][0], out_of(to_image[number]))
        yield slots[1]
        yield from narrowed(affine(block.mlp.lin1), affine(block.mlp.lin2))
        yield slots[2]
        yield from narrowed(joined(*keys), joined(values_of(across), *values))
        *_, gain, shift, bias = wide
        yield from (bias, gain, shift)

    keys = [*first_keys, affine(next_own.q_proj), affine(next_own.k_proj)]
    return (
        *narrowed(joined(*map(affine, (own.q_proj, own.k_proj, own.v_proj)))),
        *block(0, keys, [affine(next_own.v_proj)]),
        *block(1, [*second_keys, last_rows], []),
        *narrowed(out_of(last)),
    )


def joined(*pairs: Affine) -> Affine:
    """Return weights and biases, one below the other."""
    weights, biases = zip(*pairs, strict=True)
    return torch.cat(weights), torch.cat(biases)


def by_heads(*pairs: tuple[nn.Module, nn.Module], heads: int) -> list[tuple[Affine, Affine]]:
    """Return, of each pair, the projection from tokens to rows whose products with image tokens are
    the scores of all heads, and to what is added to the scores.

    Args:
        *pairs: Projection of the tokens to all heads, and projection of the image tokens.
        heads: Number of heads.
    """
    weights, biases = zip(*(affine(each) for pair in pairs for each in pair), strict=True)
    both = torch.cat([torch.stack(weights), torch.stack(biases)[..., None]], 2)
    tokens, image = both.unflatten(1, (heads, -1)).unflatten(0, (-1, 2)).unbind(1)
    channels = [weights[0].shape[1], 1]
    found = (image.transpose(2, 3) @ tokens).split(channels, 2)
    parts = (each.flatten(1, 2).split(channels, 2) for each in found)
    rows, scores = (
        zip(weight.unbind(), bias.squeeze(2).unbind(), strict=True) for weight, bias in parts
    )
    return list(zip(rows, scores, strict=True))


def values_of(across: DecoderAttention) -> Affine:
    """Return the projection from tokens to the values of all heads, as wide as image tokens."""
    heads = across.num_heads
    left = affine(across.out_proj)[0].unflatten(1, (heads, -1)).transpose(0, 1)
    weight, bias = (each.unflatten(0, (heads, -1)) for each in affine(across.v_proj))
    return (left @ weight).flatten(0, 1), (left @ bias[..., None]).flatten()


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

    def added_bias() -> tuple[Tensor]:
        return (images + dense.bias.to(kind),)

    shares = same_images and dense.name is not None
    (x,) = shared(transformer, str(dense.name), added_bias) if shares else added_bias()
    index = None if len(images) == 1 else mask_image
    projected = (None if each is None else each.to(kind) for each in (dense.features, dense.weight))
    source = ImageSource(x, places, index, *projected, shared=True)
    first, bias, *weights, last, last_bias = shared(
        transformer, "fused", lambda: token_weights(transformer, kind)
    )
    tensors, added = getattr(transformer, ATTRIBUTE, None), cast(Any, None)
    rest = linear(transformer, query_pe, (first, bias))
    for block, start in zip(blocks, (0, AFTER_TOKENS + AFTER_IMAGE + OF_IMAGE), strict=True):
        middle = start + AFTER_TOKENS
        end = middle + AFTER_IMAGE
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
            options, found, added, query_pe, *weights[middle:end]
        )
        query_pe = more[0] if more else None
        keys, bias, values = (each.view(*shape, -1) for each in (keys, bias, values))
        source = update_image(
            block, [keys, bias, values, *weights[end : end + OF_IMAGE]], attention_mask, source
        )
    across = transformer.final_attn_token_to_image
    found, source = attend_to_image(across, rest.view(*shape, -1), source)
    tokens = added + linear(transformer, found, (last, last_bias))
    return layer_norm(tokens, transformer.norm_final_attn).unflatten(0, shape), source.x


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
    tensors: Sequence[Tensor],
    attention_mask: Bool[Tensor, "M N"] | None,
    source: ImageSource,
) -> ImageSource:
    """Return the image tokens after their attention to the tokens.

    Args:
        block: The block.
        tensors: Keys of all heads, what is added to their scores, values, and bias, gain and shift.
        attention_mask: Which tokens to attend to; None means all.
        source: The image tokens before it.
    """
    (keys, bias, values, *vectors), across = tensors, block.cross_attn_image_to_token
    if attention_mask is not None:
        bias = bias.masked_fill(~attention_mask[..., None], -torch.inf)
    heads = across.num_heads
    own = (each.unflatten(-1, (heads, -1)) for each in (keys, values))
    options = (across.internal_dim // heads) ** -0.5, block.norm4.eps, source.shared
    x = ImageAttention.apply(*options, *own, bias, *vectors, *source[:5])
    return ImageSource(x, source.positions)
