"""Table of what can be sampled: the items of an index, their columns, and their locations.

Items are the images with at least one passing mask, or all passing masks, image by image in the
order of the json. A mask passes if the filters keep it and it is not empty, as in `data.dataset`
for a whole image. A column is computed when it is first read, a block of images at a time, and then
kept:

- tar (its number in the index, ascending), masks (number of masks of the image, passing or not),
  width and height of the image
- area_fraction, predicted_iou, stability: a mask's own; for an image the mean over its passing
  masks
- granularity: 0 fine, 1 medium, 2 coarse, by a mask's share of the image. An image has that of most
  of its passing masks, the coarsest in a tie. Of BSDS500's 200 training photographs, 143, 48 and 9
  are then fine, medium and coarse; by the mean share of their masks, it would be 3, 180 and 17
- difficulty: a weighted sum of 1 - area_fraction, 1 - stability, 1 - predicted_iou and the number
  of masks of the image
- complexity (0, 1 or 2 by the number of masks of the image) and domain (tars whose names differ in
  their number only), unless the user's table has columns of these names

and the columns of the user's own table (`data.attributes`). For training without masks, items are
all images, with the columns of the first line and the last only.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Literal, NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Float32, Float64, Int, Int32, Int64

from gigamask.data import storage
from gigamask.data.index import Index
from gigamask.data.mask_sampling import MaskFilters
from gigamask.errors import GigamaskError
from gigamask.interfaces import SampleTable
from gigamask.masks.resample import offsets_of, repeat_index

Integers = Int64[np.ndarray, "n"]
Floats = Float32[np.ndarray, "n"]
Kind = Literal["image", "mask"]

FINE_BELOW, COARSE_ABOVE = 0.01, 0.1
"""A mask between these shares of the image is of medium granularity."""
AREA_WEIGHT, STABILITY_WEIGHT, IOU_WEIGHT, MASKS_WEIGHT = 0.3, 0.3, 0.2, 0.2
"""Weights of the terms of difficulty."""
COMPLEXITY_MASKS = (50, 150)
"""Largest numbers of masks of images of complexity 0 and 1."""
MANY_MASKS = 200
"""Number of masks of an image at which that term of its difficulty reaches the maximum."""

IMAGE_COLUMNS = {"tar": "shard", "masks": "masks", "width": "width", "height": "height"}
SCORE_COLUMNS = {"predicted_iou": "predicted_iou", "stability": "stability_score"}
MASK_COLUMNS = ("area_fraction", *SCORE_COLUMNS, "granularity")
DEFAULT_COLUMNS = ("complexity", "domain")
"""Columns that the user's table may replace."""
COLUMNS = (*IMAGE_COLUMNS, *MASK_COLUMNS, "difficulty", *DEFAULT_COLUMNS)
"""Columns of the items of every index."""

IMAGES_AT_ONCE = 2**14
BLOCK_IMAGES = 2**10
"""Images per block, whose masks, about 100,000, fit the CPU cache."""
ITEMS_AT_ONCE = 2**14
FIRST_MASKS = 8
"""Number of masks of each image that are checked before all of its masks are."""
GATHER_RATIO = 1 / 8
"""Gathering the masks of more than this share of the images is slower than reading all masks."""


@dataclass(frozen=True, eq=False)
class IndexSamples:
    """The items of an index and their locations.

    If items are images, `rows_or_offsets` holds the row of each item; if they are masks, the number
    of items before each image, and the total number.
    """

    kind: Kind
    items: SampleTable
    rows_or_offsets: Int64[np.ndarray, "p"]

    def locate(self, items: Integers) -> tuple[Integers, Integers]:
        """Return the index row of each item's image, and the position of the mask in it.

        The position counts the passing masks of the image from 0; it is -1 if items are images.
        """
        if self.kind == "image":
            return self.rows_or_offsets[items], np.full(len(items), -1)
        rows = np.searchsorted(self.rows_or_offsets, items, side="right") - 1
        return rows, items - self.rows_or_offsets[rows]


def open_sample_table(
    index: Index,
    filters: MaskFilters,
    kind: Kind = "image",
    attributes: Mapping[str, np.ndarray] | None = None,
    seed: int = 0,
    with_masks: bool = True,
) -> IndexSamples:
    """Build the table of the items of an index.

    Args:
        index: The index.
        filters: Filters that masks must pass.
        kind: Whether items are images or masks.
        attributes: Further columns by name, one value per image of the index.
        seed: Random seed of the samplers' orders.
        with_masks: Whether samples have masks; if not, every image is an item.

    Raises:
        GigamaskError: Items are masks, but samples have none.
    """
    if kind == "mask":
        locations = _item_offsets(index, filters)
    else:
        locations = _passing_rows(index, filters) if with_masks else np.arange(len(index))
    count = len(locations) if kind == "image" else int(locations[-1])
    attributes = attributes or {}
    builtin = COLUMNS if with_masks else (*IMAGE_COLUMNS, *DEFAULT_COLUMNS)
    names = tuple(dict.fromkeys((*builtin, *attributes)))
    columns = _Columns(names, index, filters, kind, locations, attributes)
    return IndexSamples(kind, SampleTable(count, columns, seed, len(index.shard_paths)), locations)


