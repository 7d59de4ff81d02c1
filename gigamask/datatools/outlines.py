"""Limits of the masks of one image, and drawing of polygons within them, for every format.

All limits are checked before anything is drawn, so that time and memory of a conversion are
bounded whatever a file says. Valid polygons are drawn by faster-coco-eval exactly as in
pycocotools; time and memory grow with the length of their outlines, not with the size of the image.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from faster_coco_eval import mask_api_new_cpp  # pyrefly: ignore[missing-module-attribute]  (compiled, without stubs)
from jaxtyping import Bool, Float64

from gigamask.data.annotation import MAX_MASKS, MAX_SIDE, RleSegmentation
from gigamask.data.image import check_size
from gigamask.errors import CorruptSampleError
from gigamask.masks.rle import RLEMasks, union

MAX_COORDINATE = 2 * MAX_SIDE
"""Largest coordinate of a corner in pixels; the time to draw an outline grows with its length."""
MAX_OUTLINE = 2**22
"""Maximum length of one mask's outlines in pixels, hundreds of times what annotators draw."""
MAX_IMAGE_OUTLINE = 2**25
"""Maximum length of all outlines of an image in pixels; drawing takes 0.1 s per million."""
MAX_NUMBERS = 2**22
"""Maximum numbers (coordinates, run lengths) of an image, 400 for each of `MAX_MASKS`."""
MAX_RUN_BYTES = 2**23
"""Maximum characters of the compressed run lengths of an image; SA-1B's have a tenth."""
MAX_PIXELS_OF_MASKS = 2**30
"""Maximum pixels of all PNGs of masks of an image, which take a few seconds to decode."""
MAX_RUNS = 2**23
"""Maximum changes between mask and background along the columns of an image, over all masks."""

BEYOND = "beyond the limits"
"""Kind of masks and images that are too much to read."""
DROPPED = "polygons without area were left out of masks that have others"
"""Note of such polygons."""
NO_AREA = "no area"
"""Kind of polygons that are a point or a line."""

Polygons = list[list[float | None] | float | None]


class MaskLimitError(CorruptSampleError):
    """An image has more masks, corners or run lengths than are read."""


def check_count(count: int, what: str, limit: int, name: str) -> None:
    """Raise `MaskLimitError` if an image has more of something than is read.

    Args:
        count: How many the image has, or the number at which counting stopped.
        what: What they are, in the plural.
        limit: Largest number that is read.
        name: The image's name in error messages.
    """
    if count > limit:
        raise MaskLimitError(
            f"{name}: has {count:,} {what}, at most {limit:,} are read; leave it out or split it",
            BEYOND,
        )


def check_masks(count: int, name: str) -> None:
    """Raise `MaskLimitError` if an image has more than `MAX_MASKS` masks.

    Args:
        count: How many it has.
        name: The image's name in error messages.
    """
    check_count(count, "masks", MAX_MASKS, name)


