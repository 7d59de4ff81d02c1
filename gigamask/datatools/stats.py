"""Statistics of an index: counts, distributions and histograms, as data and as a table.

Counts, sums and shares are exact. Quantiles, means and histograms of very long columns are taken
from rows at an even stride (`sampled_rows`). `datatools.plots` draws the same results.
"""

import math
from typing import Any

import numpy as np
from jaxtyping import Int64, Shaped
from rich.filesize import decimal

from gigamask.data.index import Index
from gigamask.data.sample_table import COARSE_ABOVE, FINE_BELOW, granularity
from gigamask.errors import counted
from gigamask.interfaces import GRANULARITIES

QUANTILES = {
    "min": 0.0,
    "5%": 0.05,
    "25%": 0.25,
    "median": 0.5,
    "75%": 0.75,
    "95%": 0.95,
    "max": 1.0,
}
MAX_ROWS = 2**22
"""Four million rows put a quantile within 0.1 % of its true rank."""
LOGARITHMIC = ("mask area", "mask area share", "jpg bytes")
"""Columns whose histograms have logarithmic bins."""
MAX_BINS = 40
BINS_PER_DECADE = 8
MAX_DECADES = 9
"""Span of a logarithmic histogram; smaller values are counted in its lowest bin."""
_IMAGE_BLOCK = 2**16


