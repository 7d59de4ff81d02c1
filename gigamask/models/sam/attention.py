"""Exact attention with decomposed relative positions.

With the query at (i, j) and the key at (u, v) of an h x w grid of tokens, the score is
`scale * q.k + q.rows[i, u] + q.columns[j, v]`; the last two terms are not scaled (Segment Anything,
`modeling/image_encoder.py`; Li et al. 2021, MViTv2). There are three implementations of the same
function: a reference, the only one that stores the (heads, N, N) bias; a chunked one, the fastest
on CPUs; and an augmented one, a single call of a fused kernel for GPUs.
"""

from collections.abc import Callable, Iterator
from functools import lru_cache

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from gigamask.errors import GigamaskError

Heads = Float[Tensor, "B n N d"]
RowOffsets = Float[Tensor, "h h d"]
ColumnOffsets = Float[Tensor, "w w d"]
CHUNK = 1 << 20
"""Number of scores in memory at a time: two float32 arrays of 4 MiB, about one core's share of the
outer cache levels."""


def rel_pos_attention(
    q: Heads, k: Heads, v: Heads, rows: RowOffsets, columns: ColumnOffsets
) -> Heads:
    """Compute attention with relative positions, using the implementation for the device.

    A trace or an exported program gets the reference: exporters drop what others write in place.

    Args:
        q: Queries of N = h * w tokens, n heads and B images or windows.
        k: Keys.
        v: Values.
        rows: Vector of each pair of rows, from `get_rel_pos`.
        columns: Vector of each pair of columns.
    """
    is_exported = torch.jit.is_tracing() or torch.compiler.is_exporting()
    attend = attention_for_device("meta" if is_exported else q.device.type)
    return attend(q, k, v, rows.to(q.dtype), columns.to(q.dtype))


def attention_for_device(device: str) -> Callable[..., Tensor]:
    """Return the implementation for a device type.

    The meta device uses the reference, so that matrix products can be counted.
    """
    return {"cuda": rel_pos_attention_augmented, "meta": rel_pos_attention_reference}.get(
        device, rel_pos_attention_chunked
    )


def get_rel_pos(table: Float[Tensor, "L d"], size: int | None = None) -> Float[Tensor, "s s d"]:
    """Return the vector of each pair of positions, from a table with one vector per offset.

    The positions of keys are in reverse order, so that the result is a view: `[i, s - 1 - u]` is
    the vector of offset i - u.

    Args:
        table: Vectors of at least 2 * s - 1 offsets, offset 0 in the middle.
        size: Number of positions, s; None: as many as there are offsets for.
    """
    most = len(table) // 2 + 1
    size = most if size is None else size
    table = table[most - size : len(table) - (most - size)]
    return table.unfold(0, size, 1).transpose(1, 2)


def rel_pos_attention_reference(
    q: Heads, k: Heads, v: Heads, rows: RowOffsets, columns: ColumnOffsets
) -> Heads:
    """Compute attention by definition, with the whole bias in memory.

    Args:
        q: Queries of N = h * w tokens, n heads and B images or windows.
        k: Keys.
        v: Values.
        rows: Vector of each pair of rows, from `get_rel_pos`.
        columns: Vector of each pair of columns.
    """
    by_row, by_column = _biases(q.flatten(0, 1), rows.flip(1), columns.flip(1))
    bias = (by_row[..., :, None] + by_column[..., None, :]).flatten(2).view(*q.shape[:3], -1)
    return ((q * q.shape[-1] ** -0.5) @ k.transpose(2, 3) + bias).softmax(-1) @ v


def rel_pos_attention_augmented(
    q: Heads, k: Heads, v: Heads, rows: RowOffsets, columns: ColumnOffsets
) -> Heads:
    """Compute attention with one fused kernel.

    The biases become extra channels of the queries, selected by each key's one-hot row and column.
    All channels, including those of the values, are padded to `flash_head_size`; 64 + 64 + 64 and
    80 + 64 + 64 are below its limit of 256.

    Args:
        q: Queries of N = h * w tokens, n heads and B images or windows.
        k: Keys.
        v: Values.
        rows: Vector of each pair of rows, from `get_rel_pos`.
        columns: Vector of each pair of columns.
    """
    h, w, d = len(rows), len(columns), q.shape[-1]
    by_row, by_column = _biases(q.flatten(0, 1), rows, columns)
    heads, head_size = q.shape[:2], flash_head_size(d + h + w, _compute_capability(q.device))
    spare = head_size - (d + h + w)
    make = _key_channels.__wrapped__ if torch.compiler.is_compiling() else _key_channels
    # Fake tensors of one mode cannot be used in another.
    channels = make(h, w, d, spare, q.dtype, q.device, getattr(q, "fake_mode", None))
    zeros = channels[0, 0, h + w :].expand(*q.shape[:3], spare)
    queries = torch.cat([q, by_row.unflatten(0, heads), by_column.unflatten(0, heads), zeros], -1)
    keys = torch.cat([k.unflatten(2, (h, w)), channels.expand(*heads, -1, -1, -1)], -1)
    out = F.scaled_dot_product_attention(
        queries, keys.flatten(2, 3), F.pad(v, (0, head_size - d)), scale=d**-0.5
    )
    return out[..., :d]


