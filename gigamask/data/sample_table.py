"""What can be sampled: an index and filters enter, items with their columns leave, and where each item lies.

Items are the images of which at least one mask passes, or every mask that passes, image by image in its json's order. A mask passes when the filters
keep it and it has a pixel, which is what `data.dataset` keeps of a whole image.
A column is worked out when it is first asked for, a block of images at a time, and then kept:

- tar (its number in the index, ascending); masks (how many its image has, whether they pass or not), width and height of its image
- area_share, predicted_iou, stability: a mask's own; an image's is the mean over its masks that pass
- granularity: 0 fine, 1 medium, 2 coarse, by a mask's share of the image. An image has that of most of its masks that pass, of equally many the
  coarsest. Of BSDS500's 200 training photographs 143, 48 and 9 are fine, medium and coarse so; by their masks' mean share 3, 180 and 17 would be
- difficulty: a weighted sum of 1 - area_share, 1 - stability, 1 - predicted_iou and of how many masks the image has

and whatever the user's own table adds (`data.attributes`). Where training needs no masks, items are all images, with or without, and have the
columns that are known of these: the first line.

Not here: in which order items are visited (`samplers`), one image's masks (`data.choose`), statistics of the whole index (`prepare.stats`).
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Float32, Float64, Int, Int32, Int64

from gigamask.data.index import Index
from gigamask.data.mask_sampling import MaskFilters
from gigamask.errors import GigamaskError
from gigamask.interfaces import SampleTable

Kind = Literal["image", "mask"]

FINE_BELOW, COARSE_ABOVE = 0.01, 0.1
"""Shares of the image between which a mask is of medium granularity."""
AREA_WEIGHT, STABILITY_WEIGHT, IOU_WEIGHT, MASKS_WEIGHT = 0.3, 0.3, 0.2, 0.2
"""What counts how much towards difficulty."""
MANY_MASKS = 200
"""An image with so many masks is as difficult, in that regard, as can be."""

OF_IMAGES = {"tar": "shard", "masks": "masks", "width": "width", "height": "height"}
SCORES = {"predicted_iou": "predicted_iou", "stability": "stability_score"}
MEASURED = ("area_share", *SCORES, "granularity")
COLUMNS = (*OF_IMAGES, *MEASURED, "difficulty")
"""Names that every index's items have."""

IMAGES_AT_ONCE = 2**14
BLOCK_IMAGES = 2**10
"""The masks of so many images, about 100,000, stay in a processor's cache while they are worked on."""
ITEMS_AT_ONCE = 2**14
LOOKS = 8
"""So many first masks of an image are looked at one after the other."""
FEW = 1 / 8
"""Picking the masks of more of a block's images than this takes longer than reading all of the block's from end to end."""


@dataclass(frozen=True, eq=False)
class IndexSamples:
    """The items of an index, and where they lie.

    `places` holds each item's row where items are images; where they are masks, how many items lie before each image, and behind the last.
    """

    kind: Kind
    items: SampleTable
    places: Int64[np.ndarray, "places"]

    def locate(
        self, items: Int64[np.ndarray, "n"]
    ) -> tuple[Int64[np.ndarray, "n"], Int64[np.ndarray, "n"]]:
        """Returns the index row of each item's image, and which of the masks that pass it is, counted from 0 within the image; -1 for an image."""
        if self.kind == "image":
            return self.places[items], np.full(len(items), -1)
        rows = np.searchsorted(self.places, items, side="right") - 1
        return rows, items - self.places[rows]


def open_sample_table(
    index: Index,
    filters: MaskFilters,
    kind: Kind = "image",
    attributes: Mapping[str, np.ndarray] | None = None,
    seed: int = 0,
    masks: bool = True,
) -> IndexSamples:
    """Returns what can be sampled, in orders that `seed` names.

    `attributes` holds a value for each image of the index, an item of it has that of its image. Without `masks` every image is an item, whatever
    masks it has and whatever the filters say; raises Fault where items are to be masks all the same.
    """
    if not masks and kind == "mask":
        raise GigamaskError(
            "items are to be masks (--loader.items mask) where training is without masks; choose --loader.items image"
        )
    places = (
        _firsts(index, filters)
        if kind == "mask"
        else _rows(index, filters)
        if masks
        else np.arange(len(index))
    )
    count = len(places) if kind == "image" else int(places[-1])
    columns = _Columns(
        index, filters, kind, places, attributes or {}, tuple(COLUMNS if masks else OF_IMAGES)
    )
    return IndexSamples(kind, SampleTable(count, columns, seed, len(index.shard_paths)), places)


