"""Attention with decomposed relative position, exact, forward and backward, without the (heads, N, N) bias ever standing in memory.

Enters: queries, keys and values of tokens on an h x w grid, and one vector per pair of rows and per pair of columns. Leaves: the attended values.
A query's score for a key is `scale * q.k + q.rows[i, u] + q.columns[j, v]`, with the query at (i, j), the key at (u, v) and the query unscaled
in the last two (Segment Anything, `modeling/image_encoder.py`; Li et al. 2021, MViTv2). Three forms of one function: `attend_plainly` says what is
meant, `attend_in_chunks` is fastest on a CPU, `attend_augmented` is one call of a fused kernel, as a GPU wants it.

Not here: windows and projections (`model.image_encoder`), the decoder's attention, which has no bias (`model.two_way`).
"""

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor
from torch.autograd.function import once_differentiable

CHUNK = 1 << 20
"""Scores held at a time, in elements: 4 MiB of float32 twice, about a core's share of the outer caches."""


def attend(
    q: Float[Tensor, "B n N d"],
    k: Float[Tensor, "B n N d"],
    v: Float[Tensor, "B n N d"],
    rows: Float[Tensor, "h h d"],
    columns: Float[Tensor, "w w d"],
) -> Float[Tensor, "B n N d"]:
    """Returns attention with relative position in the form that suits the device."""
    return form_on(q.device.type)(q, k, v, rows.to(q.dtype), columns.to(q.dtype))


def form_on(device: str) -> Callable[..., Tensor]:
    """Returns the form that a device of this type takes: on the meta device the definition, whose products are there to be counted."""
    return {"cuda": attend_augmented, "meta": attend_plainly}.get(device, attend_in_chunks)


def relative(table: Float[Tensor, "L d"]) -> Float[Tensor, "s s d"]:
    """Returns each pair's vector from a table of 2 s - 1 offsets: `[i, u]` is the vector of offset i - u, offset 0 lying in the middle."""
    side = (len(table) + 1) // 2
    place = torch.arange(side, device=table.device)
    return table[place[:, None] - place[None, :] + side - 1]


def attend_plainly(
    q: Float[Tensor, "B n N d"],
    k: Float[Tensor, "B n N d"],
    v: Float[Tensor, "B n N d"],
    rows: Float[Tensor, "h h d"],
    columns: Float[Tensor, "w w d"],
) -> Float[Tensor, "B n N d"]:
    """Returns the same by the definition, with the whole bias in memory: what the other forms are held against."""
    by_row, by_column = _biases(q.flatten(0, 1), rows, columns)
    bias = (by_row[..., :, None] + by_column[..., None, :]).flatten(2).view(*q.shape[:3], -1)
    return ((q * q.shape[-1] ** -0.5) @ k.transpose(2, 3) + bias).softmax(-1) @ v


def attend_augmented(
    q: Float[Tensor, "B n N d"],
    k: Float[Tensor, "B n N d"],
    v: Float[Tensor, "B n N d"],
    rows: Float[Tensor, "h h d"],
    columns: Float[Tensor, "w w d"],
) -> Float[Tensor, "B n N d"]:
    """Returns the same from one fused kernel: the biases become extra channels of the queries, met by each key's one-hot row and column.

    The channels are padded to a multiple of 8, and the values to as many, because flash kernels ask for it; 64 + 64 + 64 and 80 + 64 + 64 stay
    under their limit of 256.
    """
    h, w, d = len(rows), len(columns), q.shape[-1]
    by_row, by_column = _biases(q.flatten(0, 1), rows, columns)
    spare = -(d + h + w) % 8
    place = torch.cat(
        [
            torch.eye(h, dtype=q.dtype, device=q.device).repeat_interleave(w, 0),
            torch.eye(w, dtype=q.dtype, device=q.device).repeat(h, 1),
        ],
        1,
    )
    queries = torch.cat(
        [q * d**-0.5, by_row.view(*q.shape[:3], h), by_column.view(*q.shape[:3], w)], -1
    )
    keys = torch.cat([k, place.expand(*k.shape[:3], h + w)], -1)
    answer = F.scaled_dot_product_attention(
        F.pad(queries, (0, spare)), F.pad(keys, (0, spare)), F.pad(v, (0, h + w + spare)), scale=1.0
    )
    return answer[..., :d]


