"""Layers of the prompt tokens: linear layers with the norms, sums and activations beside them.

All masks' tokens are the rows of one matrix. A layer norm is computed again by each program that
multiplies its result, whose rows fit into a program; sums of many products are split by columns.
Gains and shifts of norms are float32, (SLOTS, 2, C), the same in each slot, so that a program adds
its gradient to a slot of its own. The gradients of weights are left to the caller.
"""

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from gigamask.plugins.kernels.blocks import (
    load_rows,
    load_vector,
    narrow,
    normalize,
    normalize_backward,
    product,
    store_rows,
)
from gigamask.plugins.kernels.operators import launch, padded, parts, register, tuned

SLOTS = 32
"""Programs that share the rows where gradients of norms are summed."""


@triton.jit
def _normalized(x, norm, rows, R, eps, C: tl.constexpr, P: tl.constexpr):
    """Return normalized rows, the factor, and the gain."""
    normal, factor = normalize(load_rows(x, rows, R, C, P).to(tl.float32), eps, C, P)
    return normal, factor, load_vector(norm, C, P)[None]


@triton.jit
def _linear(x, weight, bias, columns, D, C: tl.constexpr, P: tl.constexpr):
    """Return some outputs of a linear layer."""
    inner = tl.arange(0, P)
    inside = (inner < C)[:, None] & (columns < D)[None]
    tile = tl.load(weight + columns[None] * C + inner[:, None], inside, 0.0)
    return product(x, tile) + tl.load(bias + columns, columns < D, 0.0).to(tl.float32)[None]


@tuned(({"BR": 32, "BD": 64}, 4), ({"BR": 16, "BD": 128}, 4))
def _project_kernel(
    given, norm, weights, outs, numbers, S: tl.constexpr, BR: tl.constexpr, BD: tl.constexpr
):
    """Normalize a block of rows, and compute some outputs of one or two linear layers."""
    C: tl.constexpr = S[0]
    P: tl.constexpr = S[1]
    D1: tl.constexpr = S[2]
    D2: tl.constexpr = S[3]
    RANGES: tl.constexpr = S[4]
    FIRST: tl.constexpr = (D1 + BD - 1) // BD
    x, positions = given
    R, eps = numbers
    rows, block = tl.program_id(0) * BR + tl.arange(0, BR), tl.program_id(1)
    normal, _, gain = _normalized(x, norm, rows, R, eps, C, P)
    kind = x.dtype.element_ty
    own = narrow(normal * gain + load_vector(norm + C, C, P)[None], kind)
    moved = own
    if positions is not None:
        added = load_rows(positions, rows, R, C, P).to(tl.float32)
        moved = narrow(own.to(tl.float32) + added, kind)
    if block == 0:
        store_rows(outs[0], own, rows, R, C, P)
        if positions is not None:
            store_rows(outs[1], moved, rows, R, C, P)
    columns = block * BD + tl.arange(0, BD)
    if D2 == 0:
        found = _linear(moved, weights[0], weights[1], columns, D1, C, P)
        if positions is None:
            found = tl.maximum(found, 0.0)
        exists = columns < D1
    else:
        beyond = columns - FIRST * BD
        if block < FIRST:
            found = _linear(moved, weights[0], weights[1], columns, D1, C, P)
        else:
            found = _linear(own, weights[2], weights[3], beyond, D2, C, P)
        exists = tl.where(block < FIRST, columns < D1, beyond < D2)
        columns = tl.where(block < FIRST, columns, D1 + beyond)
    before, width = columns, columns
    for part in tl.static_range(RANGES):
        inside = columns >= S[5 + 4 * part]
        offset = R * S[6 + 4 * part] + S[7 + 4 * part] - S[5 + 4 * part]
        before = tl.where(inside, columns + offset, before)
        width = tl.where(inside, S[8 + 4 * part], width)
    into = outs[2] + before[None] + rows[:, None] * width[None]
    tl.store(into, narrow(found, kind), (rows < R)[:, None] & exists[None])


