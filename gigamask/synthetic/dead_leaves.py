"""Synthetic scenes that resemble photographs in their statistics: textured, occluding shapes.

The dead leaves model (Lee, Mumford and Huang 2001) covers an image with shapes of power-law sizes.
Here shapes have fractal textures, shading, shadows and parts, and contrast may be low. Weights
trained on them know something of photographs without having seen one. The bytes of image N depend
only on (seed, N).
"""

import cv2
import numpy as np
from jaxtyping import Float32, Float64

from gigamask.rng import make_rng
from gigamask.synthetic.scenes import (
    LONG_SIDE,
    Canvas,
    SyntheticScene,
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
        below = self.colors[int(np.bincount(beneath).argmax())] if len(beneath) else self.colors[0]
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
    size = draw_size(generator, long_side, min_ratio=0.6, landscape_prob=0.6)
    light, mix = fractal_pattern(generator, size, max(size))
    ground = generator.uniform(20, 230, 3)
    ground = ground.mean() + (ground - ground.mean()) * generator.uniform(0.1, 0.8)
    color, second = pick_colors(generator, ground)
    canvas = LeafCanvas(
        np.zeros(size, np.uint8),
        light,
        mix,
        parents=[0],
        objects=[0],
        colors=[color],
        seconds=[second],
        crowded=True,
    )
    if generator.random() < LAND_PROB:
        _draw_land(generator, canvas)
    _draw_leaves(generator, canvas)
    masks, _ = visible_masks(generator, canvas)
    return photograph(generator, canvas, masks[generator.permutation(len(masks))], sun=(0.6, 1.25))


def _draw_land(generator: np.random.Generator, canvas: Canvas) -> None:
    """Draw one to three layers with rough horizons, such as a sky, hills and a meadow."""
    height, width = canvas.size
    across = np.linspace(0, width, 65)
    for level in np.sort(generator.uniform(0.2, 0.9, int(generator.integers(1, 4)))):
        horizon = height * (level + generator.uniform(0, 0.12) * _walk(generator, 65))
        tilt = generator.normal(0, 0.08) * height * np.linspace(-1, 1, 65)
        outline = np.stack([across, horizon + tilt], 1)
        corners = np.array([[width, 2.0 * height], [0.0, 2.0 * height]])
        identity = affine((0.0, 0.0), (1.0, 1.0), 0.0)
        window = rasterize([np.concatenate([outline, corners])], identity, canvas.size)
        if window is not None:
            canvas.add(generator, window, parent=0)


def _draw_leaves(generator: np.random.Generator, canvas: Canvas) -> None:
    """Draw shapes of power-law sizes, the larger ones mostly behind."""
    height, width = canvas.size
    count = int(np.exp(generator.uniform(*np.log(LEAVES))))
    # Density proportional to r ** -2: as many small shapes as large ones cover.
    low, high = (1 / share for share in RADIUS_SHARE)
    shares = 1 / generator.uniform(high, low, count)
    shares = shares[np.argsort(-shares * np.exp(generator.normal(0, 0.5, count)))]
    for share in shares:
        kind = str(generator.choice(SHAPES, p=SHAPE_ODDS))
        outline = rough(generator) if kind == "rough" else OUTLINES[kind](generator)
        radius = share * max(height, width)
        center = generator.uniform(-0.05, 1.05, 2) * (width, height)
        axes = (radius, radius * generator.uniform(0.35, 1.0))
        transform = affine(tuple(center), axes, generator.uniform(0, 2 * np.pi))
        window = rasterize(outline, transform, canvas.size)
        if window is None:
            continue
        if generator.random() < SHADOW_PROB:
            _cast_shadow(generator, canvas, window, float(radius))
        number = canvas.add(generator, window, parent=0)
        if generator.random() < PART_PROB:
            draw_parts(generator, canvas, outline, transform, window, number)


def _cast_shadow(
    generator: np.random.Generator, canvas: Canvas, window: Window, radius: float
) -> None:
    """Darken what lies beside a shape that is about to be painted."""
    shift = np.round(generator.normal(0, 0.12 * radius, 2)).astype(int)
    sigma = max(0.8, 0.06 * radius)
    # All that the shadow can reach, as the kernel's radius is 4 sigma.
    low = np.array([window.x0, window.y0]) + shift - int(4 * sigma + 2)
    high = low + window.pixels.shape[::-1] + 2 * int(4 * sigma + 2)
    x0, y0 = np.clip(low, 0, canvas.size[::-1])
    x1, y1 = np.clip(high, 0, canvas.size[::-1])
    light = canvas.light[y0:y1, x0:x1]
    strength = np.float32(generator.uniform(0.2, 0.6))
    if light.size:
        move = np.array([[1, 0, window.x0 + shift[0] - x0], [0, 1, window.y0 + shift[1] - y0]])
        moved = cv2.warpAffine(window.pixels.astype(np.float32), move * 1.0, light.shape[::-1])
        light *= 1 - strength * cv2.GaussianBlur(moved, (0, 0), sigma)


def rough(generator: np.random.Generator) -> Polygons:
    """Return an outline with bumps of all sizes, like a bush, a rock or an animal."""
    corners = 160
    angles = np.linspace(0, 2 * np.pi, corners, endpoint=False)
    waves = np.arange(1, 24)
    amplitudes = generator.normal(0, 1, (2, 23)) * generator.uniform(0.15, 0.4) / waves
    bumps = amplitudes[0] @ np.cos(np.outer(waves, angles))
    bumps += amplitudes[1] @ np.sin(np.outer(waves, angles))
    radii = np.exp(np.clip(bumps, -1.2, 0.7))
    return [directions(angles) * radii[:, None]]


def _walk(generator: np.random.Generator, steps: int) -> Float64[np.ndarray, "n"]:
    """Return a random walk between -1 and 1, the line of a horizon."""
    walk = np.cumsum(generator.normal(0, 1, steps))
    walk -= np.linspace(walk[0], walk[-1], steps)
    return walk / max(np.abs(walk).max(), 1e-6)


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
    down, across = np.linspace(-0.5, 0.5, height), np.linspace(-0.5, 0.5, width)
    tilt, bulge = generator.uniform(-0.4, 0.4, 2), generator.uniform(0, 0.8)
    shade = 1 + tilt[0] * across[None] + tilt[1] * down[:, None]
    shade -= bulge * (across[None] ** 2 + down[:, None] ** 2)
    rough_light = generator.uniform(0, 1) ** 2 * (_fractal(generator, size, long_side) - 0.5)
    return (shade + rough_light).astype(np.float32), np.clip(texture, 0, 1)


def _fractal(
    generator: np.random.Generator, size: tuple[int, int], long_side: int
) -> Float32[np.ndarray, "h w"]:
    """Return noise of several octaves, mostly in [0, 1], coarser along one direction."""
    height, width = size
    period = long_side * np.exp(generator.uniform(np.log(0.02), np.log(0.2)))
    stretch = np.exp(generator.normal(0, 0.6))
    persistence, weight = generator.uniform(0.5, 1.0), 1.0
    plane, total = np.zeros(size, np.float32), 0.0
    for _ in range(OCTAVES):
        cells = (
            max(2, min(height, int(height * stretch / period) + 2)),
            max(2, min(width, int(width / (period * stretch)) + 2)),
        )
        coarse = generator.standard_normal(cells, dtype=np.float32)
        detail = cv2.resize(coarse, (width, height), interpolation=cv2.INTER_CUBIC)
        detail *= np.float32(weight)
        plane += detail
        total += weight**2
        weight *= persistence
        period /= 2
    contrast = generator.uniform(0.15, 0.6)
    plane *= np.float32(contrast / np.sqrt(total))
    plane += np.float32(0.5)
    return plane
