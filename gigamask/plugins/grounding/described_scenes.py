"""Synthetic scenes with text queries; objects have a named color, pattern, shape and maybe a size.

`queries.jsonl` is written next to the tars; its target masks are known from the painting. Both
depend only on (seed, number). Objects overlap little; some scenes also have a mask of two touching
objects, which is not the target of any query.
"""

from collections.abc import Callable
from math import dist
from pathlib import Path
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Int64
from numpy.random import Generator

from gigamask.data import worker_pool
from gigamask.masks.rle import RLEMasks
from gigamask.plugins.grounding import queries
from gigamask.plugins.grounding.descriptions import WORDS, Appearance, SceneObject
from gigamask.plugins.grounding.queries import Query
from gigamask.plugins.grounding.text_queries import TextQuery, make_queries
from gigamask.rng import make_rng
from gigamask.synthetic.scenes import (
    LONG_SIDE,
    Canvas,
    SyntheticScene,
    draw_size,
    photograph,
    seeded,
    touching,
    write_scenes,
)
from gigamask.synthetic.shapes import OUTLINES, Polygons, Window, affine, directions, rasterize
from gigamask.synthetic.textures import Color, make_pattern, pick_second

QUERIES = "queries.jsonl"

COLORS = {
    "red": (205, 35, 35),
    "green": (45, 150, 55),
    "blue": (40, 75, 205),
    "yellow": (245, 220, 50),
    "orange": (240, 130, 25),
    "purple": (125, 50, 165),
    "pink": (248, 150, 190),
    "brown": (110, 65, 35),
    "white": (245, 245, 243),
    "black": (22, 22, 25),
    "grey": (130, 130, 133),
}
GROUNDS = (
    (222, 208, 180),
    (120, 160, 155),
    (95, 115, 140),
    (170, 185, 150),
    (165, 145, 165),
    (55, 62, 78),
    (200, 172, 130),
    (150, 190, 205),
)
"""Pale and dull background colors; no object has a color similar to its background."""
MIN_COLOR_DISTANCE = 80
"""Smallest distance of an object's color from the background's, in levels."""
JITTER = 8
SECONDS = {
    "yellow": 0.55,
    "pink": 0.55,
    "white": 0.62,
    "grey": 0.5,
    "red": 0.45,
    "green": 0.45,
    "purple": 0.45,
}
"""Second color of a pattern, as a share of the color's brightness."""
LIGHTER = {"blue": 0.5, "orange": 0.6, "brown": 0.45, "black": 0.45}
"""Second color of the other colors' patterns, as a share of the way to white."""
RADII = {"small": (0.062, 0.072), None: (0.09, 0.098), "large": (0.126, 0.146)}
"""Ranges of radii relative to the square root of the image's pixels."""
SIZE_ODDS = (0.45, 0.2, 0.35)
RELATIVE_RADII = {
    "disc": 1.0,
    "box": 1.05,
    "star": 1.2,
    "ring": 1.1,
    "triangle": 1.25,
    "cross": 1.12,
}
"""Radius relative to that of a disc that looks equally large."""
PATTERNS = {"plain": "solid", "striped": "stripes", "dotted": "dots", "checked": "checks"}
PERIODS = {"plain": 1.0, "striped": 0.5, "dotted": 0.42, "checked": 0.32}
"""Period of a pattern relative to the radius."""
PATTERN_ODDS = (0.4, 0.25, 0.2, 0.15)
OBJECT_COUNTS = (8, 14)
MIN_VISIBLE_SHARE = 0.85
POSITIONS_TRIED = 60
SUN = (0.93, 1.05)
PAIR_SHARE = 1 / 3
"""Share of the scenes with touching objects that have a mask of two of them."""


def _star(generator: Generator) -> Polygons:
    angles = np.arange(10) * (np.pi / 5) - np.pi / 2
    return [directions(angles) * np.where(np.arange(10) % 2 == 0, 1.0, 0.45)[:, None]]


def _triangle(generator: Generator) -> Polygons:
    angles = np.arange(3) * (2 * np.pi / 3) - np.pi / 2
    return [directions(angles)]


def _cross(generator: Generator) -> Polygons:
    inner, outer = 0.32, 0.95
    quarter = np.array([[inner, inner], [inner, outer], [-inner, outer]])
    turns = [
        np.array([[np.cos(turn), -np.sin(turn)], [np.sin(turn), np.cos(turn)]]).round()
        for turn in np.arange(4) * np.pi / 2
    ]
    return [np.concatenate([quarter @ turn.T for turn in turns])]


