"""Resampling of run-length encoded masks without decoding them."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float64, Int32, Int64

from gigamask.errors import GigamaskError


@dataclass(frozen=True)
class Spans:
    """Foreground of several masks as half-open intervals of column-major positions.

    Mask i has the spans `offsets[i]` to `offsets[i + 1]`.
    """

    begin: Int64[np.ndarray, "r"]
    end: Int64[np.ndarray, "r"]
    offsets: Int64[np.ndarray, "n1"]

    def covered(self) -> Int64[np.ndarray, "r1"]:
        """Return the number of foreground pixels, of all masks, before each span and in total."""
        return offsets_of(self.end - self.begin)

    def owner(self) -> Int64[np.ndarray, "r"]:
        """Return the index of each span's mask."""
        return np.repeat(np.arange(len(self.offsets) - 1), np.diff(self.offsets))

    def areas(self) -> Int64[np.ndarray, "n"]:
        """Return each mask's number of foreground pixels."""
        return np.diff(self.covered()[self.offsets])

    def boxes(self, heights: int | Int64[np.ndarray, "n"]) -> Int32[np.ndarray, "n 4"]:
        """Return each mask's box xyxy with inclusive ends; (0, 0, -1, -1) for an empty mask.

        Args:
            heights: Height of all masks, or of each.
        """
        counts = np.diff(self.offsets)
        filled = np.flatnonzero(counts)
        heads, tails = self.offsets[filled], self.offsets[filled + 1] - 1
        # Numbers of half the width take a third of the time.
        begin, sizes = self.begin.astype(np.int32), (self.end - self.begin).astype(np.int32)
        tall = np.broadcast_to(heights, counts.shape)[filled].astype(np.int32)
        top = begin % np.repeat(tall, counts[filled])
        low, high = np.minimum.reduceat(top, heads), np.maximum.reduceat(top + sizes, heads) - 1
        # A run that continues in the next column covers the last row of one and the first of it.
        wraps = high >= tall
        y0, y1 = np.where(wraps, 0, low), np.where(wraps, tall - 1, high)
        boxes = np.tile(np.array([0, 0, -1, -1], np.int32), (len(counts), 1))
        boxes[filled] = np.stack([begin[heads] // tall, y0, (self.end[tails] - 1) // tall, y1], 1)
        return boxes

    def points(
        self, uniforms: Float64[np.ndarray, "n k"], heights: int | Int64[np.ndarray, "n"]
    ) -> Int64[np.ndarray, "n k 2"]:
        """Return foreground pixels xy: for each uniform u, the floor(u * area)-th in column order.

        Args:
            uniforms: Numbers in [0, 1] for each mask.
            heights: Height of all masks, or of each.

        Raises:
            GigamaskError: A mask is empty.
        """
        covered = self.covered()
        areas = np.diff(covered[self.offsets])
        if not areas.all():
            mask = int((areas == 0).argmax())
            raise GigamaskError(f"mask {mask} is empty, so it has no foreground point; remove it")
        # Numbers just below 1 become 1 when they are rounded to float32.
        ranks = (
            np.minimum((uniforms * areas[:, None]).astype(np.int64), areas[:, None] - 1)
            + covered[self.offsets[:-1], None]
        )
        span = np.searchsorted(covered, ranks, "right") - 1
        tall = np.broadcast_to(heights, areas.shape)[:, None]
        return np.stack(np.divmod(self.begin[span] + ranks - covered[span], tall), -1)

    def counter(self, pixels: int) -> Callable[[Int64[np.ndarray, "k"]], Int64[np.ndarray, "k"]]:
        """Return a function that counts the foreground pixels before positions.

        It expects positions in mask i shifted by i * pixels.
        """
        shift = self.owner() * pixels
        # An empty span at the beginning serves positions before the first span.
        begin, end = (
            np.concatenate([np.full(1, -1), edge + shift]) for edge in (self.begin, self.end)
        )
        covered = np.concatenate([np.zeros(1, np.int64), self.covered()])

        def before(positions: Int64[np.ndarray, "k"]) -> Int64[np.ndarray, "k"]:
            span = np.searchsorted(begin, positions, "right") - 1
            return covered[span] + np.minimum(positions, end[span]) - begin[span]

        return before


@dataclass(frozen=True)
class ColumnRuns:
    """Runs within columns: rows `top` to `bottom` (half-open) of one column of one mask."""

    owner: Int64[np.ndarray, "p"]
    column: Int64[np.ndarray, "p"]
    top: Int64[np.ndarray, "p"]
    bottom: Int64[np.ndarray, "p"]

    def take(self, index: Int64[np.ndarray, "q"]) -> "ColumnRuns":
        """Return the runs at `index`."""
        return ColumnRuns(
            self.owner[index], self.column[index], self.top[index], self.bottom[index]
        )


def offsets_of(counts: Bool[np.ndarray, "n"] | Int64[np.ndarray, "n"]) -> Int64[np.ndarray, "n1"]:
    """Return the starts of consecutive groups of these sizes, followed by the end of the last."""
    offsets = np.zeros(len(counts) + 1, np.int64)
    np.cumsum(counts, out=offsets[1:])
    return offsets


def repeat_index(
    counts: Int64[np.ndarray, "n"],
) -> tuple[Int64[np.ndarray, "k"], Int64[np.ndarray, "k"]]:
    """Return each index repeated by its count, and the number of each repetition.

    Args:
        counts: How often each index is repeated.
    """
    index = np.repeat(np.arange(len(counts)), counts)
    return index, np.arange(len(index)) - np.repeat(np.cumsum(counts) - counts, counts)


def cancel_pairs(keys: Int64[np.ndarray, "k"]) -> Int64[np.ndarray, "c"]:
    """Return those of the sorted keys that occur an odd number of times, once each.

    A mask that changes twice at the same position does not change there.
    """
    is_new = np.ones(len(keys) + 1, bool)
    np.not_equal(keys[1:], keys[:-1], out=is_new[1:-1])
    if is_new.all():
        return keys
    heads = np.flatnonzero(is_new)
    return keys[heads[:-1][(np.diff(heads) & 1).astype(bool)]]


def resample_bounds(
    bounds: Int32[np.ndarray, "T"],
    owner: Int64[np.ndarray, "T"],
    size: tuple[int, int],
    rows: Int64[np.ndarray, "h"],
    columns: Int64[np.ndarray, "w"],
    flip: bool,
) -> Int64[np.ndarray, "k"]:
    """Return the bounds of masks with `out[i, j] = in[rows[i], columns[j]]`.

    A bound moves to the number of resampled positions before it; bounds that then coincide cancel
    in pairs.

    Args:
        bounds: Change points of all masks.
        owner: Index of each bound's mask.
        size: Size of the masks, (H, W).
        rows: Input row of each output row, non-decreasing; -1 for background, only before the first
            row or after the last.
        columns: The same for columns.
        flip: Whether to mirror the result left to right.

    Returns:
        Increasing bounds, those of mask i shifted by i * (h * w + 1). They may include bounds at
        the end of the grid.
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
    runs = split_columns(_pair_up(keys, stride, int(owner[-1]) + 1 if len(owner) else 0), height)
    first = np.cumsum(repeats) - repeats + left
    copies = repeats[runs.column]
    index, copy = repeat_index(copies)
    column = first[runs.column][index] + copy
    runs = runs.take(index)
    head = (
        runs.owner * (pixels + 1)
        + (len(columns) - 1 - column if flip else column) * len(rows)
        + above
    )
    moved = np.stack([head + runs.top, head + runs.bottom], 1).ravel()
    return cancel_pairs(np.sort(moved))


def _pair_up(keys: Int64[np.ndarray, "k"], stride: int, count: int) -> Spans:
    """Return the spans between bounds, closing those that reach the end of the grid."""
    owner, position = np.divmod(keys, stride)
    counts = np.bincount(owner, minlength=count)
    odd = np.flatnonzero(counts & 1)
    position = np.insert(position, np.cumsum(counts)[odd], stride - 1)
    offsets = offsets_of((counts + 1) >> 1)
    filled = position[1::2] > position[0::2]
    return Spans(position[0::2][filled], position[1::2][filled], offsets_of(filled)[offsets])


def split_columns(spans: Spans, height: int) -> ColumnRuns:
    """Split spans at the ends of columns.

    Args:
        spans: Foreground of masks.
        height: Height of the masks.
    """
    first, last = spans.begin // height, (spans.end - 1) // height
    runs = ColumnRuns(spans.owner(), first, spans.begin - first * height, spans.end - last * height)
    counts = last - first + 1
    if (counts == 1).all():
        return runs
    index, copy = repeat_index(counts)
    column = first[index] + copy
    top = np.where(column == first[index], runs.top[index], 0)
    bottom = np.where(column == last[index], runs.bottom[index], height)
    return ColumnRuns(runs.owner[index], column, top, bottom)


def _inside(
    lines: Int64[np.ndarray, "k"], limit: int, name: str
) -> tuple[int, Int64[np.ndarray, "m"]]:
    """Return the number of -1 before the first line, and the lines without -1."""
    inside = np.flatnonzero(lines >= 0)
    if not inside.size:
        return 0, lines[:0]
    inner = lines[inside[0] : inside[-1] + 1]
    if (np.diff(inner) < 0).any() or inner[0] < 0 or inner[-1] >= limit:
        raise ValueError(
            f"{name} must not decrease and must stay below {limit}, "
            "with -1 only before the first or after the last of them"
        )
    return int(inside[0]), inner
