"""Biases of relative positions: products of queries with the vectors of offsets, and gradients.

Queries are multiplied with the vectors of all offsets, and the result is stored where the row or
column of keys is that the offset leads to. What leads out of the window is left out.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from gigamask.plugins.kernels.blocks import narrow
from gigamask.plugins.kernels.operators import launch, parts, register, tuned
from gigamask.plugins.kernels.window_attention import (
    KEY_BLOCK,
    LOG2E,
    numbers_of,
    query_blocks,
    sizes_of,
    windows_of,
)
from gigamask.plugins.kernels.window_tokens import (
    add_weighted,
    bias_places,
    channels_of,
    load_attended,
    load_channels,
    load_tokens,
    products,
    query_block,
    store_channels,
    zero_channels,
)

SPLITS = 64
"""Programs that share the windows, each with sums of the tables' gradients of its own."""
ROWS = 32
"""Rows of a table whose gradients a program sums."""


@triton.jit
def _places(pointer, index, tokens, inside, offsets, numbers, AXIS: tl.constexpr):
    """Return where the biases of queries for offsets are, (M, N), and which of them exist."""
    size, w = numbers[2 + AXIS], numbers[3]
    keys = (tokens // w if AXIS == 0 else tokens % w)[:, None] + (size - 1 - offsets)[None]
    places = bias_places(pointer, index, tokens[:, None], keys, numbers, AXIS)
    return places, inside[:, None] & (keys >= 0) & (keys < size)


@triton.jit
def _load_slopes(slopes, index, tokens, inside, offsets, numbers, AXIS: tl.constexpr):
    """Load the gradients of the biases of queries for offsets, (M, N), in float32."""
    h, w = numbers[2], numbers[3]
    at, exists = _places(slopes[AXIS], index, tokens, inside, offsets, numbers, AXIS)
    found = tl.load(at, exists, 0.0).to(tl.float32)
    if AXIS == 0:
        for part in range(1, tl.cdiv(w, KEY_BLOCK)):
            more = at + (0 * index + part) * numbers[8] * h * h * w
            found += tl.load(more, exists, 0.0).to(tl.float32)
    return found


@triton.jit
def _load_table(tables, offsets, kind: tl.constexpr, numbers, S: tl.constexpr, AXIS: tl.constexpr):
    """Load the vectors of offsets, in two blocks of channels."""
    rows = numbers[5 + AXIS] + offsets
    exists = offsets < 2 * numbers[2 + AXIS] - 1
    found = load_channels(tables[AXIS], None, rows * S[0], exists, S)
    if len(found) > 1:
        return narrow(found[0].to(tl.float32), kind), narrow(found[1].to(tl.float32), kind)
    else:
        return (narrow(found[0].to(tl.float32), kind),)


@tuned(({"BM": 32, "BO": 32}, 4), ({"BM": 64, "BO": 64}, 8))
def _bias_kernel(
    source, tables, biases, numbers, S: tl.constexpr, BM: tl.constexpr, BO: tl.constexpr
):
    """Compute the biases of a block of queries."""
    index, tokens, places, inside = query_block(tl.program_id(0), numbers, BM)
    q = load_tokens(source, 0, index, places, inside, numbers, S)
    kind: tl.constexpr = biases[0].dtype.element_ty
    for AXIS in tl.static_range(2):
        for first in range(0, 2 * numbers[2 + AXIS] - 1, BO):
            offsets = first + tl.arange(0, BO)
            found = products(q, _load_table(tables, offsets, kind, numbers, S, AXIS)) * LOG2E
            at, exists = _places(biases[AXIS], index, tokens, inside, offsets, numbers, AXIS)
            tl.store(at, narrow(found, kind), exists)


@tuned(({"BM": 64, "BO": 32}, 4), ({"BM": 64, "BO": 64}, 8))
def _query_bias_kernel(
    tables, slopes, of_queries, of_projected, numbers, S: tl.constexpr, BM: tl.constexpr,
    BO: tl.constexpr,
):  # fmt: skip
    """Add the gradients of its biases to that of a block of queries, and store it."""
    kind: tl.constexpr = of_queries.dtype.element_ty
    index, tokens, places, inside = query_block(tl.program_id(0), numbers, BM)
    total = zero_channels(BM, S)
    for AXIS in tl.static_range(2):
        for first in range(0, 2 * numbers[2 + AXIS] - 1, BO):
            offsets = first + tl.arange(0, BO)
            slope = _load_slopes(slopes, index, tokens, inside, offsets, numbers, AXIS)
            vectors = _load_table(tables, offsets, kind, numbers, S, AXIS)
            total = add_weighted(total, slope, vectors)
    own = load_attended(of_queries, index, places, inside, numbers, S)
    if S[2]:
        total = total[0] + own[0].to(tl.float32), total[1] + own[1].to(tl.float32)
    else:
        total = (total[0] + own[0].to(tl.float32),)
    into, stride = channels_of(of_projected, 0, 3, index, numbers, S)
    store_channels(into, total, places * stride, inside, S)


@triton.jit
def _table_sums(source, slopes, sums, first, numbers, S, options: tl.constexpr):
    """Store one program's sums of the gradients of a block of a table's rows."""
    AXIS: tl.constexpr = options[0]
    BO: tl.constexpr = options[1]
    BM: tl.constexpr = options[2]
    count = numbers[8] * tl.cdiv(numbers[2] * numbers[3], BM)
    rows = first + tl.arange(0, BO)
    offsets = rows - numbers[5 + AXIS]
    total = zero_channels(BO, S)
    for number in range(tl.program_id(1), count, tl.num_programs(1)):
        index, tokens, places, inside = query_block(number, numbers, BM)
        slope = _load_slopes(slopes, index, tokens, inside, offsets, numbers, AXIS)
        q = load_tokens(source, 0, index, places, inside, numbers, S)
        total = add_weighted(total, tl.trans(slope), q)
    start = tl.program_id(1) * (numbers[9] + numbers[10]) + AXIS * numbers[9]
    store_channels(sums, total, (start + rows) * S[0], rows < numbers[9 + AXIS], S)


@tuned(({"BM": 64}, 8))
def _tables_kernel(
    source, slopes, sums, numbers, S: tl.constexpr, BO: tl.constexpr, BM: tl.constexpr
):
    """Compute a program's sums of the gradients of a block of rows of one table."""
    blocks, number = tl.cdiv(numbers[9], BO), tl.program_id(0)
    if number < blocks:
        _table_sums(source, slopes, sums, number * BO, numbers, S, (0, BO, BM))
    else:
        _table_sums(source, slopes, sums, (number - blocks) * BO, numbers, S, (1, BO, BM))


def _numbers(projected: Tensor, tables: list[Tensor], window: list[int]) -> tuple[Any, ...]:
    """Return the numbers of a kernel."""
    lengths = [len(table) for table in tables]
    starts = [length // 2 + 1 - size for length, size in zip(lengths, window, strict=False)]
    return *numbers_of(projected, window, *starts), *lengths


def window_bias(
    projected: Tensor, tables: list[Tensor], window: list[int]
) -> tuple[Tensor, Tensor]:
    """Return the biases of each query for the rows of keys, (X, h, N), and columns, (X, N, w).

    Args:
        projected: The projected tokens.
        tables: Vectors of all offsets of rows, and of columns.
        window: Height and width of a window, and heads.
    """
    found = _bias_shape(projected, tables, window)
    launch(
        _bias_kernel,
        query_blocks(projected.shape, window),
        *((projected, None), tuple(tables), found, _numbers(projected, tables, window)),
        S=sizes_of(projected, window),
    )
    return found


def _bias_shape(projected: Tensor, _: Any, window: list[int]) -> tuple[Tensor, Tensor]:
    h, w, heads = window
    count = windows_of(projected.shape, window) * heads
    return projected.new_empty(count, h, h * w), projected.new_empty(count, h * w, w)


def window_bias_queries(
    projected: Tensor,
    tables: list[Tensor],
    slopes: list[Tensor],
    of_queries: Tensor,
    into: Tensor,
    window: list[int],
) -> None:
    """Store the gradient of queries, with that of their biases, in that of projected tokens.

    Args:
        projected: The projected tokens.
        tables: Vectors of all offsets.
        slopes: Gradients of the biases.
        of_queries: Gradient of the queries, without that of their biases.
        into: Gradient of the projected tokens, but keys and values.
        window: Height and width of a window, and heads.
    """
    numbers = _numbers(projected, tables, window)
    launch(
        _query_bias_kernel,
        query_blocks(projected.shape, window),
        *(tuple(tables), tuple(slopes), of_queries, into, numbers),
        S=sizes_of(projected, window),
    )


def window_bias_tables(
    projected: Tensor, tables: list[Tensor], slopes: list[Tensor], window: list[int]
) -> Tensor:
    """Return each program's sums of the gradients of both tables, (P, L, D).

    Args:
        projected: The projected tokens.
        tables: Vectors of all offsets.
        slopes: Gradients of the biases.
        window: Height and width of a window, and heads.
    """
    sums = _tables_shape(projected, tables)
    numbers = _numbers(projected, tables, window)
    blocks = sum(parts(len(table), ROWS) for table in tables)
    launch(
        _tables_kernel,
        lambda _: (blocks, SPLITS),
        *((projected, None), tuple(slopes), sums, numbers),
        S=sizes_of(projected, window),
        BO=ROWS,
    )
    return sums


def _tables_shape(projected: Tensor, tables: list[Tensor], *_: Any) -> Tensor:
    shape = SPLITS, sum(len(table) for table in tables), tables[0].shape[1]
    return projected.new_empty(shape, dtype=torch.float32)


def _products(projected: Any, tables: Any, *given: Any) -> int:
    """Return the FLOPs of products of all queries with the vectors of offsets in a window."""
    h, w, heads = given[-1]
    slots = windows_of(projected, (h, w)) * heads * 64 * parts(h * w, 64)
    offsets = sum(64 * parts(2 * size - 1, 64) for size in (h, w))
    return 2 * slots * offsets * tables[0][1]


BIAS = register(window_bias, _bias_shape, _products)
QUERIES = register(window_bias_queries, lambda *_: None, _products, ("into",))
TABLES = register(window_bias_tables, _tables_shape, _products)
