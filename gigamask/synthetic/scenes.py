"""Synthetic scenes in SA-1B's format: overlapping textured objects with nested parts.

The bytes of image N depend only on (seed, N). An object is drawn as a tree of regions, back to
front; a mask is the visible part of one subtree: an object with its parts, a part, or two touching
objects. A click inside a part therefore has two or three correct answers, as in SA-1B (SAM section
3, "Resolving ambiguity").
"""

import contextlib
import io
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import cv2
import numpy as np
from jaxtyping import Float64, Int64, UInt8, UInt16
from PIL import Image

from gigamask.data import annotation, tar, worker_pool
from gigamask.data.image import encode_jpeg
from gigamask.data.image_folder import check_for_tars
from gigamask.errors import GigamaskError, check_range
from gigamask.masks.rle import RLEMasks
from gigamask.rng import make_rng
from gigamask.serialization import check_regular
from gigamask.synthetic.shapes import (
    OUTLINES,
    Pixels,
    Polygons,
    Transform,
    Window,
    affine,
    bar,
    compose,
    part_shapes,
    rasterize,
    rasterize_within,
)
from gigamask.synthetic.textures import (
    PATTERNS,
    Color,
    Plane,
    make_pattern,
    pick_color,
    pick_second,
)

LONG_SIDE = (256, 320)
JPEG_QUALITY = 92
# Masks must be visible at 128 px: 1 % of the image, mostly one piece, and not a sliver.
MIN_AREA_SHARE = 0.01
# 0.3 % in crowded scenes, 7 x 7 px at 128 px: most of their masks are fine, below 1 %.
MIN_CROWDED_SHARE = 0.003
MIN_PIECE_SHARE = 0.8
MIN_CORE_SHARE = 0.2
# A part that covers almost all of its object is nearly the same mask.
MAX_PART_SHARE = 0.85
# Shared border of objects that touch.
MIN_BORDER_PX = 12
OUTLINE_NAMES = tuple(OUTLINES)
OUTLINE_ODDS = (0.2, 0.18, 0.16, 0.08, 0.2, 0.08, 0.1)
PATTERN_NAMES = ("solid", *PATTERNS)
PATTERN_ODDS = (0.6, 0.14, 0.07, 0.06, 0.13)
PART_NAMES = ("inner", "disc", "band", "half", "spots", "shape")
PART_ODDS = (0.22, 0.18, 0.18, 0.14, 0.1, 0.18)


@dataclass(frozen=True)
class SyntheticScene:
    """An image and its masks with SA-1B's scores, prompt points and categories.

    A category is the kind of an object's outline; parts and pairs of objects have none.
    """

    pixels: UInt8[np.ndarray, "H W 3"] | UInt16[np.ndarray, "H W"]
    masks: RLEMasks
    predicted_iou: Float64[np.ndarray, "n"]
    stability_score: Float64[np.ndarray, "n"]
    points_xy: Int64[np.ndarray, "n 2"]
    categories: tuple[str, ...] = ()


Composer = Callable[[int], SyntheticScene]
"""Draws the scene of a number."""


