"""Synthetic scenes in SA-1B's exact format: overlapping textured objects with nested parts, so that a click is ambiguous.

In: a folder, a count, a seed. Out: tars of `sa_N.jpg` + `sa_N.json`, byte for byte determined by (seed, N).
Every object is drawn as a tree of regions, back to front; a mask is what can be seen of one subtree: an object with its parts, a part, or
two objects that touch. A click inside a part therefore has two or three right answers, as in SA-1B (SAM section 3, "Resolving ambiguity").

Not here: outlines (`prepare.shapes`), colours and patterns (`prepare.textures`), the tar (`data.tar`).
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import cv2
import numpy as np
from jaxtyping import Float32, Float64, Int64, UInt8

from gigamask.data import annotation_json as records
from gigamask.data import tar, worker_pool
from gigamask.data.image import encode_jpeg
from gigamask.errors import GigamaskError
from gigamask.masks.rle import RLEMasks
from gigamask.rng import make_rng
from gigamask.synthetic.shapes import (
    OUTLINES,
    Polygons,
    Window,
    affine,
    bar,
    circle,
    compose,
    rasterise,
    rasterise_within,
)
from gigamask.synthetic.textures import PATTERNS, Colour, Plane, pick_colour, pick_second, weave

LONG_SIDE = (256, 320)
JPEG_QUALITY = 92
# A mask is kept when it can be seen at 128 px: 1 % of the image, mostly one piece, and not a sliver.
MIN_AREA_SHARE = 0.01
# In crowded scenes 0.3 %, which is 7 x 7 px there: most of their masks are fine, below 1 %.
MIN_CROWDED_SHARE = 0.003
MIN_PIECE_SHARE = 0.8
MIN_CORE_SHARE = 0.2
# A part that hides almost all of its object says nothing that the object does not.
MAX_PART_SHARE = 0.85
# Of border that objects share which touch.
LEAST_BORDER_PX = 12
OUTLINE_NAMES = tuple(OUTLINES)
OUTLINE_ODDS = (0.2, 0.18, 0.16, 0.08, 0.2, 0.08, 0.1)
PATTERN_NAMES = ("solid", *PATTERNS)
PATTERN_ODDS = (0.6, 0.14, 0.07, 0.06, 0.13)
PART_NAMES = ("inner", "disc", "band", "half", "spots", "shape")
PART_ODDS = (0.22, 0.18, 0.18, 0.14, 0.1, 0.18)


@dataclass(frozen=True)
class SyntheticScene:
    """A picture, its masks, and for each mask the scores and the prompt that SA-1B's json holds."""

    pixels: UInt8[np.ndarray, "H W 3"]
    masks: RLEMasks
    predicted_iou: Float64[np.ndarray, "n"]
    stability_score: Float64[np.ndarray, "n"]
    points_xy: Int64[np.ndarray, "n 2"]


@dataclass
class Canvas:
    """What has been painted so far: the region that owns each pixel (0 is the background), its brightness and its share of the second colour.

    The lists hold each region's parent, the object it belongs to, and its two colours. `crowded` scenes have many small objects.
    """

    owner: UInt8[np.ndarray, "H W"]
    light: Float32[np.ndarray, "H W"]
    mix: Float32[np.ndarray, "H W"]
    parents: list[int] = field(default_factory=list)
    objects: list[int] = field(default_factory=list)
    colours: list[Colour] = field(default_factory=list)
    seconds: list[Colour] = field(default_factory=list)
    crowded: bool = False

    @property
    def least_area(self) -> float:
        """The pixels that a mask has at least."""
        return (MIN_CROWDED_SHARE if self.crowded else MIN_AREA_SHARE) * self.owner.size

    @property
    def size(self) -> tuple[int, int]:
        return self.owner.shape

    def add(self, generator: np.random.Generator, window: Window, parent: int) -> int:
        """Paints a new region over what is there and returns its number."""
        number = len(self.parents)
        place, inside = window.slices, window.pixels
        covered = np.bincount(self.owner[place][::3, ::3][inside[::3, ::3] > 0], minlength=number)
        beneath = covered @ np.array(self.colours) / max(1, covered.sum())
        kind = str(generator.choice(PATTERN_NAMES, p=PATTERN_ODDS))
        period = max(4.0, np.sqrt(inside.size) * generator.uniform(0.06, 0.3))
        woven = weave(generator, kind, inside.shape, float(period))
        colour = pick_colour(generator, beneath)
        return self.paint(
            window, woven, (colour, pick_second(generator, colour, spread=28.0)), parent
        )

    def paint(
        self,
        window: Window,
        woven: tuple[Plane, Plane],
        colours: tuple[Colour, Colour],
        parent: int = 0,
    ) -> int:
        """Paints a new region, of that brightness, share of the second colour, and those two colours, and returns its number."""
        number, place, inside = len(self.parents), window.slices, window.pixels
        cv2.copyTo(woven[0], inside, self.light[place])
        cv2.copyTo(woven[1], inside, self.mix[place])
        np.copyto(self.owner[place], np.uint8(number), where=inside.view(bool))
        self.parents.append(parent)
        self.objects.append(self.objects[parent] if parent else number)
        self.colours.append(colours[0])
        self.seconds.append(colours[1])
        return number