def granularity(shares: Float[np.ndarray, "n"]) -> Int32[np.ndarray, "n"]:
    """Return 0 (fine), 1 (medium) or 2 (coarse) by the share of the image that a mask covers."""
    return (shares >= FINE_BELOW).astype(np.int32) + (shares > COARSE_ABOVE)


def difficulty(
    area_fraction: Floats,
    stability: Floats,
    predicted_iou: Floats,
    masks: Int[np.ndarray, "n"],
) -> Floats:
    """Return the difficulty of items, 0 to 1 if the scores lie in [0, 1].

    Args:
        area_fraction: Fraction of the image that a mask covers.
        stability: stability_score.
        predicted_iou: predicted_iou.
        masks: Number of masks of the image.
    """
    result = np.empty(len(masks), np.float32)
    for start in range(0, len(masks), ITEMS_AT_ONCE):
        at = slice(start, start + ITEMS_AT_ONCE)
        result[at] = (
            AREA_WEIGHT * (1 - area_fraction[at].astype(np.float64))
            + STABILITY_WEIGHT * (1 - stability[at].astype(np.float64))
            + IOU_WEIGHT * (1 - predicted_iou[at].astype(np.float64))
            + MASKS_WEIGHT * np.minimum(1, masks[at] / MANY_MASKS)
        )
    return result


class _Block(NamedTuple):
    """The masks of consecutive images, which of them pass, and how many do in each image."""

    images: slice
    masks: slice
    passes: Bool[np.ndarray, "m"]
    counts: Integers


@dataclass(frozen=True, eq=False)
class LazyColumns(Mapping[str, np.ndarray], ABC):
    """The items' columns, each computed on first use; an unknown name raises GigamaskError."""

    more: ClassVar[str] = ""
    """advice to add a column, for the error"""
    names: tuple[str, ...]
    computed: dict[str, np.ndarray] = field(default_factory=dict, init=False)

    @abstractmethod
    def compute(self, name: str) -> None:
        """Compute a column, and perhaps others."""

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)

    def __contains__(self, name: object) -> bool:
        return name in self.names

    def __getitem__(self, name: str) -> np.ndarray:
        if name not in self.names:
            raise GigamaskError(
                f"the items have no column {name!r}; choose one of {', '.join(self)}{self.more}"
            )
        if name not in self.computed:
            self.compute(name)
        return self.computed[name]


@dataclass(frozen=True, eq=False)
class _Columns(LazyColumns):
    """Columns of the items of an index."""

    more: ClassVar[str] = ", or add it to the table of attributes"
    index: Index
    filters: MaskFilters
    kind: Kind
    locations: Int64[np.ndarray, "p"]
    attributes: Mapping[str, np.ndarray]

    def compute(self, name: str) -> None:
        """Compute a column, and those that difficulty follows from."""
        if name in MASK_COLUMNS:
            self._compute(name)
        elif name == "difficulty":
            self._compute("area_fraction", "stability", "predicted_iou")
            self.computed[name] = difficulty(
                self["area_fraction"], self["stability"], self["predicted_iou"], self["masks"]
            )
        else:
            self.computed[name] = self._image_values(name)

    def _image_values(self, name: str) -> np.ndarray:
        """Return the value of each item's image."""
        images = self.index.images
        if name in self.attributes:
            column = self.attributes[name]
        elif name in IMAGE_COLUMNS:
            column = images[IMAGE_COLUMNS[name]]
        elif name == "complexity":
            few, some = COMPLEXITY_MASKS
            column = (images["masks"] > few).astype(np.int32) + (images["masks"] > some)
        else:
            column = _domains(self.index.shard_paths)[images["shard"]]
        if self.kind == "image":
            return column[self.locations]
        return np.repeat(column, np.diff(self.locations))

    def _compute(self, *names: str) -> None:
        """Compute the columns that are missing, reading the masks once."""
        missing = [name for name in names if name not in self.computed]
        if not missing:
            return
        count = len(self.locations) if self.kind == "image" else int(self.locations[-1])
        columns = {
            name: np.empty(count, np.int32 if name == "granularity" else np.float32)
            for name in missing
        }
        done = 0
        for block in _blocks(self.index, self.filters):
            counts = block.counts[block.counts > 0]
            size = len(counts) if self.kind == "image" else int(counts.sum())
            for name, column in columns.items():
                values = _values(self.index, block, name)
                if self.kind == "image":
                    reduce = _majority if name == "granularity" else _means
                    values = reduce(values, counts)
                column[done : done + size] = values
            done += size
        self.computed.update(columns)


