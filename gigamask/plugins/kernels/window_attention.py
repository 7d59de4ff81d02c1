"""Attention within windows with decomposed relative positions, read in place from the grid.

The score of a query at (i, j) and a key at (u, v) is `scale * q.k + by_row[u] + by_column[v]`,
where `by_row[u]` is the product of the query with the vector of offset i - u, and `by_column[v]`
likewise. These two vectors of a query are the whole bias that is stored. Both and the scores are
times log2(e), as exponents of 2. A block of keys is a part of a row of the window, or rows of a
narrow one.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from gigamask.plugins.kernels.blocks import narrow
from gigamask.plugins.kernels.operators import launch, padded, parts, register, tuned
from gigamask.plugins.kernels.window_tokens import (
    add_weighted,
    bias_places,
    channels_of,
    key_block,
    load_attended,
    load_tokens,
    products,
    query_block,
    scaled,
    store_channels,
    token_places,
    zero_channels,
)

LOG2E = tl.constexpr(1.4426950408889634)
KEY_BLOCK = tl.constexpr(16)
"""Keys of a block where gradients of queries are computed."""
Source = list[Tensor | None]
"""Projected tokens (B, H, W, 3 * heads * D), and the projection's bias if there is padding."""


@triton.jit
def _scores(a, b, by_row, by_column, exists, numbers):
    """Return the scores of a block of pairs; those that do not exist are -inf."""
    found = products(a, b) * (numbers[7] * LOG2E) + by_row.to(tl.float32)
    return tl.where(exists, found + by_column.to(tl.float32), -float("inf"))


@triton.jit
def _load_row_bias(by_row, index, tokens, inside, first, numbers, S, N: tl.constexpr):
    """Load the biases of queries for a block of N keys, (M, N) or (M, 1)."""
    if S[3] >= N:
        places = bias_places(by_row, index, tokens, first, numbers, 0)
        found = tl.load(places, inside, 0.0)[:, None]
    else:
        rows, _ = key_block(first, 0, S, N)
        exists = inside[:, None] & (rows < numbers[2])[None]
        places = bias_places(by_row, index, tokens[:, None], rows[None], numbers, 0)
        found = tl.load(places, exists, 0.0)
    return found


@triton.jit
def _load_column_bias(by_column, index, tokens, inside, columns, numbers):
    """Load the biases of queries for a block of keys, (M, N)."""
    exists = inside[:, None] & (columns < numbers[3])[None]
    places = bias_places(by_column, index, tokens[:, None], columns[None], numbers, 1)
    return tl.load(places, exists, 0.0)


@triton.jit
def _load_pairs(source, q, by_row, by_column, index, keys, numbers, S: tl.constexpr):
    """Return a block of keys and values, and their scores with a block of queries."""
    at, within = token_places(index, keys[0], keys[1], numbers)
    k = load_tokens(source, 1, index, at, within, numbers, S)
    exists = ((keys[0] < numbers[2]) & (keys[1] < numbers[3]))[None]
    scores = _scores(q, k, by_row, by_column, exists, numbers)
    return k, load_tokens(source, 2, index, at, within, numbers, S), scores


@triton.jit
def _attend(found, most, total, scores, v):
    """Return sums of values and of shares, and largest scores, with those of a block of keys."""
    above = tl.maximum(most, tl.max(scores, 1))
    shares, factor = tl.exp2(scores - above[:, None]), tl.exp2(most - above)
    found = add_weighted(scaled(found, factor[:, None]), shares, v)
    return found, above, total * factor + tl.sum(shares, 1)


