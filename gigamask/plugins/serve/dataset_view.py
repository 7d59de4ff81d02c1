"""Browse an index: its shards, images with masks, statistics, and skipped samples.

Sampled images are in `sampler_view`, opened images in `session`.
"""

import threading
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property

import numpy as np

from gigamask import registry
from gigamask.data import image, storage
from gigamask.data.dataset import RawSample, Sa1bDataset
from gigamask.data.index import Index
from gigamask.datatools import stats
from gigamask.masks.rle import RLEMasks
from gigamask.plugins.serve.open_images import Json, NotFoundError
from gigamask.plugins.serve.pictures import version_of
from gigamask.plugins.serve.session import encode_jpeg, masks_to_json, shrunk
from gigamask.workflows.segment import draw_masks

MAX_ROWS = 200
"""Maximum number of images in one response."""
THUMBNAIL_PX = 240
"""Long side of a thumbnail."""
MAX_DECODING = 4
"""Maximum number of images decoded at once, of up to 200 MB each."""
MAX_SKIPPED = 1000
"""Maximum number of skipped samples in one response."""


class DatasetView:
    """An open index and its shards, which are read by one thread at a time."""

    def __init__(self, index: Index) -> None:
        self.index = index
        self._dataset, self._lock = Sa1bDataset(index), threading.Lock()
        self._codec = ThreadPoolExecutor(MAX_DECODING)

    def overview(self) -> Json:
        """Return the shards, the samples skipped in indexing, and the names of the samplers."""
        parts = self.index.manifest.parts
        first = np.searchsorted(self.index.images["shard"], np.arange(len(parts) + 1)).tolist()
        shards = [
            {
                "name": storage.basename(part.tar.path),
                "bytes": part.tar.bytes,
                "images": part.images,
                "masks": part.masks,
                "first": first[number],
            }
            for number, part in enumerate(parts)
        ]
        report = self.index.report()
        return {
            "images": len(self.index),
            "masks": report["masks"],
            "shards": shards,
            "samplers": registry.names("sampler"),
            "skipped": report["skipped"][:MAX_SKIPPED],
            "skipped_count": len(report["skipped"]),
            "broken": report["broken_tars"],
        }

    def images(self, first: int, count: int) -> list[Json]:
        """Return images in the order of the index.

        Args:
            first: Row of the first image.
            count: Number of images.
        """
        first = max(first, 0)
        last = min(first + min(count, MAX_ROWS), len(self.index))
        return [image_to_json(self.index, row) for row in range(first, last)]

    @cached_property
    def statistics(self) -> Json:
        """The statistics that `gigamask stats` prints, as data."""
        return stats.describe(self.index)

    def masks(self, row: int) -> Json:
        """Return an image with its masks and scores; raise CorruptSampleError if it is corrupt."""
        raw = self._read(row)
        if raw.json is None:
            raise NotFoundError(f"{raw.name}: has no json, so it has no masks")
        entry = raw.annotation()
        scores = {
            "predicted_iou": entry.predicted_iou.tolist(),
            "stability": entry.stability_score.tolist(),
        }
        return image_to_json(self.index, row) | {"masks": masks_to_json(entry.masks, scores)}

    def jpeg(self, row: int) -> bytes:
        """Return an image as stored, as a JPEG; raise CorruptSampleError if it is corrupt."""
        raw = self._read(row)
        preview = image.decode_preview
        return self._codec.submit(lambda: encode_jpeg(preview(raw.jpg, raw.name))).result()

    def thumbnail(self, row: int) -> bytes:
        """Return a small JPEG of an image with its masks; raise CorruptSampleError if corrupt."""
        return self._codec.submit(_thumbnail, self._read(row)).result()

    def version(self, row: int) -> str:
        """Return the version of an image's pictures, as in `image_to_json`."""
        return _version(self.index, row)

    def file(self, row: int) -> tuple[bytes, str, RLEMasks | None]:
        """Return an image's file, its name, and its masks (None if it is not annotated)."""
        raw = self._read(row)
        return raw.jpg, raw.name, None if raw.json is None else raw.annotation().masks

    def _read(self, row: int) -> RawSample:
        if not 0 <= row < len(self.index):
            raise NotFoundError(f"there is no image {row}, the index has {len(self.index)}")
        with self._lock:
            return self._dataset.read(row)


def _thumbnail(raw: RawSample) -> bytes:
    half = max(image.size(raw.jpg, raw.name)) >= 2 * THUMBNAIL_PX
    pixels = shrunk(image.decode_preview(raw.jpg, raw.name, half), THUMBNAIL_PX)
    if raw.json is not None:
        masks = raw.annotation().masks
        rows, columns = (
            ((np.arange(small) + 0.5) * large / small).astype(np.int64)
            for small, large in zip(pixels.shape, masks.size, strict=False)
        )
        pixels = draw_masks(pixels, masks.resample(rows, columns))
    return encode_jpeg(pixels)


def image_to_json(index: Index, row: int) -> Json:
    """Return the metadata of an image as JSON-compatible data.

    Args:
        index: The index.
        row: Row of the image.
    """
    images = index.images
    return {
        "row": row,
        "shows": _version(index, row),
        "name": images["name"][row].decode("utf-8", "replace"),
        **{name: int(images[name][row]) for name in ("shard", "width", "height", "masks")},
        "annotated": bool(images["json_offset"][row] >= 0),
    }


def _version(index: Index, row: int) -> str:
    """Return a version that states the shard's file and the image within it."""
    tar = index.manifest.parts[int(index.images["shard"][row])].tar
    return version_of(tar.path, tar.bytes, tar.version, index.images["name"][row])
