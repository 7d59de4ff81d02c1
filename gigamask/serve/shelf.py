"""An index to look through: its shards, its images with their masks, what was left out. Numbers and names leave, and JPEGs.

Not here: what a sampler draws of it (`serve.orders`), pictures in front of a model (`serve.studio`), statistics (`prepare.stats`).
"""

import threading
from functools import cached_property
from typing import Any

import cv2
import numpy as np

from gigamask import names
from gigamask.data import image, store
from gigamask.data.dataset import RawSample, Sa1bDataset
from gigamask.data.index import Index
from gigamask.geometry.runs import Runs
from gigamask.prepare import stats
from gigamask.serve.studio import Unknown, described, to_jpeg

MOST_ROWS = 200
"""Images that are listed, or drawn, at once."""
THUMBNAIL_PX = 240
"""Long side."""
MOST_LEFT_OUT = 1000


class Shelf:
    """An opened index and its shards, which one thread at a time reads."""

    def __init__(self, index: Index) -> None:
        self.index = index
        self._dataset, self._lock = Sa1bDataset(index), threading.Lock()

    def about(self) -> dict[str, Any]:
        """Returns the shards, what was left out when they were indexed, and which samplers there are."""
        first = np.searchsorted(self.index.images["shard"], np.arange(len(self.index.manifest.parts) + 1)).tolist()
        shards = [
            {"name": store.name(part.tar.path), "bytes": part.tar.bytes, "images": part.images, "masks": part.masks, "first": first[number]}
            for number, part in enumerate(self.index.manifest.parts)
        ]
        report = self.index.report()
        left_out = report["rejected"]
        counts = {"left_out": left_out[:MOST_LEFT_OUT], "left_out_count": len(left_out), "broken": report["broken_tars"]}
        return {"images": len(self.index), "masks": report["masks"], "shards": shards, "samplers": list(names.SEAMS["sampler"][1]), **counts}

    def listed(self, first: int, count: int) -> list[dict[str, Any]]:
        """Returns some images in the index's order."""
        return [told(self.index, row) for row in range(max(first, 0), min(max(first, 0) + min(count, MOST_ROWS), len(self.index)))]

    @cached_property
    def statistics(self) -> dict[str, Any]:
        """What `gigamask stats` tells."""
        return stats.describe(self.index)

    def masks(self, row: int) -> dict[str, Any]:
        """Returns an image's masks with what its annotation says of them; raises BadSample where it cannot be read."""
        raw = self._read(row)
        if raw.json is None:
            raise Unknown(f"{raw.name}: has no json, so it has no masks")
        entry = raw.annotation()
        scores = {"predicted_iou": entry.predicted_iou.tolist(), "stability": entry.stability_score.tolist()}
        return told(self.index, row) | {"masks": described(entry.masks, scores)}

    def jpeg(self, row: int) -> bytes:
        """Returns an image's pixels as stored, as a JPEG; raises BadSample where it cannot be read."""
        return to_jpeg(self._read(row).pixels())

    def thumbnail(self, row: int) -> bytes:
        """Returns the same, small."""
        raw = self._read(row)
        pixels = raw.pixels(half=max(image.size(raw.jpg, raw.name)) >= 2 * THUMBNAIL_PX)
        scale = min(1.0, THUMBNAIL_PX / max(pixels.shape[:2]))
        size = max(1, round(pixels.shape[1] * scale)), max(1, round(pixels.shape[0] * scale))
        return to_jpeg(cv2.resize(pixels, size, interpolation=cv2.INTER_AREA))

    def file(self, row: int) -> tuple[bytes, str, Runs | None]:
        """Returns an image's file, its name, and its masks, None where it has no annotation."""
        raw = self._read(row)
        return raw.jpg, raw.name, None if raw.json is None else raw.annotation().masks

    def _read(self, row: int) -> RawSample:
        if not 0 <= row < len(self.index):
            raise Unknown(f"there is no image {row}, the index has {len(self.index)}")
        with self._lock:
            return self._dataset.read(row)


def told(index: Index, row: int) -> dict[str, Any]:
    """Returns what is listed of an image."""
    images = index.images
    numbers = {name: int(images[name][row]) for name in ("shard", "width", "height", "masks")}
    return {"row": row, "name": images["name"][row].decode("utf-8", "replace"), **numbers, "annotated": bool(images["json_offset"][row] >= 0)}
