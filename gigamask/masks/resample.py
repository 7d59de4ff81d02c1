"""The maths of resampling masks without decoding them.

Enters: bounds or spans of masks, and what each target row and column shows. Leaves: bounds on the target grid, or the covered share of its cells.
A bound moves to the number of target positions before it; bounds that fall together cancel in pairs.

Not here: masks as a value (`runs`), which rows and columns an input square shows (`frame`).
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float32, Float64, Int32, Int64

SHARE_UNIT = 2.0**40
"""Shares are summed as whole multiples of its inverse, which float64 adds exactly: what is not covered stays exactly 0."""


@dataclass(frozen=True)
class RowSpans:
    """Foreground of several masks as half-open intervals of column-major positions; mask i owns `starts[i]` to `starts[i + 1]`."""

    begin: Int64[np.ndarray, "r"]
    end: Int64[np.ndarray, "r"]
    starts: Int64[np.ndarray, "n1"]

    def covered(self) -> Int64[np.ndarray, "r1"]:
        """Counts the foreground pixels before each span, over all masks, and at last all of them."""
        return offsets_of(self.end - self.begin)

    def owner(self) -> Int64[np.ndarray, "r"]:
        """Returns each span's mask."""
        return np.repeat(np.arange(len(self.starts) - 1), np.diff(self.starts))

    def counter(self, pixels: int) -> Callable[[Int64[np.ndarray, "k"]], Int64[np.ndarray, "k"]]:
        """Returns the function that counts the foreground before each position, where mask i's positions are shifted by i * pixels."""
        shift = self.owner() * pixels
        # A span before all others, of no extent, answers for positions before the first.
        begin, end = (
            np.concatenate([np.full(1, -1), edge + shift]) for edge in (self.begin, self.end)
        )
        covered = np.concatenate([np.zeros(1, np.int64), self.covered()])

        def before(positions: Int64[np.ndarray, "k"]) -> Int64[np.ndarray, "k"]:
            span = np.searchsorted(begin, positions, "right") - 1
            return covered[span] + np.minimum(positions, end[span]) - begin[span]

        return before


@dataclass(frozen=True)
class RunPieces:
    """Spans cut at the ends of columns: rows `top` to `bottom` (half-open) of one column of one mask."""

    owner: Int64[np.ndarray, "p"]
    column: Int64[np.ndarray, "p"]
    top: Int64[np.ndarray, "p"]
    bottom: Int64[np.ndarray, "p"]

    def take(self, index: Int64[np.ndarray, "q"]) -> "RunPieces":
        """Returns the pieces at `index`."""
        return RunPieces(self.owner[index], self.column[index], self.top[index], self.bottom[index])


def offsets_of(counts: Bool[np.ndarray, "n"] | Int64[np.ndarray, "n"]) -> Int64[np.ndarray, "n1"]:
    """Returns where each of some groups begins that lie one behind the other and have so many members, and where the last one ends."""
    offsets = np.zeros(len(counts) + 1, np.int64)
    np.cumsum(counts, out=offsets[1:])
    return offsets


def _repeated(
    counts: Int64[np.ndarray, "n"],
) -> tuple[Int64[np.ndarray, "k"], Int64[np.ndarray, "k"]]:
    """Returns each number below n as often as its count says, and which of its turns that is, from 0 on."""
    index = np.repeat(np.arange(len(counts)), counts)
    return index, np.arange(len(index)) - np.repeat(np.cumsum(counts) - counts, counts)


def cancel_pairs(keys: Int64[np.ndarray, "k"]) -> Int64[np.ndarray, "c"]:
    """Returns, of non-decreasing keys, those that occur an odd number of times: a mask that changes twice at one place does not change."""
    fresh = np.ones(len(keys) + 1, bool)
    np.not_equal(keys[1:], keys[:-1], out=fresh[1:-1])
    heads = np.flatnonzero(fresh)
    return keys[heads[:-1][(np.diff(heads) & 1).astype(bool)]]


