"""Synthetic scenes that resemble photographs in their statistics: textured, occluding shapes.

The dead leaves model (Lee, Mumford and Huang 2001) covers an image with shapes of power-law sizes.
Here shapes have fractal textures, shading, shadows and parts, and contrast may be low. Weights
trained on them know something of photographs without having seen one. The bytes of image N depend
only on (seed, N).
"""

from collections.abc import Callable
from typing import TypeVar

import cv2
import numpy as np
from jaxtyping import Int64

from gigamask.rng import make_rng
from gigamask.synthetic.scenes import (
    LONG_SIDE,
    Canvas,
    SyntheticScene,
    back_to_front,
    draw_parts,
    draw_size,
    photograph,
    visible_masks,
)
from gigamask.synthetic.shapes import (
    OUTLINES,
    Polygons,
    Window,
    affine,
    directions,
    rasterize,
)
from gigamask.synthetic.textures import Color, Plane, first_beyond

LEAVES = (10, 50)
"""Range of the number of shapes of a scene, before they hide each other."""
RADIUS_SHARE = (0.04, 0.4)
"""Range of a shape's radius, as a fraction of the long side."""
SHAPES = ("blob", "rough", "ellipse", "polygon", "capsule", "rectangle", "ring")
SHAPE_ODDS = (0.3, 0.3, 0.12, 0.1, 0.08, 0.07, 0.03)
PART_PROB, SHADOW_PROB, LAND_PROB = 0.35, 0.4, 0.6
OCTAVES = 5
Painted = TypeVar("Painted", bound=Canvas)


class LeafCanvas(Canvas):
    """A canvas whose regions have fractal textures."""

    def add(self, generator: np.random.Generator, window: Window, parent: int) -> int:
        """Paint a new region with a random texture and colors.

        Args:
            generator: Random numbers.
            window: The pixels of the region.
            parent: The region that it is a part of; 0 for an object.

        Returns:
            The number of the region.
        """
        area, inside = window.slices, window.pixels > 0
        beneath = self.owner[area][inside]
        below = self.colors[int(np.bincount(beneath, minlength=1).argmax())]
        pattern = fractal_pattern(generator, window.pixels.shape, max(self.size))
        return self.paint(window, pattern, pick_colors(generator, below), parent)


def compose_leaves(
    seed: int, number: int, long_side: tuple[int, int] = LONG_SIDE
) -> SyntheticScene:
    """Draw a scene.

    Args:
        seed: Random seed of the scenes.
        number: Number of the scene.
        long_side: Range of the longer side in pixels.
    """
    generator = make_rng(seed, "leaves", number)
    canvas = draw_ground(generator, long_side, LeafCanvas)
    draw_land(generator, canvas)
    _draw_leaves(generator, canvas)
    masks, _ = visible_masks(generator, canvas)
    return photograph(generator, canvas, masks[generator.permutation(len(masks))], sun=(0.6, 1.25))


def draw_ground(
    generator: np.random.Generator, long_side: tuple[int, int], kind: Callable[..., Painted]
) -> Painted:
    """Return a canvas of random size with a textured ground.

    Args:
        generator: Random numbers.
        long_side: Range of the longer side in pixels.
        kind: Makes the canvas.
    """
    size = draw_size(generator, long_side, min_ratio=0.6, landscape_prob=0.6)
    light, mix = fractal_pattern(generator, size, max(size))
    ground = generator.uniform(20, 230, 3)
    ground = ground.mean() + (ground - ground.mean()) * generator.uniform(0.1, 0.8)
    color, second = pick_colors(generator, ground)
    return kind(
        np.zeros(size, np.uint8),
        light,
        mix,
        colors=[color],
        seconds=[second],
        crowded=True,
    )


def draw_land(generator: np.random.Generator, canvas: Canvas) -> None:
    """Draw, mostly, one to three layers with rough horizons, such as a sky, hills and a meadow.

    Args:
        generator: Random numbers.
        canvas: The scene.
    """
    if generator.random() >= LAND_PROB:
        return
    height, width = canvas.size
    for level in np.sort(generator.uniform(0.2, 0.9, generator.integers(1, 4))):
        roughness, walk = generator.uniform(0, 0.12), np.cumsum(generator.normal(0, 1, 65))
        walk -= np.linspace(walk[0], walk[-1], 65)
        walk /= max(np.abs(walk).max(), 1e-6)
        tilt = generator.normal(0, 0.08) * height * np.linspace(-1, 1, 65)
        horizon = height * (level + roughness * walk) + tilt
        outline = np.stack([np.linspace(0, width, 65), horizon], 1)
        corners = [[width, 2.0 * height], [0.0, 2.0 * height]]
        window = rasterize([np.concatenate([outline, corners])], affine(), canvas.size)
        if window is not None:
            canvas.add(generator, window, 0)


