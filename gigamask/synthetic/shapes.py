"""Outlines of synthetic objects and their rasterization.

An outline is a list of polygons in the object's own frame, about [-1, 1] x [-1, 1]; an affine
transform maps it to the image. Polygons are filled by the even-odd rule, so a second one can cut a
hole.
"""

from collections.abc import Callable
from dataclasses import dataclass

import cv2
import numpy as np
from jaxtyping import Float64, UInt8

SUBPIXEL_BITS = 4
Polygons = list[Float64[np.ndarray, "_ 2"]]


@dataclass(frozen=True)
class Window:
    """A rasterized patch and its position in the image."""

    x0: int
    y0: int
    pixels: UInt8[np.ndarray, "h w"]

    @property
    def slices(self) -> tuple[slice, slice]:
        """Rows and columns of the patch in the image."""
        height, width = self.pixels.shape
        return slice(self.y0, self.y0 + height), slice(self.x0, self.x0 + width)


def circle(
    radius: float = 1.0, center: tuple[float, float] = (0.0, 0.0)
) -> Float64[np.ndarray, "p 2"]:
    """Return a circle as a polygon with 48 corners.

    Args:
        radius: Its radius.
        center: Its center (x, y).
    """
    angles = np.linspace(0, 2 * np.pi, 48, endpoint=False)
    return directions(angles) * radius + np.asarray(center)


def directions(angles: Float64[np.ndarray, "p"]) -> Float64[np.ndarray, "p 2"]:
    """Return the points of the unit circle at some angles."""
    return np.stack([np.cos(angles), np.sin(angles)], 1)


def bar(low: float, high: float) -> Float64[np.ndarray, "p 2"]:
    """Return the strip `low <= y <= high`, long enough to cross any object.

    Args:
        low: Its lower end.
        high: Its upper end.
    """
    return np.array([[-3, low], [3, low], [3, high], [-3, high]], dtype=np.float64)


def _ellipse(generator: np.random.Generator) -> Polygons:
    return [circle()]


def _rectangle(generator: np.random.Generator) -> Polygons:
    return [np.array([[-0.9, -0.9], [0.9, -0.9], [0.9, 0.9], [-0.9, 0.9]])]


def _polygon(generator: np.random.Generator) -> Polygons:
    corners = int(generator.integers(3, 8))
    angles = (np.arange(corners) + generator.uniform(-0.25, 0.25, corners)) * (2 * np.pi / corners)
    return [directions(angles) * generator.uniform(0.85, 1.1, (corners, 1))]


def _star(generator: np.random.Generator) -> Polygons:
    tips = int(generator.integers(4, 9))
    angles = np.arange(2 * tips) * (np.pi / tips)
    radii = np.where(np.arange(2 * tips) % 2 == 0, 1.15, generator.uniform(0.5, 0.75))
    return [directions(angles) * radii[:, None]]


def _blob(generator: np.random.Generator) -> Polygons:
    angles = np.linspace(0, 2 * np.pi, 64, endpoint=False)
    waves = np.arange(2, 6)
    bumps = (
        np.sin(angles[:, None] * waves + generator.uniform(0, 2 * np.pi, 4))
        * generator.uniform(0, 0.5, 4)
        / waves
    )
    return [directions(angles) * (1 + bumps.sum(1, keepdims=True))]


def _ring(generator: np.random.Generator) -> Polygons:
    return [circle(), circle(generator.uniform(0.4, 0.65))]


def _capsule(generator: np.random.Generator) -> Polygons:
    ends = circle(0.45)
    ends[:, 0] += np.where(ends[:, 0] >= 0, 0.7, -0.7)
    return [ends]


OUTLINES: dict[str, Callable[[np.random.Generator], Polygons]] = {
    "ellipse": _ellipse,
    "rectangle": _rectangle,
    "polygon": _polygon,
    "star": _star,
    "blob": _blob,
    "ring": _ring,
    "capsule": _capsule,
}


def affine(
    center: tuple[float, float], axes: tuple[float, float], angle: float
) -> Float64[np.ndarray, "2 3"]:
    """Return the transform that scales, then rotates, then translates.

    Args:
        center: Translation (x, y).
        axes: Scale of each axis.
        angle: Rotation in radians.
    """
    cosine, sine = np.cos(angle), np.sin(angle)
    return np.array(
        [
            [axes[0] * cosine, -axes[1] * sine, center[0]],
            [axes[0] * sine, axes[1] * cosine, center[1]],
        ]
    )