def granularity(shares: Float[np.ndarray, "n"]) -> Int32[np.ndarray, "n"]:
    """Returns for masks that cover these shares of their images which of `seams.GRANULARITIES` they are."""
    return (shares >= FINE_BELOW).astype(np.int32) + (shares > COARSE_ABOVE)


def difficulty(
    area_share: Float32[np.ndarray, "n"],
    stability: Float32[np.ndarray, "n"],
    predicted_iou: Float32[np.ndarray, "n"],
    masks: Int[np.ndarray, "n"],
) -> Float32[np.ndarray, "n"]:
    """Returns how hard items are, 0 to 1 where the scores lie in [0, 1]."""
    found = np.empty(len(masks), np.float32)
    for start in range(0, len(masks), ITEMS_AT_ONCE):
        at = slice(start, start + ITEMS_AT_ONCE)
        found[at] = (
            AREA_WEIGHT * (1 - area_share[at].astype(np.float64))
            + STABILITY_WEIGHT * (1 - stability[at].astype(np.float64))
            + IOU_WEIGHT * (1 - predicted_iou[at].astype(np.float64))
            + MASKS_WEIGHT * np.minimum(1, masks[at] / MANY_MASKS)
        )
    return found


class _Block(NamedTuple):
    """The masks of neighbouring images: which of them pass, and how many each image has of these."""

    images: slice
    masks: slice
    kept: Bool[np.ndarray, "m"]
    passing: Int64[np.ndarray, "n"]


@dataclass(frozen=True, eq=False)
class _Columns(Mapping[str, np.ndarray]):
    """The items' columns by name; a name that is not there is the user's Fault."""

    index: Index
    filters: MaskFilters
    kind: Kind
    places: Int64[np.ndarray, "places"]
    attributes: Mapping[str, np.ndarray]
    known: tuple[str, ...]
    made: dict[str, np.ndarray] = field(default_factory=dict)

    def __iter__(self) -> Iterator[str]:
        yield from self.known
        yield from self.attributes

    def __len__(self) -> int:
        return len(self.known) + len(self.attributes)

    def __contains__(self, name: object) -> bool:
        return name in self.known or name in self.attributes

    def __getitem__(self, name: str) -> np.ndarray:
        if name not in self:
            raise GigamaskError(
                f"the items have no column {name!r}; choose one of {', '.join(self)}, or add it to the table of attributes"
            )
        if name not in self.made:
            if name in MEASURED:
                self._measure(name)
            elif name == "difficulty":
                self._measure("area_share", "stability", "predicted_iou")
                self.made[name] = difficulty(
                    self["area_share"], self["stability"], self["predicted_iou"], self["masks"]
                )
            else:
                self.made[name] = self._spread(name)
        return self.made[name]

    def _spread(self, name: str) -> np.ndarray:
        """Returns what is known of images, for each item."""
        column = self.index.images[OF_IMAGES[name]] if name in OF_IMAGES else self.attributes[name]
        return (
            column[self.places] if self.kind == "image" else np.repeat(column, np.diff(self.places))
        )

    def _measure(self, *names: str) -> None:
        """Makes those of the columns that are not there yet, going through the masks once."""
        missing = [name for name in names if name not in self.made]
        if not missing:
            return
        count = len(self.places) if self.kind == "image" else int(self.places[-1])
        made = {
            name: np.empty(count, np.int32 if name == "granularity" else np.float32)
            for name in missing
        }
        done = 0
        for block in _blocks(self.index, self.filters):
            of_images = block.passing[block.passing > 0]
            size = len(of_images) if self.kind == "image" else int(of_images.sum())
            for name, column in made.items():
                values = _values(self.index, block, name)
                if self.kind == "image":
                    values = (
                        _most(values, of_images)
                        if name == "granularity"
                        else _mean(values, of_images)
                    )
                column[done : done + size] = values
            done += size
        self.made.update(made)


def _values(index: Index, block: _Block, name: str) -> np.ndarray:
    """Returns one measured column of the block's masks that pass."""
    if name in SCORES:
        return index.masks[SCORES[name]][block.masks][block.kept]
    shares = index.masks["area"][block.masks][block.kept] / np.repeat(
        _pixels(index, block.images), block.passing
    )
    return shares if name == "area_share" else granularity(shares)


def _mean(
    values: Float[np.ndarray, "m"], counts: Int64[np.ndarray, "n"]
) -> Float64[np.ndarray, "n"]:
    """Returns the means of consecutive runs of so many values, at least one each."""
    return np.add.reduceat(values.astype(np.float64), np.cumsum(counts) - counts) / counts


