"""Attention of image tokens to prompt tokens, the output projection, the sum and the layer norm.

Queries and the output are projections of the image tokens, and few prompt tokens are attended to,
so keys and values are projected instead: the score of an image token x at position p and a key k is
(x + p) . (Wq' k) + bq . k, and what is added to x is a sum of projected values, of all heads. A
block of image tokens is read, and its sum normalized and written.
"""

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from jaxtyping import Float
from torch import Tensor
from torch.autograd.function import once_differentiable

from gigamask.plugins.kernels.blocks import (
    load_rows,
    load_vector,
    narrow,
    normalize,
    normalize_backward,
    product,
    store_rows,
)
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
    Source,
    gradients_to_store,
    sizes_of,
    source_gradients,
    source_shapes,
    splits_of,
)
from gigamask.plugins.kernels.operators import contiguous, launch, padded, parts, register, tuned

ROWS = 32
"""Rows of keys that a program takes at a time, those of one head or of several; half of them where
it also sums the gradients of shared image tokens."""
BLOCKS = 4
"""Programs that share the image tokens of a mask in the backward pass."""


@triton.jit
def _head_places(first, mask, numbers, S: tl.constexpr):
    """Return where the rows of some heads are, each padded to NP tokens, and which exist."""
    HEADS: tl.constexpr = S[7]
    NP: tl.constexpr = S[8]
    N, rows = numbers[1], tl.arange(0, HEADS * NP)
    within = rows % NP * S[6] + rows // NP
    return within + (mask * N * S[6] + first), rows % NP < N


@triton.jit
def _shares(tensors, source, which, numbers, S: tl.constexpr):
    """Return the attention weights of image tokens to the tokens of some heads."""
    HEADS: tl.constexpr = S[7]
    NP: tl.constexpr = S[8]
    keys, _, bias, _, _ = tensors
    places, valid, _, _ = which
    scores = pairs(source, keys, which, numbers, S[5], S)
    scores = (scores + tl.load(bias + places, valid, -float("inf"))[None]) * numbers[4]
    grouped = tl.reshape(scores, [scores.shape[0], HEADS, NP])
    shares = tl.exp(grouped - tl.max(grouped, 2)[:, :, None])
    return tl.reshape(shares / tl.sum(shares, 2)[:, :, None], [scores.shape[0], HEADS * NP])


@triton.jit
def _slopes(tensors, sums, shares, which, numbers, S: tl.constexpr):
    """Return the gradients of the scores, from those of the sums in memory."""
    HEADS: tl.constexpr = S[7]
    NP: tl.constexpr = S[8]
    found = pairs((sums, None, None, None, None), tensors[1], which, numbers, 0, S)
    grouped = tl.reshape(found * shares, [shares.shape[0], HEADS, NP])
    mean = tl.sum(grouped, 2)[:, :, None] + tl.zeros_like(grouped)
    return shares * (found - tl.reshape(mean, [shares.shape[0], HEADS * NP])) * numbers[4]


@triton.jit
def _sum(tensors, source, mask, rows, numbers, S: tl.constexpr):
    """Return image tokens plus what they attend to, before the layer norm."""
    C: tl.constexpr = S[0]
    P: tl.constexpr = S[2]
    H: tl.constexpr = S[6]
    HEADS: tl.constexpr = S[7]
    found = load_image(source, mask, rows, tl.arange(0, P), numbers[2], S[5], S).to(tl.float32)
    found += load_vector(tensors[3], C, P)[None]
    for first in range(0, H, HEADS):
        places, valid = _head_places(first, mask, numbers, S)
        shares = _shares(tensors, source, (places, valid, mask, rows), numbers, S)
        given = load_places(tensors[1], places, valid, S)
        found += product(narrow(shares, given.dtype), given)
    return found


