"""What convert knows of one image: where its picture lies, and its objects' masks once they have been read.

Not here: where the objects come from (`prepare.coco`, `prepare.label_images`), the shards (`prepare.convert`).
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Bool, Int64

from gigamask.masks.rle import RLEMasks, from_keys
from gigamask.types import SkippedSample

EMPTY = "it covers no pixel of the image, whose pixels are what coordinates count; leave it out or write it again"


@dataclass(frozen=True)
class Objects:
    """The masks of one image, what its json says of each beside SA-1B's keys, and what was left out.

    `extras[i]` may hold an `id`, which then is the mask's. `rejected` are broken, `crowds` counts what was not asked for.
    """

    masks: RLEMasks
    extras: list[dict[str, Any]]
    rejected: list[SkippedSample]
    crowds: int = 0


@dataclass(frozen=True)
class Annotated(ABC):
    """One image to be converted: `number` becomes its `image_id`, `source` is what its owner calls it, and `picture` where that lies."""

    number: int
    source: str
    picture: Path

    @abstractmethod
    def objects(self) -> Objects:
        """Reads the masks; raises CorruptSampleError when the image has to be left out."""


@dataclass(frozen=True)
class SourceListing:
    """The images that were given, and what was left out before any was read.

    `strays` are annotations that belong to no image, `unlabelled` counts the pictures without a label image; `renumbered` says that the images' own
    names could not be their numbers.
    """

    images: Sequence[Annotated]
    rejected: list[SkippedSample]
    renumbered: bool
    strays: list[SkippedSample] = field(default_factory=list)
    unlabelled: int = 0


def numbers(names: Sequence[str]) -> tuple[list[int], bool]:
    """Returns one number for each image, and whether they are new ones.

    Names that are distinct whole numbers are kept; otherwise each image gets its place in the list, from 0 on.
    """
    found = [
        int(name) if name.isascii() and name.isdigit() and len(name) <= 18 else -1 for name in names
    ]
    if min(found, default=0) >= 0 and len(set(found)) == len(found):
        return found, False
    return list(range(len(names))), True


def unite(masks: RLEMasks, owner: Int64[np.ndarray, "n"], count: int) -> RLEMasks:
    """Returns `count` masks, each the union of the masks that it owns."""
    pixels = masks.size[0] * masks.size[1]
    lengths = np.diff(masks.starts)
    of = np.repeat(np.arange(len(masks)), lengths)
    opens: Bool[np.ndarray, "T"] = (np.arange(len(masks.bounds)) - masks.starts[of]) % 2 == 0
    # A mask that goes on to the end of the grid is closed there, so that no count of covers runs into the next owner's.
    odd = owner[lengths % 2 == 1]
    keys = np.concatenate([owner[of] * (pixels + 1) + masks.bounds, odd * (pixels + 1) + pixels])
    steps = np.concatenate([np.where(opens, 1, -1), np.full(len(odd), -1)])
    places, inverse = np.unique(keys, return_inverse=True)
    covered = np.cumsum(np.bincount(inverse, steps, len(places))) > 0
    return from_keys(masks.size, count, places[np.diff(covered, prepend=False)], pixels + 1)