def _most(values: Int32[np.ndarray, "m"], counts: Int64[np.ndarray, "n"]) -> Int64[np.ndarray, "n"]:
    """Returns the commonest granularity of consecutive runs of so many values, at least one each; of equally common ones the coarsest."""
    starts = np.cumsum(counts) - counts
    return 2 - np.stack(
        [np.add.reduceat(values == level, starts, dtype=np.int32) for level in (2, 1, 0)]
    ).argmax(0)


def _firsts(index: Index, filters: MaskFilters) -> Int64[np.ndarray, "borders"]:
    """Returns how many masks pass before each image, and in all."""
    firsts = np.zeros(len(index) + 1, np.int64)
    for block in _blocks(index, filters):
        firsts[1:][block.images] = block.passing
    return np.cumsum(firsts, out=firsts)


def _blocks(index: Index, filters: MaskFilters) -> Iterator[_Block]:
    """Yields all masks in order."""
    for start in range(0, len(index), BLOCK_IMAGES):
        images = slice(start, min(start + BLOCK_IMAGES, len(index)))
        first = index.images["first_mask"][start : images.stop + 1]
        counts, masks = np.diff(first), slice(int(first[0]), int(first[-1]))
        kept = _kept(index, filters, np.repeat(_pixels(index, images), counts), masks)
        passing, some = np.zeros(len(counts), np.int64), counts > 0
        passing[some] = np.add.reduceat(kept, (first[:-1] - first[0])[some], dtype=np.int64)
        yield _Block(images, masks, kept, passing)


def _rows(index: Index, filters: MaskFilters) -> Int64[np.ndarray, "N"]:
    """Returns the images of which a mask passes."""
    parts = [np.zeros(0, np.int64)]
    for start in range(0, len(index), IMAGES_AT_ONCE):
        stop = min(start + IMAGES_AT_ONCE, len(index))
        parts.append(start + np.flatnonzero(_usable(index, filters, start, stop)))
    return np.concatenate(parts)


def _usable(index: Index, filters: MaskFilters, start: int, stop: int) -> Bool[np.ndarray, "n"]:
    """Says which of the images `start` to `stop` have a mask that passes."""
    counts, first = index.images["masks"][start:stop], index.images["first_mask"][start : stop + 1]
    pixels, passes = _pixels(index, slice(start, stop)), np.zeros(stop - start, bool)
    # Most images pass by one of their first masks; only the others' masks are all looked at.
    for look in range(LOOKS):
        rest = np.flatnonzero(~passes & (counts > look))
        passes[rest] = _kept(index, filters, pixels[rest], first[rest] + look)
    rest = np.flatnonzero(~passes & (counts > LOOKS))
    if len(rest) > FEW * len(passes):
        rest = np.flatnonzero(counts)
        kept = _kept(
            index, filters, np.repeat(pixels, counts), slice(int(first[0]), int(first[-1]))
        )
        passes[rest] = np.logical_or.reduceat(kept, first[rest] - first[0])
    elif len(rest):
        many = counts[rest].astype(np.int64)
        owner = np.repeat(np.arange(len(rest)), many)
        masks = np.arange(len(owner)) + np.repeat(first[rest] - (np.cumsum(many) - many), many)
        passes[rest] = (
            np.bincount(
                owner[_kept(index, filters, pixels[rest][owner], masks)], minlength=len(rest)
            )
            > 0
        )
    return passes


def _kept(
    index: Index,
    filters: MaskFilters,
    pixels: Int64[np.ndarray, "n"],
    masks: Int64[np.ndarray, "n"] | slice,
) -> Bool[np.ndarray, "n"]:
    """Says which rows of the mask table pass; `pixels` holds those of each one's image."""

    def scores(name: str, least: float | None) -> Float32[np.ndarray, "n"]:
        # A column that no filter reads is not fetched: each has a billion rows.
        return (
            np.broadcast_to(np.float32(1), len(pixels))
            if least is None
            else index.masks[name][masks]
        )

    areas = index.masks["area"][masks]
    predicted_iou = scores("predicted_iou", filters.min_predicted_iou)
    return filters.keep(
        areas, pixels, predicted_iou, scores("stability_score", filters.min_stability)
    ) & (areas > 0)


def _pixels(index: Index, images: slice) -> Int64[np.ndarray, "n"]:
    return index.images["width"][images].astype(np.int64) * index.images["height"][images]