@dataclass
class Canvas:
    """A scene being painted.

    Attributes:
        owner: The region of each pixel; 0 is the background.
        light: The brightness of each pixel.
        mix: The share of the region's second color in each pixel.
        parents: The parent of each region.
        objects: The object of each region.
        colors: The first color of each region.
        seconds: The second color of each region.
        crowded: Whether the scene has many small objects.
        kinds: The kind of outline of some regions.
        drawn: The pixels of each region when it was painted.
    """

    owner: Pixels
    light: Plane
    mix: Plane
    parents: list[int] = field(default_factory=lambda: [0])
    objects: list[int] = field(default_factory=lambda: [0])
    colors: list[Color] = field(default_factory=list)
    seconds: list[Color] = field(default_factory=list)
    crowded: bool = False
    kinds: dict[int, str] = field(default_factory=dict)
    drawn: list[int] = field(default_factory=lambda: [0])
    min_shares = (MIN_AREA_SHARE, MIN_CROWDED_SHARE)
    is_thin = False
    """Whether masks may be thin."""
    min_visible = 0.0
    """The smallest share of what was drawn of a mask that must be visible."""

    @property
    def min_area(self) -> float:
        """The smallest area of a mask in pixels."""
        return self.min_shares[self.crowded] * self.owner.size

    @property
    def size(self) -> tuple[int, int]:
        """Height and width in pixels."""
        return self.owner.shape

    def add(self, generator: np.random.Generator, window: Window, parent: int) -> int:
        """Paint a new region with a random pattern and colors.

        Args:
            generator: Random numbers.
            window: The pixels of the region.
            parent: The region that it is a part of; 0 for an object.

        Returns:
            The number of the region.
        """
        number = len(self.parents)
        area, inside = window.slices, window.pixels
        covered = np.bincount(self.owner[area][::3, ::3][inside[::3, ::3] > 0], minlength=number)
        beneath = covered @ np.array(self.colors) / max(1, covered.sum())
        kind = generator.choice(PATTERN_NAMES, p=PATTERN_ODDS)
        period = max(4.0, np.sqrt(inside.size) * generator.uniform(0.06, 0.3))
        pattern = make_pattern(generator, kind, inside.shape, period)
        color = pick_color(generator, beneath)
        second = pick_second(generator, color, spread=28.0)
        return self.paint(window, pattern, (color, second), parent)

    def paint(
        self,
        window: Window,
        pattern: tuple[Plane, Plane],
        colors: tuple[Color, Color],
        parent: int = 0,
    ) -> int:
        """Paint a new region over what exists.

        Args:
            window: The pixels of the region.
            pattern: Brightness and share of the second color of the window's pixels.
            colors: The two colors.
            parent: The region that it is a part of; 0 for an object.

        Returns:
            The number of the region.
        """
        number, area, inside = len(self.parents), window.slices, window.pixels
        cv2.copyTo(pattern[0], inside, self.light[area])
        cv2.copyTo(pattern[1], inside, self.mix[area])
        np.copyto(self.owner[area], np.uint8(number), where=inside.view(bool))
        self.drawn.append(int(inside.sum()))
        self.parents.append(parent)
        self.objects.append(self.objects[parent] if parent else number)
        self.colors.append(colors[0])
        self.seconds.append(colors[1])
        return number


def write(
    folder: Path | str,
    images: int,
    seed: int = 0,
    long_side: tuple[int, int] = LONG_SIDE,
    **numbering: Any,
) -> list[Path]:
    """Write scenes of objects.

    Args:
        folder: The folder for the shards.
        images: Number of scenes.
        seed: Random seed of the scenes.
        long_side: Range of the images' longer side in pixels.
        numbering: `shard_images` and `first` of `write_scenes`.
    """
    return write_scenes(folder, images, seeded(compose_scene, seed, long_side), **numbering)


def seeded(
    compose: Callable[..., SyntheticScene], seed: int, long_side: tuple[int, int] = LONG_SIDE
) -> Composer:
    """Return what draws the scenes of a seed.

    Args:
        compose: Draws a scene, as `compose_scene` does.
        seed: Random seed of the scenes.
        long_side: Range of the images' longer side in pixels.

    Raises:
        GigamaskError: The range is not one of 32 to 8192 pixels.
    """
    if not 32 <= long_side[0] <= long_side[1] <= 8192:
        raise GigamaskError(
            "--long-side must be two numbers of pixels from 32 to 8192, the smaller first "
            f"(got {long_side[0]} {long_side[1]})"
        )
    return partial(compose, seed, long_side=long_side)


