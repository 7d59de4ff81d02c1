"""Functions of Triton on the image tokens of a mask, and on pairs of these and rows of vectors.

Image tokens, `source`, have a memory of their own for each mask, or are those of the mask's image
(`SHARED`) plus a projection of the mask's features, which is never stored. Rows are the vectors of
each prompt token and head, of all masks: (M, N, H, C). `numbers` begin with those of
masks, prompt tokens, image tokens and channels, and the factor of the scores; `S` begins with what
`image_source.sizes_of` returns.
"""

import triton
import triton.language as tl

from gigamask.plugins.kernels.blocks import load_rows, narrow, product


@triton.jit
def image_of(index, mask):
    """Return the image of a mask.

    Args:
        index: The image of each; None if there is only one.
        mask: The mask.
    """
    return 0 * mask if index is None else tl.load(index + mask)


@triton.jit
def load_image(source, mask, rows, columns, T, SHARED: tl.constexpr, S: tl.constexpr):
    """Load some channels of image tokens, and add the projection of features if there are any.

    Args:
        source: The image tokens.
        mask: The mask.
        rows: Which of its tokens.
        columns: Which channels.
        T: Number of image tokens.
        SHARED: Whether masks share them.
        S: Sizes.
    """
    C: tl.constexpr = S[0]
    F: tl.constexpr = S[1]
    PF: tl.constexpr = S[3]
    x, _, index, features, weight = source
    first = (image_of(index, mask) if SHARED else mask) * T * C
    inside = (rows < T)[:, None] & (columns < C)[None]
    tile = tl.load(x + first + rows[:, None] * C + columns[None], inside, 0.0)
    if features is not None:
        given = load_rows(features + mask * T * F, rows, T, F, PF)
        inner = tl.arange(0, PF)
        exists = (inner < F)[:, None] & (columns < C)[None]
        projection = tl.load(weight + columns[None] * F + inner[:, None], exists, 0.0)
        tile = narrow(tile.to(tl.float32) + product(given, projection), x.dtype.element_ty)
    return tile


@triton.jit
def load_with_positions(source, mask, rows, columns, T, SHARED: tl.constexpr, S: tl.constexpr):
    """Load what `load_image` does, and add the encoding of positions.

    Args:
        source: As of `load_image`.
        mask: As of `load_image`.
        rows: As of `load_image`.
        columns: As of `load_image`.
        T: As of `load_image`.
        SHARED: As of `load_image`.
        S: As of `load_image`.
    """
    C: tl.constexpr = S[0]
    tile = load_image(source, mask, rows, columns, T, SHARED, S)
    inside = (rows < T)[:, None] & (columns < C)[None]
    added = tl.load(source[1] + rows[:, None] * C + columns[None], inside, 0.0)
    return narrow(tile.to(tl.float32) + added.to(tl.float32), tile.dtype)


@triton.jit
def pairs(source, vectors, which, numbers, SHARED: tl.constexpr, S: tl.constexpr):
    """Return the products of image tokens, plus positions unless None, and rows of vectors.

    Args:
        source: The image tokens.
        vectors: The vectors.
        which: Where the rows are and which exist; the mask and its image tokens.
        numbers: Numbers.
        SHARED: Whether masks share image tokens.
        S: Sizes.
    """
    C: tl.constexpr = S[0]
    BC: tl.constexpr = S[4]
    places, valid, mask, rows = which
    found = tl.zeros([rows.shape[0], places.shape[0]], tl.float32)
    for start in range(0, numbers[3], BC):
        columns = start + tl.arange(0, BC)
        if source[1] is None:
            tile = load_image(source, mask, rows, columns, numbers[2], SHARED, S)
        else:
            tile = load_with_positions(source, mask, rows, columns, numbers[2], SHARED, S)
        inside = valid[None] & (columns < C)[:, None]
        given = tl.load(vectors + places[None] * C + columns[:, None], inside, 0.0)
        found += product(tile, given)
    return found


@triton.jit
def _at(vectors, places, valid, S: tl.constexpr):
    """Return pointers to rows of vectors, and which numbers exist."""
    C: tl.constexpr = S[0]
    P: tl.constexpr = S[2]
    columns = tl.arange(0, P)[None]
    return vectors + places[:, None] * C + columns, valid[:, None] & (columns < C)


@triton.jit
def load_places(vectors, places, valid, S: tl.constexpr):
    """Load rows of vectors.

    Args:
        vectors: The vectors.
        places: Where the rows are.
        valid: Which exist.
        S: Sizes.
    """
    pointers, inside = _at(vectors, places, valid, S)
    return tl.load(pointers, inside, 0.0)


@triton.jit
def store_places(vectors, values, places, valid, S: tl.constexpr):
    """Store rows of vectors.

    Args:
        vectors: Where the vectors are stored.
        values: The rows.
        places: Where the rows are.
        valid: Which exist.
        S: Sizes.
    """
    pointers, inside = _at(vectors, places, valid, S)
    tl.store(pointers, narrow(values, vectors.dtype.element_ty), inside)


@triton.jit
def store_projection(of_source, found, mask, source, rows, T, S: tl.constexpr):
    """Store the gradient of a mask's features, and return that of their projection.

    Args:
        of_source: Where gradients are stored.
        found: Gradient of the image tokens.
        mask: The mask.
        source: The image tokens.
        rows: Which of its tokens.
        T: Number of image tokens.
        S: Sizes.
    """
    C: tl.constexpr = S[0]
    F: tl.constexpr = S[1]
    P: tl.constexpr = S[2]
    PF: tl.constexpr = S[3]
    inner, columns = tl.arange(0, PF), tl.arange(0, P)
    exists = (inner < F)[None] & (columns < C)[:, None]
    projection = tl.load(source[4] + columns[:, None] * F + inner[None], exists, 0.0)
    given = load_rows(source[3] + mask * T * F, rows, T, F, PF)
    gradient = narrow(found, given.dtype)
    into = of_source[1] + mask * T * F + rows[:, None] * F + inner[None]
    inside = (rows < T)[:, None] & (inner < F)[None]
    tl.store(into, narrow(product(gradient, projection), given.dtype), inside)
    return product(tl.trans(given), gradient)


@triton.jit
def store_sums(of_source, total, projection, rows, T, S: tl.constexpr):
    """Store a program's sums over masks of the gradients of image tokens and of the projection.

    Args:
        of_source: Where gradients are stored; that of features is None if there are none.
        total: Gradient of the image tokens.
        projection: Gradient of the projection.
        rows: Which image tokens.
        T: Number of image tokens.
        S: Sizes.
    """
    C: tl.constexpr = S[0]
    P: tl.constexpr = S[2]
    PF: tl.constexpr = S[3]
    part = tl.program_id(1).to(tl.int64)
    inside = (rows < T)[:, None] & (tl.arange(0, P) < C)[None]
    into = of_source[0] + (part * T + rows[:, None]) * C + tl.arange(0, P)[None]
    tl.store(into, total, inside)
    if of_source[1] is not None:
        place = (part * tl.num_programs(0) + tl.program_id(0)) * (PF * P)
        inner = tl.arange(0, PF)[:, None] * P + tl.arange(0, P)[None]
        tl.store(of_source[2] + place + inner, projection)