def _domains(shard_paths: list[str]) -> Int32[np.ndarray, "shards"]:
    """Return the domain of each tar, in the order in which domains first occur."""
    numbers: dict[str, int] = {}
    names = (storage.basename(path).removesuffix(".tar") for path in shard_paths)
    domains = [numbers.setdefault(name.rstrip("0123456789"), len(numbers)) for name in names]
    return np.array(domains, np.int32)


def _values(index: Index, block: _Block, name: str) -> np.ndarray:
    """Return one column of the block's masks that pass."""
    if name in SCORE_COLUMNS:
        return index.masks[SCORE_COLUMNS[name]][block.masks][block.passes]
    shares = index.masks["area"][block.masks][block.passes] / np.repeat(
        _image_areas(index, block.images), block.counts
    )
    return shares if name == "area_fraction" else granularity(shares)


def _means(values: Float[np.ndarray, "m"], counts: Integers) -> Float64[np.ndarray, "n"]:
    """Return the means of consecutive groups of `counts` values, at least one each."""
    return np.add.reduceat(values.astype(np.float64), np.cumsum(counts) - counts) / counts


def _majority(values: Int32[np.ndarray, "m"], counts: Integers) -> Integers:
    """Return the most frequent granularity of consecutive groups, the coarsest in a tie."""
    starts = np.cumsum(counts) - counts
    return 2 - np.stack(
        [np.add.reduceat(values == level, starts, dtype=np.int32) for level in (2, 1, 0)]
    ).argmax(0)


def _item_offsets(index: Index, filters: MaskFilters) -> Int64[np.ndarray, "n1"]:
    """Return the number of passing masks before each image, and of all images."""
    counts = np.zeros(len(index), np.int64)
    for block in _blocks(index, filters):
        counts[block.images] = block.counts
    return offsets_of(counts)


def _blocks(index: Index, filters: MaskFilters) -> Iterator[_Block]:
    """Yield all masks in order."""
    for start in range(0, len(index), BLOCK_IMAGES):
        images = slice(start, min(start + BLOCK_IMAGES, len(index)))
        first = index.images["first_mask"][start : images.stop + 1]
        counts, masks = np.diff(first), slice(int(first[0]), int(first[-1]))
        passes = _passes(index, filters, np.repeat(_image_areas(index, images), counts), masks)
        passing, nonempty = np.zeros(len(counts), np.int64), counts > 0
        starts = (first[:-1] - first[0])[nonempty]
        passing[nonempty] = np.add.reduceat(passes, starts, dtype=np.int64)
        yield _Block(images, masks, passes, passing)


def _passing_rows(index: Index, filters: MaskFilters) -> Int64[np.ndarray, "N"]:
    """Return the rows of the images with a passing mask."""
    parts = [np.zeros(0, np.int64)]
    for start in range(0, len(index), IMAGES_AT_ONCE):
        stop = min(start + IMAGES_AT_ONCE, len(index))
        parts.append(start + np.flatnonzero(_images_pass(index, filters, start, stop)))
    return np.concatenate(parts)


def _images_pass(
    index: Index, filters: MaskFilters, start: int, stop: int
) -> Bool[np.ndarray, "n"]:
    """Return which of the images `start` to `stop` have a mask that passes."""
    counts, first = index.images["masks"][start:stop], index.images["first_mask"][start : stop + 1]
    areas, result = _image_areas(index, slice(start, stop)), np.zeros(stop - start, bool)
    # Most images pass because of their first masks; all masks are checked only for the others.
    for number in range(FIRST_MASKS):
        rest = np.flatnonzero(~result & (counts > number))
        result[rest] = _passes(index, filters, areas[rest], first[rest] + number)
    rest = np.flatnonzero(~result & (counts > FIRST_MASKS))
    if len(rest) > GATHER_RATIO * len(result):
        rest = np.flatnonzero(counts)
        masks = slice(int(first[0]), int(first[-1]))
        passes = _passes(index, filters, np.repeat(areas, counts), masks)
        result[rest] = np.logical_or.reduceat(passes, first[rest] - first[0])
    elif len(rest):
        image, number = repeat_index(counts[rest].astype(np.int64))
        passes = _passes(index, filters, areas[rest][image], first[rest][image] + number)
        result[rest] = np.bincount(image[passes], minlength=len(rest)) > 0
    return result


def _passes(
    index: Index,
    filters: MaskFilters,
    image_areas: Integers,
    masks: Integers | slice,
) -> Bool[np.ndarray, "n"]:
    """Return which rows of the mask table pass."""

    def scores(name: str, minimum: float | None) -> Floats:
        # A column that no filter reads is not fetched: each has a billion rows.
        if minimum is None:
            return np.broadcast_to(np.float32(1), len(image_areas))
        return index.masks[name][masks]

    areas = index.masks["area"][masks]
    predicted_iou = scores("predicted_iou", filters.min_predicted_iou)
    stability = scores("stability_score", filters.min_stability)
    return filters.keep(areas, image_areas, predicted_iou, stability) & (areas > 0)


def _image_areas(index: Index, images: slice) -> Integers:
    return index.images["width"][images].astype(np.int64) * index.images["height"][images]
