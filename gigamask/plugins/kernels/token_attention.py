"""Attention of prompt tokens to image tokens, whose keys and values are never computed.

Keys and values are projections of the same image tokens, so queries are projected instead: the
score of a query q and image token x at position p is (Wk' q) . (x + p), and the attended values are
the projection of attended image tokens. All heads thus share the image tokens as keys and values;
what the bias of the keys adds is the same for all of a query's scores and changes nothing.
"""

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from jaxtyping import Float
from torch import Tensor
from torch.autograd.function import once_differentiable

from gigamask.plugins.kernels.blocks import load_rows, narrow, product, store_rows
from gigamask.plugins.kernels.image_blocks import (
    image_of,
    load_image,
    load_places,
    load_with_positions,
    pairs,
    store_places,
    store_projection,
    store_sums,
)
from gigamask.plugins.kernels.image_source import (
    TILE,
    Rows,
    Source,
    gradients_to_store,
    sizes_of,
    source_gradients,
    source_shapes,
    splits_of,
)
from gigamask.plugins.kernels.operators import contiguous, launch, padded, parts, register, tuned


@triton.jit
def _row_places(first, mask, numbers, S: tl.constexpr, BR: tl.constexpr):
    """Return where a block of rows of a mask is, and which of them exist."""
    count = S[6] * numbers[1]
    rows = first + tl.arange(0, BR)
    return mask * count + rows, rows < count


@tuned(({"BR": 32, "BT": 32}, 8), ({"BR": 16, "BT": 32}, 4))
def _forward_kernel(
    queries, source, out, lse, numbers, S: tl.constexpr, BR: tl.constexpr, BT: tl.constexpr
):
    """Compute attended image tokens of a block of rows of one mask."""
    P: tl.constexpr = S[2]
    SHARED: tl.constexpr = S[5]
    _, _, T, _, scale, _ = numbers
    mask = tl.program_id(1).to(tl.int64)
    places, valid = _row_places(tl.program_id(0) * BR, mask, numbers, S, BR)
    most = tl.full([BR], -float("inf"), tl.float32)
    total = tl.zeros([BR], tl.float32)
    found = tl.zeros([BR, P], tl.float32)
    for start in range(0, T, BT):
        rows = start + tl.arange(0, BT)
        scores = pairs(source, queries, (places, valid, mask, rows), numbers, SHARED, S)
        scores = tl.where((rows < T)[:, None], scores * scale, -float("inf"))
        above = tl.maximum(most, tl.max(scores, 0))
        shares, factor = tl.exp(scores - above[None]), tl.exp(most - above)
        total, most = total * factor + tl.sum(shares, 0), above
        tile = load_image(source, mask, rows, tl.arange(0, P), T, SHARED, S)
        found = found * factor[:, None] + product(tl.trans(narrow(shares, tile.dtype)), tile)
    store_places(out, found / total[:, None], places, valid, S)
    tl.store(lse + places, most + tl.log(total), valid)


@triton.jit
def _slopes(source, queries, given, level, mean, which, numbers, S: tl.constexpr):
    """Return the attention weights and the gradients of the scores."""
    SHARED: tl.constexpr = S[5]
    _, valid, _, rows = which
    exists = (rows < numbers[2])[:, None] & valid[None]
    scores = pairs(source, queries, which, numbers, SHARED, S) * numbers[4]
    shares = tl.where(exists, tl.exp(scores - level[None]), 0.0)
    x, _, index, features, weight = source
    slope = pairs((x, None, index, features, weight), given, which, numbers, SHARED, S)
    return shares, shares * (slope - mean[None]) * numbers[4]


