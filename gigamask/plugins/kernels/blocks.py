"""Functions of Triton that several kernels share."""

import triton
import triton.language as tl

IS_INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))
"""Whether Triton's interpreter runs the kernels; it multiplies the bits of bfloat16 as integers."""


@triton.jit
def narrow(x, kind: tl.constexpr):
    """Round float32 to a dtype; the interpreter would cut off what bfloat16 does not hold.

    Args:
        x: Numbers in float32, or in the dtype.
        kind: The dtype.
    """
    if IS_INTERPRETED and kind == tl.bfloat16 and x.dtype == tl.float32:
        bits = x.to(tl.int32, bitcast=True)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & -65536
        x = bits.to(tl.float32, bitcast=True)
    return x.to(kind)


@triton.jit
def load_rows(pointer, rows, count, C: tl.constexpr, P: tl.constexpr):
    """Load rows of C channels as a block of P channels; 0 where there are none.

    Args:
        pointer: The first row.
        rows: Which rows.
        count: Number of rows.
        C: Channels.
        P: Channels with padding.
    """
    columns = tl.arange(0, P)
    inside = (rows < count)[:, None] & (columns < C)[None]
    return tl.load(pointer + rows[:, None] * C + columns[None], inside, 0.0)


@triton.jit
def store_rows(pointer, values, rows, count, C: tl.constexpr, P: tl.constexpr):
    """Store a block of rows, in the dtype of the memory.

    Args:
        pointer: The first row.
        values: The block.
        rows: Which rows.
        count: Number of rows.
        C: Channels.
        P: Channels with padding.
    """
    columns = tl.arange(0, P)
    inside = (rows < count)[:, None] & (columns < C)[None]
    into = pointer + rows[:, None] * C + columns[None]
    tl.store(into, narrow(values, pointer.dtype.element_ty), inside)


@triton.jit
def load_vector(pointer, C: tl.constexpr, P: tl.constexpr):
    """Load C numbers as a block of P in float32; 0 beyond.

    Args:
        pointer: The first.
        C: Their number.
        P: Size of the block.
    """
    index = tl.arange(0, P)
    return tl.load(pointer + index, index < C, 0.0).to(tl.float32)


@triton.jit
def product(a, b):
    """Multiply matrices, adding in float32; those in float32 are not rounded before.

    Args:
        a: The left.
        b: The right.
    """
    if IS_INTERPRETED:
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, input_precision="ieee")


@triton.jit
def normalize(x, eps, C: tl.constexpr, P: tl.constexpr):
    """Return rows with mean 0 and variance 1 over their C channels, and the factor.

    Args:
        x: The rows, in float32.
        eps: Added to the variance.
        C: Channels.
        P: Channels with padding.
    """
    inside = (tl.arange(0, P) < C)[None]
    centered = tl.where(inside, x - (tl.sum(x, 1) / C)[:, None], 0.0)
    factor = 1 / tl.sqrt(tl.sum(centered * centered, 1) / C + eps)
    return centered * factor[:, None], factor


@triton.jit
def normalize_backward(gradient, normal, factor, C: tl.constexpr, P: tl.constexpr):
    """Return the gradient of what was normalized; 0 beyond the C channels, as `gradient` is.

    Args:
        gradient: Gradient of the result.
        normal: The result.
        factor: The factor.
        C: Channels.
        P: Channels with padding.
    """
    mean = tl.sum(gradient, 1) / C
    slope = tl.sum(gradient * normal, 1) / C
    found = factor[:, None] * (gradient - mean[:, None] - normal * slope[:, None])
    return tl.where((tl.arange(0, P) < C)[None], found, 0.0)


@triton.jit
def gelu(x):
    """Return GELU, by the error function."""
    return 0.5 * x * (1 + tl.erf(x * 0.7071067811865476))


@triton.jit
def gelu_slope(x):
    """Return GELU and its derivative."""
    share = 0.5 * (1 + tl.erf(x * 0.7071067811865476))
    return x * share, share + x * 0.3989422804014327 * tl.exp(-0.5 * x * x)
