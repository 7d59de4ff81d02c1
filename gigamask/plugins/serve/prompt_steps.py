"""The prompts on an image, in order: points with labels, and boxes."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Float64

from gigamask.errors import GigamaskError

MAX_PROMPTS = 64
"""Maximum number of prompts on one image."""
MAX_MASKS = 16
"""No model predicts as many masks for a prompt."""


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

    __pydantic_config__ = {"extra": "forbid", "allow_inf_nan": False}  # noqa: RUF012 (of the requests that hold it)

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
        checked_points([step.point] if step.box is None else [step.box[:2], step.box[2:]], size)
        if step.chosen is not None and not 0 <= step.chosen < MAX_MASKS:
            raise GigamaskError(
                f"mask {step.chosen} was chosen; choose one of 0 to {MAX_MASKS - 1}"
            )


def checked_points(
    points: Sequence[Any], size: tuple[int, int] | None = None
) -> Float64[np.ndarray, "n 2"]:
    """Return points that were given from outside as an array, after a check of each number.

    Args:
        points: x and y of each, in pixels counted from 0.
        size: (H, W) of the image, which they must not leave; None for any finite numbers.

    Raises:
        GigamaskError: A number is not finite, or outside the image.
    """
    found = np.array(points, np.float64).reshape(-1, 2)
    if not np.isfinite(found).all():
        raise GigamaskError("point coordinates must be finite numbers, not NaN or infinite")
    if size is not None and not ((found >= 0).all() and (found <= size[::-1]).all()):
        wrong = found[((found < 0) | (found > size[::-1])).any(1)][0].tolist()
        raise GigamaskError(
            f"a point is at {wrong}, outside the image of {size[1]} x {size[0]}; give one inside"
        )
    return found