@tuned(({"BR": 32, "BD": 64}, 4), ({"BR": 16, "BD": 128}, 4))
def _project_backward_kernel(
    tensors, hidden, outs, numbers, S: tl.constexpr, BR: tl.constexpr, BD: tl.constexpr
):
    """Compute gradients of what is normalized, of the norm, and of the inputs of a layer before."""
    gradient, x, norm, weight = tensors
    C: tl.constexpr = S[0]
    P: tl.constexpr = S[1]
    D: tl.constexpr = S[2]
    R, eps = numbers
    kind = x.dtype.element_ty
    slot, block = tl.program_id(0), tl.program_id(1)
    columns, inner = block * BD + tl.arange(0, BD), tl.arange(0, P)
    inside = (inner < C)[:, None] & (columns < D)[None]
    tile = tl.load(weight + inner[:, None] * D + columns[None], inside, 0.0)
    of_gain, of_shift = tl.zeros([P], tl.float32), tl.zeros([P], tl.float32)
    for first in range(slot * BR, R, tl.num_programs(0) * BR):
        rows = first + tl.arange(0, BR)
        normal, factor, gain = _normalized(x, norm, rows, R, eps, C, P)
        given = load_rows(gradient, rows, R, C, P).to(tl.float32)
        of_gain += tl.sum(given * normal, 0)
        of_shift += tl.sum(given, 0)
        of_sum = narrow(normalize_backward(given * gain, normal, factor, C, P), kind)
        if block == 0:
            store_rows(outs[0], of_sum, rows, R, C, P)
        found = product(of_sum, tile)
        place = rows[:, None] * D + columns[None]
        exists = (rows < R)[:, None] & (columns < D)[None]
        if hidden is not None:
            active = tl.load(hidden + place, exists, 0.0)
            found = tl.where(active > 0, found, 0.0)
        tl.store(outs[2] + place, narrow(found, kind), exists)
    if block == 0:
        into = outs[1] + slot * (2 * C) + inner
        tl.store(into, of_gain, inner < C)
        tl.store(into + C, of_shift, inner < C)


@triton.jit
def _products(total, x, weight, which, D, S: tl.constexpr, BK: tl.constexpr):
    """Add to `total` the products of rows of D numbers with columns of a weight."""
    C: tl.constexpr = S[0]
    rows, columns, R = which
    for start in range(0, D, BK):
        inner = start + tl.arange(0, BK)
        inside = (rows < R)[:, None] & (inner < D)[None]
        left = tl.load(x + rows[:, None] * D + inner[None], inside, 0.0)
        inside = (inner < D)[:, None] & (columns < C)[None]
        if S[1]:
            right = tl.load(weight + columns[None] * D + inner[:, None], inside, 0.0)
        else:
            right = tl.load(weight + inner[:, None] * C + columns[None], inside, 0.0)
        total += product(left, right)
    return total


@tuned(({"BR": 32, "BD": 32, "BK": 128}, 4), ({"BR": 16, "BD": 64, "BK": 128}, 4))
def _sum_kernel(
    pairs,
    added,
    outs,
    numbers,
    S: tl.constexpr,
    BR: tl.constexpr,
    BD: tl.constexpr,
    BK: tl.constexpr,
):
    """Compute some columns of a block of rows of a sum of products."""
    C: tl.constexpr = S[0]
    R, first, second = numbers
    kind = outs[0].dtype.element_ty
    rows = tl.program_id(0) * BR + tl.arange(0, BR)
    columns = tl.program_id(1) * BD + tl.arange(0, BD)
    place, inside = rows[:, None] * C + columns[None], (rows < R)[:, None] & (columns < C)[None]
    which, total = (rows, columns, R), tl.zeros([BR, BD], tl.float32)
    total = _products(total, pairs[0], pairs[1], which, first, S, BK)
    if outs[1] is not None:
        moved = total
        if added[2] is not None:
            moved += tl.load(added[2] + place, inside, 0.0).to(tl.float32)
        tl.store(outs[1] + place, narrow(moved, kind), inside)
    if pairs[2] is not None:
        total = _products(total, pairs[2], pairs[3], which, second, S, BK)
    if added[0] is not None:
        total += tl.load(added[0] + columns, columns < C, 0.0).to(tl.float32)[None]
    if added[1] is not None:
        total += tl.load(added[1] + place, inside, 0.0).to(tl.float32)
    tl.store(outs[0] + place, narrow(total, kind), inside)