@tuned(({"BR": 32, "BT": 32}, 8), ({"BR": 16, "BT": 32}, 4))
def _rows_kernel(
    tensors, source, of_queries, delta, numbers, S: tl.constexpr, BR: tl.constexpr, BT: tl.constexpr
):
    """Compute the gradient of a block of rows of queries."""
    queries, out, lse, gradient = tensors
    P: tl.constexpr = S[2]
    T = numbers[2]
    mask = tl.program_id(1).to(tl.int64)
    places, valid = _row_places(tl.program_id(0) * BR, mask, numbers, S, BR)
    given = load_places(gradient, places, valid, S).to(tl.float32)
    mean = tl.sum(given * load_places(out, places, valid, S).to(tl.float32), 1)
    tl.store(delta + places, mean, valid)
    level = tl.load(lse + places, valid, 0.0)
    found = tl.zeros([BR, P], tl.float32)
    for start in range(0, T, BT):
        rows = start + tl.arange(0, BT)
        which = places, valid, mask, rows
        _, slope = _slopes(source, queries, gradient, level, mean, which, numbers, S)
        tile = load_with_positions(source, mask, rows, tl.arange(0, P), T, S[5], S)
        found += product(tl.trans(narrow(slope, tile.dtype)), tile)
    store_places(of_queries, found, places, valid, S)


@triton.jit
def _of_image(found, tensors, source, mask, rows, numbers, S: tl.constexpr, BR: tl.constexpr):
    """Return `found` plus the gradient of a block of image tokens of one mask."""
    queries, lse, delta, gradient = tensors
    H: tl.constexpr = S[6]
    kind = gradient.dtype.element_ty
    for first in range(0, H * numbers[1], BR):
        places, valid = _row_places(first, mask, numbers, S, BR)
        level, mean = tl.load(lse + places, valid, 0.0), tl.load(delta + places, valid, 0.0)
        which = places, valid, mask, rows
        shares, slope = _slopes(source, queries, gradient, level, mean, which, numbers, S)
        found += product(narrow(slope, kind), load_places(queries, places, valid, S))
        found += product(narrow(shares, kind), load_places(gradient, places, valid, S))
    return found


@tuned(({"BR": 32}, 8), ({"BR": 16}, 8))
def _image_kernel(
    tensors, source, given, of_source, numbers, S: tl.constexpr, BT: tl.constexpr, BR: tl.constexpr
):
    """Compute the gradient of a block of image tokens, of one mask or of every n-th of an image."""
    C: tl.constexpr = S[0]
    P: tl.constexpr = S[2]
    PF: tl.constexpr = S[3]
    M, _, T, _, _, splits = numbers
    rows, part = tl.program_id(0) * BT + tl.arange(0, BT), tl.program_id(1).to(tl.int64)
    found = tl.zeros([BT, P], tl.float32)
    if S[5]:
        total, projection = found, tl.zeros([PF, P], tl.float32)
        for number in range(part % splits, M, splits):
            mask = number + 0 * part
            if image_of(source[2], mask) == part // splits:
                more = _of_image(found, tensors, source, mask, rows, numbers, S, BR)
                total += more
                if of_source[1] is not None:
                    projection += store_projection(of_source, more, mask, source, rows, T, S)
        store_sums(of_source, total, projection, rows, T, S)
    else:
        if given is not None:
            found += load_rows(given + part * T * C, rows, T, C, P)
        found = _of_image(found, tensors, source, part, rows, numbers, S, BR)
        store_rows(of_source[0] + part * T * C, found, rows, T, C, P)


def _numbers(queries: Tensor, source: Source, scale: float, splits: int = 1) -> tuple[Any, ...]:
    x = source[0]
    assert x is not None
    return *queries.shape[:2], *x.shape[1:], scale, splits


