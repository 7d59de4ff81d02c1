"""The prompts on an image, in order: points with labels, and boxes."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from gigamask.errors import GigamaskError

MAX_PROMPTS = 64
"""Maximum number of prompts on one image."""


@dataclass(frozen=True)
class PromptStep:
    """One prompt: a point or a box, in pixels of the image counted from 0.

    Attributes:
        point: (x, y).
        foreground: Whether the point is on the object.
        box: (x0, y0, x1, y1).
        chosen: Which mask predicted for this prompt is passed to the next one; None means the mask
            with the highest predicted IoU.
    """

    __pydantic_config__ = {"extra": "forbid"}  # noqa: RUF012 (of the requests that hold it)

    point: tuple[float, float] | None = None
    foreground: bool = True
    box: tuple[float, float, float, float] | None = None
    chosen: int | None = None


def check_steps(size: tuple[int, int], steps: Sequence[PromptStep]) -> None:
    """Raise `GigamaskError` if there are no prompts, too many, or one outside the image.

    Args:
        size: (H, W) of the image.
        steps: The prompts.
    """
    if not 1 <= len(steps) <= MAX_PROMPTS:
        raise GigamaskError(f"{len(steps)} prompts were given; pass 1 to {MAX_PROMPTS}")
    for step in steps:
        if (step.point is None) == (step.box is None):
            raise GigamaskError("a prompt is either a point or a box; give one of them")
        corners = np.array(step.point if step.box is None else step.box, np.float64).reshape(-1, 2)
        inside = (corners >= 0).all() and (corners <= size[::-1]).all()
        if not (np.isfinite(corners).all() and inside):
            raise GigamaskError(
                f"a prompt is at {corners.tolist()}, outside the image of {size[1]} x {size[0]};"
                " give one inside"
            )
