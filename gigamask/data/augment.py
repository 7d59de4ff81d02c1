"""How a photograph is laid into the input square: one `Frame` for image, masks, points and boxes.

In: the original size, the square's side, a generator. Out: a frame.

Not here: what a frame does (`geometry.frame`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gigamask.faults import Fault

if TYPE_CHECKING:
    import numpy as np

    from gigamask.geometry.frame import Frame


@dataclass(frozen=True)
class Augment(ABC):
    """Says how an image is laid into the input square."""

    @abstractmethod
    def frame(self, original: tuple[int, int], side: int, generator: np.random.Generator) -> Frame:
        """Returns the frame of an image of size `original`."""


@dataclass(frozen=True)
class Plain(Augment):
    """The whole image, its long side as long as the square's: SAM's own, which trains without augmentation."""

    def frame(self, original: tuple[int, int], side: int, generator: np.random.Generator) -> Frame:
        from gigamask.geometry.frame import Frame

        return Frame.whole(original, side)


@dataclass(frozen=True)
class Flip(Augment):
    """The whole image, sometimes mirrored left to right."""

    probability: float = 0.5
    """share of the visits that are mirrored"""

    def __post_init__(self) -> None:
        if not 0 <= self.probability <= 1:
            raise Fault(f"the flip's probability is {self.probability}, it lies in [0, 1]; give such")

    def frame(self, original: tuple[int, int], side: int, generator: np.random.Generator) -> Frame:
        from gigamask.geometry.frame import Frame

        return Frame.whole(original, side, flip=bool(generator.random() < self.probability))