def compose(
    outer: Float64[np.ndarray, "2 3"], inner: Float64[np.ndarray, "2 3"]
) -> Float64[np.ndarray, "2 3"]:
    """Return the transform that applies `inner`, then `outer`.

    Args:
        outer: The second transform.
        inner: The first transform.
    """
    return np.concatenate(
        [outer[:, :2] @ inner[:, :2], outer[:, :2] @ inner[:, 2:] + outer[:, 2:]], 1
    )


def rasterize(
    polygons: Polygons, transform: Float64[np.ndarray, "2 3"], size: tuple[int, int]
) -> Window | None:
    """Rasterize an outline, cropped to the image.

    Args:
        polygons: The outline.
        transform: Maps the outline to the image.
        size: Height and width of the image in pixels.

    Returns:
        The pixels inside; None if none are in the image.
    """
    corners = [polygon @ transform[:, :2].T + transform[:, 2] for polygon in polygons]
    low = np.floor(np.min([ring.min(0) for ring in corners], 0)).astype(int)
    high = np.ceil(np.max([ring.max(0) for ring in corners], 0)).astype(int) + 1
    x0, y0 = np.maximum(low, 0)
    x1, y1 = np.minimum(high, (size[1], size[0]))
    if x1 - x0 < 2 or y1 - y0 < 2:
        return None
    everything = np.ones((y1 - y0, x1 - x0), np.uint8)
    return rasterize_within(polygons, transform, Window(int(x0), int(y0), everything))


def rasterize_within(
    polygons: Polygons, transform: Float64[np.ndarray, "2 3"], window: Window
) -> Window:
    """Rasterize an outline inside a window.

    Args:
        polygons: The outline.
        transform: Maps the outline to the image.
        window: The pixels to stay inside of.

    Returns:
        The pixels inside both, on the window's patch.
    """
    origin = np.array([window.x0, window.y0])
    fixed = [
        np.round(
            (polygon @ transform[:, :2].T + transform[:, 2] - origin) * (1 << SUBPIXEL_BITS)
        ).astype(np.int32)
        for polygon in polygons
    ]
    pixels = np.zeros_like(window.pixels)
    cv2.fillPoly(pixels, fixed, 1, shift=SUBPIXEL_BITS)
    return Window(window.x0, window.y0, pixels & window.pixels)


def part_shapes(
    generator: np.random.Generator, kind: str, outline: Polygons
) -> list[tuple[Polygons, Float64[np.ndarray, "2 3"]]]:
    """Return outlines, each with the transform from its frame to its parent's.

    Args:
        generator: Random numbers.
        kind: inner, disc, band, half, spots or shape.
        outline: Outline of the parent.
    """
    shift = tuple(generator.uniform(-0.18, 0.18, 2))
    turn = generator.uniform(0, 2 * np.pi)
    if kind == "inner":
        scale = generator.uniform(0.5, 0.75)
        return [(outline, affine(shift, (scale, scale), 0.0))]
    if kind == "disc":
        radius = generator.uniform(0.35, 0.55)
        return [([circle()], affine(shift, (radius, radius), 0.0))]
    if kind == "band":
        half_width = generator.uniform(0.18, 0.32)
        middle = generator.uniform(-0.3, 0.3)
        return [
            ([bar(middle - half_width, middle + half_width)], affine((0.0, 0.0), (1.0, 1.0), turn))
        ]
    if kind == "half":
        return [([bar(generator.uniform(-0.15, 0.25), 3.0)], affine((0.0, 0.0), (1.0, 1.0), turn))]
    if kind == "spots":
        spots = int(generator.integers(2, 5))
        angles = turn + np.arange(spots) * (2 * np.pi / spots)
        radius = generator.uniform(0.2, 0.3)
        return [
            (
                [circle()],
                affine((0.48 * np.cos(angle), 0.48 * np.sin(angle)), (radius, radius), 0.0),
            )
            for angle in angles
        ]
    other = str(generator.choice([name for name in OUTLINES if name != "ring"]))
    scale = generator.uniform(0.45, 0.62)
    return [(OUTLINES[other](generator), affine(shift, (scale, scale), turn))]
