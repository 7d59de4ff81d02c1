"""Data classes without tensors: annotations of images, and references to samples.

Commands that only read data import these, and not torch.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float32, Float64, Int64, UInt8

from gigamask.masks.rle import RLEMasks


@dataclass(frozen=True)
class InstanceFields:
    """What COCO's annotations state of an image's masks.

    Attributes:
        image_id: Id of the image.
        category_ids: Ids of the categories.
        crowd: Which masks cover a crowd of objects.
        areas: Areas in pixels, which may be those of polygons.
        boxes: Boxes xyxy, from x, y to x + width, y + height in pixels.
    """

    image_id: int
    category_ids: Int64[np.ndarray, "n"]
    crowd: Bool[np.ndarray, "n"]
    areas: Float64[np.ndarray, "n"]
    boxes: Float32[np.ndarray, "n 4"]


@dataclass(frozen=True)
class ImageAnnotation:
    """The annotation of one image: validated masks at original size, with SA-1B's scores.

    `categories` names the category of each mask, "" for a mask without one; it is empty if no mask
    has one. `source` is the image's name before it was converted, "" if the json states none.
    `ignore` is one mask of the pixels that scores leave out; None: no pixel. `instances` are the
    fields of COCO's annotations; None: there are none.
    """

    name: str
    size: tuple[int, int]
    masks: RLEMasks
    predicted_iou: Float32[np.ndarray, "n"]
    stability_score: Float32[np.ndarray, "n"]
    categories: tuple[str, ...] = ()
    source: str = ""
    ignore: RLEMasks | None = None
    instances: InstanceFields | None = None

    @property
    def areas(self) -> Int64[np.ndarray, "n"] | Float64[np.ndarray, "n"]:
        """Areas of the masks in pixels: the stated ones, if there are any."""
        return self.masks.areas() if self.instances is None else self.instances.areas

    def classes(self, names: Sequence[str]) -> Int64[np.ndarray, "n"]:
        """Return the class of each mask, the number of its category among names; -1 for none."""
        numbers = {name: number for number, name in enumerate(names)}
        given = self.categories or [""] * len(self.masks)
        return np.array([numbers.get(name, -1) for name in given], np.int64)


class AnnotatedImage(NamedTuple):
    """A decoded image as stored, and its annotation."""

    pixels: UInt8[np.ndarray, "H W C"]
    annotation: ImageAnnotation


class SampleRef(NamedTuple):
    """One entry of the endless sequence of samples.

    Attributes:
        epoch: Number of the epoch, from 0.
        position: Position in the epoch, from 0.
        row: Row of the image in the index.
        mask_index: Index of the only mask to train on, among those that pass the filters; -1: any
            masks.
        batch_index: Position in the global batch.
        weight: Weight of the sample's losses.
        stratum: Stratum that the sampler drew it from; -1: none.
    """

    epoch: int
    position: int
    row: int
    mask_index: int = -1
    batch_index: int = 0
    weight: float = 1.0
    stratum: int = -1


@dataclass(frozen=True)
class StepPlan:
    """The samples of one rank in one step.

    Attributes:
        micro_batches: Samples of each micro-batch.
        samples_before: Number of samples consumed by all ranks before the step.
        samples_after: Number of samples consumed by all ranks after the step.
    """

    micro_batches: tuple[tuple[SampleRef, ...], ...]
    samples_before: int
    samples_after: int


@dataclass(frozen=True)
class DataCursor:
    """Number of samples consumed so far: the entire state of the data loader."""

    samples: int = 0


@dataclass(frozen=True)
class SkippedSample:
    """A sample that was skipped, and the reason."""

    name: str
    reason: str