def resample_bounds(
    bounds: Int32[np.ndarray, "T"],
    owner: Int64[np.ndarray, "T"],
    size: tuple[int, int],
    rows: Int64[np.ndarray, "h"],
    columns: Int64[np.ndarray, "w"],
    flip: bool,
) -> Int64[np.ndarray, "k"]:
    """Returns the bounds of `out[i, j] = in[rows[i], columns[j]]`, mask i's shifted by i * (h * w + 1), increasing.

    Bounds at the end of the grid, which say nothing, may be among them.
    """
    above, inner_rows = _inside(rows, size[0], "rows")
    left, inner_columns = _inside(columns, size[1], "columns")
    shown, repeats = np.unique(inner_columns, return_counts=True)
    height, pixels = len(inner_rows), len(rows) * len(columns)
    if not height or not len(shown):
        return np.zeros(0, np.int64)
    row_start = np.searchsorted(inner_rows, np.arange(size[0]))
    column_start = np.searchsorted(shown, np.arange(size[1] + 1))
    is_shown = np.diff(column_start)
    x = bounds // np.int32(size[0])
    y = bounds - x * np.int32(size[0])
    stride = height * len(shown) + 1
    keys = cancel_pairs(
        (column_start[:-1] * height)[x] + row_start[y] * is_shown[x] + owner * stride
    )
    if not flip and (height, len(shown)) == (len(rows), len(columns)):
        return keys
    pieces = _cut_columns(_pair_up(keys, stride, int(owner[-1]) + 1 if len(owner) else 0), height)
    first = np.cumsum(repeats) - repeats + left
    copies = repeats[pieces.column]
    index, turn = _repeated(copies)
    column = first[pieces.column][index] + turn
    pieces = pieces.take(index)
    head = (
        pieces.owner * (pixels + 1)
        + (len(columns) - 1 - column if flip else column) * len(rows)
        + above
    )
    moved = np.stack([head + pieces.top, head + pieces.bottom], 1).ravel()
    return cancel_pairs(np.sort(moved))


def _pair_up(keys: Int64[np.ndarray, "k"], stride: int, count: int) -> RowSpans:
    """Returns the spans between bounds, closing those that reach the end of the grid."""
    owner, position = np.divmod(keys, stride)
    counts = np.bincount(owner, minlength=count)
    odd = np.flatnonzero(counts & 1)
    position = np.insert(position, np.cumsum(counts)[odd], stride - 1)
    starts = offsets_of((counts + 1) >> 1)
    filled = position[1::2] > position[0::2]
    return RowSpans(position[0::2][filled], position[1::2][filled], offsets_of(filled)[starts])


def _cut_columns(spans: RowSpans, height: int) -> RunPieces:
    """Returns the spans cut at the ends of columns."""
    first, last = spans.begin // height, (spans.end - 1) // height
    pieces = RunPieces(
        spans.owner(), first, spans.begin - first * height, spans.end - last * height
    )
    counts = last - first + 1
    if (counts == 1).all():
        return pieces
    index, turn = _repeated(counts)
    column = first[index] + turn
    top = np.where(column == first[index], pieces.top[index], 0)
    bottom = np.where(column == last[index], pieces.bottom[index], height)
    return RunPieces(pieces.owner[index], column, top, bottom)


def _inside(
    lines: Int64[np.ndarray, "k"], limit: int, name: str
) -> tuple[int, Int64[np.ndarray, "m"]]:
    """Returns how many lines lie outside before the first inside, and the lines inside."""
    inside = np.flatnonzero(lines >= 0)
    if not inside.size:
        return 0, lines[:0]
    inner = lines[inside[0] : inside[-1] + 1]
    if (np.diff(inner) < 0).any() or inner[0] < 0 or inner[-1] >= limit:
        raise ValueError(
            f"{name} must not decrease and must stay below {limit}; -1 only before the first or after the last of them"
        )
    return int(inside[0]), inner