def _box(generator: Generator) -> Polygons:
    return [np.array([[-0.82, -0.82], [0.82, -0.82], [0.82, 0.82], [-0.82, 0.82]])]


SHAPES: dict[str, Callable[[Generator], Polygons]] = {
    "disc": OUTLINES["ellipse"],
    "box": _box,
    "star": _star,
    "ring": OUTLINES["ring"],
    "triangle": _triangle,
    "cross": _cross,
}


class DescribedScene(NamedTuple):
    """A scene with its objects, the number of each object's mask, and the queries."""

    scene: SyntheticScene
    objects: list[SceneObject]
    masks: Int64[np.ndarray, "objects"]
    queries: list[TextQuery]


class Placed(NamedTuple):
    """A painted object: appearance, center, radius and number of pixels."""

    appearance: Appearance
    center_xy: tuple[float, float]
    radius: float
    pixels: int


def write(
    folder: Path | str,
    images: int,
    seed: int = 0,
    shard_images: int = 500,
    first: int = 0,
    progress: worker_pool.Progress | None = None,
    long_side: tuple[int, int] = LONG_SIDE,
) -> tuple[list[Path], list[Query]]:
    """Write `images` images, numbered from `first` on, with their queries.

    Queries of other tars in the folder's `queries.jsonl` are kept.

    Args:
        folder: The folder for the shards and `queries.jsonl`.
        images: Number of images.
        seed: Random seed of the scenes.
        shard_images: Images per shard; image N is in shard `N // shard_images`.
        first: Number of the first image.
        progress: Called as `progress(done, images)` after each image.
        long_side: Range of the images' longer side in pixels.

    Returns:
        The paths of the shards, and the queries.

    Raises:
        GigamaskError: A number is out of range, or a shard exists with other images.
    """
    found: dict[int, list[Query]] = {}  # a scene may be composed twice, to compare it with a tar

    def compose(seed: int, number: int, long_side: tuple[int, int]) -> SyntheticScene:
        described = compose_scene(seed, number, long_side)
        tar, image = f"sa_{number // shard_images:06d}.tar", f"sa_{number}.jpg"
        found[number] = [
            Query(tar, image, text, tuple(sorted(described.masks[list(targets)].tolist())), kind)
            for text, targets, kind in described.queries
        ]
        return described.scene

    paths = write_scenes(
        folder, images, seeded(compose, seed, long_side), shard_images, first, progress
    )
    new = [query for number in sorted(found) for query in found[number]]
    path, tars = Path(folder) / QUERIES, {path.name for path in paths}
    others = (
        [query for query in queries.read(path) if query.tar not in tars] if path.exists() else []
    )
    queries.write(path, sorted([*others, *new], key=lambda query: query.tar or ""))
    return paths, new


def compose_scene(seed: int, number: int, long_side: tuple[int, int] = LONG_SIDE) -> DescribedScene:
    """Draw a scene with queries.

    Args:
        seed: Random seed of the scenes.
        number: Number of the scene.
        long_side: Range of the longer side in pixels.
    """
    generator = make_rng(seed, "describable scene", number)
    size = draw_size(generator, long_side)
    ground = np.array(
        GROUNDS[int(generator.integers(len(GROUNDS)))], np.float64
    ) + generator.uniform(-JITTER, JITTER, 3)
    canvas = _ground(generator, size, ground)
    appearances = [placed.appearance for placed in _draw_objects(generator, canvas, ground)]
    seen = np.array([canvas.owner == region for region in range(1, len(appearances) + 1)])
    pairs = touching(canvas)
    if pairs and generator.random() < PAIR_SHARE:
        one, other = pairs[int(generator.integers(len(pairs)))]
        seen = np.concatenate([seen, (seen[one - 1] | seen[other - 1])[None]])
    order = generator.permutation(len(seen))
    scene = photograph(generator, canvas, RLEMasks.from_dense(seen[order]), SUN)
    numbers = np.argsort(order)[: len(appearances)]
    boxes = scene.masks.boxes()[numbers]
    objects = [
        _scene_object(appearance, pixels, box)
        for appearance, pixels, box in zip(
            appearances, seen[: len(appearances)], boxes.tolist(), strict=True
        )
    ]
    return DescribedScene(
        scene, objects, numbers, make_queries(make_rng(seed, "questions", number), objects)
    )