@tuned(({"BT": 64}, 8), ({"BT": 32}, 4))
def _forward_kernel(tensors, shift, source, out, numbers, S: tl.constexpr, BT: tl.constexpr):
    """Compute a block of image tokens of one mask."""
    C: tl.constexpr = S[0]
    P: tl.constexpr = S[2]
    T = numbers[2]
    rows, mask = tl.program_id(0) * BT + tl.arange(0, BT), tl.program_id(1).to(tl.int64)
    normal, _ = normalize(_sum(tensors, source, mask, rows, numbers, S), numbers[5], C, P)
    found = normal * load_vector(tensors[4], C, P)[None] + load_vector(shift, C, P)[None]
    store_rows(out + mask * T * C, found, rows, T, C, P)


@triton.jit
def _of_sum(tensors, source, gradient, sums, mask, rows, numbers, S: tl.constexpr):
    """Store the gradient of the sum; return that of image tokens, and of gain, shift and bias."""
    C: tl.constexpr = S[0]
    P: tl.constexpr = S[2]
    H: tl.constexpr = S[6]
    HEADS: tl.constexpr = S[7]
    T = numbers[2]
    normal, factor = normalize(_sum(tensors, source, mask, rows, numbers, S), numbers[5], C, P)
    given = load_rows(gradient + mask * T * C, rows, T, C, P).to(tl.float32)
    found = given * load_vector(tensors[4], C, P)[None]
    found = normalize_backward(found, normal, factor, C, P)
    found = tl.where((rows < T)[:, None], found, 0.0)
    store_rows(sums + mask * T * C, found, rows, T, C, P)
    vectors = tl.sum(given * normal, 0), tl.sum(given, 0), tl.sum(found, 0)
    tl.debug_barrier()  # all threads read below what each has stored
    for first in range(0, H, HEADS):
        places, valid = _head_places(first, mask, numbers, S)
        which = places, valid, mask, rows
        shares = _shares(tensors, source, which, numbers, S)
        slope = _slopes(tensors, sums, shares, which, numbers, S)
        keys = load_places(tensors[0], places, valid, S)
        found += product(narrow(slope, keys.dtype), keys)
    return found, vectors[0], vectors[1], vectors[2]


@tuned(({}, 8))
def _image_kernel(
    tensors, source, gradient, found, of_source, numbers, S: tl.constexpr, BT: tl.constexpr
):
    """Compute gradients of image tokens: some blocks of a mask, or a block of an image's masks."""
    C: tl.constexpr = S[0]
    P: tl.constexpr = S[2]
    PF: tl.constexpr = S[3]
    sums, partial = found
    M, _, T, _, _, _, splits = numbers
    block, blocks, part = tl.program_id(0), tl.num_programs(0), tl.program_id(1).to(tl.int64)
    gain, shift = tl.zeros([P], tl.float32), tl.zeros([P], tl.float32)
    bias = tl.zeros([P], tl.float32)
    if S[5]:
        rows = block * BT + tl.arange(0, BT)
        total = tl.zeros([BT, P], tl.float32)
        projection = tl.zeros([PF, P], tl.float32)
        for number in range(part % splits, M, splits):
            mask = number + 0 * part
            if image_of(source[2], mask) == part // splits:
                more, a, b, c = _of_sum(tensors, source, gradient, sums, mask, rows, numbers, S)
                total, gain, shift, bias = total + more, gain + a, shift + b, bias + c
                if of_source[1] is not None:
                    projection += store_projection(of_source, more, mask, source, rows, T, S)
        store_sums(of_source, total, projection, rows, T, S)
    else:
        for start in range(block * BT, T, blocks * BT):
            rows = start + tl.arange(0, BT)
            more, a, b, c = _of_sum(tensors, source, gradient, sums, part, rows, numbers, S)
            store_rows(of_source[0] + part * T * C, more, rows, T, C, P)
            gain, shift, bias = gain + a, shift + b, bias + c
    into = partial + (part * blocks + block) * (3 * P) + tl.arange(0, P)
    tl.store(into, gain)
    tl.store(into + P, shift)
    tl.store(into + 2 * P, bias)


