"""Batches of run-length encoded masks: areas, boxes, IoU, points and resampling without decoding.

The cost grows with the masks' boundaries, not with their pixels.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, pairwise

import numpy as np
from jaxtyping import Bool, Float64, Int32, Int64

from gigamask.masks.coco_rle import check_size, read_spans, write_counts
from gigamask.masks.resample import (
    Spans,
    cancel_pairs,
    offsets_of,
    repeat_index,
    resample_bounds,
)

PAIR_BLOCK = 2**20
"""Number of spans looked up at a time when masks are intersected; limits the memory."""


@dataclass(frozen=True, eq=False)
class RLEMasks:
    """Run-length encoded masks of one size.

    A mask is the list of the column-major positions (`x * H + y`) where it changes, starting as
    background. Positions of a mask increase strictly, so equal masks have equal bounds; if their
    number is odd, the mask is foreground up to the end.

    Attributes:
        size: Size of the masks, (H, W).
        bounds: Change points of all masks; mask i has `bounds[offsets[i]:offsets[i + 1]]`.
        offsets: Start of each mask's bounds, followed by the end of the last.
    """

    size: tuple[int, int]
    bounds: Int32[np.ndarray, "T"]
    offsets: Int64[np.ndarray, "n1"]

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, selection: np.ndarray | slice) -> "RLEMasks":
        """Return the masks selected by integers, bools or a slice, in that order."""
        index = np.arange(len(self))[selection]
        counts = np.diff(self.offsets)[index]
        offsets = offsets_of(counts)
        gather = np.repeat(self.offsets[index] - offsets[:-1], counts) + np.arange(offsets[-1])
        return RLEMasks(self.size, self.bounds[gather], offsets)

    @classmethod
    def from_coco(
        cls, counts: Sequence[bytes | str | Sequence], size: tuple[int, int]
    ) -> "RLEMasks":
        """Decode masks in COCO's format.

        Args:
            counts: Counts of each mask, compressed strings or lists of integers.
            size: Size of the masks, (H, W).

        Raises:
            GigamaskError: A mask is not valid; the message has its index.
        """
        height, width = map(int, size)
        return read_masks([counts], [(height, width)])[0]

    def to_coco(self) -> list[bytes]:
        """Return the masks as COCO's compressed counts, byte for byte as pycocotools does."""
        return write_masks([self])

    @classmethod
    def from_dense(cls, masks: Bool[np.ndarray, "n H W"]) -> "RLEMasks":
        """Encode dense masks."""
        masks = masks.astype(bool, copy=False)
        count, height, width = masks.shape
        pixels = check_size((height, width))
        flat = masks.transpose(0, 2, 1).reshape(count, pixels)
        changes = np.empty((count, pixels), bool)
        changes[:, 0] = flat[:, 0]
        np.not_equal(flat[:, 1:], flat[:, :-1], out=changes[:, 1:])
        return from_keys((height, width), count, np.flatnonzero(changes), pixels)

    def to_dense(self) -> Bool[np.ndarray, "n H W"]:
        """Decode the masks, as a transposed view because runs are column-major."""
        height, width = self.size
        lengths, offsets = _lengths([self])
        index = repeat_index(np.diff(offsets))[1]
        return (
            np.repeat((index & 1).astype(bool), lengths)
            .reshape(len(self), width, height)
            .transpose(0, 2, 1)
        )

    def spans(self) -> Spans:
        """Return the foreground as half-open intervals of positions."""
        return spans_of([self])

    def areas(self) -> Int64[np.ndarray, "n"]:
        """Return each mask's number of foreground pixels."""
        return self.spans().areas()

    def boxes(self) -> Int32[np.ndarray, "n 4"]:
        """Return each mask's box xyxy with inclusive ends; (0, 0, -1, -1) for an empty mask."""
        return self.spans().boxes(self.size[0])

    def intersections(self, other: "RLEMasks") -> Int64[np.ndarray, "n m"]:
        """Return the number of pixels that each mask shares with each mask of `other`."""
        if self.size != other.size:
            raise ValueError(f"masks must have the same size, got {self.size} and {other.size}")
        shared = np.zeros((len(self), len(other)), np.int64)
        pixels = self.size[0] * self.size[1]
        a, before = self.spans(), other.spans().counter(pixels)
        rows, columns = np.nonzero(_boxes_meet(self.boxes(), other.boxes()))
        counts = np.diff(a.offsets)[rows]
        for first, stop in _blocks(counts):
            block, row, column = counts[first:stop], rows[first:stop], columns[first:stop]
            offsets = offsets_of(block)
            gather = np.repeat(a.offsets[row] - offsets[:-1], block) + np.arange(offsets[-1])
            shift = np.repeat(column * pixels, block)
            shared[row, column] = np.add.reduceat(
                before(a.end[gather] + shift) - before(a.begin[gather] + shift), offsets[:-1]
            )
        return shared

    def iou(self, other: "RLEMasks") -> Float64[np.ndarray, "n m"]:
        """Return each mask's IoU with each mask of `other`; 0 where both are empty."""
        shared = self.intersections(other)
        union = self.areas()[:, None] + other.areas()[None, :] - shared
        return shared / np.maximum(union, 1)

    def sample_points(self, uniforms: Float64[np.ndarray, "n k"]) -> Int64[np.ndarray, "n k 2"]:
        """Return foreground pixels xy as `Spans.points` does.

        The pixels are uniform in the mask if u is uniform in [0, 1).
        """
        return self.spans().points(uniforms, self.size[0])

    def resample(
        self, rows: Int64[np.ndarray, "h"], columns: Int64[np.ndarray, "w"], flip: bool = False
    ) -> "RLEMasks":
        """Return masks with `out[i, j] = in[rows[i], columns[j]]`.

        Args:
            rows: Row of this grid for each row of the result, non-decreasing; -1 for background,
                only before the first row or after the last.
            columns: The same for columns.
            flip: Whether to mirror the result left to right.

        Returns:
            Masks of size h x w.
        """
        size = (len(rows), len(columns))
        check_size(size)
        owner = np.repeat(np.arange(len(self)), np.diff(self.offsets))
        keys = resample_bounds(self.bounds, owner, self.size, rows, columns, flip)
        return from_keys(size, len(self), keys, size[0] * size[1] + 1)

    @staticmethod
    def concatenate(parts: "Sequence[RLEMasks]") -> "RLEMasks":
        """Return the masks of all parts in order; the parts must have the same size."""
        sizes = {part.size for part in parts}
        if len(sizes) != 1:
            raise ValueError(f"masks to concatenate must have the same size, got {sorted(sizes)}")
        bounds, counts, _ = _join(parts)
        return RLEMasks(parts[0].size, bounds, offsets_of(counts))