@lru_cache(maxsize=32)
def _key_channels(
    h: int, w: int, d: int, spare: int, dtype: torch.dtype, device: torch.device, fake_mode: object
) -> Float[Tensor, "h w c"]:
    """Return the channels of each key that select the bias of its row and of its column.

    They are one-hot, from the last position to the first as in `get_rel_pos`, and undo the scale by
    which the kernel multiplies all scores; `spare` channels are 0.
    """
    wide = torch.promote_types(dtype, torch.float32)
    rows, columns = (torch.eye(side, dtype=wide, device=device).flip(0) * d**0.5 for side in (h, w))
    both = [rows[:, None].expand(h, w, h), columns.expand(h, w, w)]
    return F.pad(torch.cat(both, -1), (0, spare)).to(dtype)


def flash_head_size(size: int, capability: tuple[int, int] | None) -> int:
    """Return the head size to pad to, so that torch trains with its flash attention kernel.

    The kernel takes up to 256 channels, best a multiple of 8. Of GPUs of compute capability 8.6 to
    8.9 and 12.0 to 12.1 (RTX 3090, 4090, 5090, A10, L40S) torch refuses it from 193 to 224 channels
    if a gradient is needed, in `aten/src/ATen/native/transformers/cuda/sdp_utils.cpp`,
    `check_requires_grad_and_head_dim_gt192_constraints_on_sm86_89_or_120`. Above 192 all GPUs run
    the same kernel, so a few more channels cost only their memory.

    Args:
        size: Channels of a head.
        capability: Compute capability of the GPU, major and minor; None for other devices.
    """
    padded = -(-size // 8) * 8
    is_limited = capability is not None and any(
        first <= capability <= last for first, last in (((8, 6), (8, 9)), ((12, 0), (12, 1)))
    )
    return 232 if is_limited and 192 < padded <= 224 else padded


def _compute_capability(device: torch.device) -> tuple[int, int] | None:
    if device.type != "cuda":
        return None
    properties = torch.cuda.get_device_properties(device)  # unlike the capability, compiles
    return properties.major, properties.minor


def rel_pos_attention_chunked(
    q: Heads, k: Heads, v: Heads, rows: RowOffsets, columns: ColumnOffsets
) -> Heads:
    """Compute attention in chunks of queries; backward recomputes the scores from q, k and v.

    Half-precision inputs are computed in float32, since CPUs without matrix units gain nothing from
    half precision.

    Args:
        q: Queries of N = h * w tokens, n heads and B images or windows.
        k: Keys.
        v: Values.
        rows: Vector of each pair of rows, from `get_rel_pos`.
        columns: Vector of each pair of columns.
    """
    return _Chunked.apply(q, k, v, rows.flip(1), columns.flip(1))


def _biases(
    q: Float[Tensor, "X N d"], rows: RowOffsets, columns: ColumnOffsets
) -> tuple[Float[Tensor, "X N h"], Float[Tensor, "X N w"]]:
    """Return each query's bias for every row and for every column of keys."""
    grid = q.unflatten(1, (len(rows), len(columns)))
    return torch.einsum("xijd,iud->xiju", grid, rows).flatten(1, 2), torch.einsum(
        "xijd,jvd->xijv", grid, columns
    ).flatten(1, 2)


def _chunks(count: int, tokens: int) -> Iterator[tuple[slice, slice]]:
    """Yield slices of heads (of all images) and of queries whose scores fill one chunk."""
    queries = max(1, min(tokens, CHUNK // tokens))
    heads = max(1, CHUNK // (tokens * tokens))
    for head in range(0, count, heads):
        for query in range(0, tokens, queries):
            yield slice(head, min(head + heads, count)), slice(query, min(query + queries, tokens))


def _chunk_weights(
    buffer: Tensor, q: Tensor, k: Tensor, by_row: Tensor, by_column: Tensor
) -> Float[Tensor, "x m N"]:
    """Return a chunk's attention weights; its scores overwrite `buffer`."""
    heads, queries, tokens = len(q), q.shape[1], k.shape[1]
    scores = buffer[: heads * queries * tokens].view(heads, queries, tokens)
    grid = scores.view(heads, queries, by_row.shape[-1], by_column.shape[-1])
    torch.add(by_row[..., :, None], by_column[..., None, :], out=grid)
    scores.baddbmm_(q, k.transpose(1, 2), alpha=q.shape[-1] ** -0.5)
    return scores.softmax(-1)


class _Chunked(torch.autograd.Function):
    """Attention in chunks of queries with an explicit backward."""

    @staticmethod
    def forward(ctx, q, k, v, rows, columns):
        ctx.save_for_backward(q, k, v, rows, columns)
        with torch.autocast(q.device.type, enabled=False):
            wide_q, wide_k, wide_v, wide_rows, wide_columns = _widen(q, k, v, rows, columns)
            by_row, by_column = _biases(wide_q, wide_rows, wide_columns)
            out = torch.empty_like(wide_v)
            buffer = wide_q.new_empty(max(CHUNK, wide_q.shape[1]))
            for head, query in _chunks(*wide_q.shape[:2]):
                weights = _chunk_weights(
                    buffer,
                    wide_q[head, query],
                    wide_k[head],
                    by_row[head, query],
                    by_column[head, query],
                )
                torch.bmm(weights, wide_v[head], out=out[head, query])
            return out.view(q.shape).to(q.dtype)

    @staticmethod
    def backward(ctx, *gradients):
        if torch.is_grad_enabled():  # torch's once_differentiable may return wrong ones instead
            raise GigamaskError(
                "attention has no second derivatives (create_graph=True) unless each block has "
                "attn.use_attention(gigamask.models.sam.attention.rel_pos_attention_reference)"
            )
        q, k, v, rows, columns = ctx.saved_tensors
        with torch.autocast(q.device.type, enabled=False):
            wide = _widen(q, k, v, rows, columns)
            grads = _chunked_gradients(*wide, gradients[0].flatten(0, 1).to(wide[0].dtype))
        return tuple(
            grad.view(x.shape).to(x.dtype)
            for grad, x in zip(grads, (q, k, v, rows, columns), strict=True)
        )


def _widen(
    q: Tensor, k: Tensor, v: Tensor, rows: Tensor, columns: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the tensors in at least float32, with images and heads on one contiguous axis."""
    wide = torch.promote_types(q.dtype, torch.float32)
    q, k, v = (x.flatten(0, 1).to(wide).contiguous() for x in (q, k, v))
    return q, k, v, rows.to(wide), columns.to(wide)


def _chunked_gradients(
    q: Tensor, k: Tensor, v: Tensor, rows: Tensor, columns: Tensor, gradient: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of the five inputs, recomputing scores chunk by chunk."""
    h, w, scale = len(rows), len(columns), q.shape[-1] ** -0.5
    by_row, by_column = _biases(q, rows, columns)
    row_grads, column_grads = torch.empty_like(by_row), torch.empty_like(by_column)
    q_grads, k_grads, v_grads = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
    buffer = q.new_empty(max(CHUNK, q.shape[1]))
    for head, query in _chunks(*q.shape[:2]):
        weights = _chunk_weights(
            buffer, q[head, query], k[head], by_row[head, query], by_column[head, query]
        )
        v_grads[head].baddbmm_(weights.transpose(1, 2), gradient[head, query])
        scores = buffer[: weights.numel()].view_as(weights)
        torch.bmm(gradient[head, query], v[head].transpose(1, 2), out=scores)
        scores.mul_(weights)
        scores.addcmul_(weights, scores.sum(-1, keepdim=True), value=-1)
        grid = scores.view(*scores.shape[:2], h, w)
        row_grads[head, query] = grid.sum(3)
        column_grads[head, query] = grid.sum(2)
        torch.bmm(scores, k[head], out=q_grads[head, query])
        k_grads[head].baddbmm_(scores.transpose(1, 2), q[head, query], alpha=scale)
    q_grid, row_grid, column_grid = (x.unflatten(1, (h, w)) for x in (q, row_grads, column_grads))
    from_bias = torch.einsum("xiju,iud->xijd", row_grid, rows) + torch.einsum(
        "xijv,jvd->xijd", column_grid, columns
    )
    return (
        q_grads.mul_(scale).add_(from_bias.flatten(1, 2)),
        k_grads,
        v_grads,
        torch.einsum("xiju,xijd->iud", row_grid, q_grid),
        torch.einsum("xijv,xijd->jvd", column_grid, q_grid),
    )
