"""Shares of the cells of a grid that masks cover, from run lengths without decoding them."""

import numpy as np
from jaxtyping import Float32, Float64, Int64

from gigamask.masks.resample import offsets_of, repeat_index, split_columns
from gigamask.masks.rle import RLEMasks
from gigamask.masks.transforms import ImageTransform

SHARE_UNIT = 2.0**40
"""Shares are summed as integer multiples of 1 / SHARE_UNIT, which float64 adds exactly, so that
cells that are not covered are exactly 0."""


def soft_masks(
    transform: ImageTransform, masks: RLEMasks, mask_size: int
) -> Float32[np.ndarray, "n mask_size mask_size"]:
    """Return the share of each cell of a grid over the model input that each mask covers.

    Args:
        transform: Transform from the whole image to the input, without a flip.
        masks: Masks at original size.
        mask_size: Side of the grid in cells.
    """
    edges = np.arange(mask_size + 1) * (transform.image_size / mask_size)
    (height, width), (h, w) = masks.size, transform.resized
    return average(masks, edges * (height / h), edges * (width / w))


def average(
    masks: RLEMasks,
    row_edges: Float64[np.ndarray, "h1"],
    column_edges: Float64[np.ndarray, "w1"],
) -> Float32[np.ndarray, "n h w"]:
    """Return the share of each cell of a grid that each mask covers.

    This equals cv2's INTER_AREA if cells are larger than pixels. The ends of runs are added to a
    table of differences along each column of cells; one cumulative sum over the boxes of all masks
    gives the shares.

    Args:
        masks: The masks.
        row_edges: Edges of the h rows of cells, in pixels of the masks, strictly increasing;
            everything outside of the masks is background.
        column_edges: The same for the w columns of cells.

    Raises:
        ValueError: Edges do not increase, or there are fewer than two.
    """
    for name, edges in (("row", row_edges), ("column", column_edges)):
        if len(edges) < 2 or not (np.diff(edges) > 0).all():
            raise ValueError(
                f"there must be at least two {name} edges, strictly increasing, got {edges}"
            )
    boxes = masks.boxes()
    height, width = len(row_edges) - 1, len(column_edges) - 1
    shares = np.zeros((len(boxes), width, height), np.float32)
    first_cell, last_cell = _cells(column_edges, masks.size[1])
    top_cell, bottom_cell = _cells(row_edges, masks.size[0])
    left, right = first_cell[boxes[:, 0]], last_cell[boxes[:, 2]]
    upper, lower = top_cell[boxes[:, 1]], bottom_cell[boxes[:, 3]]
    filled = (boxes[:, 2] >= 0) & (left <= right) & (upper <= lower)
    # Two more cells below each column: one where the last run may end, one for its remainder.
    tall, wide = np.where(filled, lower - upper + 3, 0), np.where(filled, right - left + 1, 0)
    offsets = offsets_of(tall * wide)
    runs = split_columns(masks.spans(), masks.size[0])
    counts = np.where(filled[runs.owner], np.maximum(last_cell - first_cell + 1, 0)[runs.column], 0)
    index, copy = repeat_index(counts)
    runs = runs.take(index)
    cell = first_cell[runs.column] + copy
    overlap = np.minimum(runs.column + 1, column_edges[cell + 1]) - np.maximum(
        runs.column, column_edges[cell]
    )
    weight = np.rint(overlap / (column_edges[cell + 1] - column_edges[cell]) * SHARE_UNIT)
    base = offsets[runs.owner] + (cell - left[runs.owner]) * tall[runs.owner] - upper[runs.owner]
    table = np.zeros(int(offsets[-1]))
    for ends, sign in ((runs.top, 1.0), (runs.bottom, -1.0)):
        row, below = _split(row_edges, ends)
        part = np.rint(below * weight)
        for index, amount in ((base + row, part), (base + row + 1, weight - part)):
            table += np.bincount(index, sign * amount, minlength=len(table))
    np.cumsum(table, out=table)
    covered = np.flatnonzero(table)
    mask = np.searchsorted(offsets, covered, "right") - 1
    column, row = np.divmod(covered - offsets[mask], tall[mask])
    column += left[mask]
    shares[mask, column, upper[mask] + row] = table[covered] / SHARE_UNIT
    return shares.transpose(0, 2, 1)


def _cells(
    edges: Float64[np.ndarray, "k1"], size: int
) -> tuple[Int64[np.ndarray, "s"], Int64[np.ndarray, "s"]]:
    """Return the first and last cell that each pixel of a line touches; first > last if none."""
    pixels = np.arange(size)
    first = np.searchsorted(edges, pixels, "right") - 1
    last = np.searchsorted(edges, pixels + 1, "left") - 1
    return np.maximum(first, 0), np.minimum(last, len(edges) - 2)


def _split(
    edges: Float64[np.ndarray, "k1"], ends: Int64[np.ndarray, "p"]
) -> tuple[Int64[np.ndarray, "p"], Float64[np.ndarray, "p"]]:
    """Return the cell that contains each end of a run, and the share of the cell after the end."""
    inner = np.clip(ends, edges[0], edges[-1])
    cell = np.minimum(np.searchsorted(edges, inner, "right") - 1, len(edges) - 2)
    return cell, (edges[cell + 1] - inner) / (edges[cell + 1] - edges[cell])