def write(
    folder: Path | str,
    images: int,
    seed: int = 0,
    shard_images: int = 500,
    first: int = 0,
    long_side: tuple[int, int] = LONG_SIDE,
    progress: worker_pool.Progress | None = None,
    crowded: float = 0.0,
) -> list[Path]:
    """Writes images `first` to `first + images` and returns the shards' paths; image N lies in shard `N // shard_images`.

    `long_side` bounds the images' longer side in pixels; `progress(done, images)` is called after each image. `crowded` is the share of scenes with
    many small objects, whose masks are mostly fine (< 1 % of the image); the other scenes are the same with and without.
    """
    if not 32 <= long_side[0] <= long_side[1] <= 8192:
        raise GigamaskError(
            f"{folder}: long sides of {long_side[0]} to {long_side[1]} px, known are 32 to 8192, the smaller first; give such"
        )
    if not 0 <= crowded <= 1:
        raise GigamaskError(
            f"{folder}: {crowded} of the scenes are to be crowded, a share is from 0 to 1; give such"
        )
    return write_scenes(
        folder,
        images,
        lambda number: compose_scene(seed, number, long_side, crowded),
        shard_images,
        first,
        progress,
    )


def write_scenes(
    folder: Path | str,
    images: int,
    compose: Callable[[int], SyntheticScene],
    shard_images: int = 500,
    first: int = 0,
    progress: worker_pool.Progress | None = None,
) -> list[Path]:
    """Writes the scenes `first` to `first + images`, each composed from its number, and returns the shards' paths; see `write`."""
    if images < 1 or shard_images < 1 or first < 0:
        raise GigamaskError(
            f"{folder}: {images} images from {first} on, {shard_images} a shard: counts start at 1 and numbers at 0; give such"
        )
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    held = {
        folder / f"sa_{shard:06d}.tar": range(
            max(first, shard * shard_images), min(first + images, (shard + 1) * shard_images)
        )
        for shard in range(first // shard_images, (first + images - 1) // shard_images + 1)
    }
    for path, numbers in held.items():
        if path.exists() and not _begins_with(path, compose(numbers[0])):
            raise GigamaskError(
                f"{path}: exists and holds other images than these scenes, so it is not overwritten; give another folder, or remove it"
            )
    for path, numbers in held.items():
        scenes = zip(numbers, map(compose, numbers), strict=True)
        tar.write(
            path, _members(scenes, lambda number: progress and progress(number - first + 1, images))
        )
    return list(held)


def _begins_with(path: Path, scene: SyntheticScene) -> bool:
    """Tells whether a tar's first member is the scene's picture."""
    jpg = _jpeg(scene)
    with open(path, "rb") as file:
        file.seek(tar.BLOCK)
        return file.read(len(jpg)) == jpg


def _members(
    scenes: Iterable[tuple[int, SyntheticScene]], done: Callable[[int], object]
) -> Iterator[tuple[str, bytes]]:
    for number, scene in scenes:
        yield f"sa_{number}.jpg", _jpeg(scene)
        yield f"sa_{number}.json", records.encode(record(scene, number))
        done(number)


def _jpeg(scene: SyntheticScene) -> bytes:
    return encode_jpeg(scene.pixels, JPEG_QUALITY)


def record(scene: SyntheticScene, number: int) -> dict[str, Any]:
    """Returns the scene's json as SA-1B writes it."""
    ids = range(number * 1000, number * 1000 + len(scene.masks))
    return records.image_record(
        number, scene.masks, ids, scene.points_xy, scene.predicted_iou, scene.stability_score
    )


def compose_scene(
    seed: int, number: int, long_side: tuple[int, int] = LONG_SIDE, crowded: float = 0.0
) -> SyntheticScene:
    """Returns image `number` of the world that `seed` names, of whose scenes a share is crowded."""
    generator = make_rng(seed, "scene", number)
    long = int(generator.integers(long_side[0], long_side[1] + 1))
    short = max(2, int(long * generator.uniform(0.75, 1.0)))
    size = (short, long) if generator.random() < 0.7 else (long, short)
    canvas = _background(generator, size)
    canvas.crowded = bool(make_rng(seed, "crowded", number).random() < crowded)
    _draw_objects(generator, canvas)
    masks = _visible_masks(generator, canvas)
    return photograph(generator, canvas, masks[generator.permutation(len(masks))])


def photograph(
    generator: np.random.Generator,
    canvas: Canvas,
    masks: RLEMasks,
    sun: tuple[float, float] = (0.75, 1.2),
) -> SyntheticScene:
    """Returns the scene that the canvas and its masks make; `sun` bounds how bright its parts are lit."""
    points = masks.sample_points(generator.random((len(masks), 1)))[:, 0]
    return SyntheticScene(
        pixels=_expose(generator, canvas, sun),
        masks=masks,
        predicted_iou=generator.uniform(0.88, 1.0, len(masks)),
        stability_score=generator.uniform(0.92, 1.0, len(masks)),
        points_xy=points,
    )


def _background(generator: np.random.Generator, size: tuple[int, int]) -> Canvas:
    kind = str(generator.choice(PATTERN_NAMES, p=(0.4, 0.15, 0.08, 0.1, 0.27)))
    light, mix = weave(generator, kind, size, float(max(size) * generator.uniform(0.03, 0.2)))
    colour = generator.uniform(40, 215, 3)
    second = pick_second(generator, colour, spread=22.0)
    canvas = Canvas(
        np.zeros(size, np.uint8),
        light,
        mix,
        parents=[0],
        objects=[0],
        colours=[colour],
        seconds=[second],
    )
    if generator.random() < 0.3:  # a ground, a wall or a sky
        centre = (size[1] * generator.uniform(0.3, 0.7), size[0] * generator.uniform(0.35, 0.65))
        reach = float(max(size))
        place = affine(
            centre, (reach, reach), generator.normal(0, 0.15) + generator.choice([0, 0, np.pi / 2])
        )
        window = rasterise([bar(0.0, 3.0)], place, size)
        if window is not None:
            canvas.add(generator, window, parent=0)
    return canvas


def _draw_objects(generator: np.random.Generator, canvas: Canvas) -> None:
    """Draws three to six objects back to front, the larger ones mostly behind; twelve to twenty small ones in a crowded scene."""
    count = int(generator.integers(12, 21) if canvas.crowded else generator.integers(3, 7))
    height, width = canvas.size
    low, high = (0.004, 0.012) if canvas.crowded else (0.05, 0.32)
    shares = np.exp(generator.uniform(np.log(low), np.log(high), count)) * (
        1.0 if canvas.crowded else (5.0 / count) ** 0.4
    )
    shares = shares[np.argsort(-shares * np.exp(generator.normal(0, 0.4, count)))]
    centres: list[np.ndarray] = []
    for share in shares:
        kind = str(generator.choice(OUTLINE_NAMES, p=OUTLINE_ODDS))
        ratio = (
            generator.uniform(0.75, 1.0)
            if kind in ("star", "ring", "capsule")
            else generator.uniform(0.45, 1.0)
        )
        radius = np.sqrt(share * height * width / (np.pi * ratio))
        # The loneliest of three places, so that most of an object can be seen but objects still overlap.
        places = generator.uniform(0.08, 0.92, (3, 2)) * (width, height)
        lonely = [
            min((float(np.linalg.norm(place - other)) for other in centres), default=0.0)
            for place in places
        ]
        centres.append(places[int(np.argmax(lonely))])
        place = affine(
            tuple(centres[-1]), (radius, radius * ratio), generator.uniform(0, 2 * np.pi)
        )
        outline = OUTLINES[kind](generator)
        window = rasterise(outline, place, canvas.size)
        if window is None:
            continue
        number = canvas.add(generator, window, parent=0)
        if generator.random() < 0.45:
            _draw_parts(generator, canvas, outline, place, window, number)


def _draw_parts(
    generator: np.random.Generator,
    canvas: Canvas,
    outline: Polygons,
    place: Float64[np.ndarray, "2 3"],
    window: Window,
    parent: int,
    depth: int = 0,
) -> None:
    """Draws one kind of part inside a region, and parts of that part once more."""
    kind = (
        str(generator.choice(PART_NAMES, p=PART_ODDS))
        if len(outline) == 1
        else str(generator.choice(["band", "half"]))
    )
    for shape, inner in _part_shapes(generator, kind, outline):
        inner_place = compose(place, inner)
        part = rasterise_within(shape, inner_place, window)
        if int(part.pixels.sum()) < canvas.least_area:
            continue
        number = canvas.add(generator, part, parent)
        if depth < 2 and kind in ("inner", "disc", "shape") and generator.random() < 0.4:
            _draw_parts(generator, canvas, shape, inner_place, part, number, depth + 1)


def _part_shapes(
    generator: np.random.Generator, kind: str, outline: Polygons
) -> list[tuple[Polygons, Float64[np.ndarray, "2 3"]]]:
    """Returns outlines, each with the map from its own frame into its parent's."""
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
    other = str(generator.choice([name for name in OUTLINE_NAMES if name != "ring"]))
    scale = generator.uniform(0.45, 0.62)
    return [(OUTLINES[other](generator), affine(shift, (scale, scale), turn))]


def _visible_masks(generator: np.random.Generator, canvas: Canvas) -> RLEMasks:
    """Returns what can be seen of each object, each part, and sometimes of two objects that touch, where it is worth a mask."""
    regions = len(canvas.parents)
    within = np.eye(regions, dtype=bool)
    for number in range(regions - 1, 0, -1):
        within[canvas.parents[number]] |= within[number]
    seen = np.bincount(canvas.owner.ravel(), minlength=regions)
    areas = within @ seen
    parents = np.array(canvas.parents)
    distinct = (parents == 0) | (areas < MAX_PART_SHARE * areas[parents])
    rows = [within[number] for number in range(1, regions) if distinct[number]]
    pairs = touching(canvas)
    if len(pairs) and generator.random() < 0.6:
        one, other = pairs[int(generator.integers(len(pairs)))]
        if min(areas[one], areas[other]) > 0.1 * max(areas[one], areas[other]):
            rows.append(within[one] | within[other])
    rows = [row for row in rows if row @ seen >= canvas.least_area]
    tables = np.zeros((len(rows), 256), np.uint8)
    tables[:, :regions] = np.array(rows).reshape(len(rows), regions)
    pictures = [cv2.LUT(canvas.owner, table) for table in tables]
    kept = [picture.view(bool) for picture in pictures if _worth_a_mask(picture)]
    return RLEMasks.from_dense(np.array(kept, dtype=bool).reshape(len(kept), *canvas.size))


def touching(canvas: Canvas) -> list[tuple[int, int]]:
    """Returns the pairs of objects that share some pixels of border."""
    objects = np.array(canvas.objects)[canvas.owner]
    count = len(canvas.objects)
    border = np.concatenate(
        [_codes(objects[:, 1:], objects[:, :-1], count), _codes(objects[1:], objects[:-1], count)]
    )
    lengths = np.bincount(border, minlength=count * count).reshape(count, count)
    lengths += lengths.T
    one, other = np.nonzero(np.triu(lengths, 1) >= LEAST_BORDER_PX)
    return [(int(a), int(b)) for a, b in zip(one, other, strict=True) if a > 0]


def _codes(
    here: Int64[np.ndarray, "h w"], there: Int64[np.ndarray, "h w"], count: int
) -> Int64[np.ndarray, "k"]:
    differ = here != there
    return here[differ] * count + there[differ]


def _worth_a_mask(pixels: UInt8[np.ndarray, "H W"]) -> bool:
    """Says whether a mask is mostly one piece and thick enough to be seen."""
    # A square of one fiftieth of the image must fit, and fit often: at 128 px that is three cells of the mask grid.
    side = max(3, max(pixels.shape) // 50)
    x, y, width, height = cv2.boundingRect(pixels)
    pixels = pixels[y : y + height, x : x + width]
    area = int(pixels.sum())
    _, _, stats, _ = cv2.connectedComponentsWithStats(pixels, connectivity=4)
    if stats[1:, cv2.CC_STAT_AREA].max() < MIN_PIECE_SHARE * area:
        return False
    core = cv2.erode(
        pixels, np.ones((side, side), np.uint8), borderType=cv2.BORDER_CONSTANT, borderValue=0
    )
    return int(core.sum()) > MIN_CORE_SHARE * area


def _expose(
    generator: np.random.Generator, canvas: Canvas, sun: tuple[float, float]
) -> UInt8[np.ndarray, "H W 3"]:
    """Returns the picture a camera would take: slightly blurred edges, uneven light, sensor noise."""
    height, width = canvas.size
    blur = generator.uniform(0.4, 0.9)
    lit = generator.uniform(*sun, (3, 3)).astype(np.float32)
    light = canvas.light * cv2.resize(lit, (width, height), interpolation=cv2.INTER_LINEAR)
    noise = generator.standard_normal((height, width), dtype=np.float32) * np.float32(
        generator.uniform(1, 6)
    )
    colours = np.zeros((256, 3), np.float32)
    colours[: len(canvas.colours)] = canvas.colours
    steps = np.zeros((256, 3), np.float32)
    steps[: len(canvas.seconds)] = np.array(canvas.seconds) - np.array(canvas.colours)
    channels = []
    for channel in range(3):
        plane = cv2.LUT(canvas.owner, colours[:, channel].copy()) + canvas.mix * cv2.LUT(
            canvas.owner, steps[:, channel].copy()
        )
        plane = cv2.GaussianBlur(plane * light, (3, 3), blur)
        channels.append(cv2.add(plane, noise, dtype=cv2.CV_8U))
    return cv2.merge(channels)