def read_masks(
    counts: Sequence[Sequence[bytes | str | Sequence]], sizes: Sequence[tuple[int, int]]
) -> list[RLEMasks]:
    """Decode masks of several images in COCO's format at once.

    Args:
        counts: Counts of each mask of each image, compressed strings or lists of integers.
        sizes: Size of each image, (H, W).

    Raises:
        GigamaskError: A mask is not valid; the message has its index among all.
    """
    pixels, numbers = [check_size(size) for size in sizes], [len(each) for each in counts]
    spans = read_spans(list(chain.from_iterable(counts)), np.repeat(sizes, numbers, 0))
    stride = max(pixels) + 1  # keeps the end of a mask apart from the start of the next
    shift = spans.owner() * stride
    keys = np.stack([spans.begin + shift, spans.end + shift], 1).ravel()
    return _split(sizes, numbers, cancel_pairs(keys), stride)


def write_masks(parts: Sequence[RLEMasks]) -> list[bytes]:
    """Return masks of several images as COCO's compressed counts, as pycocotools does."""
    return write_counts(*_lengths(parts))


def spans_of(parts: Sequence[RLEMasks]) -> Spans:
    """Return the foreground of masks of several images."""
    bounds, counts, pixels = _join(parts)
    bounds = bounds.astype(np.int64)
    odd = np.flatnonzero(counts & 1)
    if odd.size:
        bounds = np.insert(bounds, np.cumsum(counts)[odd], pixels[odd])
    return Spans(bounds[0::2], bounds[1::2], offsets_of((counts + 1) >> 1))


def _join(
    parts: Sequence[RLEMasks],
) -> tuple[Int32[np.ndarray, "T"], Int64[np.ndarray, "n"], Int64[np.ndarray, "n"]]:
    """Return the bounds of all masks, and the number of bounds and of pixels of each."""
    return (
        np.concatenate([part.bounds for part in parts]),
        np.concatenate([part.offsets[1:] - part.offsets[:-1] for part in parts]),
        np.repeat([part.size[0] * part.size[1] for part in parts], [len(part) for part in parts]),
    )


