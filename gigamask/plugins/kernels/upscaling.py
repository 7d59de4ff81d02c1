"""The decoder's upscaling: from image tokens to the logits of masks in one kernel.

A token becomes four pixels, and each of these four more. A program takes a block of tokens of one
mask and one of the four after the other; the logits of its four pixels and K masks are one product
with a matrix of 16 columns. The backward pass computes all again from the tokens, and sums the
gradients of weights over blocks of tokens in float32. Only the gradient of the first weight is a
matrix product of its own, of the gradients of the first layer's outputs.
"""

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from jaxtyping import Float
from torch import Tensor
from torch.autograd.function import once_differentiable

from gigamask.plugins.kernels.blocks import (
    gelu,
    gelu_slope,
    load_vector,
    narrow,
    normalize,
    normalize_backward,
    product,
)
from gigamask.plugins.kernels.operators import contiguous, launch, padded, parts, register, tuned

MAX_MASKS = 4
"""Most masks of a prompt, whose four pixels fill the 16 columns of a product."""


@triton.jit
def _second(weights, S: tl.constexpr):
    """Load the second weight as P4 inputs x 4 * P8 outputs, and its bias."""
    C4: tl.constexpr = S[1]
    C8: tl.constexpr = S[2]
    P4: tl.constexpr = S[5]
    P8: tl.constexpr = S[6]
    inputs, outputs = tl.arange(0, P4), tl.arange(0, 4 * P8)
    channel = outputs % P8
    rows = (outputs // P8) * C8 + channel
    inside = (inputs < C4)[:, None] & (channel < C8)[None]
    weight = tl.load(weights[4] + rows[None] * C4 + inputs[:, None], inside, 0.0)
    return weight, tl.load(weights[5] + channel, channel < C8, 0.0).to(tl.float32)


@triton.jit
def _is_own_pixel(P8: tl.constexpr):
    """Return which outputs of the second layer belong to the pixel of which column."""
    return (tl.arange(0, 4 * P8) // P8)[:, None] == (tl.arange(0, 16) % 4)[None]


@triton.jit
def _head_columns(heads, mask, S: tl.constexpr):
    """Load a mask's heads as 4 * P8 x 16, of which column 4 k + r takes pixel r to mask k."""
    C8: tl.constexpr = S[2]
    K: tl.constexpr = S[3]
    P8: tl.constexpr = S[6]
    channel, column = tl.arange(0, 4 * P8) % P8, tl.arange(0, 16) // 4
    inside = _is_own_pixel(P8) & (channel < C8)[:, None] & (column < K)[None]
    place = mask * C8 * K + channel[:, None] * K + column[None]
    return tl.load(heads + place, inside, 0.0)


@triton.jit
def _pixels(mask, rows, q, numbers, S: tl.constexpr):
    """Return where the logits of a block of tokens are, and which exist."""
    T, width, _, _ = numbers
    r, column = tl.arange(0, 16) % 4, tl.arange(0, 16) // 4
    y = (rows // width * 4 + q // 2 * 2)[:, None] + (r // 2)[None]
    x = (rows % width * 4 + q % 2 * 2)[:, None] + (r % 2)[None]
    inside = (rows < T)[:, None] & (column < S[3])[None]
    return (mask * S[3] + column[None]) * (16 * T) + y * (4 * width) + x, inside


@triton.jit
def _upscale(x, weights, second, mask, rows, q, numbers, S: tl.constexpr):
    """Return the normalized first layer and its factor, that before GELU, and the second layer."""
    C: tl.constexpr = S[0]
    C4: tl.constexpr = S[1]
    P4: tl.constexpr = S[5]
    BC: tl.constexpr = S[7]
    T, _, channels, eps = numbers
    outputs = tl.arange(0, P4)
    hidden = tl.zeros([rows.shape[0], P4], tl.float32)
    for start in range(0, channels, BC):
        columns = start + tl.arange(0, BC)
        inside = (rows < T)[:, None] & (columns < C)[None]
        tokens = tl.load(x + (mask * T + rows[:, None]) * C + columns[None], inside, 0.0)
        inside = (outputs < C4)[None] & (columns < C)[:, None]
        first = tl.load(weights[0] + (q * C4 + outputs[None]) * C + columns[:, None], inside, 0.0)
        hidden += product(tokens, first)
    hidden += load_vector(weights[1], C4, P4)[None]
    normal, factor = normalize(hidden, eps, C4, P4)
    gain, shift = load_vector(weights[2], C4, P4), load_vector(weights[3], C4, P4)
    scaled = normal * gain[None] + shift[None]
    wide = product(narrow(gelu(scaled), x.dtype.element_ty), second[0]) + second[1][None]
    return normal, factor, scaled, wide


@tuned(({"BT": 64}, 8), ({"BT": 32}, 4))
def _forward_kernel(x, weights, logits, numbers, S: tl.constexpr, BT: tl.constexpr):
    """Compute the logits of a block of tokens of one mask."""
    kind = x.dtype.element_ty
    rows, mask = tl.program_id(0) * BT + tl.arange(0, BT), tl.program_id(1).to(tl.int64)
    for q in range(4):
        head, second = _head_columns(weights[6], mask, S), _second(weights, S)
        _, _, _, wide = _upscale(x, weights, second, mask, rows, q, numbers, S)
        place, inside = _pixels(mask, rows, q, numbers, S)
        found = product(narrow(gelu(wide), kind), head)
        tl.store(logits + place, narrow(found, logits.dtype.element_ty), inside)


@tuned(({"BT": 32}, 8), ({"BT": 16}, 8))
def _backward_kernel(x, weights, gradient, found, numbers, S: tl.constexpr, BT: tl.constexpr):
    """Compute the gradients of one of the four pixels of all tokens of a mask."""
    C4: tl.constexpr = S[1]
    C8: tl.constexpr = S[2]
    P4: tl.constexpr = S[5]
    P8: tl.constexpr = S[6]
    kind = x.dtype.element_ty
    q, mask = tl.program_id(0), tl.program_id(1).to(tl.int64)
    hidden_gradient, partial, head_partial = found
    head, second = _head_columns(weights[6], mask, S), _second(weights, S)
    gain = load_vector(weights[2], C4, P4)
    of_second, of_second_bias = tl.zeros([P4, 4 * P8], tl.float32), tl.zeros([4 * P8], tl.float32)
    of_head, of_gain = tl.zeros([4 * P8, 16], tl.float32), tl.zeros([P4], tl.float32)
    of_shift, of_bias = tl.zeros([P4], tl.float32), tl.zeros([P4], tl.float32)
    columns = tl.arange(0, P4)
    for start in range(0, numbers[0], BT):
        rows = start + tl.arange(0, BT)
        normal, factor, scaled, wide = _upscale(x, weights, second, mask, rows, q, numbers, S)
        place, inside = _pixels(mask, rows, q, numbers, S)
        given = tl.load(gradient + place, inside, 0.0).to(kind)
        active, slope = gelu_slope(wide)
        of_head += product(tl.trans(narrow(active, kind)), given)
        wide_gradient = product(given, tl.trans(head)) * slope
        of_second_bias += tl.sum(wide_gradient, 0)
        narrowed = narrow(wide_gradient, kind)
        active, slope = gelu_slope(scaled)
        of_second += product(tl.trans(narrow(active, kind)), narrowed)
        of_scaled = product(narrowed, tl.trans(second[0])) * slope
        of_gain += tl.sum(of_scaled * normal, 0)
        of_shift += tl.sum(of_scaled, 0)
        of_hidden = normalize_backward(of_scaled * gain[None], normal, factor, C4, P4)
        of_bias += tl.sum(of_hidden, 0)
        exists = (rows < numbers[0])[:, None] & (columns < C4)[None]
        into = hidden_gradient + ((mask * numbers[0] + rows[:, None]) * 4 + q) * C4 + columns[None]
        tl.store(into, narrow(of_hidden, kind), exists)
    program = mask * 4 + q
    partial += program * (4 * C8 * C4 + C8 + 3 * C4)
    channel, four = tl.arange(0, 4 * P8) % P8, tl.arange(0, 4 * P8) // P8
    place = (four * C8 + channel)[None] * C4 + columns[:, None]
    inside = columns < C4
    tl.store(partial + place, of_second, inside[:, None] & (channel < C8)[None])
    partial += 4 * C8 * C4
    channel = tl.arange(0, P8)
    of_second_bias = tl.sum(tl.reshape(of_second_bias, [4, P8]), 0)
    tl.store(partial + channel, of_second_bias, channel < C8)
    partial += C8 + columns
    tl.store(partial, of_bias, inside)
    tl.store(partial + C4, of_gain, inside)
    tl.store(partial + 2 * C4, of_shift, inside)
    own = tl.where(_is_own_pixel(P8), of_head, 0.0)
    of_masks = tl.sum(tl.sum(tl.reshape(own, [4, P8, 4, 4]), 3), 0)
    place = tl.arange(0, P8)[:, None] * 4 + tl.arange(0, 4)[None]
    tl.store(head_partial + program * (4 * P8) + place, of_masks)


def _sizes(x: Tensor, weights: Sequence[Tensor]) -> tuple[int, ...]:
    """Return channels of the layers, masks, the channels with padding, and those of a block."""
    sizes = x.shape[-1], *reversed(weights[6].shape[1:]), weights[4].shape[1]
    channels, masks, eight, four = sizes
    block = padded(channels)
    return channels, four, eight, masks, block, padded(four), padded(eight), min(64, block)


def upscale(x: Tensor, weights: list[Tensor], width: int, eps: float) -> Tensor:
    """Return the logits, (M, K, 4 H, 4 W).

    Args:
        x: Image tokens.
        weights: The weights, and the outputs of the hypernetworks.
        width: Width of the grid of image tokens.
        eps: Added to the norm's variance.
    """
    logits = _forward_shape(x, weights, width)
    launch(
        _forward_kernel,
        lambda blocks: (parts(x.shape[1], blocks["BT"]), len(x)),
        *(x, tuple(weights), logits, (x.shape[1], width, x.shape[2], eps)),
        S=_sizes(x, weights),
    )
    return logits


def _forward_shape(x: Tensor, weights: Any, width: int, *_: Any) -> Tensor:
    return x.new_empty(len(x), weights[6].shape[-1], 4 * (x.shape[1] // width), 4 * width)


def upscale_backward(
    x: Tensor, weights: list[Tensor], gradient: Tensor, width: int, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return gradients of the first layer's outputs, and of weights and heads by program.

    Args:
        x: Image tokens.
        weights: The weights, and the outputs of the hypernetworks.
        gradient: Gradient of the result.
        width: Width of the grid of image tokens.
        eps: Added to the norm's variance.
    """
    found = _backward_shape(x, weights)
    launch(
        _backward_kernel,
        lambda _: (4, len(x)),
        *(x, tuple(weights), gradient, found, (x.shape[1], width, x.shape[2], eps)),
        S=_sizes(x, weights),
    )
    return found


def _backward_shape(x: Tensor, weights: Any, *_: Any) -> Any:
    c4, c8 = _sizes(x, weights)[1:3]
    eight = padded(c8)
    return (
        x.new_empty(*x.shape[:2], len(weights[0])),
        x.new_empty(4 * len(x), 4 * c8 * c4 + c8 + 3 * c4, dtype=torch.float32),
        x.new_empty(len(x), 4, eight, 4, dtype=torch.float32),
    )


def _products(x: Any, weights: Any, *_: Any) -> int:
    """Return the FLOPs of the forward pass, by shapes."""
    four, wide = padded(weights[4][1]), 4 * padded(weights[6][1])
    return 2 * x[0] * x[1] * 4 * (padded(x[2]) * four + four * wide + wide * 16)


UPSCALE = register(upscale, _forward_shape, _products)
UPSCALE_BACKWARD = register(upscale_backward, _backward_shape, lambda *args: 3 * _products(*args))


class Upscaling(torch.autograd.Function):
    """Logits of masks from image tokens; saves its inputs alone.

    Its inputs are the grid's width and the norm's eps, the tokens, first weight and bias, gain and
    shift of the layer norm, second weight and bias, and the hypernetworks' outputs.
    """

    @staticmethod
    def forward(
        ctx, width: int, eps: float, x: Float[Tensor, "M T C"], *weights: Tensor
    ) -> Float[Tensor, "M K h w"]:
        """Return the logits.

        Args:
            ctx: What the backward pass needs.
            width: Width of the grid of image tokens.
            eps: Added to the norm's variance.
            x: Image tokens.
            *weights: The weights, and the outputs of the hypernetworks.
        """
        tokens, *own = contiguous(x, *weights)
        ctx.save_for_backward(tokens, *own)
        ctx.options = width, eps
        return UPSCALE(tokens, own, width, eps)

    @staticmethod
    @once_differentiable
    def backward(ctx, *gradients: Tensor) -> tuple[Tensor | None, ...]:  # pyrefly: ignore[bad-override]
        x, *weights = ctx.saved_tensors
        c4, c8, masks = _sizes(x, weights)[1:4]
        hidden, partial, heads = UPSCALE_BACKWARD(
            x, weights, gradients[0].contiguous(), *ctx.options
        )
        sums = partial.sum(0).to(weights[4].dtype)
        second, second_bias, *vectors = sums.split([4 * c8 * c4, c8, c4, c4, c4])
        return (
            None,
            None,
            hidden @ weights[0],
            hidden.flatten(0, 1).T @ x.flatten(0, 1),
            *vectors,
            second.view_as(weights[4]),
            second_bias,
            heads.sum(1)[:, :c8, :masks],
        )
