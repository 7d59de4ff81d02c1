"""Masks as run lengths on one grid, from COCO's text to the device.

Enters: COCO counts or dense masks. Leaves: areas, boxes, overlaps, points and resampled masks, all computed on the runs; dense masks only
where asked for. The cost is that of the boundaries, not of the pixels.

Not here: which cells an input square asks for (`frame`), COCO's text itself (`coco`), the maths of resampling (`resampling`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from jaxtyping import Bool, Float32, Float64, Int, Int32, Int64
from torch import Tensor

from gigamask.errors import GigamaskError
from gigamask.masks.coco_rle import check_size, read_counts, write_counts
from gigamask.masks.resample import (
    RowSpans,
    average_spans,
    cancel_pairs,
    offsets_of,
    resample_bounds,
)

PAIR_BLOCK = 2**20
"""How many spans are looked up at once when masks are intersected; bounds the memory."""


@dataclass(frozen=True, eq=False)
class RLEMasks:
    """Masks of one size. Each is the list of positions, counted column by column (`x * H + y`), where it changes; it starts as background.

    Within a mask positions increase strictly, so equal masks have equal bounds; an odd number of them means foreground to the end.
    Mask i owns `bounds[starts[i]:starts[i + 1]]`.
    """

    size: tuple[int, int]
    bounds: Int32[np.ndarray, "T"]
    starts: Int64[np.ndarray, "n1"]

    def __len__(self) -> int:
        return len(self.starts) - 1

    def __getitem__(self, chosen: np.ndarray | slice) -> "RLEMasks":
        """Returns the masks chosen by whole numbers, by a bool for each mask, or by a slice, in that order."""
        index = np.arange(len(self))[chosen]
        counts = np.diff(self.starts)[index]
        starts = offsets_of(counts)
        gather = np.repeat(self.starts[index] - starts[:-1], counts) + np.arange(starts[-1])
        return RLEMasks(self.size, self.bounds[gather], starts)

    @classmethod
    def from_coco(
        cls, counts: Sequence[bytes | str | Sequence], size: tuple[int, int]
    ) -> "RLEMasks":
        """Reads COCO counts, compressed strings or lists of whole numbers; raises a `GigamaskError` that names a mask that is not sound."""
        lengths, offsets = read_counts(counts, size)
        height, width = size
        pixels = height * width
        owner = np.repeat(np.arange(len(counts)), np.diff(offsets))
        # Every mask sums to the whole grid, so one running sum serves all; a mask's last bound, the end of the grid, is its own stride short.
        keys = np.cumsum(lengths) + owner
        return from_keys((height, width), len(counts), cancel_pairs(keys), pixels + 1)

    def to_coco(self) -> list[bytes]:
        """Returns each mask as COCO's compressed counts, byte for byte what pycocotools writes."""
        lengths, offsets = _lengths(self)
        return write_counts(lengths, offsets)

    @classmethod
    def from_dense(cls, masks: Bool[np.ndarray, "n H W"]) -> "RLEMasks":
        """Reads masks given as pixels."""
        count, height, width = masks.shape
        pixels = check_size((height, width))
        flat = masks.transpose(0, 2, 1).reshape(count, pixels)
        changes = np.empty((count, pixels), bool)
        changes[:, 0] = flat[:, 0]
        np.not_equal(flat[:, 1:], flat[:, :-1], out=changes[:, 1:])
        return from_keys((height, width), count, np.flatnonzero(changes), pixels)

    def to_dense(self) -> Bool[np.ndarray, "n H W"]:
        """Returns the masks as pixels: a transposed view, since runs go down the columns."""
        height, width = self.size
        lengths, offsets = _lengths(self)
        place = np.arange(len(lengths)) - np.repeat(offsets[:-1], np.diff(offsets))
        return (
            np.repeat((place & 1).astype(bool), lengths)
            .reshape(len(self), width, height)
            .transpose(0, 2, 1)
        )

    def areas(self) -> Int64[np.ndarray, "n"]:
        """Counts each mask's foreground pixels."""
        spans = _spans(self)
        return np.diff(spans.covered()[spans.starts])

    def boxes(self) -> Int32[np.ndarray, "n 4"]:
        """Returns each mask's box `x0, y0, x1, y1` with inclusive ends; (0, 0, -1, -1) for an empty mask."""
        spans, height = _spans(self), self.size[0]
        boxes = np.tile(np.array([0, 0, -1, -1], np.int32), (len(self), 1))
        filled = np.flatnonzero(np.diff(spans.starts))
        if not filled.size:
            return boxes
        heads, tails = spans.starts[filled], spans.starts[filled + 1] - 1
        x0, y0 = np.divmod(spans.begin, height)
        x1, y1 = np.divmod(spans.end - 1, height)
        # A run that goes on in the next column covers the foot of one column and the head of the other.
        y0[x0 != x1], y1[x0 != x1] = 0, height - 1
        boxes[filled] = np.stack(
            [x0[heads], np.minimum.reduceat(y0, heads), x1[tails], np.maximum.reduceat(y1, heads)],
            1,
        )
        return boxes

    def intersections(self, other: "RLEMasks") -> Int64[np.ndarray, "n m"]:
        """Counts the pixels that each mask shares with each of `other`'s, which must be of the same size."""
        if self.size != other.size:
            raise ValueError(
                f"masks of size {self.size} cannot be laid over masks of size {other.size}"
            )
        shared = np.zeros((len(self), len(other)), np.int64)
        pixels = self.size[0] * self.size[1]
        a, before = _spans(self), _spans(other).counter(pixels)
        rows, columns = np.nonzero(_boxes_meet(self.boxes(), other.boxes()))
        counts = np.diff(a.starts)[rows]
        for first, stop in _blocks(counts):
            block, index, pair = counts[first:stop], rows[first:stop], columns[first:stop]
            offsets = offsets_of(block)
            gather = np.repeat(a.starts[index] - offsets[:-1], block) + np.arange(offsets[-1])
            shift = np.repeat(pair * pixels, block)
            shared[index, pair] = np.add.reduceat(
                before(a.end[gather] + shift) - before(a.begin[gather] + shift), offsets[:-1]
            )
        return shared

    def iou(self, other: "RLEMasks") -> Float64[np.ndarray, "n m"]:
        """Returns each mask's intersection over union with each of `other`'s; 0 where both are empty."""
        shared = self.intersections(other)
        union = self.areas()[:, None] + other.areas()[None, :] - shared
        return shared / np.maximum(union, 1)

    def points(self, uniforms: Float64[np.ndarray, "n k"]) -> Int64[np.ndarray, "n k 2"]:
        """Returns foreground pixels `xy`, uniform in each mask when `uniforms` are uniform in [0, 1): the floor(u * area)-th pixel."""
        spans = _spans(self)
        covered = spans.covered()
        areas = np.diff(covered[spans.starts])
        if not areas.all():
            raise GigamaskError(
                f"mask {int((areas == 0).argmax())} is empty: it has no foreground point; leave this mask out"
            )
        # Numbers below 1 may have been rounded up to 1 on the way, as float32 does.
        ranks = (
            np.minimum((uniforms * areas[:, None]).astype(np.int64), areas[:, None] - 1)
            + covered[spans.starts[:-1], None]
        )
        span = np.searchsorted(covered, ranks, "right") - 1
        return np.stack(np.divmod(spans.begin[span] + ranks - covered[span], self.size[0]), -1)

    def resample(
        self, rows: Int64[np.ndarray, "h"], columns: Int64[np.ndarray, "w"], flip: bool = False
    ) -> "RLEMasks":
        """Returns masks with `out[i, j] = in[rows[i], columns[j]]`; `flip` then mirrors them left to right.

        Rows and columns do not decrease; -1, before the first or after the last of them, means background.
        """
        size = (len(rows), len(columns))
        check_size(size)
        owner = np.repeat(np.arange(len(self)), np.diff(self.starts))
        keys = resample_bounds(self.bounds, owner, self.size, rows, columns, flip)
        return from_keys(size, len(self), keys, size[0] * size[1] + 1)

    def average(
        self,
        row_edges: Float64[np.ndarray, "h1"],
        column_edges: Float64[np.ndarray, "w1"],
        flip: bool = False,
    ) -> Float32[np.ndarray, "n h w"]:
        """Returns the share of each cell that a mask covers, where cells lie between neighbouring edges, in pixels of this grid.

        Equals cv2's INTER_AREA when cells are larger than pixels. Edges increase strictly; what lies outside the grid is background.
        `flip` then mirrors the cells left to right.
        """
        for name, edges in (("row", row_edges), ("column", column_edges)):
            if len(edges) < 2 or not (np.diff(edges) > 0).all():
                raise ValueError(
                    f"{name} edges must increase strictly and be two at least, got {edges}"
                )
        return average_spans(_spans(self), self.boxes(), self.size, row_edges, column_edges, flip)

    @staticmethod
    def concatenate(parts: "Sequence[RLEMasks]") -> "RLEMasks":
        """Returns the masks of all parts, which must be of one size, in order."""
        sizes = {part.size for part in parts}
        if len(sizes) != 1:
            raise ValueError(f"masks of one size are needed to concatenate, got {sorted(sizes)}")
        counts = np.concatenate([np.diff(part.starts) for part in parts])
        return RLEMasks(
            parts[0].size, np.concatenate([part.bounds for part in parts]), offsets_of(counts)
        )