def project_tokens(
    x: Tensor,
    positions: Tensor | None,
    norm: Tensor,
    weights: list[Tensor],
    ranges: list[int],
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return normalized rows, those plus positions, and outputs of linear layers.

    Args:
        x: Rows to normalize.
        positions: What is added for the first layer; without, its outputs pass a ReLU.
        norm: Gain and shift of the norm.
        weights: Weight and bias of one or two layers, the second of which reads no positions.
        ranges: For each range of outputs its first, the channels of all rows before it in memory,
            the channels before it in a row there, and those of a row.
        eps: Added to the norm's variance.
    """
    outs = _project_shape(x, positions, norm, weights)
    count, channels = x.shape
    widths = [len(weights[0]), len(weights[2]) if weights[2:] else 0]
    launch(
        _project_kernel,
        lambda b: (parts(count, b["BR"]), sum(parts(each, b["BD"]) for each in widths)),
        *((x, positions), norm, tuple(weights), outs, (count, eps)),
        S=(channels, padded(channels), *widths, len(ranges) // 4, *ranges),
    )
    return outs


def _project_shape(x: Tensor, positions: Any, norm: Any, weights: Any, *_: Any) -> Any:
    width = sum(map(len, weights[::2]))
    moved = x.new_empty(0 if positions is None else x.shape)
    return x.new_empty(x.shape), moved, x.new_empty(len(x), width)


def project_tokens_backward(
    tensors: list[Tensor], hidden: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return gradients of what was normalized, of the norm by slot, and of a layer's inputs.

    The layer's outputs, and a residual, have been summed and normalized.

    Args:
        tensors: Gradient of the normalized rows, the rows before the norm, the norm, and the
            layer's weight.
        hidden: Inputs of the layer that have passed a ReLU; None if they have not.
        eps: Added to the norm's variance.
    """
    _, x, _, weight = tensors
    outs = _project_backward_shape(tensors)
    launch(
        _project_backward_kernel,
        lambda blocks: (SLOTS, parts(weight.shape[1], blocks["BD"])),
        *(tuple(tensors), hidden, outs, (len(x), eps)),
        S=(x.shape[1], padded(x.shape[1]), weight.shape[1]),
    )
    return outs


def _project_backward_shape(tensors: Any, *_: Any) -> Any:
    _, x, norm, weight = tensors
    return x.new_empty(x.shape), norm.new_empty(norm.shape), x.new_empty(len(x), weight.shape[1])


def sum_tokens(
    pairs: list[Tensor], added: list[Tensor | None], is_backward: bool
) -> tuple[Tensor, Tensor]:
    """Return the sum of one or two products and of what is added, and the first product likewise.

    Args:
        pairs: Rows and weight of each product.
        added: A bias and rows for the sum; and rows for the first product, if it is returned.
        is_backward: Whether rows are gradients of outputs of layers with these weights, not inputs.
    """
    outs = _sum_shape(pairs, added, is_backward)
    count, channels = outs[0].shape
    launch(
        _sum_kernel,
        lambda blocks: (parts(count, blocks["BR"]), parts(channels, blocks["BD"])),
        *((*pairs, None, None)[:4], (*added, None)[:3]),
        (outs[0], outs[1] if len(added) == 3 else None),
        (count, *(each.shape[1] for each in [*pairs, pairs[0]][:3:2])),
        S=(channels, 0 if is_backward else 1),
    )
    return outs


def _sum_shape(pairs: Any, added: Any, is_backward: bool) -> Any:
    x, weight = pairs[:2]
    channels = weight.shape[1] if is_backward else len(weight)
    count = len(x) if len(added) == 3 else 0
    return x.new_empty(len(x), channels), x.new_empty(count, channels)


def _flops(rows: Any, weights: Any) -> int:
    """Return the FLOPs of products of rows with weights, from their shapes."""
    return 2 * rows[0] * sum(wide * deep for wide, deep in weights)


PROJECT = register(
    project_tokens, _project_shape, lambda x, _, norm, weights, *rest: _flops(x, weights[::2])
)
PROJECT_BACKWARD = register(
    project_tokens_backward, _project_backward_shape, lambda own, *_: _flops(own[1], own[3:])
)
SUM = register(sum_tokens, _sum_shape, lambda pairs, *_: _flops(pairs[0], pairs[1::2]))
