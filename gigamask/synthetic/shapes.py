"""Outlines of synthetic objects and their rasterization.

An outline is a list of polygons in the object's own frame, about [-1, 1] x [-1, 1]; an affine
transform maps it to the image. Polygons are filled by the even-odd rule, so a second one can cut a
hole.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import cv2
import numpy as np
from jaxtyping import Float64, UInt8

SUBPIXEL_BITS = 4
PART_SCALES = {"inner": (0.5, 0.75), "disc": (0.35, 0.55)}
Pixels = UInt8[np.ndarray, "_ _"]
Points = Float64[np.ndarray, "... 2"]
Polygons = list[Points]
Pair = Sequence[float] | Float64[np.ndarray, "2"]
Transform = Float64[np.ndarray, "2 3"]


@dataclass(frozen=True)
class Window:
    """A rasterized patch and its position in the image."""

    x0: int
    y0: int
    pixels: Pixels

    @property
    def slices(self) -> tuple[slice, slice]:
        """Rows and columns of the patch in the image."""
        height, width = self.pixels.shape
        return slice(self.y0, self.y0 + height), slice(self.x0, self.x0 + width)


def circle(radius: float = 1.0) -> Points:
    """Return a circle as a polygon with 48 corners."""
    return directions(np.linspace(0, 2 * np.pi, 48, endpoint=False)) * radius


def directions(angles: Float64[np.ndarray, "p"]) -> Points:
    """Return the points of the unit circle at some angles."""
    return np.stack([np.cos(angles), np.sin(angles)], 1)


def bar(low: float, high: float) -> Points:
    """Return the strip `low <= y <= high`, long enough to cross any object.

    Args:
        low: Its lower end.
        high: Its upper end.
    """
    return np.array([[-3, low], [3, low], [3, high], [-3, high]])


def _polygon(generator: np.random.Generator) -> Polygons:
    corners = generator.integers(3, 8)
    angles = (np.arange(corners) + generator.uniform(-0.25, 0.25, corners)) * (2 * np.pi / corners)
    return [directions(angles) * generator.uniform(0.85, 1.1, (corners, 1))]


def _star(generator: np.random.Generator) -> Polygons:
    tips = generator.integers(4, 9)
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


def _capsule(generator: np.random.Generator) -> Polygons:
    ends = circle(0.45)
    ends[:, 0] += np.where(ends[:, 0] >= 0, 0.7, -0.7)
    return [ends]


OUTLINES: dict[str, Callable[[np.random.Generator], Polygons]] = {
    "ellipse": lambda _: [circle()],
    "rectangle": lambda _: [np.array([[-0.9, -0.9], [0.9, -0.9], [0.9, 0.9], [-0.9, 0.9]])],
    "polygon": _polygon,
    "star": _star,
    "blob": _blob,
    "ring": lambda generator: [circle(), circle(generator.uniform(0.4, 0.65))],
    "capsule": _capsule,
}


def affine(center: Pair = (0.0, 0.0), axes: Pair | float = 1.0, angle: float = 0.0) -> Transform:
    """Return the transform that scales, then rotates, then translates.

    Args:
        center: Translation (x, y).
        axes: Scale of each axis, or of both.
        angle: Rotation in radians.
    """
    cosine, sine = np.cos(angle), np.sin(angle)
    return np.column_stack([np.array([[cosine, -sine], [sine, cosine]]) * axes, center])


def compose(outer: Transform, inner: Transform) -> Transform:
    """Return the transform that applies `inner`, then `outer`.

    Args:
        outer: The second transform.
        inner: The first transform.
    """
    both = outer[:, :2] @ inner
    both[:, 2] += outer[:, 2]
    return both


def placed(points: Points, transform: Transform) -> Points:
    """Return where a transform maps points to.

    Args:
        points: The points.
        transform: The transform.
    """
    return points @ transform[:, :2].T + transform[:, 2]


def rasterize(polygons: Polygons, transform: Transform, size: tuple[int, int]) -> Window | None:
    """Rasterize an outline, cropped to the image.

    Args:
        polygons: The outline.
        transform: Maps the outline to the image.
        size: Height and width of the image in pixels.

    Returns:
        The pixels inside; None if none are in the image.
    """
    corners = np.concatenate([placed(polygon, transform) for polygon in polygons])
    low = np.floor(corners.min(0)).astype(int)
    high = np.ceil(corners.max(0)).astype(int) + 1
    (x0, y0), (x1, y1) = np.clip([low, high], 0, size[::-1])
    if x1 - x0 < 2 or y1 - y0 < 2:
        return None
    everything = np.ones((y1 - y0, x1 - x0), np.uint8)
    return rasterize_within(polygons, transform, Window(int(x0), int(y0), everything))


def rasterize_within(polygons: Polygons, transform: Transform, window: Window) -> Window:
    """Rasterize an outline inside a window.

    Args:
        polygons: The outline.
        transform: Maps the outline to the image.
        window: The pixels to stay inside of.

    Returns:
        The pixels inside both, on the window's patch.
    """
    origin = (window.x0, window.y0)
    fixed = [
        np.round((placed(polygon, transform) - origin) * (1 << SUBPIXEL_BITS)).astype(np.int32)
        for polygon in polygons
    ]
    pixels = np.zeros_like(window.pixels)
    cv2.fillPoly(pixels, fixed, 1, shift=SUBPIXEL_BITS)
    return Window(window.x0, window.y0, pixels & window.pixels)


def part_shapes(
    generator: np.random.Generator, kind: str, outline: Polygons
) -> list[tuple[Polygons, Transform]]:
    """Return outlines, each with the transform from its frame to its parent's.

    Args:
        generator: Random numbers.
        kind: inner, disc, band, half, spots or shape.
        outline: Outline of the parent.
    """
    shift = generator.uniform(-0.18, 0.18, 2)
    turn = generator.uniform(0, 2 * np.pi)
    if kind == "band":
        half_width = generator.uniform(0.18, 0.32)
        middle = generator.uniform(-0.3, 0.3)
        return [([bar(middle - half_width, middle + half_width)], affine(angle=turn))]
    if kind == "half":
        return [([bar(generator.uniform(-0.15, 0.25), 3.0)], affine(angle=turn))]
    if kind == "spots":
        spots = generator.integers(2, 5)
        angles = turn + np.arange(spots) * (2 * np.pi / spots)
        radius = generator.uniform(0.2, 0.3)
        return [([circle()], affine(center, radius)) for center in 0.48 * directions(angles)]
    if kind in PART_SCALES:
        scale = generator.uniform(*PART_SCALES[kind])
        return [(outline if kind == "inner" else [circle()], affine(shift, scale))]
    other = generator.choice([name for name in OUTLINES if name != "ring"])
    scale = generator.uniform(0.45, 0.62)
    return [(OUTLINES[other](generator), affine(shift, scale, turn))]