def _lengths(parts: Sequence[RLEMasks]) -> tuple[Int64[np.ndarray, "R"], Int64[np.ndarray, "n1"]]:
    """Return the run lengths of all masks, background first, and the start of each mask's."""
    bounds, counts, pixels = _join(parts)
    edges = offsets_of(pixels)
    ends = bounds + np.repeat(edges[:-1], counts)
    ends = np.insert(ends, np.cumsum(counts), edges[1:])
    return np.diff(ends, prepend=0), offsets_of(counts + 1)


def _blocks(counts: Int64[np.ndarray, "p"]) -> list[tuple[int, int]]:
    """Return consecutive blocks of pairs, start and stop, of about `PAIR_BLOCK` spans each."""
    cuts = np.flatnonzero(np.diff(np.cumsum(counts) // PAIR_BLOCK)) + 1
    edges = [0, *cuts.tolist(), len(counts)]
    return [(first, stop) for first, stop in pairwise(edges) if stop > first]


def _boxes_meet(
    a: Int32[np.ndarray, "n 4"], b: Int32[np.ndarray, "m 4"]
) -> Bool[np.ndarray, "n m"]:
    """Return which boxes share a pixel; the box of an empty mask shares none."""
    low = np.maximum(a[:, None, :2], b[None, :, :2])
    high = np.minimum(a[:, None, 2:], b[None, :, 2:])
    return (low[..., 0] <= high[..., 0]) & (low[..., 1] <= high[..., 1])


def from_keys(
    size: tuple[int, int], count: int, keys: Int64[np.ndarray, "k"], stride: int
) -> RLEMasks:
    """Return masks from the bounds of all masks in one increasing array.

    Args:
        size: Size of the masks, (H, W).
        count: Number of masks.
        keys: Bounds of mask i plus i * stride; a bound at the end of the grid is dropped.
        stride: Distance between masks, at least H * W.
    """
    return _split([size], [count], keys, stride)[0]


def _split(
    sizes: Sequence[tuple[int, int]],
    numbers: Sequence[int],
    keys: Int64[np.ndarray, "k"],
    stride: int,
) -> list[RLEMasks]:
    """Return the masks of several images, of which each has a size and a number of masks."""
    edges = [0, *accumulate(numbers)]
    offsets = np.searchsorted(keys, np.arange(edges[-1] + 1) * stride)
    lengths = np.diff(offsets)
    bounds = keys - np.repeat(np.arange(edges[-1]) * stride, lengths)
    pixels = np.array([height * width for height, width in sizes])
    limits = np.repeat(np.repeat(pixels, numbers), lengths) if len(sizes) > 1 else pixels
    dropped = np.flatnonzero(bounds >= limits)
    if dropped.size:
        bounds, offsets = np.delete(bounds, dropped), offsets - np.searchsorted(dropped, offsets)
    bounds = bounds.astype(np.int32)
    return [
        RLEMasks(size, bounds[own[0] : own[-1]], own - own[0])
        for size, own in zip(sizes, (offsets[i : j + 1] for i, j in pairwise(edges)), strict=True)
    ]


def union(masks: RLEMasks, groups: Int64[np.ndarray, "n"], count: int) -> RLEMasks:
    """Return the union of the masks of each group.

    Args:
        masks: The masks.
        groups: Group of each mask, from 0.
        count: Number of groups.
    """
    pixels, lengths = masks.size[0] * masks.size[1], np.diff(masks.offsets)
    of, bound = repeat_index(lengths)
    # A run that reaches the end of the grid is closed there, or it would extend into the next mask.
    odd = groups[lengths % 2 == 1]
    begins = groups[of] * (pixels + 1) + masks.bounds
    # Ends are odd, so that what begins where another ends is sorted before it.
    keys = np.concatenate([2 * begins + (bound & 1), 2 * (odd * (pixels + 1) + pixels) + 1])
    keys.sort()
    ends = keys & 1
    depth = np.cumsum(1 - 2 * ends)
    return from_keys(masks.size, count, keys[depth == 1 - ends] >> 1, pixels + 1)
