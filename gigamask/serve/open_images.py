"""Images opened in the page with their cached results; the least recently used is dropped first."""

import threading
from collections import OrderedDict
from dataclasses import dataclass, field

import numpy as np
from jaxtyping import Float, UInt8
from torch import Tensor

from gigamask.errors import GigamaskError
from gigamask.inference.automatic_mask_generator import MaskProposals
from gigamask.inference.predictor import SamPredictor
from gigamask.masks.rle import RLEMasks

MAX_CACHED_BYTES = 2**30
"""Limit of the opened images with their embeddings and predictions; an SA-1B image has 10 MB, its
embedding 4 MB, the three masks of a prompt .8 MB."""
MIN_CACHED_IMAGES = 2


class NotFoundError(GigamaskError):
    """Raised if the requested item does not exist, or no longer exists."""


@dataclass(frozen=True, eq=False)
class Answer:
    """The masks of a sequence of prompts.

    Attributes:
        low_res_logits: Logits that the next prompt gets.
        iou: Predicted IoU.
        masks: The masks at the size of the image.
        stability: Their stability scores.
    """

    low_res_logits: Float[Tensor, "C G G"]
    iou: Float[Tensor, "C"]
    masks: RLEMasks
    stability: Float[Tensor, "C"]

    @property
    def nbytes(self) -> int:
        """Bytes of the logits and the masks."""
        return self.low_res_logits.nbytes + self.masks.bounds.nbytes


@dataclass(eq=False)
class OpenImage:
    """An opened image and its cached results.

    Attributes:
        name: Its file name.
        pixels: RGB.
        predictor: Holds its embedding once it is computed.
        annotated_masks: Its masks in the dataset; None if it is not from one.
        proposals: All masks generated from a grid of points, once requested.
        predictions: Answer after each sequence of prompts.
        fraction: Fraction of the image whose masks are generated.
    """

    name: str
    pixels: UInt8[np.ndarray, "H W N"]
    predictor: SamPredictor
    annotated_masks: RLEMasks | None = None
    proposals: MaskProposals | None = None
    predictions: dict[tuple, Answer] = field(default_factory=dict)
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

    def report(self, fraction: float) -> None:
        """Note the fraction of the image whose masks are generated."""
        self.fraction = fraction


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
