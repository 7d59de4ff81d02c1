"""Photographs with things of other photographs pasted over them, and the masks of what is visible.

Copy-paste (Ghiasi et al. 2021, https://arxiv.org/abs/2012.07177), for masks of any kind. Image N
depends only on the photographs and (seed, N).
"""

from functools import cache
from typing import NamedTuple

import cv2
import numpy as np
from jaxtyping import Bool, Float64, Int64, UInt8

from gigamask.data import annotation, image
from gigamask.data.index import Index
from gigamask.data.shards import ShardReader
from gigamask.errors import GigamaskError
from gigamask.masks.rle import RLEMasks
from gigamask.records import AnnotatedImage
from gigamask.rng import make_rng
from gigamask.synthetic.scenes import LONG_SIDE, SyntheticScene

THINGS = (3, 12)
"""Range of the number of things that are pasted."""
SIDE_SHARE = (0.03, 0.45)
"""Range of the longer side of a thing, as a fraction of the image's."""
MAX_SCALE = 2.0
"""How much a thing is enlarged at most."""
BRIGHTNESS, OFFSET = (0.75, 1.25), 15
"""Range of the factor of a thing's brightness, and the most levels that are added to it."""
SOFT_PX = 0.7
"""Standard deviation of the blur of a thing's border in pixels."""
MIN_AREA, MIN_VISIBLE = 20, 0.4
"""Fewest pixels of a mask, and the smallest share of it that must be visible."""
MIN_INSIDE = 0.9
"""Smallest share of a mask that lies in a thing which it is a part of."""
TRIES = 50
"""Photographs that are drawn until one has masks."""


class _Cutout(NamedTuple):
    """A part of a photograph, its masks, their two scores, and their categories."""

    pixels: UInt8[np.ndarray, "h w 3"]
    masks: Bool[np.ndarray, "n h w"]
    scores: Float64[np.ndarray, "2 n"]
    categories: np.ndarray