def _scene_object(
    appearance: Appearance, seen: Bool[np.ndarray, "H W"], box: list[int]
) -> SceneObject:
    x0, y0, x1, y1 = box
    ys, xs = np.nonzero(seen[y0 : y1 + 1, x0 : x1 + 1])
    return SceneObject(
        appearance,
        (float(x0), float(y0), float(x1), float(y1)),
        (float(xs.mean()) + x0, float(ys.mean()) + y0),
        float(len(xs)),
    )


def _ground(generator: Generator, size: tuple[int, int], color: Color) -> Canvas:
    kind = str(generator.choice(["solid", "cloud"]))
    light, mix = make_pattern(
        generator, kind, size, float(max(size) * generator.uniform(0.05, 0.2))
    )
    second = pick_second(generator, color, spread=14.0)
    return Canvas(
        np.zeros(size, np.uint8),
        _soften(light),
        mix,
        colors=[color],
        seconds=[second],
    )


def _soften(light: np.ndarray) -> np.ndarray:
    """Reduce the brightness gradient to a third: with all of it, white could look gray."""
    return 1 + (light - 1) / np.float32(3)


def _draw_objects(generator: Generator, canvas: Canvas, ground: Color) -> list[Placed]:
    """Paint 8 to 14 objects, as far as they fit, of a few colors and shapes, large ones first."""
    palette = [
        name
        for name, color in COLORS.items()
        if np.linalg.norm(np.array(color) - ground) > MIN_COLOR_DISTANCE
    ]
    colors = generator.choice(palette, int(generator.integers(4, 7)), replace=False)
    shapes = generator.choice(WORDS.shape, int(generator.integers(3, 6)), replace=False)
    count = int(generator.integers(OBJECT_COUNTS[0], OBJECT_COUNTS[1] + 1))
    sizes = generator.choice(3, count, p=SIZE_ODDS)
    placed: list[Placed] = []
    for size in sorted(sizes.tolist(), reverse=True):
        pattern = str(generator.choice(WORDS.pattern, p=PATTERN_ODDS))
        appearance = Appearance(
            list(RADII)[size],
            str(generator.choice(colors)),
            pattern,
            str(generator.choice(shapes)),
        )
        painted = _paint_object(generator, canvas, appearance, placed)
        if painted is not None:
            placed.append(painted)
    return placed


def _paint_object(
    generator: Generator, canvas: Canvas, appearance: Appearance, placed: list[Placed]
) -> Placed | None:
    """Paint an object where it hides little of others; None if no such position is found."""
    height, width = canvas.size
    unit = np.sqrt(height * width)
    disc_radius = float(unit * generator.uniform(*RADII[appearance.size]))
    radius = disc_radius * RELATIVE_RADII[appearance.shape or ""]
    outline, angle = SHAPES[appearance.shape or ""](generator), float(generator.uniform(-0.3, 0.3))
    seen = np.bincount(canvas.owner.ravel(), minlength=len(placed) + 1)
    for _ in range(POSITIONS_TRIED):
        center = tuple(
            generator.uniform(radius + 2, np.array([width, height]) - radius - 2).tolist()
        )
        window = (
            rasterize(outline, affine(center, (radius, radius), angle), canvas.size)
            if _free(appearance, center, radius, placed)
            else None
        )
        if window is None:
            continue
        hidden = np.bincount(
            canvas.owner[window.slices][window.pixels > 0], minlength=len(placed) + 1
        )
        if all(
            seen[number] - hidden[number] >= MIN_VISIBLE_SHARE * other.pixels
            for number, other in enumerate(placed, 1)
        ):
            _paint(generator, canvas, appearance, window, disc_radius)
            return Placed(appearance, center, radius, int(window.pixels.sum()))
    return None


def _free(
    appearance: Appearance, center_xy: tuple[float, ...], radius: float, placed: list[Placed]
) -> bool:
    """Return whether an object is far enough from others: not touching those of its color."""
    for other in placed:
        if dist(center_xy, other.center_xy) < (radius + other.radius) * (
            1.05 if other.appearance.color == appearance.color else 0.8
        ):
            return False
    return True


def _paint(
    generator: Generator,
    canvas: Canvas,
    appearance: Appearance,
    window: Window,
    disc_radius: float,
) -> None:
    name, pattern = appearance.color or "", appearance.pattern or ""
    color = np.clip(np.array(COLORS[name]) + generator.uniform(-JITTER, JITTER, 3), 0, 255)
    second = color * SECONDS[name] if name in SECONDS else color + (255 - color) * LIGHTER[name]
    light, mix = make_pattern(
        generator, PATTERNS[pattern], window.pixels.shape, max(4.0, PERIODS[pattern] * disc_radius)
    )
    canvas.paint(window, (_soften(light), mix), (color, second))
