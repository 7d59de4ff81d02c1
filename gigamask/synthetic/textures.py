"""Colors and patterns of synthetic scenes.

Colors are RGB in [0, 255]; a pattern is a plane of brightness and a plane with the share of the
second color.
"""

from collections.abc import Callable

import cv2
import numpy as np
from jaxtyping import Float32, Float64

Color = Float64[np.ndarray, "3"]
Plane = Float32[np.ndarray, "h w"]
Across = Float32[np.ndarray, "1 w"]
Down = Float32[np.ndarray, "h 1"]


def pick_color(generator: np.random.Generator, beneath: Color) -> Color:
    """Return a color that differs from the one beneath by a random distance.

    It is the first of eight random colors beyond the distance (60 to 130 levels), else the
    farthest.

    Args:
        generator: Random numbers.
        beneath: The color to differ from.
    """
    candidates = generator.uniform(15, 240, (8, 3))
    gray = candidates.mean(1, keepdims=True)
    candidates = np.clip(gray + (candidates - gray) * generator.uniform(0.3, 1.2), 8, 247)
    return first_beyond(candidates, beneath, generator.uniform(60, 130))


def first_beyond(candidates: Float64[np.ndarray, "n 3"], color: Color, distance: float) -> Color:
    """Return the first candidate that is farther from a color than a distance, else the farthest.

    Args:
        candidates: Colors to choose from.
        color: The color to differ from.
        distance: Distance in levels.
    """
    distances = np.linalg.norm(candidates - color, axis=1)
    enough = np.flatnonzero(distances > distance)
    return candidates[enough[0] if len(enough) else distances.argmax()]


def _stripes(generator: np.random.Generator, xs: Across, ys: Down, period: float) -> Plane:
    angle, phase = generator.uniform(0, np.pi), generator.uniform(0, 2 * np.pi)
    pace = 2 * np.pi / period
    across = xs * np.float32(np.cos(angle) * pace) + phase
    wave = np.sin(across + ys * np.float32(np.sin(angle) * pace))
    return np.clip(wave * generator.uniform(0.7, 4) + 0.5, 0, 1)


def _dots(generator: np.random.Generator, xs: Across, ys: Down, period: float) -> Plane:
    radius = generator.uniform(0.25, 0.4)
    across, down = (xs / period) % 1 - 0.5, (ys / period) % 1 - 0.5
    return ((across * across + down * down) < radius * radius).astype(np.float32)


def _checks(generator: np.random.Generator, xs: Across, ys: Down, period: float) -> Plane:
    return (np.floor(xs / period) + np.floor(ys / period)) % 2


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


def pick_second(generator: np.random.Generator, color: Color, spread: float) -> Color:
    """Return a pattern's second color, mostly lighter or darker than the first.

    Args:
        generator: Random numbers.
        color: The first color.
        spread: Approximate distance from the first color in levels.
    """
    direction = generator.normal(size=3) + generator.choice([-1.5, 1.5])
    return np.clip(
        color + direction / np.linalg.norm(direction) * spread * generator.uniform(0.6, 1.6),
        0,
        255,
    )


def make_pattern(
    generator: np.random.Generator, kind: str, size: tuple[int, int], period: float
) -> tuple[Plane, Plane]:
    """Return a patch's brightness (a gradient around 1) and share of the second color in [0, 1].

    Args:
        generator: Random numbers.
        kind: "solid" or one of `PATTERNS`.
        size: Height and width in pixels.
        period: Period of the pattern in pixels.
    """
    height, width = size
    xs = np.arange(width, dtype=np.float32)[None]
    ys = np.arange(height, dtype=np.float32)[:, None]
    tilt = generator.uniform(-0.28, 0.28, 2).astype(np.float32)
    light = (xs / width - 0.5) * tilt[0] + 1 + (ys / height - 0.5) * tilt[1]
    if kind == "solid":
        return light, np.zeros_like(light)
    return light, PATTERNS[kind](generator, xs, ys, float(period))