def compose_pasted(
    seed: int, number: int, long_side: tuple[int, int] = LONG_SIDE, *, data: str
) -> SyntheticScene:
    """Paste things of photographs over another one.

    Args:
        seed: Random seed of the scenes.
        number: Number of the scene.
        long_side: Range of the longer side in pixels; a smaller photograph is not enlarged.
        data: Folder of the index of the photographs.

    Raises:
        GigamaskError: The photographs have no masks.
        CorruptSampleError: A photograph or its json is damaged.
    """
    generator = make_rng(seed, "pasted", number)
    ground = _draw_photograph(generator, data)
    side = generator.integers(*long_side, endpoint=True)
    height, width = ground.annotation.size
    scale = min(1.0, side / max(height, width))
    parts = [_cut(ground, slice(None), (0, 0, width, height), scale)]
    pixels = parts[0].pixels
    size = pixels.shape[:2]
    visible = [parts[0].masks.copy()]
    for _ in range(generator.integers(*THINGS, endpoint=True)):
        thing = _draw_thing(generator, _draw_photograph(generator, data), max(size))
        height, width = thing.pixels.shape[:2]
        y, x = generator.integers(0, size) - (height // 2, width // 2)
        there = slice(max(0, y), y + height), slice(max(0, x), x + width)
        here = slice(max(0, -y), size[0] - y), slice(max(0, -x), size[1] - x)
        mask = thing.masks[0][here]
        soft = cv2.GaussianBlur(mask.astype(np.float32), (0, 0), SOFT_PX)[..., None]
        pixels[there] = np.rint(pixels[there] * (1 - soft) + thing.pixels[here] * soft)
        for hidden in visible:
            hidden[:, *there] &= ~mask
        visible.append(np.zeros((len(thing.masks), *size), bool))
        visible[-1][:, *there] = thing.masks[:, *here]
        parts.append(thing)
    seen = np.concatenate(visible)
    areas, drawn = seen.sum((1, 2)), np.concatenate([part.masks.sum((1, 2)) for part in parts])
    kept = np.flatnonzero((areas >= MIN_AREA) & (areas >= MIN_VISIBLE * drawn))
    kept = generator.permutation(kept)
    masks = RLEMasks.from_dense(seen[kept])
    points = masks.sample_points(generator.random((len(kept), 1)))[:, 0]
    iou, stability = np.concatenate([part.scores for part in parts], 1)[:, kept]
    categories = np.concatenate([part.categories for part in parts])[kept]
    return SyntheticScene(pixels, masks, iou, stability, points, tuple(categories.tolist()))


@cache
def _opened(data: str) -> tuple[Index, ShardReader]:
    index = Index.open(data)
    return index, ShardReader(index.shard_paths)


def _draw_photograph(generator: np.random.Generator, data: str) -> AnnotatedImage:
    """Return a random photograph that has masks; unlike `Sa1bDataset`, without torch."""
    index, shards = _opened(data)
    for row in generator.integers(len(index), size=TRIES).tolist():
        name, (jpg, json) = index.entry_name(row), shards.read_entry(index, row)
        if json and (entry := annotation.parse(json, name)).masks.areas().any():
            return AnnotatedImage(image.decode(jpg, name, entry.size), entry)
    raise GigamaskError(
        f"--data: none of {TRIES} random photographs has a mask; give photographs with masks"
    )


def _draw_thing(generator: np.random.Generator, photograph: AnnotatedImage, side: int) -> _Cutout:
    """Cut out what is in a random mask, which becomes the first, and masks inside.

    Args:
        generator: Random numbers.
        photograph: The photograph.
        side: The longer side in pixels of the image that it is for.
    """
    entry = photograph.annotation
    masks, (height, width) = entry.masks, entry.size
    boxes, areas = masks.boxes(), masks.areas()
    is_whole = (boxes[:, :2] > 0).all(1) & (boxes[:, 2:] < (width - 1, height - 1)).all(1)
    # What the photograph's border cuts off would have a straight edge.
    odds = 1e-6 * (areas > 0) + is_whole
    chosen = generator.choice(len(masks), p=odds / odds.sum())
    shared = masks.intersections(masks[chosen : chosen + 1])[:, 0]
    inside = shared >= MIN_INSIDE * np.maximum(1, areas)
    inside[chosen] = False
    x0, y0, x1, y1 = (boxes[chosen] + (0, 0, 1, 1)).tolist()
    share = np.exp(generator.uniform(*np.log(SIDE_SHARE)))
    scale = min(MAX_SCALE, share * side / max(x1 - x0, y1 - y0))
    rows = np.append(chosen, np.flatnonzero(inside))
    thing = _cut(photograph, rows, (x0, y0, x1, y1), scale, flip=generator.random() < 0.5)
    factor, offset = generator.uniform(*BRIGHTNESS), generator.uniform(-OFFSET, OFFSET)
    pixels = np.rint(np.clip(thing.pixels * factor + offset, 0, 255)).astype(np.uint8)
    return thing._replace(pixels=pixels, masks=thing.masks & thing.masks[0])


def _cut(
    photograph: AnnotatedImage,
    rows: slice | Int64[np.ndarray, "n"],
    box: tuple[int, int, int, int],
    scale: float,
    flip: bool = False,
) -> _Cutout:
    """Cut out a part of a photograph.

    Args:
        photograph: The photograph.
        rows: Its masks that are cut out too.
        box: What is cut out, xyxy with exclusive ends.
        scale: How much larger the result is.
        flip: Whether to mirror it left to right.
    """
    x0, y0, x1, y1 = box
    height, width = (max(1, round(length * scale)) for length in (y1 - y0, x1 - x0))
    pixels = cv2.resize(
        photograph.pixels[y0:y1, x0:x1], (width, height), interpolation=cv2.INTER_AREA
    )
    entry = photograph.annotation
    masks = entry.masks[rows].resample(
        np.linspace(y0, y1, 2 * height + 1)[1::2].astype(int),
        np.linspace(x0, x1, 2 * width + 1)[1::2].astype(int),
        flip,
    )
    scores = np.array([entry.predicted_iou, entry.stability_score], np.float64)[:, rows]
    categories = np.array(entry.categories or [""] * len(entry.masks))[rows]
    pixels = pixels[:, ::-1] if flip else pixels
    return _Cutout(pixels, masks.to_dense(), scores, categories)