@tuned(({"BT": 32}, 8), ({"BT": 16}, 8))
def _rows_kernel(tensors, source, sums, of_rows, numbers, S: tl.constexpr, BT: tl.constexpr):
    """Compute the gradients of the projected keys and values of some heads of one mask."""
    C: tl.constexpr = S[0]
    P: tl.constexpr = S[2]
    HEADS: tl.constexpr = S[7]
    R: tl.constexpr = HEADS * S[8]
    T, mask = numbers[2], tl.program_id(1).to(tl.int64)
    places, valid = _head_places(tl.program_id(0) * HEADS, mask, numbers, S)
    keys, values = tl.zeros([R, P], tl.float32), tl.zeros([R, P], tl.float32)
    bias = tl.zeros([R], tl.float32)
    for start in range(0, T, BT):
        rows = start + tl.arange(0, BT)
        which = places, valid, mask, rows
        shares = _shares(tensors, source, which, numbers, S)
        slope = _slopes(tensors, sums, shares, which, numbers, S)
        given = load_rows(sums + mask * T * C, rows, T, C, P)
        values += product(tl.trans(narrow(shares, given.dtype)), given)
        bias += tl.sum(slope, 0)
        tile = load_with_positions(source, mask, rows, tl.arange(0, P), T, S[5], S)
        keys += product(tl.trans(narrow(slope, tile.dtype)), tile)
    store_places(of_rows[0], keys, places, valid, S)
    store_places(of_rows[1], values, places, valid, S)
    tl.store(of_rows[2] + places, narrow(bias, of_rows[2].dtype.element_ty), valid)