def _lengths(runs: RLEMasks) -> tuple[Int64[np.ndarray, "R"], Int64[np.ndarray, "n1"]]:
    """Returns all masks' run lengths, background first, and where each mask's begin."""
    pixels, masks = runs.size[0] * runs.size[1], np.arange(len(runs))
    owner = np.repeat(masks, np.diff(runs.starts))
    ends = np.empty(len(runs.bounds) + len(runs), np.int64)
    ends[np.arange(len(owner)) + owner] = runs.bounds + owner * pixels
    ends[runs.starts[1:] + masks] = (masks + 1) * pixels
    return np.diff(ends, prepend=0), runs.starts + np.arange(len(runs) + 1)


def _spans(runs: RLEMasks) -> RowSpans:
    """Returns the foreground as half-open intervals of positions."""
    counts = np.diff(runs.starts)
    bounds = runs.bounds.astype(np.int64)
    odd = np.flatnonzero(counts & 1)
    if odd.size:
        bounds = np.insert(bounds, runs.starts[odd + 1], runs.size[0] * runs.size[1])
    return RowSpans(bounds[0::2], bounds[1::2], offsets_of((counts + 1) >> 1))


def _blocks(counts: Int64[np.ndarray, "p"]) -> list[tuple[int, int]]:
    """Cuts pairs into consecutive blocks of about `PAIR_BLOCK` spans each."""
    cuts = np.flatnonzero(np.diff(np.cumsum(counts) // PAIR_BLOCK)) + 1
    edges = [0, *cuts.tolist(), len(counts)]
    return [(first, stop) for first, stop in pairwise(edges) if stop > first]


def _boxes_meet(
    a: Int32[np.ndarray, "n 4"], b: Int32[np.ndarray, "m 4"]
) -> Bool[np.ndarray, "n m"]:
    """Says which boxes share a pixel; an empty mask's box shares none."""
    low = np.maximum(a[:, None, :2], b[None, :, :2])
    high = np.minimum(a[:, None, 2:], b[None, :, 2:])
    return (low[..., 0] <= high[..., 0]) & (low[..., 1] <= high[..., 1])


def from_keys(
    size: tuple[int, int], count: int, keys: Int64[np.ndarray, "k"], stride: int
) -> RLEMasks:
    """Returns the masks whose bounds are `keys`, increasing: mask i's are shifted by i * stride. A bound at the end of the grid says nothing."""
    starts = np.searchsorted(keys, np.arange(count + 1) * stride)
    bounds = keys - np.repeat(np.arange(count) * stride, np.diff(starts))
    kept = bounds < size[0] * size[1]
    return RLEMasks(size, bounds[kept].astype(np.int32), offsets_of(kept)[starts])


def decode_rle(
    bounds: Int[Tensor, "T"], starts: Int64[Tensor, "n1"], size: tuple[int, int]
) -> Bool[Tensor, "n H W"]:
    """Returns runs as pixels, on the device they are on: a mark at each bound, then the parity of the marks so far.

    The result is a transposed view, since runs go down the columns.
    """
    height, width = size
    pixels, count = height * width, len(starts) - 1
    masks_at_once = max((2**31 - 1) // pixels, 1)
    owner = torch.repeat_interleave(
        torch.arange(count, device=bounds.device), starts.diff(), output_size=len(bounds)
    )
    marks = torch.zeros(count, pixels, dtype=torch.int8, device=bounds.device)
    marks[owner, bounds.long()] = 1
    # int8 wraps around, which keeps the parity. A scan of more than 2**31 - 1 numbers would pass what int32 indices reach.
    for part in marks.split(masks_at_once):
        torch.cumsum(part, 1, dtype=torch.int8, out=part)
    return marks.bitwise_and_(1).view(torch.bool).view(count, width, height).transpose(1, 2)
