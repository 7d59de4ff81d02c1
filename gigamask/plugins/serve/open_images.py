"""Images opened in the page with their cached results; the least recently used is dropped first."""

import threading
from collections import OrderedDict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Float32, UInt8
from torch import Tensor

from gigamask.errors import GigamaskError
from gigamask.inference.automatic_mask_generator import (
    MaskProposals,
    calculate_stability_score,
)
from gigamask.inference.predictor import MASK_THRESHOLD, SamPredictor
from gigamask.masks.devices import encode_boxes
from gigamask.masks.rle import RLEMasks
from gigamask.masks.transforms import ImageTransform, above, logit_boxes
from gigamask.models.configs import SamConfig
from gigamask.types import WindowLogits

MAX_CACHED_BYTES = 2**30
"""Limit of the opened images with their embeddings and predictions; an SA-1B image has 10 MB, its
embedding 4 MB, the three masks of a prompt .8 MB."""
MIN_CACHED_IMAGES = 2
STABILITY_OFFSET = 1.0
"""Offset in logits, as in automatic mask generation."""

Json = dict[str, Any]
"""A JSON object by its fields."""
LogitBox = tuple[Float32[Tensor, "_ _"], tuple[int, int]]


class NotFoundError(GigamaskError):
    """Raised if the requested item does not exist, or no longer exists."""


@dataclass(frozen=True, eq=False)
class Answer:
    """The masks of a sequence of prompts; a mask is resized to the image once it is shown.

    Attributes:
        logits: Low-resolution logits, or those in the windows of one prompt.
        iou: Predicted IoU.
        classes: Their classes (`inference.classes.class_fields`); None if the model has none.
        shown: The masks that were shown, by number, as in `masks_to_json`.
    """

    logits: Float[Tensor, "C G G"] | WindowLogits
    iou: Float[Tensor, "C"]
    classes: list[Json] | None = None
    shown: dict[int, Json] = field(default_factory=dict)

    def low_res_logits(self, number: int, config: SamConfig) -> Float[Tensor, "G G"]:
        """Return the logits of a mask that the next prompt gets.

        Args:
            number: Number of the mask.
            config: Configuration of the model.
        """
        if not isinstance(self.logits, WindowLogits):
            return self.logits[number]
        window = self.logits.select(torch.tensor([number]))
        return window.paste(config.mask_size, config.image_size)[0, 0]

    def show(self, number: int, config: SamConfig, transform: ImageTransform) -> Json:
        """Return a mask at the size of the image, as in `masks_to_json`.

        Args:
            number: Number of the mask.
            config: Configuration of the model.
            transform: Transform of the image.
        """
        if number not in self.shown:
            low = self.low_res_logits(number, config)[None]
            [box] = logit_boxes(transform, low, MASK_THRESHOLD - STABILITY_OFFSET)
            self.keep(number, box, transform.original)
        return self.shown[number]

    def keep(self, number: int, box: LogitBox, size: tuple[int, int]) -> None:
        """Keep a mask to show it.

        Args:
            number: Number of the mask.
            box: Its logits in a box, outside of which all are low, and the box's first row and
                column.
            size: (H, W) of the image.
        """
        logits, corner = box[0][None], np.array(box[1])[None]
        stability = calculate_stability_score(logits, STABILITY_OFFSET)
        masks = encode_boxes([(above(logits, MASK_THRESHOLD), corner)], size)
        scores = {
            "predicted_iou": [float(self.iou[number])],
            "stability": stability.nan_to_num(0.0).tolist(),
        }
        classes = None if self.classes is None else [self.classes[number]]
        [self.shown[number]] = masks_to_json(masks, scores, classes)

    @property
    def nbytes(self) -> int:
        """Bytes of the logits and of the masks that were shown."""
        kept = self.logits
        parts = [kept.logits, kept.windows] if isinstance(kept, WindowLogits) else [kept]
        masks = list(self.shown.values())
        return sum(part.nbytes for part in parts) + sum(
            len(each["segmentation"]["counts"]) for each in masks
        )


@dataclass(eq=False)
class OpenImage:
    """An opened image and its cached results.

    Attributes:
        name: Its file name.
        pixels: RGB.
        predictor: Holds its embedding once it is computed.
        annotated_masks: Its masks in the dataset; None if it is not from one.
        note: How it is shown, if not as stored.
        proposals: All masks generated from a grid of points, once requested.
        predictions: Answer after each sequence of prompts.
        fraction: Fraction of the image whose masks are generated.
    """

    name: str
    pixels: UInt8[np.ndarray, "H W N"]
    predictor: SamPredictor
    annotated_masks: RLEMasks | None = None
    note: str = ""
    proposals: MaskProposals | None = None
    predictions: dict[Hashable, Answer] = field(default_factory=dict)
    fraction: float = 0.0

    @property
    def size(self) -> tuple[int, int]:
        """Height and width in pixels."""
        return self.pixels.shape[0], self.pixels.shape[1]

    @property
    def cached_bytes(self) -> int:
        """Bytes of the pixels, the embedding and the predictions."""
        kept = [
            self.predictor.features,
            *self.predictor.crop_decoders,
            *list(self.predictions.values()),
        ]
        return self.pixels.nbytes + sum(each.nbytes for each in kept if each is not None)


class OpenImages:
    """The opened images by id, limited to `MAX_CACHED_BYTES`; thread-safe."""

    def __init__(self) -> None:
        self._images: OrderedDict[str, OpenImage] = OrderedDict()
        self._lock = threading.Lock()

    def add(self, key: str, opened: OpenImage) -> None:
        """Add an image unless its id is known.

        Args:
            key: Id of the image.
            opened: The image.
        """
        with self._lock:
            self._images.setdefault(key, opened)
            self._images.move_to_end(key)
        self.trim()

    def __contains__(self, key: str) -> bool:
        """Return whether an image is cached."""
        return key in self._images

    def get(self, key: str) -> OpenImage:
        """Return an image; raise `NotFoundError` if it was dropped."""
        with self._lock:
            if key not in self._images:
                raise NotFoundError("this image is no longer cached; open it again")
            self._images.move_to_end(key)
            return self._images[key]

    def trim(self) -> None:
        """Drop the images that were used least recently until the others fit the limit."""
        with self._lock:
            cached_bytes = sum(opened.cached_bytes for opened in self._images.values())
            while len(self._images) > MIN_CACHED_IMAGES and cached_bytes > MAX_CACHED_BYTES:
                _, dropped = self._images.popitem(last=False)
                cached_bytes -= dropped.cached_bytes


def masks_to_json(
    masks: RLEMasks,
    scores: dict[str, list[float]],
    classes: Sequence[Json] | None = None,
) -> list[Json]:
    """Return each mask as COCO RLE with its area, box, scores and class.

    Args:
        masks: Masks of one image.
        scores: One score per mask, by name.
        classes: `inference.classes.class_fields` of the masks; None without classes.

    Returns:
        One dictionary per mask; "box" is `xyxy` with inclusive ends.
    """
    areas, boxes = masks.areas().tolist(), masks.boxes().tolist()
    return [
        {
            "segmentation": {"size": list(masks.size), "counts": counts.decode()},
            "area": areas[number],
            "box": boxes[number],
            **{name: round(float(values[number]), 4) for name, values in scores.items()},
            **(classes[number] if classes else {}),
        }
        for number, counts in enumerate(masks.to_coco())
    ]