@tuned(({"BM": 64, "BN": 32}, 4), ({"BM": 128, "BN": 64}, 8))
def _forward_kernel(
    source, biases, out, lse, numbers, S: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr
):
    """Compute attended values of a block of queries."""
    C: tl.constexpr = S[3] if S[3] < BN else BN
    h, w = numbers[2], numbers[3]
    index, tokens, places, inside = query_block(tl.program_id(0), numbers, BM)
    q = load_tokens(source, 0, index, places, inside, numbers, S)
    most = tl.full([BM], -float("inf"), tl.float32)
    total, found = tl.zeros([BM], tl.float32), zero_channels(BM, S)
    for start in range(0, w, C):
        _, columns = key_block(0, start, S, BN)
        by_column = _load_column_bias(biases[1], index, tokens, inside, columns, numbers)
        for first in range(0, h, BN // C):
            by_row = _load_row_bias(biases[0], index, tokens, inside, first, numbers, S, BN)
            keys = key_block(first, start, S, BN)
            _k, v, scores = _load_pairs(source, q, by_row, by_column, index, keys, numbers, S)
            found, most, total = _attend(found, most, total, scores, v)
    into, stride = channels_of(out, 0, 1, index, numbers, S)
    store_channels(into, scaled(found, (1 / total)[:, None]), places * stride, inside, S)
    tl.store(lse + index * h * w + tokens, most + tl.log2(total), inside)


@tuned(({"BM": 64, "BN": KEY_BLOCK.value}, 8), ({"BM": 64, "BN": KEY_BLOCK.value}, 4))
def _queries_kernel(
    source, biases, given, found, numbers, S: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr
):
    """Compute the gradients of a block of queries, without those of its biases, and of these."""
    C: tl.constexpr = S[3] if S[3] < BN else BN
    h, w = numbers[2], numbers[3]
    out, lse, gradient = given
    of_queries, of_rows, of_columns, delta = found
    index, tokens, places, inside = query_block(tl.program_id(0), numbers, BM)
    q = load_tokens(source, 0, index, places, inside, numbers, S)
    g = load_attended(gradient, index, places, inside, numbers, S)
    o = load_attended(out, index, places, inside, numbers, S)
    mean = tl.zeros([BM], tl.float32)
    for BLOCK in tl.static_range(len(g)):
        mean += tl.sum(g[BLOCK].to(tl.float32) * o[BLOCK].to(tl.float32), 1)
    tl.store(delta + index * h * w + tokens, mean, inside)
    level = tl.load(lse + index * h * w + tokens, inside, float("inf"))
    total = zero_channels(BM, S)
    for start in range(0, w, C):
        _, columns = key_block(0, start, S, BN)
        by_column = _load_column_bias(biases[1], index, tokens, inside, columns, numbers)
        of_column = tl.zeros([BM, BN], tl.float32)
        part = of_rows + (0 * index + start // C) * numbers[8] * h * h * w
        for first in range(0, h, BN // C):
            by_row = _load_row_bias(biases[0], index, tokens, inside, first, numbers, S, BN)
            keys = key_block(first, start, S, BN)
            k, v, scores = _load_pairs(source, q, by_row, by_column, index, keys, numbers, S)
            slope = tl.exp2(scores - level[:, None]) * (products(g, v) - mean[:, None])
            total = add_weighted(total, slope, k)
            of_column += slope
            by_rows = tl.sum(tl.reshape(slope, [BM, BN // C, C]), 2)
            _store_bias(part, by_rows, index, tokens, inside, first, 0, numbers)
        by_columns = tl.sum(tl.reshape(of_column, [BM, BN // C, C]), 1)
        _store_bias(of_columns, by_columns, index, tokens, inside, start, 1, numbers)
    into, stride = channels_of(of_queries, 0, 1, index, numbers, S)
    store_channels(into, scaled(total, numbers[7]), places * stride, inside, S)


@triton.jit
def _store_bias(pointer, values, index, tokens, inside, first, AXIS: tl.constexpr, numbers):
    """Store the gradients of biases for some rows (0) or for the columns (1) of keys."""
    keys = first + tl.arange(0, values.shape[1])
    exists = inside[:, None] & (keys < numbers[2 + AXIS])[None]
    places = bias_places(pointer, index, tokens[:, None], keys[None], numbers, AXIS)
    tl.store(places, narrow(values, pointer.dtype.element_ty), exists)


@tuned(({"BM": 16, "BN": 64}, 4), ({"BM": 64, "BN": 64}, 8))
def _keys_kernel(
    source, biases, given, found, numbers, S: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr
):
    """Compute the gradients of a block of keys and values, and the sums of those of padding."""
    C: tl.constexpr = S[3] if S[3] < BN else BN
    h, w = numbers[2], numbers[3]
    lse, delta, gradient = given
    of_projected, of_bias = found
    across = tl.cdiv(w, C)
    blocks = tl.cdiv(h, BN // C) * across
    index, number = (tl.program_id(0) // blocks).to(tl.int64), tl.program_id(0) % blocks
    first = number // across * (BN // C)
    rows, columns = key_block(first, number % across * C, S, BN)
    at, within = token_places(index, rows, columns, numbers)
    k = load_tokens(source, 1, index, at, within, numbers, S)
    v = load_tokens(source, 2, index, at, within, numbers, S)
    of_k, of_v = zero_channels(BN, S), zero_channels(BN, S)
    exists = (rows < h) & (columns < w)
    for block in range(tl.cdiv(h * w, BM)):
        tokens = block * BM + tl.arange(0, BM)
        places, inside = token_places(index, tokens // w, tokens % w, numbers)
        q = load_tokens(source, 0, index, places, inside, numbers, S)
        g = load_attended(gradient, index, places, inside, numbers, S)
        level = tl.load(lse + index * h * w + tokens, inside, float("inf"))
        mean = tl.load(delta + index * h * w + tokens, inside, 0.0)
        by_row = _load_row_bias(biases[0], index, tokens, inside, first, numbers, S, BN)
        by_column = _load_column_bias(biases[1], index, tokens, inside, columns, numbers)
        pair = tl.trans(by_row), tl.trans(by_column)
        shares = tl.exp2(_scores(k, q, *pair, exists[:, None], numbers) - level[None])
        of_v = add_weighted(of_v, shares, g)
        of_k = add_weighted(of_k, shares * (products(v, g) - mean[None]), q)
    of_k = scaled(of_k, numbers[7])
    into, stride = channels_of(of_projected, 1, 3, index, numbers, S)
    store_channels(into, of_k, at * stride, within, S)
    into, _ = channels_of(of_projected, 2, 3, index, numbers, S)
    store_channels(into, of_v, at * stride, within, S)
    if of_bias is not None:
        values, part = (scaled(of_k, 0.0), of_k, of_v), index // numbers[4] * blocks + number
        _store_padding(of_bias, values, exists & (within == 0), part, index, numbers, S)


@triton.jit
def _store_padding(into, values, chosen, part, index, numbers, S: tl.constexpr):
    """Store the sums of the gradients of padding, which are 0 for queries."""
    for BLOCK in tl.static_range(len(values[0])):
        columns = BLOCK * S[1] + tl.arange(0, S[1 + BLOCK])
        for WHICH in tl.static_range(3):
            found = tl.sum(tl.where(chosen[:, None], values[WHICH][BLOCK], 0.0), 0)
            head = (part * 3 + WHICH) * numbers[4] + index % numbers[4]
            tl.store(into + head * S[0] + columns, found, columns < S[0])


def sizes_of(projected: Tensor, window: list[int]) -> tuple[int, ...]:
    """Return the channels of a head, of its two blocks, and of a row of keys with padding.

    Args:
        projected: The projected tokens.
        window: Height and width of a window, and heads.
    """
    channels = projected.shape[-1] // (3 * window[2])
    first = max(16, 1 << (channels.bit_length() - 1))
    second = padded(channels - first) if channels > first else 0
    return channels, first, second, padded(window[1])


def numbers_of(
    projected: Tensor, window: list[int], first_row: int = 0, first_column: int = 0
) -> tuple[Any, ...]:
    """Return the numbers of a kernel.

    Args:
        projected: The projected tokens.
        window: Height and width of a window, and heads.
        first_row: First vector used of the table of rows.
        first_column: That of columns.
    """
    scale = (projected.shape[-1] // (3 * window[2])) ** -0.5
    count = windows_of(projected.shape, window) * window[2]
    return *projected.shape[1:3], *window, first_row, first_column, scale, count


def windows_of(shape: Any, window: Sequence[int]) -> int:
    """Return the number of windows of all images.

    Args:
        shape: Shape of the projected tokens.
        window: Height and width of a window, and heads.
    """
    return shape[0] * parts(shape[1], window[0]) * parts(shape[2], window[1])


def query_blocks(shape: Any, window: list[int]) -> Callable[[dict[str, int]], tuple[int]]:
    """Return a function from a configuration to the blocks of queries of all windows and heads.

    Args:
        shape: Shape of the projected tokens.
        window: Height and width of a window, and heads.
    """
    (h, w, heads), count = window, windows_of(shape, window)
    return lambda blocks: (count * heads * parts(h * w, blocks["BM"]),)


def key_blocks(window: Sequence[int], keys: int) -> int:
    """Return the blocks of keys of a window.

    Args:
        window: Height and width of a window, and heads.
        keys: Keys of a block.
    """
    columns = min(keys, padded(window[1]))
    return parts(window[0], keys // columns) * parts(window[1], columns)


def window_attention(
    source: Source, biases: list[Tensor], window: list[int]
) -> tuple[Tensor, Tensor]:
    """Return attended values, (B, H, W, heads * D), and the logarithm of each row's sum.

    Args:
        source: The projected tokens.
        biases: Biases of each query for the rows and the columns of keys.
        window: Height and width of a window, and heads.
    """
    projected = source[0]
    assert projected is not None
    found, sizes = _forward_shape(source, biases, window), sizes_of(projected, window)
    grid = query_blocks(projected.shape, window)
    args = tuple(source), tuple(biases), *found, numbers_of(projected, window)
    launch(_forward_kernel, grid, *args, S=sizes)
    return found


def _forward_shape(source: Source, biases: list[Tensor], window: list[int]) -> Any:
    x = source[0]
    assert x is not None
    lse = x.new_empty(biases[0].shape[0], window[0] * window[1], dtype=torch.float32)
    return x.new_empty(*x.shape[:3], x.shape[3] // 3), lse


def window_attention_queries(
    source: Source, biases: list[Tensor], given: list[Tensor], window: list[int]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of queries, without those of their biases, of both biases, and the mean
    gradient of each query's scores. Those of biases for rows are sums over parts of the columns.

    Args:
        source: The projected tokens.
        biases: Biases of each query.
        given: Attended values, logarithms of the sums, and the gradient of the values.
        window: Height and width of a window, and heads.
    """
    projected = source[0]
    assert projected is not None
    found, sizes = _queries_shape(source, biases, given), sizes_of(projected, window)
    grid = query_blocks(projected.shape, window)
    args = tuple(source), tuple(biases), tuple(given), found, numbers_of(projected, window)
    launch(_queries_kernel, grid, *args, S=sizes)
    return found


def _queries_shape(source: Source, biases: list[Tensor], given: list[Tensor], *_: Any) -> Any:
    out, lse = given[:2]
    rows = biases[0].new_empty(parts(biases[1].shape[2], KEY_BLOCK.value), *biases[0].shape)
    return torch.empty_like(out), rows, torch.empty_like(biases[1]), torch.empty_like(lse)


def window_attention_keys(
    source: Source, biases: list[Tensor], given: list[Tensor], window: list[int]
) -> tuple[Tensor, Tensor]:
    """Return the gradient of projected tokens, where those of queries are not set yet, and sums of
    the gradients of padding, (P, 3 * heads * D).

    Args:
        source: The projected tokens.
        biases: Biases of each query.
        given: Logarithms of the sums, mean gradients, and the gradient of the values.
        window: Height and width of a window, and heads.
    """
    projected, bias = source
    assert projected is not None
    found, sizes = _keys_shape(source, biases, given, window), sizes_of(projected, window)
    count = windows_of(projected.shape, window) * window[2] * key_blocks(window, 64)
    pair = found[0], None if bias is None else found[1]
    args = tuple(source), tuple(biases), tuple(given), pair, numbers_of(projected, window)
    launch(_keys_kernel, lambda _: (count,), *args, S=sizes)
    return found


def _keys_shape(source: Source, biases: Any, given: Any, window: list[int]) -> Any:
    projected, bias = source
    assert projected is not None
    blocks = key_blocks(window, 64)
    count = 0 if bias is None else windows_of(projected.shape, window) * blocks
    sums = projected.new_empty(count, projected.shape[3], dtype=torch.float32)
    return torch.empty_like(projected), sums


def _products(count: int, keys: int) -> Callable[..., int]:
    """Return a function that returns the FLOPs of products of all queries and keys."""

    def flops(source: Any, *given: Any) -> int:
        shape, (h, w, heads) = source[0], given[-1]
        pairs = windows_of(shape, (h, w)) * heads * 64 * parts(h * w, 64)
        pairs *= keys * key_blocks((h, w), keys)
        return 2 * count * pairs * (shape[3] // (3 * heads))

    return flops


FORWARD = register(window_attention, _forward_shape, _products(2, 32))
QUERIES = register(window_attention_queries, _queries_shape, _products(3, KEY_BLOCK.value))
KEYS = register(window_attention_keys, _keys_shape, _products(4, 64))