def average_spans(
    spans: RowSpans,
    boxes: Int32[np.ndarray, "n 4"],
    size: tuple[int, int],
    row_edges: Float64[np.ndarray, "h1"],
    column_edges: Float64[np.ndarray, "w1"],
    flip: bool,
) -> Float32[np.ndarray, "n h w"]:
    """Returns the share of each cell that each mask covers; `flip` then mirrors the cells left to right.

    A run's ends add to a table of differences down each column of cells; one running sum over all masks' boxes gives the shares.
    """
    height, width = len(row_edges) - 1, len(column_edges) - 1
    shares = np.zeros((len(boxes), width, height), np.float32)
    first_cell, last_cell = _cells(column_edges, size[1])
    top_cell, bottom_cell = _cells(row_edges, size[0])
    left, right = first_cell[boxes[:, 0]], last_cell[boxes[:, 2]]
    upper, lower = top_cell[boxes[:, 1]], bottom_cell[boxes[:, 3]]
    filled = (boxes[:, 2] >= 0) & (left <= right) & (upper <= lower)
    # Two more cells below each column: where the last run may end, and what that leaves for the next.
    tall, wide = np.where(filled, lower - upper + 3, 0), np.where(filled, right - left + 1, 0)
    offsets = offsets_of(tall * wide)
    pieces = _cut_columns(spans, size[0])
    counts = np.where(
        filled[pieces.owner], np.maximum(last_cell - first_cell + 1, 0)[pieces.column], 0
    )
    index, turn = _repeated(counts)
    pieces = pieces.take(index)
    cell = first_cell[pieces.column] + turn
    overlap = np.minimum(pieces.column + 1, column_edges[cell + 1]) - np.maximum(
        pieces.column, column_edges[cell]
    )
    weight = np.rint(overlap / (column_edges[cell + 1] - column_edges[cell]) * SHARE_UNIT)
    base = (
        offsets[pieces.owner]
        + (cell - left[pieces.owner]) * tall[pieces.owner]
        - upper[pieces.owner]
    )
    table = np.zeros(int(offsets[-1]))
    for ends, sign in ((pieces.top, 1.0), (pieces.bottom, -1.0)):
        place, inside = _split(row_edges, ends)
        part = np.rint(inside * weight)
        for where, amount in ((base + place, part), (base + place + 1, weight - part)):
            table += np.bincount(where, sign * amount, minlength=len(table))
    np.cumsum(table, out=table)
    covered = np.flatnonzero(table)
    mask = np.searchsorted(offsets, covered, "right") - 1
    column, row = np.divmod(covered - offsets[mask], tall[mask])
    column += left[mask]
    shares[mask, width - 1 - column if flip else column, upper[mask] + row] = (
        table[covered] / SHARE_UNIT
    )
    return shares.transpose(0, 2, 1)


def _cells(
    edges: Float64[np.ndarray, "k1"], size: int
) -> tuple[Int64[np.ndarray, "s"], Int64[np.ndarray, "s"]]:
    """Returns the first and the last cell that each pixel of a line touches; first > last where it touches none."""
    pixels = np.arange(size)
    first = np.searchsorted(edges, pixels, "right") - 1
    last = np.searchsorted(edges, pixels + 1, "left") - 1
    return np.maximum(first, 0), np.minimum(last, len(edges) - 2)


def _split(
    edges: Float64[np.ndarray, "k1"], ends: Int64[np.ndarray, "p"]
) -> tuple[Int64[np.ndarray, "p"], Float64[np.ndarray, "p"]]:
    """Returns the cell that holds each end of a run, and the share of that cell that lies behind it."""
    inner = np.clip(ends, edges[0], edges[-1])
    cell = np.minimum(np.searchsorted(edges, inner, "right") - 1, len(edges) - 2)
    return cell, (edges[cell + 1] - inner) / (edges[cell + 1] - edges[cell])
