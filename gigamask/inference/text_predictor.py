"""Finding masks by text: what a plugin offers to the page."""

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import numpy as np
from jaxtyping import Float64, Int64, UInt8

from gigamask.masks.rle import RLEMasks
from gigamask.models.promptable import PromptableModel


@runtime_checkable
class MatchedMasks(Protocol):
    """Which masks of an image fit a text.

    Attributes:
        order: Numbers of the masks, best first.
        confidence: Of each mask, in that order.
        num_matches: How many fit.
        note: What a person should know about the text; may be empty.
    """

    order: Int64[np.ndarray, "m"]
    confidence: Float64[np.ndarray, "m"]
    num_matches: int
    note: str


@runtime_checkable
class TextPredictor(Protocol):
    """Finds masks by text."""

    @property
    def segmenter(self) -> PromptableModel:
        """The model that finds the candidate masks."""

    def check(self, text: str) -> None:
        """Raise `GigamaskError` if a text cannot be used.

        Args:
            text: The text.
        """

    def predict(
        self, pixels: UInt8[np.ndarray, "H W 3"], masks: RLEMasks, texts: Sequence[str]
    ) -> Sequence[MatchedMasks]:
        """Rank the masks of an image for each text.

        Args:
            pixels: RGB image.
            masks: Its candidate masks.
            texts: The texts.
        """