def token_attention(
    queries: Tensor, source: list[Tensor | None], shared: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """Return attended image tokens, (M, N, H, C), and the logarithm of each row's sum.

    Args:
        queries: Projected queries.
        source: The image tokens.
        shared: Whether masks share them.
        scale: Factor of the scores.
    """
    out, lse = _forward_shape(queries)
    masks, tokens, heads, _ = queries.shape
    launch(
        _forward_kernel,
        lambda blocks: (parts(heads * tokens, blocks["BR"]), masks),
        *(queries, tuple(source), out, lse, _numbers(queries, source, scale)),
        S=(*sizes_of(source), int(shared), heads),
    )
    return out, lse


def _forward_shape(queries: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    """Return empty results."""
    wide = queries.new_empty(queries.shape[:3], dtype=torch.float32)
    return torch.empty_like(queries), wide


def token_attention_backward(
    tensors: list[Tensor], source: list[Tensor | None], shared: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """Return the gradient of the queries, and its product with the results for each row.

    Args:
        tensors: What the forward pass had and returned, and the gradient of its result.
        source: The image tokens.
        shared: Whether masks share them.
        scale: Factor of the scores.
    """
    queries = tensors[0]
    of_queries, delta = _forward_shape(queries)
    masks, tokens, heads, _ = queries.shape
    launch(
        _rows_kernel,
        lambda blocks: (parts(heads * tokens, blocks["BR"]), masks),
        *(tuple(tensors), tuple(source), of_queries, delta, _numbers(queries, source, scale)),
        S=(*sizes_of(source), int(shared), heads),
    )
    return of_queries, delta


def token_attention_image(
    tensors: list[Tensor],
    source: list[Tensor | None],
    shared: bool,
    scale: float,
    given: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of image tokens plus `given`, of features, and of their projection.

    Args:
        tensors: What the forward pass had and returned, and the gradient of its result.
        source: The image tokens.
        shared: Whether masks share them.
        scale: Factor of the scores.
        given: Gradient from who used the image tokens afterwards; None adds nothing.
    """
    found = _image_shape(tensors, source, shared)
    queries, x = tensors[0], source[0]
    assert x is not None
    splits, programs = splits_of(x, len(queries), shared)
    launch(
        _image_kernel,
        lambda _: (parts(x.shape[1], TILE), programs),
        *(tuple(tensors), tuple(source), given, gradients_to_store(found)),
        _numbers(queries, source, scale, splits),
        S=(*sizes_of(source), int(shared), queries.shape[2]),
        BT=TILE,
    )
    return found


def _image_shape(tensors: Any, source: Any, shared: bool, *_: Any) -> Any:
    return source_shapes(source[0], source[3], shared)


def _products(count: int) -> Callable[..., int]:
    """Return a function that returns the FLOPs of some products of all rows and image tokens."""

    def flops(own: Any, source: Any, *_: Any) -> int:
        masks, tokens, heads, _ = own if isinstance(own[0], int) else own[0]
        rows, x = 32 * parts(heads * tokens, 32), source[0]
        return 2 * count * masks * rows * x[1] * padded(x[2])

    return flops


FORWARD = register(token_attention, _forward_shape, _products(2))
BACKWARD = register(token_attention_backward, lambda own, *_: _forward_shape(own[0]), _products(3))
IMAGE = register(token_attention_image, _image_shape, _products(4))


class TokenAttention(torch.autograd.Function):
    """Attended image tokens; image tokens that masks do not share are also returned.

    Who uses the returned ones passes their gradient through this backward pass, which adds its own.
    """

    @staticmethod
    def forward(
        ctx, queries: Rows, scale: float, shared: bool, *source: Any
    ) -> tuple[Rows, Float[Tensor, "B T C"]]:
        """Return attended image tokens, and the image tokens.

        Args:
            ctx: What the backward pass needs.
            queries: Projected queries.
            scale: Factor of the scores.
            shared: Whether masks share image tokens.
            *source: The image tokens.
        """
        rows, *image = contiguous(queries, *source)
        out, lse = FORWARD(rows, image, shared, scale)
        ctx.save_for_backward(rows, out, lse, *image)
        ctx.options = shared, scale
        ctx.set_materialize_grads(False)
        return out, image[0].view_as(image[0])

    @staticmethod
    @once_differentiable
    def backward(  # pyrefly: ignore[bad-override]
        ctx, gradient: Tensor | None, given: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        """Return the gradients.

        Args:
            ctx: What the forward pass kept.
            gradient: Gradient of the attended image tokens.
            given: Gradient of the image tokens that were returned.
        """
        queries, out, lse, *source = ctx.saved_tensors
        if gradient is None:
            return None, None, None, given, *[None] * 4
        gradient, given = contiguous(gradient, given)
        of_queries, delta = BACKWARD([queries, out, lse, gradient], source, *ctx.options)
        found = IMAGE([queries, lse, delta, gradient], source, *ctx.options, given)
        gradients = source_gradients(source, found, ctx.options[0])
        return of_queries, None, None, *gradients[:5]
