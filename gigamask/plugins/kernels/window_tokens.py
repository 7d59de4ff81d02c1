"""Tokens of the encoder's windows as kernels read them: where they are, and their channels.

A window of h x w tokens is a part of the grid of an image, or all of it. The tokens of windows that
reach over the edge of the grid are padding, whose queries, keys and values are the projection's
bias. `numbers` of a kernel are height and width of the grid and of a window, heads, the first rows
used of both tables of relative positions, the scale of the scores, and the heads of all windows.

The channels of a head are in two blocks, as 80 are in 64 and 16, since sizes of blocks are powers
of two. `S` are the channels, those of each block, 0 if there is one, and the width of a window with
padding.
"""

import triton
import triton.language as tl

from gigamask.plugins.kernels.blocks import narrow, product


@triton.jit
def token_places(index, row, column, numbers):
    """Return where tokens of a window are in an image, and which of them are in the grid.

    Args:
        index: Number of the window and head.
        row: Their rows in the window.
        column: Their columns.
        numbers: Sizes.
    """
    H, W, h, w = numbers[0], numbers[1], numbers[2], numbers[3]
    across, down, window = tl.cdiv(W, w), tl.cdiv(H, h), (index // numbers[4]).to(tl.int32)
    y, x = window // across % down * h + row, window % across * w + column
    inside = (row < h) & (column < w) & (y < H) & (x < W)
    return y * W + x, inside


@triton.jit
def query_block(number, numbers, M: tl.constexpr):
    """Return window and head, tokens, their places, and which are in the grid, of M queries.

    Args:
        number: Which block of all windows and heads.
        numbers: Sizes.
        M: Tokens of a block.
    """
    h, w = numbers[2], numbers[3]
    blocks = tl.cdiv(h * w, M)
    index = (number // blocks).to(tl.int64)
    tokens = number % blocks * M + tl.arange(0, M)
    places, inside = token_places(index, tokens // w, tokens % w, numbers)
    return index, tokens, places, inside


@triton.jit
def key_block(row, column, S: tl.constexpr, N: tl.constexpr):
    """Return the rows and columns of N keys.

    Args:
        row: The first row.
        column: The first column.
        S: Sizes.
        N: Keys of a block.
    """
    keys, C = tl.arange(0, N), (S[3] if S[3] < N else N)
    return row + keys // C, column + keys % C


@triton.jit
def channels_of(pointer, which: tl.constexpr, COUNT: tl.constexpr, index, numbers, S: tl.constexpr):
    """Return where the channels of a head begin in an image, and how far apart tokens are.

    Args:
        pointer: The channels of all tokens of all images.
        which: Which of a token's vectors.
        COUNT: Vectors of a token.
        index: Number of the window and head.
        numbers: Sizes.
        S: Sizes.
    """
    H, W, heads = numbers[0], numbers[1], numbers[4]
    image = index // (heads * tl.cdiv(H, numbers[2]) * tl.cdiv(W, numbers[3]))
    first = (image * H * W * COUNT + which) * heads + index % heads
    return pointer + first * S[0], COUNT * heads * S[0]


@triton.jit
def bias_places(pointer, index, tokens, keys, numbers, AXIS: tl.constexpr):
    """Return where the biases of queries for rows (0) or columns (1) of keys are.

    Args:
        pointer: The biases of all windows and heads.
        index: Number of the window and head.
        tokens: The queries.
        keys: The rows or columns.
        numbers: Sizes.
        AXIS: Which of both.
    """
    count = numbers[2] * numbers[3]
    start = pointer + index * numbers[2 + AXIS] * count
    return start + (keys * count + tokens if AXIS == 0 else tokens * numbers[3] + keys)


@triton.jit
def _load_block(pointer, bias, places, inside, S: tl.constexpr, BLOCK: tl.constexpr):
    """Load the channels of one of both blocks of a head."""
    columns = BLOCK * S[1] + tl.arange(0, S[1 + BLOCK])
    exists = inside[:, None] & (columns < S[0])[None]
    into = pointer + places[:, None] + columns[None]
    if bias is None:
        found = tl.load(into, exists, 0.0)
    else:
        other = tl.load(bias + columns, columns < S[0], 0.0).to(tl.float32)
        found = tl.load(into, exists, narrow(other, pointer.dtype.element_ty)[None])
    return found


@triton.jit
def load_channels(pointer, bias, places, inside, S: tl.constexpr):
    """Load the channels of a head, in one or two blocks.

    Args:
        pointer: The first channel of the first token.
        bias: Those of padding; None means 0.
        places: Where the tokens begin.
        inside: Which tokens exist.
        S: Sizes.
    """
    first = _load_block(pointer, bias, places, inside, S, 0)
    if S[2]:
        return first, _load_block(pointer, bias, places, inside, S, 1)
    else:
        return (first,)


@triton.jit
def load_tokens(source, which: tl.constexpr, index, places, inside, numbers, S: tl.constexpr):
    """Load queries, 0, keys, 1, or values, 2, of a head.

    Args:
        source: The projected tokens, and the bias of padding or None.
        which: Which of them.
        index: Number of the window and head.
        places: Places of the tokens.
        inside: Which tokens are in the grid.
        numbers: Sizes.
        S: Sizes.
    """
    pointer, stride = channels_of(source[0], which, 3, index, numbers, S)
    if source[1] is None:
        return load_channels(pointer, None, places * stride, inside, S)
    else:
        bias = source[1] + (which * numbers[4] + index % numbers[4]) * S[0]
        return load_channels(pointer, bias, places * stride, inside, S)


@triton.jit
def load_attended(pointer, index, places, inside, numbers, S: tl.constexpr):
    """Load attended values of a head, or their gradient.

    Args:
        pointer: Those of the first token.
        index: Number of the window and head.
        places: Places of the tokens.
        inside: Which tokens are in the grid.
        numbers: Sizes.
        S: Sizes.
    """
    pointer, stride = channels_of(pointer, 0, 1, index, numbers, S)
    return load_channels(pointer, None, places * stride, inside, S)


@triton.jit
def store_channels(pointer, values, places, inside, S: tl.constexpr):
    """Store the channels of a head.

    Args:
        pointer: The first channel of the first token.
        values: The channels.
        places: Where the tokens begin.
        inside: Which tokens exist.
        S: Sizes.
    """
    for BLOCK in tl.static_range(len(values)):
        columns = BLOCK * S[1] + tl.arange(0, S[1 + BLOCK])
        exists = inside[:, None] & (columns < S[0])[None]
        into = pointer + places[:, None] + columns[None]
        tl.store(into, narrow(values[BLOCK], pointer.dtype.element_ty), exists)


@triton.jit
def zero_channels(M: tl.constexpr, S: tl.constexpr):
    """Return zeros for M tokens.

    Args:
        M: Number of tokens.
        S: Sizes.
    """
    P: tl.constexpr = S[1]
    Q: tl.constexpr = S[2]
    if Q:
        return tl.zeros([M, P], tl.float32), tl.zeros([M, Q], tl.float32)
    else:
        return (tl.zeros([M, P], tl.float32),)


@triton.jit
def products(a, b):
    """Return the products of all tokens with all others.

    Args:
        a: Channels of the rows.
        b: Those of the columns.
    """
    found = product(a[0], tl.trans(b[0]))
    if len(b) > 1:
        found += product(a[1], tl.trans(b[1]))
    return found


@triton.jit
def add_weighted(total, weights, values):
    """Return `total` plus weighted sums of channels.

    Args:
        total: Channels, in float32.
        weights: Weight of each value in each sum, in float32.
        values: Channels.
    """
    weights = narrow(weights, values[0].dtype)
    first = total[0] + product(weights, values[0])
    if len(values) > 1:
        return first, total[1] + product(weights, values[1])
    else:
        return (first,)


@triton.jit
def scaled(values, factor):
    """Return channels times a factor.

    Args:
        values: The channels.
        factor: The factor.
    """
    if len(values) > 1:
        return values[0] * factor, values[1] * factor
    else:
        return (values[0] * factor,)