@dataclass
class Outlines:
    """The polygons and run lengths of an image's masks, in order, until they are drawn.

    `dropped` is the number of rings that are no area and were left out beside valid ones.
    """

    size: tuple[int, int]
    name: str
    rings: list[tuple[int, list[float], float]] = field(default_factory=list)
    rle: list[tuple[int, RLEMasks]] = field(default_factory=list)
    masks: int = 0
    dropped: int = 0
    run_bytes: int = 0

    @property
    def notes(self) -> dict[str, int]:
        """Counts of what was changed."""
        return {DROPPED: self.dropped}

    def add(self, segmentation: Polygons | RleSegmentation | None) -> None:
        """Add a mask of COCO's; errors as of `add_polygons` and `add_rle`."""
        if isinstance(segmentation, RleSegmentation):
            self.add_rle(segmentation)
        else:
            self.add_polygons(segmentation or [])

    def add_polygons(self, polygons: Polygons) -> None:
        """Add a mask: one polygon, or several.

        Args:
            polygons: Rings x0, y0, x1, y1, ... in pixels; or the numbers of a single one.

        Raises:
            CorruptSampleError: They are not safe to draw, or none of them has an area.
        """
        if not polygons:
            raise CorruptSampleError("it has no polygon; a box alone is not a mask", "no outline")
        nested = [ring for ring in polygons if isinstance(ring, list)]
        if not nested:
            nested = [[value for value in polygons if not isinstance(value, list)]]
        elif len(nested) < len(polygons):
            raise CorruptSampleError("it mixes polygons and numbers; write it again", "no outline")
        corners = [_corners(i, numbers) for i, numbers in enumerate(nested)]
        rings = [ring for ring in corners if isinstance(ring, np.ndarray)]
        if not rings:
            raise CorruptSampleError(str(corners[0]), NO_AREA)
        if max(self.size) > 2 and all(ring.min() >= 0 and ring.max() <= 1 for ring in rings):
            raise CorruptSampleError(
                "its coordinates are from 0 to 1, as fractions of the image's size; give pixels",
                "fractions, not pixels",
            )
        lengths = [
            float(np.abs(ring - ring[np.arange(-1, len(ring) - 1)]).max(1).sum()) for ring in rings
        ]
        if sum(lengths) > MAX_OUTLINE:
            raise CorruptSampleError(
                f"its outline is {sum(lengths):.0f} px long, at most {MAX_OUTLINE} are drawn; "
                "remove it or write it again",
                BEYOND,
            )
        for ring, length in zip(rings, lengths, strict=True):
            self.rings.append((self.masks, ring.ravel().tolist(), length))
        self.dropped += len(corners) - len(rings)
        self.masks += 1

    def add_parts(self, polygons: Sequence[Sequence[float | None]], masks: list[RLEMasks]) -> None:
        """Add a mask that is the union of polygons and of masks that are decoded already.

        Args:
            polygons: Rings x0, y0, x1, y1, ... in pixels.
            masks: Masks of the image's size, one in each.

        Raises:
            CorruptSampleError: There is neither, or as for `add_polygons`.
        """
        if polygons or not masks:
            self.add_polygons([list(ring) for ring in polygons])
        else:
            self.masks += 1
        self.rle += [(self.masks - 1, mask) for mask in masks]

    def add_rle(self, segmentation: RleSegmentation) -> None:
        """Add a mask given as run lengths; raise GigamaskError if they are invalid."""
        check_size(segmentation.size, self.size, "it")
        if isinstance(segmentation.counts, str):
            self.run_bytes += len(segmentation.counts)
        check_count(self.run_bytes, "bytes of run lengths", MAX_RUN_BYTES, self.name)
        self.add_parts([], [RLEMasks.from_coco([segmentation.counts], self.size)])

    def draw(self) -> RLEMasks:
        """Return all masks, some of which may be empty; raise `MaskLimitError` beyond limits."""
        check_masks(self.masks, self.name)
        total = round(sum(length for _, _, length in self.rings))
        check_count(total, "pixels of outlines", MAX_IMAGE_OUTLINE, self.name)
        parts = [mask for _, mask in self.rle]
        owners = [owner for owner, _ in self.rle]
        runs = sum(len(mask.bounds) for mask in parts)
        for some in self._chunks():
            rows = sorted({owner for owner, _ in some})
            drawn = mask_api_new_cpp.frPoly([ring for _, ring in some], *self.size)
            rings = RLEMasks.from_coco([rle["counts"] for rle in drawn], self.size)
            if len(rows) < len(some):
                groups = np.searchsorted(rows, [owner for owner, _ in some])
                rings = union(rings, groups, len(rows))
            parts.append(rings)
            owners += rows
            runs += len(parts[-1].bounds)
            check_count(runs, "runs of masks", MAX_RUNS, self.name)
        check_count(runs, "runs of masks", MAX_RUNS, self.name)
        if len(parts) == 1 and not self.rle:
            return parts[0]
        every = RLEMasks.concatenate(parts or [RLEMasks.from_coco([], self.size)])
        if len(set(owners)) < len(owners):  # a mask of polygons and of PNGs, as LabelMe can group
            return union(every, np.array(owners, np.int64), self.masks)
        return every[np.argsort(owners, kind="stable")]

    def _chunks(self) -> list[list[tuple[int, list[float]]]]:
        """Divide the rings into parts of whole masks that are drawn at once."""
        chunks: list[list[tuple[int, list[float]]]] = []
        left = 0.0
        for i, (owner, ring, length) in enumerate(self.rings):
            if i == 0 or (left < length and owner != self.rings[i - 1][0]):
                chunks.append([])
                left = MAX_OUTLINE
            chunks[-1].append((owner, ring))
            left -= length
        return chunks


def crop_mask(
    crop: Bool[np.ndarray, "h w"], corner: tuple[int, int], size: tuple[int, int]
) -> RLEMasks:
    """Return a mask that is given as a part of its image.

    Args:
        crop: The part; it lies within the image.
        corner: x and y of its first pixel.
        size: Height and width of the image in pixels.
    """
    (x0, y0), (height, width) = corner, crop.shape
    columns = np.zeros((1, size[0], width), bool)
    columns[0, y0 : y0 + height] = crop
    bounds = RLEMasks.from_dense(columns).bounds
    end = np.array([width * size[0]] * (len(bounds) % 2), bounds.dtype)  # a run to the last pixel
    bounds = np.concatenate([bounds, end]) + x0 * size[0]
    bounds = bounds[bounds < size[0] * size[1]].astype(np.int32)
    return RLEMasks(size, bounds, np.array([0, len(bounds)], np.int64))


def _corners(i: int, numbers: Sequence[float | None]) -> Float64[np.ndarray, "k 2"] | str:
    """Return a polygon's corners, or why it has no area; raise an error if it cannot be drawn."""
    if len(numbers) % 2:
        raise CorruptSampleError(
            f"polygon {i} has {len(numbers)} numbers, it needs an even number of at least 6 (three"
            " corners); remove it or write it again",
            "odd number of coordinates",
        )
    ring = np.array(numbers, np.float64).reshape(-1, 2)
    wrong = ~(np.abs(ring) <= MAX_COORDINATE)  # NaN too
    if wrong.any():
        number = ring[wrong][0]
        stated = "that is NaN, infinite or null" if np.isnan(number) else f"of {number:g}"
        raise CorruptSampleError(
            f"polygon {i} has a coordinate {stated}, at most {MAX_COORDINATE} px from"
            " 0 are allowed; remove it",
            "coordinates beyond the limits",
        )
    if len(numbers) < 6:
        return (
            f"polygon {i} has {len(numbers)} numbers, it needs an even number of at least 6 (three"
            " corners); remove it or write it again"
        )
    arms = ring - ring[0]
    longest = arms[np.abs(arms).argmax() // 2]
    if not (arms[:, 0] * longest[1] != arms[:, 1] * longest[0]).any():
        return f"polygon {i} is a line or a point without area; draw its outline"
    return ring