def _draw_leaves(generator: np.random.Generator, canvas: Canvas) -> None:
    """Draw shapes of power-law sizes, the larger ones mostly behind."""
    height, width = canvas.size
    count = int(np.exp(generator.uniform(*np.log(LEAVES))))
    # Density proportional to r ** -2: as many small shapes as large ones cover.
    low, high = (1 / share for share in RADIUS_SHARE)
    shares = 1 / generator.uniform(high, low, count)
    for share in back_to_front(generator, shares, 0.5):
        outline = random_outline(generator)
        radius = share * max(height, width)
        center = generator.uniform(-0.05, 1.05, 2) * (width, height)
        axes = (radius, radius * generator.uniform(0.35, 1.0))
        transform = affine(center, axes, generator.uniform(0, 2 * np.pi))
        window = rasterize(outline, transform, canvas.size)
        if window is None:
            continue
        if generator.random() < SHADOW_PROB:
            shift = np.round(generator.normal(0, 0.12 * radius, 2)).astype(int)
            softness = max(0.8, 0.06 * radius)
            cast_shadow(canvas, window, shift, softness, generator.uniform(0.2, 0.6))
        number = canvas.add(generator, window, 0)
        if generator.random() < PART_PROB:
            draw_parts(generator, canvas, outline, transform, window, number)


def cast_shadow(
    canvas: Canvas, window: Window, shift: Int64[np.ndarray, "2"], sigma: float, strength: float
) -> None:
    """Darken what lies beside a shape that is about to be painted.

    Args:
        canvas: The scene.
        window: The pixels of the shape.
        shift: Where the shadow falls (x, y), in pixels.
        sigma: Its softness in pixels.
        strength: The share of light that it takes.
    """
    reach = int(4 * sigma + 2)  # the kernel's radius is 4 sigma
    start, size = np.add(shift, (window.x0, window.y0)), window.pixels.shape[::-1]
    (x0, y0), (x1, y1) = np.clip([start - reach, start + size + reach], 0, canvas.size[::-1])
    light = canvas.light[y0:y1, x0:x1]
    if light.size:
        move = np.column_stack([np.eye(2), start - (x0, y0)])
        moved = cv2.warpAffine(window.pixels.astype(np.float32), move, light.shape[::-1])
        light *= 1 - strength * cv2.GaussianBlur(moved, (0, 0), sigma)


def random_outline(generator: np.random.Generator) -> Polygons:
    """Return an outline of a random kind."""
    kind = str(generator.choice(SHAPES, p=SHAPE_ODDS))
    return rough(generator) if kind == "rough" else OUTLINES[kind](generator)


def rough(generator: np.random.Generator) -> Polygons:
    """Return an outline with bumps of all sizes, like a bush, a rock or an animal."""
    corners = 160
    angles = np.linspace(0, 2 * np.pi, corners, endpoint=False)
    waves = np.arange(1, 24)
    amplitudes = generator.normal(0, 1, (2, 23)) * generator.uniform(0.15, 0.4) / waves
    turns = np.outer(waves, angles)
    bumps = amplitudes[0] @ np.cos(turns) + amplitudes[1] @ np.sin(turns)
    radii = np.exp(np.clip(bumps, -1.2, 0.7))
    return [directions(angles) * radii[:, None]]


def pick_colors(generator: np.random.Generator, beneath: Color) -> tuple[Color, Color]:
    """Return a color that differs from the one beneath, sometimes only a little, and a second one.

    Args:
        generator: Random numbers.
        beneath: The color to differ from.
    """
    gray = generator.uniform(15, 235, (8, 1))
    candidates = gray + generator.normal(0, 1, (8, 3)) * generator.uniform(2, 35)
    candidates = np.clip(candidates, 4, 250)
    color = first_beyond(candidates, beneath, generator.uniform(12, 90))
    step = generator.normal(0, 1) * generator.uniform(10, 110) + generator.normal(0, 10, 3)
    return color, np.clip(color + step, 0, 255)


def fractal_pattern(
    generator: np.random.Generator, size: tuple[int, int], long_side: int
) -> tuple[Plane, Plane]:
    """Return a patch's brightness around 1, shaded, and its share of the second color in [0, 1].

    Args:
        generator: Random numbers.
        size: Height and width of the patch.
        long_side: Long side of the image, which limits the coarsest texture.
    """
    height, width = size
    texture = _fractal(generator, size, long_side)
    down, across = np.linspace(-0.5, 0.5, height)[:, None], np.linspace(-0.5, 0.5, width)
    tilt, bulge = generator.uniform(-0.4, 0.4, 2), generator.uniform(0, 0.8)
    shade = 1 + tilt[0] * across + tilt[1] * down
    shade -= bulge * (across**2 + down**2)
    rough_light = generator.uniform(0, 1) ** 2 * (_fractal(generator, size, long_side) - 0.5)
    return (shade + rough_light).astype(np.float32), np.clip(texture, 0, 1)


def _fractal(generator: np.random.Generator, size: tuple[int, int], long_side: int) -> Plane:
    """Return noise of several octaves, mostly in [0, 1], coarser along one direction."""
    height, width = size
    period = long_side * np.exp(generator.uniform(np.log(0.02), np.log(0.2)))
    stretch = np.exp(generator.normal(0, 0.6))
    persistence, weight = generator.uniform(0.5, 1.0), 1.0
    plane, total = np.zeros(size, np.float32), 0.0
    for _ in range(OCTAVES):
        cells = np.array([height * stretch / period, width / (period * stretch)]) + 2
        cells = np.clip(cells.astype(int), 2, size)
        coarse = generator.standard_normal(cells, dtype=np.float32)
        detail = cv2.resize(coarse, (width, height), interpolation=cv2.INTER_CUBIC)
        detail *= weight
        plane += detail
        total += weight**2
        weight *= persistence
        period /= 2
    contrast = generator.uniform(0.15, 0.6)
    plane *= np.float32(contrast / np.sqrt(total))
    plane += 0.5
    return plane
