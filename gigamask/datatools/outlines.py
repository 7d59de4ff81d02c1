"""Limits of the masks of one image, and drawing of polygons within them, for every format.

All limits are checked before anything is drawn, so that time and memory of a conversion are
bounded whatever a file says. Valid polygons are drawn by faster-coco-eval exactly as in
pycocotools; time and memory grow with the length of their outlines, not with the size of the image.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby
from operator import itemgetter

import numpy as np
from faster_coco_eval import mask_api_new_cpp  # pyrefly: ignore[missing-module-attribute]  (compiled, without stubs)
from jaxtyping import Bool

from gigamask.data.annotation import MAX_MASKS, MAX_SIDE, RleSegmentation
from gigamask.data.image import check_size
from gigamask.datatools.objects import in_groups
from gigamask.errors import CorruptSampleError
from gigamask.masks.rle import RLEMasks, read_masks, union

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


@dataclass(eq=False)
class Outlines:
    """The masks of an image, in order, until they are drawn.

    `rings` has the number of each mask of polygons, its rings and their length, `parts` what is
    decoded, and the number of the mask of each. `dropped` is the number of rings that are no area
    and were left out beside valid ones.
    """

    size: tuple[int, int]
    name: str
    rings: list[tuple[int, list[list[float]], float]] = field(default_factory=list)
    parts: list[tuple[list[int], RLEMasks]] = field(default_factory=list)
    masks: int = 0
    dropped: int = 0
    run_bytes: int = 0

    @property
    def notes(self) -> dict[str, int]:
        """Counts of what was changed."""
        return {DROPPED: self.dropped}

    @property
    def length(self) -> int:
        """Length of all rings in pixels."""
        return round(sum(length for _, _, length in self.rings))

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
        found = [_measured(i, numbers) for i, numbers in enumerate(nested)]
        rings = [each for each in found if not isinstance(each, str)]
        if not rings:
            raise CorruptSampleError(str(found[0]), NO_AREA)
        is_share = all(max(ring) <= 1 and min(ring) >= 0 for ring, _ in rings)
        # Whole numbers are the corners of the first pixel.
        if max(self.size) > 2 and is_share and any(x % 1 for ring, _ in rings for x in ring):
            raise CorruptSampleError(
                "its coordinates are from 0 to 1, as fractions of the image's size; give pixels",
                "fractions, not pixels",
            )
        length = sum(length for _, length in rings)
        if length > MAX_OUTLINE:
            raise CorruptSampleError(
                f"its outline is {length:.0f} px long, at most {MAX_OUTLINE} are drawn; "
                "remove it or write it again",
                BEYOND,
            )
        self.rings.append((self.masks, [ring for ring, _ in rings], length))
        self.dropped += len(nested) - len(rings)
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
        self.parts += [([self.masks - 1], mask) for mask in masks]

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
        check_count(self.length, "pixels of outlines", MAX_IMAGE_OUTLINE, self.name)
        draw_rings([self])
        parts = [part for _, part in self.parts] or [RLEMasks.from_coco([], self.size)]
        runs = sum(len(part.bounds) for part in parts)
        check_count(runs, "runs of masks", MAX_RUNS, self.name)
        masks = RLEMasks.concatenate(parts)
        numbers = [number for some, _ in self.parts for number in some]
        if numbers == list(range(self.masks)):
            return masks
        return union(masks, np.array(numbers, np.int64), self.masks)


def draw_rings(images: Sequence[Outlines]) -> None:
    """Draw the polygons of several images at once, for `Outlines.draw` to return.

    Args:
        images: The masks of each; those beyond the limits are left as they are.
    """
    images = [image for image in images if image.length <= MAX_IMAGE_OUTLINE]
    masks_of_images = ((image, *mask) for image in images for mask in image.rings)
    for some in in_groups(masks_of_images, itemgetter(3), MAX_OUTLINE):
        own = [(image, list(masks)) for image, masks in groupby(some, itemgetter(0))]
        drawn = [
            mask_api_new_cpp.frPoly([ring for mask in masks for ring in mask[2]], *image.size)
            for image, masks in own
        ]
        counts = [[rle["counts"] for rle in each] for each in drawn]
        parts = read_masks(counts, [image.size for image, _ in own])
        for (image, masks), part in zip(own, parts, strict=True):
            image.parts.append(([number for _, number, rings, _ in masks for _ in rings], part))
    for image in images:
        image.rings.clear()


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


def _measured(i: int, numbers: Sequence[float | None]) -> tuple[list[float], float] | str:
    """Return a polygon and its length, or why it has no area; raise an error if it cannot be drawn.

    Most have so few corners that NumPy would take longer.
    """
    too_few = (
        f"polygon {i} has {len(numbers)} numbers, it needs an even number of at least 6 (three"
        " corners); remove it or write it again"
    )
    if len(numbers) % 2:
        raise CorruptSampleError(too_few, "odd number of coordinates")
    known = [x for x in numbers if x is not None and abs(x) <= MAX_COORDINATE]  # not NaN
    if len(known) < len(numbers):
        number = next(x for x in numbers if x is None or not abs(x) <= MAX_COORDINATE)
        is_nan = number is None or number != number
        stated = "that is NaN, infinite or null" if is_nan else f"of {number:g}"
        raise CorruptSampleError(
            f"polygon {i} has a coordinate {stated}, at most {MAX_COORDINATE} px from"
            " 0 are allowed; remove it",
            "coordinates beyond the limits",
        )
    if len(numbers) < 6:
        return too_few
    xs, ys = known[0::2], known[1::2]
    arms = [(x - xs[0], y - ys[0]) for x, y in zip(xs, ys, strict=True)]
    far_x, far_y = max(arms, key=lambda arm: max(abs(arm[0]), abs(arm[1])))
    if not any(x * far_y != y * far_x for x, y in arms):
        return f"polygon {i} is a line or a point without area; draw its outline"
    sides = zip(xs, xs[-1:] + xs, ys, ys[-1:] + ys, strict=False)
    return known, sum(max(abs(x1 - x0), abs(y1 - y0)) for x1, x0, y1, y0 in sides)