def attend_in_chunks(
    q: Float[Tensor, "B n N d"],
    k: Float[Tensor, "B n N d"],
    v: Float[Tensor, "B n N d"],
    rows: Float[Tensor, "h h d"],
    columns: Float[Tensor, "w w d"],
) -> Float[Tensor, "B n N d"]:
    """Returns the same a few queries at a time, and keeps only q, k and v for backward, which computes the scores again.

    Half precisions are computed in float32 inside: a CPU without matrix units gains nothing from less.
    """
    return _Chunked.apply(q, k, v, rows, columns)


def _biases(
    q: Float[Tensor, "X N d"], rows: Float[Tensor, "h h d"], columns: Float[Tensor, "w w d"]
) -> tuple[Float[Tensor, "X N h"], Float[Tensor, "X N w"]]:
    """Returns each query's bias for every row and for every column of keys."""
    grid = q.unflatten(1, (len(rows), len(columns)))
    return torch.einsum("xijd,iud->xiju", grid, rows).flatten(1, 2), torch.einsum(
        "xijd,jvd->xijv", grid, columns
    ).flatten(1, 2)


def _pieces(count: int, tokens: int) -> Iterator[tuple[slice, slice]]:
    """Yields slices of heads (of all images) and of queries whose scores fill one chunk."""
    queries = max(1, min(tokens, CHUNK // tokens))
    heads = max(1, CHUNK // (tokens * tokens))
    for head in range(0, count, heads):
        for query in range(0, tokens, queries):
            yield slice(head, min(head + heads, count)), slice(query, min(query + queries, tokens))


def _weights(
    buffer: Tensor, q: Tensor, k: Tensor, by_row: Tensor, by_column: Tensor
) -> Float[Tensor, "x m N"]:
    """Writes a chunk's attention weights; `buffer` is overwritten with its scores."""
    heads, queries, tokens = len(q), q.shape[1], k.shape[1]
    scores = buffer[: heads * queries * tokens].view(heads, queries, tokens)
    grid = scores.view(heads, queries, by_row.shape[-1], by_column.shape[-1])
    torch.add(by_row[..., :, None], by_column[..., None, :], out=grid)
    scores.baddbmm_(q, k.transpose(1, 2), alpha=q.shape[-1] ** -0.5)
    return scores.softmax(-1)


class _Chunked(torch.autograd.Function):
    """Attention in chunks of queries with its backward written out. The heads of all images lie on one axis."""

    @staticmethod
    def forward(ctx, q, k, v, rows, columns):
        ctx.save_for_backward(q, k, v, rows, columns)
        with torch.autocast(q.device.type, enabled=False):
            wide_q, wide_k, wide_v, wide_rows, wide_columns = _widen(q, k, v, rows, columns)
            by_row, by_column = _biases(wide_q, wide_rows, wide_columns)
            answer = torch.empty_like(wide_v)
            buffer = wide_q.new_empty(max(CHUNK, wide_q.shape[1]))
            for head, query in _pieces(*wide_q.shape[:2]):
                weights = _weights(
                    buffer,
                    wide_q[head, query],
                    wide_k[head],
                    by_row[head, query],
                    by_column[head, query],
                )
                torch.bmm(weights, wide_v[head], out=answer[head, query])
            return answer.view(q.shape).to(q.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx, *gradients):  # pyrefly: ignore[bad-override]  (what the decorator makes of it)
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
    """Returns the tensors in at least float32, images and heads on one contiguous axis."""
    wide = torch.promote_types(q.dtype, torch.float32)
    q, k, v = (x.flatten(0, 1).to(wide).contiguous() for x in (q, k, v))
    return q, k, v, rows.to(wide), columns.to(wide)


def _chunked_gradients(
    q: Tensor, k: Tensor, v: Tensor, rows: Tensor, columns: Tensor, gradient: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Returns the gradients of the five inputs, from scores computed again chunk by chunk."""
    h, w, scale = len(rows), len(columns), q.shape[-1] ** -0.5
    by_row, by_column = _biases(q, rows, columns)
    row_grads, column_grads = torch.empty_like(by_row), torch.empty_like(by_column)
    q_grads, k_grads, v_grads = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
    buffer = q.new_empty(max(CHUNK, q.shape[1]))
    for head, query in _pieces(*q.shape[:2]):
        weights = _weights(
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
