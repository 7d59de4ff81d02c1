"""Synthetic scenes that mix what makes photographs hard, at all sizes.

On a ground with land lie things of a body with limbs and parts, shaded, with cast shadows; thin
structures (branches, fences, poles, arcs and rings); and rows and piles of small things. Writing,
patterned patches and shadows have no masks. The bytes of image N depend only on (seed, N).
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import cv2
import numpy as np
from jaxtyping import Float64

from gigamask.plugins.scenes.dead_leaves import (
    LeafCanvas,
    Painted,
    cast_shadow,
    draw_ground,
    draw_land,
    fractal_pattern,
    pick_colors,
    random_outline,
)
from gigamask.rng import make_rng
from gigamask.synthetic.scenes import (
    LONG_SIDE,
    SyntheticScene,
    back_to_front,
    draw_parts,
    photograph,
    visible_masks,
)
from gigamask.synthetic.shapes import (
    Points,
    Polygons,
    Window,
    affine,
    directions,
    placed,
    rasterize,
    rasterize_within,
)
from gigamask.synthetic.textures import PATTERNS, make_pattern

DRAWN = (6, 40)
"""Range of the number of things, thin structures and groups of a scene."""
RADIUS_SHARE = (0.012, 0.5)
"""Range of their radius, as a fraction of the long side."""
MAX_PER_OCTAVE = 3
"""Most masks between an area and twice of it, so that small ones are not most of all."""
MAX_REGIONS = 190
LETTERS = [*"ABCDEFGHKLMNPRSTUXYZabcdeghknoprsu0123456789.:-"]


@dataclass(kw_only=True)
class ClutterCanvas(LeafCanvas):
    """A canvas whose regions look round under one sun, and whose masks may be small and thin.

    Attributes:
        generator: Random numbers.
        sun: Direction from which the light comes (x, y), and how strongly.
    """

    generator: np.random.Generator
    sun: Points
    min_shares = (0.0007, 0.0007)
    is_thin = True
    min_visible = 0.25

    def paint(self, window: Window, *given, **named) -> int:
        """Paint a new region that is lit from one side, as if it were round; see `Canvas`."""
        number = super().paint(window, *given, **named)
        inside, light = window.pixels, self.light[window.slices]
        sigma = max(1.0, 0.2 * inside.sum() ** 0.5)
        soft = inside.astype(np.float32)
        soft = cv2.GaussianBlur(soft, (0, 0), sigma, borderType=cv2.BORDER_CONSTANT)
        x, y = self.sun * (-0.08 * sigma)
        lit = 1 + cv2.Sobel(soft, -1, 1, 0, scale=x) + cv2.Sobel(soft, -1, 0, 1, scale=y)
        cv2.copyTo(light * lit, inside, light)
        return number

    def draw_thing(self, center: Points, radius: float) -> None:
        """Draw the shadow of a shape, mostly the shape, and often limbs, parts and marks.

        Args:
            center: Its center.
            radius: Its radius in pixels.
        """
        generator = self.generator
        outline = random_outline(generator)
        angle = generator.choice([generator.normal(0, 0.15), generator.uniform(0, 7)])
        transform = affine(center, (radius, radius * generator.uniform(0.35, 1.0)), angle)
        window = rasterize(outline, transform, self.size)
        if window is None:
            return
        self.cast(window, radius)
        if generator.random() < 0.08:
            return  # what casts it is outside of the picture
        body = self.add(generator, window, 0)
        if generator.random() < 0.4:  # legs, a head or a handle
            length, steps = generator.uniform(0.2, 0.7), np.arange(generator.integers(1, 5))
            angles = generator.uniform(0, 7) + generator.uniform(0.4, 2.2) * steps
            places = directions(angles) * (0.85 + 0.7 * length) @ transform[:, :2].T
            self.draw_alike(center + places, length * radius, np.arctan2(*places.T[::-1]), body)
        if generator.random() < 0.4:
            draw_parts(generator, self, outline, transform, window, body)
        for _ in range(generator.choice([0, 0, 1, 3])):
            self.mark(window, body)

    def draw_group(self, center: Points, radius: float) -> None:
        """Draw rows or a pile of small things.

        Args:
            center: The center of the first.
            radius: Their radius in pixels, if they are small.
        """
        generator, count = self.generator, self.generator.integers(4, 22)
        radius = min(radius, 0.08 * max(self.size))
        rows = np.divmod(np.arange(count), generator.integers(1, count + 1))
        places = np.stack(rows, 1) @ affine(angle=generator.uniform(0, 2 * np.pi))[:, :2]
        mess = generator.choice([0.1, 1.5])
        places = places * generator.uniform(1.6, 3) + generator.normal(0, mess, (count, 2))
        angles = generator.uniform(0, 2 * np.pi) + generator.normal(0, mess, count)
        self.draw_alike(center + places * radius, radius, angles)

    def draw_alike(
        self, centers: Points, radius: float, angles: np.ndarray, parent: int = 0
    ) -> None:
        """Draw things of one shape and nearly of one size and color.

        Args:
            centers: Their centers.
            radius: Their radius in pixels.
            angles: How they are turned.
            parent: What they are parts of, and half of the time behind; 0 for objects.
        """
        generator = self.generator
        outline, squeeze = random_outline(generator), generator.uniform(0.35, 1)
        is_behind = parent and generator.random() < 0.5
        colors = pick_colors(generator, self.colors[parent])
        for center, angle in zip(centers, angles, strict=True):
            size = radius * np.exp(generator.normal(0, 0.12))
            window = rasterize(outline, affine(center, (size, size * squeeze), angle), self.size)
            if window is None:
                continue
            if is_behind:
                window.pixels[self.owner[window.slices] == parent] = 0
            else:
                self.cast(window, radius)
            pattern = fractal_pattern(generator, window.pixels.shape, 4 * int(radius) + 8)
            first, second = np.clip(np.add(colors, generator.normal(0, 12)), 0, 255)
            self.paint(window, pattern, (first, second), parent)

    def draw_thin(self, center: Points, radius: float) -> None:
        """Draw a branch, a fence or pole, or an arc or ring.

        Args:
            center: Its center.
            radius: Its radius in pixels.
        """
        generator, uniform = self.generator, self.generator.uniform
        bars = [np.array([[x, -1], [x, 1]]) for x in np.linspace(-1, 1, generator.integers(1, 8))]
        fence = bars + [bar[:, ::-1] for bar in bars[: generator.integers(3)]]
        arc = directions(np.linspace(0, min(uniform(0.5, 12), 2 * np.pi), 40))
        lines = (fence, [arc], _branches(generator))[generator.integers(3)]
        transform = affine(center, (radius, radius * uniform(0.2, 1)), uniform(0, 2 * np.pi))
        thickness = int(max(2, min(max(self.size) * uniform(0.006, 0.03), radius / 6)))
        pixels = np.zeros(self.size, np.uint8)
        for line in lines:
            cv2.polylines(pixels, [placed(line, transform).astype(np.int32)], False, 1, thickness)
        x, y, width, height = cv2.boundingRect(pixels)
        if width:
            window = Window(x, y, pixels[y : y + height, x : x + width].copy())
            self.cast(window, 3 * thickness)
            self.add(generator, window, 0)

    def cast(self, window: Window, radius: float) -> None:
        """Cast the shadow of what is about to be painted away from the sun.

        Args:
            window: Its pixels.
            radius: Its radius or height in pixels.
        """
        uniform = self.generator.uniform
        shift = (self.sun * -radius * uniform(0.05, 0.3)).astype(int)
        cast_shadow(self, window, shift, max(0.7, radius * uniform(0.02, 0.12)), uniform(0, 0.6))

    def mark(self, window: Window, number: int) -> None:
        """Write on a region, or paint a pattern on a patch of it; neither is a region.

        Args:
            window: The pixels of the region.
            number: The region.
        """
        generator, uniform, area = self.generator, self.generator.uniform, window.slices
        inside = (self.owner[area] == number).astype(np.uint8)
        size = window.pixels.shape
        side = min(size) * uniform(0.3, 0.9)
        center = uniform(0.3, 0.7, 2) * size[::-1]
        if generator.random() < 0.5:
            kind, period = generator.choice([*PATTERNS]), max(3.0, side * uniform(0.06, 0.3))
            _, plane = make_pattern(generator, kind, size, period)
            transform = affine(center, side / 2, uniform(0, 7))
            patch = rasterize_within(random_outline(generator), transform, Window(0, 0, inside))
            plane *= patch.pixels
        else:
            plane = np.zeros(size, np.uint8)
            height, font = max(5.0, side * uniform(0.2, 0.6)), int(uniform(0, 8))
            text = "".join(generator.choice(LETTERS, generator.integers(2, 12)))
            start = (center - (side / 2, 0)).astype(int).tolist()
            cv2.putText(plane, text, start, font, height / 25, 1, max(1, round(height / 12)))
            plane = plane * inside
        self.light[area] *= 1 + plane * generator.choice([-0.5, 0.6])
        self.mix[area] += plane * uniform(-1, 1)


def compose_clutter(
    seed: int, number: int, long_side: tuple[int, int] = LONG_SIDE
) -> SyntheticScene:
    """Draw a scene.

    Args:
        seed: Random seed of the scenes.
        number: Number of the scene.
        long_side: Range of the longer side in pixels.
    """
    generator = make_rng(seed, "clutter", number)
    canvas = draw_sunlit_ground(generator, long_side, ClutterCanvas)
    # The ground has a mask as everything that lies on it has.
    canvas.add(generator, Window(0, 0, np.ones(canvas.size, np.uint8)), 0)
    draw_land(generator, canvas)
    for share in draw_radii(generator, DRAWN, RADIUS_SHARE, 0.5):
        center = generator.uniform(-0.03, 1.03, 2) * canvas.size[::-1]
        draw = (*[canvas.draw_thing] * 3, canvas.draw_thin, canvas.draw_group)
        if len(canvas.parents) < MAX_REGIONS:
            draw[generator.integers(5)](center, share * max(canvas.size))
    masks, _ = visible_masks(generator, canvas)
    masks = masks[generator.permutation(len(masks))]
    octaves = np.log2(masks.areas()).astype(int)
    rare = np.tril(octaves[:, None] == octaves).sum(1) <= MAX_PER_OCTAVE
    return photograph(generator, canvas, masks[np.flatnonzero(rare)], (0.6, 1.25))


def draw_sunlit_ground(
    generator: np.random.Generator, long_side: tuple[int, int], kind: Callable[..., Painted]
) -> Painted:
    """Return a canvas of random size with a textured ground, and a random sun.

    Args:
        generator: Random numbers.
        long_side: Range of the longer side in pixels.
        kind: Makes the canvas.
    """
    sun = directions(generator.uniform(0, 2 * np.pi, 1))[0] * generator.uniform(0, 2)
    return draw_ground(generator, long_side, partial(kind, generator=generator, sun=sun))


def draw_radii(
    generator: np.random.Generator,
    counts: tuple[int, int],
    shares: tuple[float, float],
    spread: float,
) -> Float64[np.ndarray, "n"]:
    """Return radii that are uniform in their logarithm, in the order of drawing.

    Args:
        generator: Random numbers.
        counts: Range of their number.
        shares: Range of the radii, as fractions of the long side.
        spread: How much chance has a say in the order.
    """
    count = int(np.exp(generator.uniform(*np.log(counts))))
    radii = np.exp(generator.uniform(*np.log(shares), size=count))
    return back_to_front(generator, radii, spread)


def _branches(generator: np.random.Generator) -> Polygons:
    """Return the lines of a branch that divides."""
    lines, buds = [], [(np.zeros(2), 0.0, 2.0)]
    for start, angle, length in buds:
        bends = angle + np.cumsum(generator.normal(0, 0.2, 5))
        lines.append(np.vstack([start, start + np.cumsum(directions(bends), 0) * length / 5]))
        for point in generator.choice(lines[-1], generator.integers(1, 4) * (length > 0.6)):
            buds.append((point, angle + generator.normal(0, 0.7), 0.6 * length))
    return lines
