"""One entry becomes one sample: the fourth door.

In: a JPEG's bytes, its checked annotation, the visit, the settings, and the seed of its chance. Out: a `Sample`: pixels fitted to
the input square, masks as runs of the target grid, boxes in the input, and every random number that will be spent on it.
All chance is named by (epoch, position in the epoch), so that neither the process that loads a sample nor the order of loading changes it.

Not here: reading (`data.shards`), which masks stay and which are taken (`data.choose`), masks cut beforehand (`data.mask_store`), batching
(`data.loader`).
"""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch
from jaxtyping import Int, Int32, Int64, UInt8
from torch import Tensor

from gigamask.contracts import Chance, Draws, Entry, Sample, Visit
from gigamask.data import image
from gigamask.data.choose import Candidates
from gigamask.data.items import granularity
from gigamask.data.settings import Assembly
from gigamask.draws import draw
from gigamask.geometry.frame import Frame
from gigamask.geometry.runs import Runs

Cut = Callable[[Int64[np.ndarray, "k"], Frame], tuple[Runs, Int[np.ndarray, "k 4"]]]
"""Cuts the masks of some numbers to the target grid of a frame; the boxes are of what the frame shows of them, in original pixels."""


def assemble(raw: bytes, entry: Entry, visit: Visit, settings: Assembly, chance: Chance) -> Sample:
    """Returns the sample of a visit; raises `BadSample` when its JPEG cannot be used.

    A mask that has no cell of the target grid, or none in the crop, is left out.
    """
    masks = entry.masks
    candidates = Candidates(entry.size, masks.areas(), masks.boxes(), entry.predicted_iou, entry.stability_score)

    def cut(chosen: Int64[np.ndarray, "k"], frame: Frame) -> tuple[Runs, Int[np.ndarray, "k 4"]]:
        taken = masks[chosen]
        boxes = candidates.boxes[chosen] if frame.crop_size == frame.original else _visible_boxes(taken, frame)
        return frame.masks(taken, settings.grid), boxes

    return compose(raw, entry.name, candidates, cut, visit, settings, chance)


def compose(raw: bytes, name: str, candidates: Candidates, cut: Cut, visit: Visit, settings: Assembly, chance: Chance) -> Sample:
    """Returns the sample of an image whose masks are known by what `candidates` says and are made by `cut`, those only that are taken."""
    frame = settings.augment.frame(candidates.size, settings.side, draw(chance.seed, "frame", visit.epoch, visit.position))
    chosen = _choose(candidates, visit.mask, frame, settings, draw(chance.seed, "masks", visit.epoch, visit.position))
    masks, boxes = cut(chosen, frame)
    seen = masks.areas() > 0
    shares = candidates.areas[chosen] / (candidates.size[0] * candidates.size[1])
    pixels = _fit(raw, name, frame, settings.half_scale).numpy()
    return Sample(
        name=name,
        visit=visit,
        image=torch.from_numpy(settings.colour.adjust(pixels, draw(chance.seed, "colour", visit.epoch, visit.position))),
        frame=frame,
        masks=masks[seen],
        boxes_input=frame.boxes_to_input(boxes[seen].astype(np.float32)),
        strata=(granularity(shares) if visit.stratum < 0 else np.full(len(shares), visit.stratum))[seen].astype(np.int64),
        draws=_draw(int(seen.sum()), chance, visit),
    )


def _choose(candidates: Candidates, only: int, frame: Frame, settings: Assembly, generator: np.random.Generator) -> Int64[np.ndarray, "k"]:
    """Returns the numbers of the masks that are trained on, of those that pass the filters, or of the one of them that is asked for.

    A mask whose box does not meet the crop is not among them.
    """
    (height, width), (y0, x0, y1, x1), boxes = candidates.size, frame.crop, candidates.boxes
    kept = settings.filters.keep(candidates.areas, height * width, candidates.predicted_iou, candidates.stability_score)
    numbers = np.flatnonzero(kept & (candidates.areas > 0))
    if only >= 0:
        numbers = numbers[only : only + 1]
    met = (boxes[:, 0] < x1) & (boxes[:, 1] < y1) & (boxes[:, 2] >= x0) & (boxes[:, 3] >= y0)
    numbers = numbers[met[numbers]]
    return numbers[settings.choice.choose(candidates[numbers], settings.max_masks, generator)]


def _visible_boxes(masks: Runs, frame: Frame) -> Int32[np.ndarray, "k 4"]:
    """Returns the boxes of what the crop shows of the masks, in original pixels; what it does not show has none that means anything."""
    y0, x0, y1, x1 = frame.crop
    return masks.resample(np.arange(y0, y1), np.arange(x0, x1)).boxes() + np.array([x0, y0, x0, y0], np.int32)


def _fit(raw: bytes, name: str, frame: Frame, half_scale: bool) -> UInt8[Tensor, "3 h w"]:
    """Returns the pixels fitted to the input square, decoded at half scale where asked for and where nothing has to be enlarged then."""
    half = half_scale and all(-(-crop // 2) >= resized for crop, resized in zip(frame.crop_size, frame.resized, strict=True))
    pixels = image.decode(raw, name, frame.original, half)
    height, width = pixels.shape[:2]
    if (height, width) == frame.original:
        return frame.image(pixels)
    y0, x0, y1, x1 = frame.crop
    tall, wide = frame.original
    crop = (y0 * height // tall, x0 * width // wide, -(-y1 * height // tall), -(-x1 * width // wide))
    return replace(frame, original=(height, width), crop=crop).image(pixels)


def _draw(masks: int, chance: Chance, visit: Visit) -> Draws:
    def uniform(purpose: str, *shape: int) -> Tensor:
        return torch.from_numpy(draw(chance.seed, purpose, visit.epoch, visit.position).random(shape, dtype=np.float32))

    noise = draw(chance.seed, "box_noise", visit.epoch, visit.position).standard_normal((masks, 4), dtype=np.float32)
    return Draws(
        first=uniform("first", masks),
        clicks=torch.cat([uniform("clicks", masks, chance.clicks, 2), uniform("points", masks, chance.points, 2)], 1),
        box_noise=torch.from_numpy(noise),
        drop_path=uniform("drop_path", 1, chance.blocks, 2),
        patches=uniform("patches", 1, chance.patches),
    )
