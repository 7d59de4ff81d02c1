"""Statistics of an index: its columns enter, plain numbers leave, and the same numbers as a table.

Counts, sums and shares are exact; the quantiles and mean of very long columns come from rows taken at an even stride (`sampled_rows`).

Not here: what was left out when indexing, entry by entry (`data.index.Index.report`); the same as a picture (`prepare.histograms`).
"""

from typing import Any

import numpy as np
from jaxtyping import Int64, Shaped

from gigamask.data.index import Index
from gigamask.data.items import COARSE_ABOVE, FINE_BELOW, granularity
from gigamask.prepare import histograms
from gigamask.seams import GRANULARITIES

QUANTILES = {"min": 0.0, "5%": 0.05, "25%": 0.25, "median": 0.5, "75%": 0.75, "95%": 0.95, "max": 1.0}
MAX_ROWS = 2**22
"""Four million rows put a quantile within 0.1 % of its true rank."""
LOGARITHMIC = ("mask area", "mask area share", "jpg bytes")
"""Whose histograms have bars of equal ratio."""
_IMAGE_BLOCK = 2**16


def describe(index: Index) -> dict[str, Any]:
    """Returns counts, bytes, granularity, and the distributions and histograms of sizes, areas and scores, ready for JSON."""
    images, masks = index.images, index.masks
    pixels = images["width"].astype(np.int64) * images["height"]
    images_at, masks_at = (slice(0, rows, -(-rows // MAX_ROWS) or 1) for rows in (len(index), index.manifest.masks))
    owners = np.searchsorted(images["first_mask"], np.arange(masks_at.start, masks_at.stop, masks_at.step), side="right") - 1
    areas = masks["area"][masks_at]
    sides = np.stack([images["height"], images["width"]])[:, images_at]
    columns = {
        "masks per image": images["masks"][images_at],
        "short side": sides.min(0),
        "long side": sides.max(0),
        "jpg bytes": images["jpg_bytes"][images_at],
        "mask area": areas,
        "mask area share": areas / pixels[owners],
        "predicted_iou": masks["predicted_iou"][masks_at],
        "stability_score": masks["stability_score"][masks_at],
    }
    return {
        "images": len(index),
        "masks": index.manifest.masks,
        "tars": len(index.manifest.tars),
        "tar_bytes": sum(stored.bytes for stored in index.manifest.tars),
        "jpg_bytes": int(images["jpg_bytes"].sum()),
        "json_bytes": int(images["json_bytes"].sum()),
        "images_without_json": int((images["json_offset"] < 0).sum()),
        "images_without_masks": int((images["masks"] == 0).sum()),
        "images_left_out": len(index.manifest.left_out.rejected),
        "granularity": _granularity(index, pixels),
        "distributions": {name: _distribution(column) for name, column in columns.items() if len(column)},
        "histograms": {name: histograms.count(column, name in LOGARITHMIC) for name, column in columns.items() if len(column)},
        "sampled_rows": {"images": sides.shape[1], "masks": len(areas)},
    }


def table(stats: dict[str, Any]) -> str:
    """Returns what `describe` found as plain text."""
    images, masks = stats["images"], stats["masks"]
    lines = [
        f"{images:,} images with {masks:,} masks in {stats['tars']:,} tars, {_in_bytes(stats['tar_bytes'])}"
        f" (jpg {_in_bytes(stats['jpg_bytes'])}, json {_in_bytes(stats['json_bytes'])})",
        f"{stats['images_without_masks']:,} images have no masks, {stats['images_without_json']:,} have no json;"
        f" {stats['images_left_out']:,} unusable ones were left out",
        "",
        *(f"{name:24} {count:>14,} {count / masks:>7.1%}" for name, count in stats["granularity"].items() if masks),
        "",
        " " * 16 + "".join(f"{name:>11}" for name in ("mean", *QUANTILES)),
    ]
    for name, values in stats["distributions"].items():
        lines.append(f"{name:16}" + "".join(f"{histograms.short(values[key]):>11}" for key in ("mean", *QUANTILES)))
    rows = stats["sampled_rows"]
    if rows["images"] < images or rows["masks"] < masks:
        lines.append(f"(distributions from {rows['images']:,} images and {rows['masks']:,} masks at an even stride)")
    return "\n".join(lines)


def _granularity(index: Index, pixels: Int64[np.ndarray, "n"]) -> dict[str, int]:
    """Counts the masks of each granularity, a block of images at a time, so that a billion masks need no billion more numbers."""
    first = index.images["first_mask"]
    counts = np.zeros(len(GRANULARITIES), np.int64)
    for start in range(0, len(pixels), _IMAGE_BLOCK):
        block = first[start : start + _IMAGE_BLOCK + 1]
        shares = index.masks["area"][block[0] : block[-1]] / np.repeat(pixels[start : start + _IMAGE_BLOCK], np.diff(block))
        counts += np.bincount(granularity(shares), minlength=len(counts))
    names = f"fine (< {FINE_BELOW:.0%})", f"medium ({FINE_BELOW:.0%} to {COARSE_ABOVE:.0%})", f"coarse (> {COARSE_ABOVE:.0%})"
    return dict(zip(names, counts.tolist(), strict=True))


def _distribution(column: Shaped[np.ndarray, "n"]) -> dict[str, float]:
    values = column.astype(np.float64)
    quantiles = np.quantile(values, list(QUANTILES.values()))
    return {"mean": float(values.mean()), **dict(zip(QUANTILES, map(float, quantiles), strict=True))}


def _in_bytes(count: int | float) -> str:
    for unit in ("B", "KB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"