def write_scenes(
    folder: Path | str,
    images: int,
    compose: Composer,
    shard_images: int = 500,
    first: int = 0,
    progress: worker_pool.Progress | None = None,
    workers: int = 1,
) -> list[Path]:
    """Write `images` scenes of any kind, numbered from `first` on.

    Args:
        folder: The folder for the shards.
        images: Number of scenes.
        compose: Draws the scene of a number; with more than one worker, it must be picklable.
        shard_images: Scenes per shard; scene N is in shard `N // shard_images`.
        first: Number of the first scene.
        progress: Called as `progress(done, images)` after each scene.
        workers: Number of processes that draw; the shards do not depend on it.

    Returns:
        The paths of the shards.

    Raises:
        GigamaskError: A number is out of range, or a shard exists with other images.
    """
    check_range("--images", images, 1)
    check_range("--shard-images", shard_images, 1)
    check_range("--first", first, 0)
    check_range("--workers", workers, 1)
    folder = Path(folder)
    check_for_tars(folder)
    folder.mkdir(parents=True, exist_ok=True)
    shards = {
        folder / f"sa_{shard:06d}.tar": range(
            max(first, shard * shard_images), min(first + images, (shard + 1) * shard_images)
        )
        for shard in range(first // shard_images, (first + images - 1) // shard_images + 1)
    }
    for path, numbers in shards.items():
        if path.exists() and not _begins_with(path, _sample(compose, numbers[0])[0][1]):
            raise GigamaskError(
                f"{path}: exists with other images, so it is not overwritten; give another folder,"
                " or remove it"
            )
    samples = worker_pool.ordered_map(
        partial(_sample, compose), range(first, first + images), min(workers, images)
    )
    done = itertools.count(1)

    def members(count: int) -> Iterator[tuple[str, bytes]]:
        for sample in itertools.islice(samples, count):
            yield from sample
            if progress is not None:
                progress(next(done), images)

    with contextlib.closing(samples):
        for path, numbers in shards.items():
            tar.write(path, members(len(numbers)))
    return list(shards)


def _begins_with(path: Path, encoded: bytes) -> bool:
    """Return whether a tar's first member has these bytes."""
    check_regular(path)
    with open(path, "rb") as file:
        file.seek(tar.BLOCK)
        return file.read(len(encoded)) == encoded


def _sample(compose: Composer, number: int) -> list[tuple[str, bytes]]:
    """Return the names and bytes of a scene's image, a JPEG or a PNG of 16 bits, and json."""
    scene, name = compose(number), f"sa_{number}"
    if scene.pixels.dtype == np.uint8:
        image = f"{name}.jpg", encode_jpeg(scene.pixels, JPEG_QUALITY)
    else:
        file = io.BytesIO()
        Image.fromarray(scene.pixels).save(file, "png", compress_level=1)
        image = f"{name}.png", file.getvalue()
    return [image, (f"{name}.json", annotation.encode(record(scene, number)))]


def record(scene: SyntheticScene, number: int) -> dict[str, Any]:
    """Return the scene's json in SA-1B's format.

    Args:
        scene: The scene.
        number: Its number, which becomes the `image_id`.
    """
    ids = range(number * 1000, number * 1000 + len(scene.masks))
    content = annotation.image_record(
        number, scene.masks, ids, scene.points_xy, scene.predicted_iou, scene.stability_score
    )
    for entry, category in zip(content["annotations"], scene.categories, strict=False):
        entry |= {"category": category} if category else {}
    return content


def compose_scene(
    seed: int, number: int, long_side: tuple[int, int] = LONG_SIDE, crowded: float = 0.0
) -> SyntheticScene:
    """Draw a scene.

    Args:
        seed: Random seed of the scenes.
        number: Number of the scene.
        long_side: Range of the longer side in pixels.
        crowded: Share of scenes with many small objects, whose masks are mostly fine (< 1 % of the
            image); the other scenes do not depend on it.
    """
    generator = make_rng(seed, "scene", number)
    canvas = _background(generator, draw_size(generator, long_side))
    canvas.crowded = bool(make_rng(seed, "crowded", number).random() < crowded)
    _draw_objects(generator, canvas)
    masks, categories = visible_masks(generator, canvas)
    order = generator.permutation(len(masks))
    scene = photograph(generator, canvas, masks[order])
    return replace(scene, categories=tuple(categories[index] for index in order))


def draw_size(
    generator: np.random.Generator,
    long_side: tuple[int, int],
    min_ratio: float = 0.75,
    landscape_prob: float = 0.7,
) -> tuple[int, int]:
    """Return a random height and width in pixels.

    Args:
        generator: Random numbers.
        long_side: Range of the longer side in pixels.
        min_ratio: Smallest ratio of the shorter side to the longer one.
        landscape_prob: Probability that the width is the longer side.
    """
    long = int(generator.integers(long_side[0], long_side[1] + 1))
    short = max(2, int(long * generator.uniform(min_ratio, 1.0)))
    return (short, long) if generator.random() < landscape_prob else (long, short)


def photograph(
    generator: np.random.Generator,
    canvas: Canvas,
    masks: RLEMasks,
    sun: tuple[float, float] = (0.75, 1.2),
) -> SyntheticScene:
    """Render a canvas with lighting, blur and noise.

    Args:
        generator: Random numbers.
        canvas: The painted scene.
        masks: Its masks.
        sun: Range of the light's brightness.
    """
    points = masks.sample_points(generator.random((len(masks), 1)))[:, 0]
    return SyntheticScene(
        pixels=_expose(generator, canvas, sun),
        masks=masks,
        predicted_iou=generator.uniform(0.88, 1.0, len(masks)),
        stability_score=generator.uniform(0.92, 1.0, len(masks)),
        points_xy=points,
    )


def _background(generator: np.random.Generator, size: tuple[int, int]) -> Canvas:
    kind = generator.choice(PATTERN_NAMES, p=(0.4, 0.15, 0.08, 0.1, 0.27))
    light, mix = make_pattern(generator, kind, size, max(size) * generator.uniform(0.03, 0.2))
    color = generator.uniform(40, 215, 3)
    second = pick_second(generator, color, spread=22.0)
    canvas = Canvas(
        np.zeros(size, np.uint8),
        light,
        mix,
        colors=[color],
        seconds=[second],
    )
    if generator.random() < 0.3:  # a ground, a wall or a sky
        center = (size[1] * generator.uniform(0.3, 0.7), size[0] * generator.uniform(0.35, 0.65))
        transform = affine(
            center,
            float(max(size)),
            generator.normal(0, 0.15) + generator.choice([0, 0, np.pi / 2]),
        )
        window = rasterize([bar(0.0, 3.0)], transform, size)
        if window is not None:
            canvas.add(generator, window, 0)
    return canvas


def _draw_objects(generator: np.random.Generator, canvas: Canvas) -> None:
    """Draw three to six objects, larger ones mostly behind; 12 to 20 small ones when crowded."""
    count = generator.integers(12, 21) if canvas.crowded else generator.integers(3, 7)
    height, width = canvas.size
    low, high = (0.004, 0.012) if canvas.crowded else (0.05, 0.32)
    shares = np.exp(generator.uniform(np.log(low), np.log(high), count))
    if not canvas.crowded:
        shares *= (5.0 / count) ** 0.4
    centers = np.full((1, 2), np.inf)
    for share in back_to_front(generator, shares, 0.4):
        kind = str(generator.choice(OUTLINE_NAMES, p=OUTLINE_ODDS))
        ratio = generator.uniform(0.75 if kind in ("star", "ring", "capsule") else 0.45, 1.0)
        radius = np.sqrt(share * height * width / (np.pi * ratio))
        # The most isolated of three positions: objects stay mostly visible but still overlap.
        positions = generator.uniform(0.08, 0.92, (3, 2)) * (width, height)
        nearest = np.linalg.norm(positions[:, None] - centers, axis=2).min(1)
        center = positions[nearest.argmax()]
        centers = np.append(centers, center[None], 0)
        transform = affine(center, (radius, radius * ratio), generator.uniform(0, 2 * np.pi))
        outline = OUTLINES[kind](generator)
        window = rasterize(outline, transform, canvas.size)
        if window is None:
            continue
        number = canvas.add(generator, window, 0)
        canvas.kinds[number] = kind
        if generator.random() < 0.45:
            draw_parts(generator, canvas, outline, transform, window, number)


def back_to_front(
    generator: np.random.Generator, shares: Float64[np.ndarray, "n"], spread: float
) -> Float64[np.ndarray, "n"]:
    """Return sizes in the order of drawing, larger ones mostly first.

    Args:
        generator: Random numbers.
        shares: The sizes.
        spread: How much chance has a say.
    """
    return shares[np.argsort(-shares * np.exp(generator.normal(0, spread, len(shares))))]


def draw_parts(
    generator: np.random.Generator,
    canvas: Canvas,
    outline: Polygons,
    transform: Transform,
    window: Window,
    parent: int,
    depth: int = 0,
) -> None:
    """Draw one kind of part inside a region, and parts within parts.

    Args:
        generator: Random numbers.
        canvas: The scene.
        outline: Outline of the region.
        transform: Maps the outline to the image.
        window: The pixels of the region.
        parent: The region.
        depth: How many parts the region is inside of.
    """
    kind = (
        generator.choice(PART_NAMES, p=PART_ODDS)
        if len(outline) == 1
        else generator.choice(["band", "half"])
    )
    for shape, inner in part_shapes(generator, kind, outline):
        inner_transform = compose(transform, inner)
        part = rasterize_within(shape, inner_transform, window)
        if int(part.pixels.sum()) < canvas.min_area:
            continue
        number = canvas.add(generator, part, parent)
        if depth < 2 and kind in ("inner", "disc", "shape") and generator.random() < 0.4:
            draw_parts(generator, canvas, shape, inner_transform, part, number, depth + 1)


def visible_masks(
    generator: np.random.Generator, canvas: Canvas
) -> tuple[RLEMasks, tuple[str, ...]]:
    """Return the visible masks of objects, parts, and sometimes of two touching objects.

    The second value is the kind of each mask's outline, "" where it is not known.

    Args:
        generator: Random numbers.
        canvas: The painted scene.
    """
    regions = len(canvas.parents)
    within = np.eye(regions, dtype=bool)
    for number in range(regions - 1, 0, -1):
        within[canvas.parents[number]] |= within[number]
    seen = np.bincount(canvas.owner.ravel(), minlength=regions)
    areas = within @ seen
    parents = np.array(canvas.parents)
    distinct = (parents == 0) | (areas < MAX_PART_SHARE * areas[parents])
    rows = [
        (within[number], canvas.kinds.get(number, ""))
        for number in range(1, regions)
        if distinct[number]
    ]
    pairs = touching(canvas)
    if pairs and generator.random() < 0.6:
        one, other = pairs[generator.integers(len(pairs))]
        if min(areas[one], areas[other]) > 0.1 * max(areas[one], areas[other]):
            rows.append((within[one] | within[other], ""))
    drawn = canvas.min_visible * np.array(canvas.drawn)
    visible = []
    for row, kind in rows:
        if row @ seen >= max(canvas.min_area, row @ drawn):
            mask = cv2.LUT(canvas.owner, np.pad(row, (0, 256 - regions)).astype(np.uint8))
            if _is_visible(mask, canvas.is_thin):
                visible.append((mask.view(bool), kind))
    dense = np.array([mask for mask, _ in visible], dtype=bool)
    kinds = tuple(kind for _, kind in visible)
    return RLEMasks.from_dense(dense.reshape(len(visible), *canvas.size)), kinds


def touching(canvas: Canvas) -> list[list[int]]:
    """Return the pairs of objects with a shared border of at least `MIN_BORDER_PX`."""
    objects = np.array(canvas.objects)[canvas.owner]
    count = len(canvas.objects)
    border = [
        (objects[:, 1:] * count + objects[:, :-1]).ravel(),
        (objects[1:] * count + objects[:-1]).ravel(),
    ]
    lengths = np.bincount(np.concatenate(border), minlength=count * count).reshape(count, count)
    lengths += lengths.T
    pairs = np.argwhere(np.triu(lengths, 1) >= MIN_BORDER_PX)
    return pairs[pairs[:, 0] > 0].tolist()


def _is_visible(pixels: Pixels, is_thin: bool) -> bool:
    """Return whether a mask is mostly one piece, and a square fits into it in many places."""
    # At 128 px, three cells of the mask grid.
    side = 2 if is_thin else max(3, max(pixels.shape) // 50)
    x, y, width, height = cv2.boundingRect(pixels)
    pixels = pixels[y : y + height, x : x + width]
    area, kernel = pixels.sum(), np.ones((side, side), np.uint8)
    _, _, stats, _ = cv2.connectedComponentsWithStats(pixels, connectivity=4)
    core = cv2.erode(pixels, kernel, borderType=cv2.BORDER_CONSTANT, borderValue=0)
    is_one_piece = stats[1:, cv2.CC_STAT_AREA].max() >= MIN_PIECE_SHARE * area
    return bool(is_one_piece and core.sum() > MIN_CORE_SHARE * area)


def _expose(
    generator: np.random.Generator, canvas: Canvas, sun: tuple[float, float]
) -> UInt8[np.ndarray, "H W 3"]:
    """Render with slightly blurred edges, uneven light and sensor noise."""
    height, width = canvas.size
    blur = generator.uniform(0.4, 0.9)
    lit = generator.uniform(*sun, (3, 3)).astype(np.float32)
    light = canvas.light * cv2.resize(lit, (width, height), interpolation=cv2.INTER_LINEAR)
    noise = generator.standard_normal((height, width), dtype=np.float32) * generator.uniform(1, 6)
    tables = np.zeros((2, 256, 3), np.float32)
    tables[:, : len(canvas.colors)] = canvas.colors, np.subtract(canvas.seconds, canvas.colors)
    channels = []
    for channel in range(3):
        first, step = (cv2.LUT(canvas.owner, table[:, channel].copy()) for table in tables)
        plane = first + canvas.mix * step
        plane = cv2.GaussianBlur(plane * light, (3, 3), blur)
        channels.append(cv2.add(plane, noise, dtype=cv2.CV_8U))
    return cv2.merge(channels)