def _sizes(keys: Tensor, source: Source, shared: bool, rows: int = ROWS) -> tuple[int, ...]:
    """Return sizes of image tokens, heads, heads that a program takes, and tokens with padding."""
    heads, tokens = keys.shape[2], padded(keys.shape[1], 8)
    together = max(1, rows // tokens)
    while heads % together:
        together //= 2
    return *sizes_of(source), int(shared), heads, together, max(tokens, 16 // together)


def _numbers(
    keys: Tensor, source: Source, scale: float, eps: float = 0.0, splits: int = 1
) -> tuple[Any, ...]:
    x = source[0]
    assert x is not None
    return *keys.shape[:2], *x.shape[1:], scale, eps, splits


def image_attention(
    tensors: list[Tensor],
    shift: Tensor,
    source: list[Tensor | None],
    shared: bool,
    scale: float,
    eps: float,
) -> Tensor:
    """Return image tokens of masks, (M, T, C).

    Args:
        tensors: Keys, values, what is added to the scores, bias of the output, gain of the norm.
        shift: Shift of the layer norm.
        source: The image tokens.
        shared: Whether masks share them.
        scale: Factor of the scores.
        eps: Added to the norm's variance.
    """
    out, keys = _forward_shape(tensors, shift, source), tensors[0]
    launch(
        _forward_kernel,
        lambda blocks: (parts(out.shape[1], blocks["BT"]), len(out)),
        *(tuple(tensors), shift, tuple(source), out, _numbers(keys, source, scale, eps)),
        S=_sizes(keys, source, shared),
    )
    return out


def _forward_shape(tensors: Any, shift: Any, source: Any, *_: Any) -> Tensor:
    return source[0].new_empty(len(tensors[0]), *source[0].shape[1:])


def image_attention_image(
    tensors: list[Tensor],
    source: list[Tensor | None],
    shared: bool,
    scale: float,
    eps: float,
    gradient: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return gradients of the sum, of gain, shift and bias by program, and of the image tokens.

    Args:
        tensors: What the forward pass had and returned, and the gradient of its result.
        source: The image tokens.
        shared: Whether masks share them.
        scale: Factor of the scores.
        eps: Added to the norm's variance.
        gradient: Gradient of the result.
    """
    sums, partial, *found = _image_shape(tensors, source, shared)
    keys, x = tensors[0], source[0]
    assert x is not None
    splits, programs = splits_of(x, len(keys), shared)
    *sizes, block = _sizes(keys, source, shared, ROWS // 2 if shared else ROWS)
    sizes[4] = min(32, sizes[4])
    launch(
        _image_kernel,
        lambda _: (_blocks(x, shared), programs),
        *(tuple(tensors), tuple(source), gradient, (sums, partial), gradients_to_store(found)),
        _numbers(keys, source, scale, eps, splits),
        S=(*sizes, block),
        BT=TILE,
    )
    return sums, partial, found[0], found[1], found[2]


def _blocks(x: Tensor, shared: bool) -> int:
    """Return how many programs share the image tokens."""
    most = parts(x.shape[1], TILE)
    return most if shared else min(BLOCKS, most)


def _image_shape(tensors: Any, source: Any, shared: bool, *_: Any) -> Any:
    x, masks = source[0], len(tensors[0])
    blocks = splits_of(x, masks, shared)[1] * _blocks(x, shared), 3, padded(x.shape[-1])
    sums, partial = x.new_empty(masks, *x.shape[1:]), x.new_empty(blocks, dtype=torch.float32)
    return sums, partial, *source_shapes(x, source[3], shared)


def image_attention_rows(
    tensors: list[Tensor], source: list[Tensor | None], shared: bool, scale: float, sums: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of projected keys and values, and of what is added to the scores.

    Args:
        tensors: What the forward pass had and returned, and the gradient of its result.
        source: The image tokens.
        shared: Whether masks share them.
        scale: Factor of the scores.
        sums: Gradients of the sums before the norm.
    """
    found, keys = _rows_shape(tensors), tensors[0]
    sizes = _sizes(keys, source, shared)
    launch(
        _rows_kernel,
        lambda _: (keys.shape[2] // sizes[7], len(keys)),
        *(tuple(tensors), tuple(source), sums, found, _numbers(keys, source, scale)),
        S=sizes,
    )
    return found


def _rows_shape(tensors: Any, *_: Any) -> Any:
    return tuple(torch.empty_like(each) for each in tensors[:3])


def _products(count: int, at: int = 1) -> Callable[..., int]:
    """Return a function that returns the FLOPs of some products of all rows and image tokens.

    Args:
        count: Number of the products.
        at: Position of the image tokens among the arguments.
    """

    def flops(*shapes: Any) -> int:
        (masks, tokens, heads, channels), x = shapes[0][0], shapes[at][0]
        return 2 * count * masks * heads * padded(tokens, 8) * x[1] * padded(channels)

    return flops


FORWARD = register(image_attention, _forward_shape, _products(2, 2))
IMAGE = register(image_attention_image, _image_shape, _products(5))
ROWS_BACKWARD = register(image_attention_rows, _rows_shape, _products(4))


class ImageAttention(torch.autograd.Function):
    """Image tokens after their attention to prompt tokens; saves its inputs alone.

    Its inputs are options, then keys, values, what is added to the scores, the output's bias, gain
    and shift of the layer norm, and the five tensors of the image tokens.
    """

    @staticmethod
    def forward(
        ctx, scale: float, eps: float, shared: bool, *tensors: Tensor | None
    ) -> Float[Tensor, "M T C"]:
        """Return image tokens of masks.

        Args:
            ctx: What the backward pass needs.
            scale: Factor of the scores.
            eps: Added to the norm's variance.
            shared: Whether masks share image tokens.
            *tensors: The tensors.
        """
        *own, shift = contiguous(*tensors[:6])
        source = contiguous(*tensors[6:])
        ctx.save_for_backward(*own, *source)
        ctx.options = shared, scale, eps
        return FORWARD(own, shift, source, *ctx.options)

    @staticmethod
    @once_differentiable
    def backward(ctx, *gradients: Tensor) -> tuple[Tensor | None, ...]:  # pyrefly: ignore[bad-override]
        own, source = list(ctx.saved_tensors[:5]), list(ctx.saved_tensors[5:])
        shared, scale, _ = ctx.options
        sums, partial, *found = IMAGE(own, source, *ctx.options, gradients[0].contiguous())
        of_rows = ROWS_BACKWARD(own, source, shared, scale, sums)
        gain, shift, bias = partial.sum(0).to(own[4].dtype)[:, : len(own[4])]
        of_source = source_gradients(source, found, shared)[:5]
        return None, None, None, *of_rows, bias, gain, shift, *of_source