def describe(index: Index) -> dict[str, Any]:
    """Return counts, bytes, granularities, distributions and histograms, ready for JSON."""
    images, masks = index.images, index.masks
    pixels = images["width"].astype(np.int64) * images["height"]
    some_images, some_masks = (
        slice(0, rows, -(-rows // MAX_ROWS) or 1) for rows in (len(index), index.manifest.masks)
    )
    mask_rows = np.arange(some_masks.start, some_masks.stop, some_masks.step)
    mask_image = np.searchsorted(images["first_mask"], mask_rows, side="right") - 1
    areas = masks["area"][some_masks]
    sides = np.stack([images["height"], images["width"]])[:, some_images]
    columns = {
        "masks per image": images["masks"][some_images],
        "short side": sides.min(0),
        "long side": sides.max(0),
        "jpg bytes": images["jpg_bytes"][some_images],
        "mask area": areas,
        "mask area share": areas / pixels[mask_image],
        "predicted_iou": masks["predicted_iou"][some_masks],
        "stability_score": masks["stability_score"][some_masks],
    }
    columns = {name: column for name, column in columns.items() if len(column)}
    return {
        "images": len(index),
        "masks": index.manifest.masks,
        "tars": len(index.manifest.tars),
        "tar_bytes": sum(stored.bytes for stored in index.manifest.tars),
        "jpg_bytes": int(images["jpg_bytes"].sum()),
        "json_bytes": int(images["json_bytes"].sum()),
        "images_without_json": int((images["json_offset"] < 0).sum()),
        "images_without_masks": int((images["masks"] == 0).sum()),
        "skipped_images": len(index.manifest.left_out.skipped),
        "granularity": _count_granularities(index, pixels),
        "distributions": {name: _distribution(column) for name, column in columns.items()},
        "histograms": {
            name: histogram(column, name in LOGARITHMIC) for name, column in columns.items()
        },
        "sampled_rows": {"images": sides.shape[1], "masks": len(areas)},
    }


def histogram(column: Shaped[np.ndarray, "n"], logarithmic: bool = False) -> dict[str, list]:
    """Count the values of a column in bins with round edges.

    A bin holds the values from its left edge up to, but not including, its right edge. Bins of
    integers have an integer width.

    Args:
        column: Numbers, at least one.
        logarithmic: Whether to use logarithmic bins, 8 per decade, instead of bins of equal width.

    Returns:
        `edges`, one more than there are bins, and `counts`.
    """
    values = column.astype(np.float64)
    if logarithmic:
        scaled = np.log10(np.maximum(values, np.finfo(np.float64).tiny)) * BINS_PER_DECADE
        scaled = np.maximum(scaled, math.ceil(scaled.max()) - MAX_DECADES * BINS_PER_DECADE)
        first = math.floor(scaled.min())
        last = max(math.ceil(scaled.max()), first + 1)
        edges = 10.0 ** (np.arange(first, last + 1) / BINS_PER_DECADE)
    else:
        step = round_step((values.max() - values.min()) / MAX_BINS)
        step = max(step, 1.0) if column.dtype.kind in "iu" else step
        # A float32 just below an edge belongs to the bin of the number it was rounded from.
        scaled = values / step + 1e-5
        first, last = math.floor(scaled.min()), math.floor(scaled.max()) + 1
        edges = np.round(np.arange(first, last + 1) * step, 12)
    bins = np.clip(np.floor(scaled) - first, 0, last - first - 1).astype(np.int64)
    counts = np.bincount(bins, minlength=last - first)
    return {"edges": edges.tolist(), "counts": counts.tolist()}


def round_step(least: float) -> float:
    """Return the smallest 1, 2 or 5 times a power of ten that is at least `least`."""
    if least < 1e-9:
        return 0.01
    power = 10.0 ** math.floor(math.log10(least))
    steps = (round(power * factor, 12) for factor in (1, 2, 5, 10))
    return next(step for step in steps if step >= least * (1 - 1e-9))


def table(stats: dict[str, Any]) -> str:
    """Format the result of `describe` as plain text."""
    images, masks = stats["images"], stats["masks"]
    lines = [
        f"{counted(images, 'image')} with {counted(masks, 'mask')} in"
        f" {counted(stats['tars'], 'tar')},"
        f" {decimal(stats['tar_bytes'])}"
        f" (jpg {decimal(stats['jpg_bytes'])}, json {decimal(stats['json_bytes'])})",
        f"images without masks: {stats['images_without_masks']:,},"
        f" without json: {stats['images_without_json']:,},"
        f" unusable and left out: {stats['skipped_images']:,}",
        "",
        *(
            f"{name:24} {count:>14,} {count / masks:>7.1%}"
            for name, count in stats["granularity"].items()
            if masks
        ),
        "",
        " " * 16 + "".join(f"{name:>11}" for name in ("mean", *QUANTILES)),
    ]
    for name, values in stats["distributions"].items():
        cells = "".join(f"{short(values[key]):>11}" for key in ("mean", *QUANTILES))
        lines.append(f"{name:16}{cells}")
    rows = stats["sampled_rows"]
    if rows["images"] < images or rows["masks"] < masks:
        lines.append(
            f"(distributions from {rows['images']:,} images and {rows['masks']:,} masks at an even"
            " stride)"
        )
    return "\n".join(lines)


def short(value: float) -> str:
    """Format a number with three significant digits, or without decimals from 100 on."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def _count_granularities(index: Index, pixels: Int64[np.ndarray, "n"]) -> dict[str, int]:
    """Count the masks of each granularity block by block, so that memory stays bounded."""
    first = index.images["first_mask"]
    counts = np.zeros(len(GRANULARITIES), np.int64)
    for start in range(0, len(pixels), _IMAGE_BLOCK):
        block = first[start : start + _IMAGE_BLOCK + 1]
        mask_pixels = np.repeat(pixels[start : start + _IMAGE_BLOCK], np.diff(block))
        shares = index.masks["area"][block[0] : block[-1]] / mask_pixels
        counts += np.bincount(granularity(shares), minlength=len(counts))
    names = (
        f"fine (< {FINE_BELOW:.0%})",
        f"medium ({FINE_BELOW:.0%} to {COARSE_ABOVE:.0%})",
        f"coarse (> {COARSE_ABOVE:.0%})",
    )
    return dict(zip(names, counts.tolist(), strict=True))


def _distribution(column: Shaped[np.ndarray, "n"]) -> dict[str, float]:
    values = column.astype(np.float64)
    quantiles = np.quantile(values, list(QUANTILES.values())).tolist()
    return {"mean": float(values.mean()), **dict(zip(QUANTILES, quantiles, strict=True))}
