"""Colours and patterns that the synthetic scenes are painted with.

In: a kind, a generator, the size to fill. Out: two RGB colours in [0, 255], and planes that say how bright each pixel is and how much of
the second colour it shows.

Not here: which region is painted with what (`prepare.synthetic`).
"""

from collections.abc import Callable

import cv2
import numpy as np
from jaxtyping import Float32, Float64

Colour = Float64[np.ndarray, "3"]
Plane = Float32[np.ndarray, "h w"]
Across = Float32[np.ndarray, "1 w"]
Down = Float32[np.ndarray, "h 1"]


def pick_colour(generator: np.random.Generator, beneath: Colour) -> Colour:
    """Returns a colour that differs from `beneath`, sometimes by much and sometimes by little.

    The first of eight random colours that is far enough, else the farthest; how far is far enough is itself random (60 to 130 levels).
    """
    candidates = generator.uniform(15, 240, (8, 3))
    grey = candidates.mean(1, keepdims=True)
    candidates = np.clip(grey + (candidates - grey) * generator.uniform(0.3, 1.2), 8, 247)
    distances = np.linalg.norm(candidates - beneath, axis=1)
    enough = np.flatnonzero(distances > generator.uniform(60, 130))
    return candidates[enough[0] if len(enough) else distances.argmax()]


def _wave(generator: np.random.Generator, xs: Across, ys: Down, period: float) -> Plane:
    angle, phase = generator.uniform(0, np.pi), generator.uniform(0, 2 * np.pi)
    pace = 2 * np.pi / period
    return np.sin(
        (xs * np.float32(np.cos(angle) * pace) + np.float32(phase))
        + ys * np.float32(np.sin(angle) * pace)
    )


def _stripes(generator: np.random.Generator, xs: Across, ys: Down, period: float) -> Plane:
    return np.clip(
        _wave(generator, xs, ys, period) * np.float32(generator.uniform(0.7, 4)) + np.float32(0.5),
        0,
        1,
    )


def _dots(generator: np.random.Generator, xs: Across, ys: Down, period: float) -> Plane:
    radius = generator.uniform(0.25, 0.4)
    across, down = (
        (xs / np.float32(period)) % 1 - np.float32(0.5),
        (ys / np.float32(period)) % 1 - np.float32(0.5),
    )
    return ((across * across + down * down) < radius * radius).astype(np.float32)


def _checks(generator: np.random.Generator, xs: Across, ys: Down, period: float) -> Plane:
    cells = np.floor(xs / np.float32(period)) + np.floor(ys / np.float32(period))
    return cells % 2


def _cloud(generator: np.random.Generator, xs: Across, ys: Down, period: float) -> Plane:
    height, width = ys.shape[0], xs.shape[1]
    coarse = generator.random((int(height / period) + 3, int(width / period) + 3), dtype=np.float32)
    return np.clip(cv2.resize(coarse, (width, height), interpolation=cv2.INTER_CUBIC), 0, 1)


PATTERNS: dict[str, Callable[[np.random.Generator, Across, Down, float], Plane]] = {
    "stripes": _stripes,
    "dots": _dots,
    "checks": _checks,
    "cloud": _cloud,
}


def pick_second(generator: np.random.Generator, colour: Colour, spread: float) -> Colour:
    """Returns a pattern's second colour, about `spread` levels away from the first and mostly lighter or darker."""
    direction = generator.normal(size=3) + generator.choice([-1.5, 1.5])
    return np.clip(
        colour + direction / np.linalg.norm(direction) * spread * generator.uniform(0.6, 1.6),
        0,
        255,
    )


def weave(
    generator: np.random.Generator, kind: str, size: tuple[int, int], period: float
) -> tuple[Plane, Plane]:
    """Returns how bright a patch is (a gradient around 1) and how much of the second colour shows, in [0, 1].

    `kind` is "solid" or one of `PATTERNS`; `period` is the pattern's, in pixels.
    """
    height, width = size
    xs = np.arange(width, dtype=np.float32)[None]
    ys = np.arange(height, dtype=np.float32)[:, None]
    tilt = generator.uniform(-0.28, 0.28, 2)
    across = (xs / np.float32(width) - np.float32(0.5)) * np.float32(tilt[0]) + np.float32(1)
    light = across + (ys / np.float32(height) - np.float32(0.5)) * np.float32(tilt[1])
    if kind == "solid":
        return light, np.zeros_like(light)
    return light, PATTERNS[kind](generator, xs, ys, period)
