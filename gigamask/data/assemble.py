"""One entry becomes one sample: the fourth door.

In: a JPEG's bytes, its checked annotation, the settings, and the names of its chance (seed, epoch, position). Out: a `Sample`: pixels fitted to
the input square, masks as runs of the target grid, boxes in the input, and every random number that will be spent on it.
All chance is named by (epoch, position in the epoch), so that neither the process that loads a sample nor the order of loading changes it.

Not here: reading (`data.shards`), which masks stay and which are taken (`data.choose`), batching (`data.loader`).
"""

from dataclasses import replace

import numpy as np
import torch
from jaxtyping import UInt8
from torch import Tensor

from gigamask.contracts import Chance, Draws, Entry, Sample
from gigamask.data import image
from gigamask.data.settings import Assembly
from gigamask.draws import draw
from gigamask.geometry.frame import Frame
from gigamask.geometry.runs import Runs


def assemble(raw: bytes, entry: Entry, position: int, settings: Assembly, chance: Chance, epoch: int) -> Sample:
    """Returns the sample at `position` of `epoch`; raises `BadSample` when its JPEG cannot be used.

    A mask that has no cell of the target grid is left out.
    """
    frame = settings.augment.frame(entry.size, settings.side, draw(chance.seed, "frame", epoch, position))
    original = _choose(entry, settings, draw(chance.seed, "masks", epoch, position))
    masks = frame.masks(original, settings.grid)
    seen = masks.areas() > 0
    return Sample(
        name=entry.name,
        position=position,
        image=_fit(raw, entry, frame, settings.half_scale),
        frame=frame,
        masks=masks[seen],
        boxes_input=frame.boxes_to_input(original[seen].boxes().astype(np.float32)),
        draws=_draw(int(seen.sum()), chance, epoch, position),
    )


def _choose(entry: Entry, settings: Assembly, generator: np.random.Generator) -> Runs:
    """Returns the masks that are trained on, on the original grid."""
    height, width = entry.size
    kept = np.flatnonzero(settings.filters.keep(entry.masks.areas(), height * width, entry.predicted_iou, entry.stability_score))
    return entry.masks[kept[settings.choice.choose(len(kept), settings.max_masks, generator)]]


def _fit(raw: bytes, entry: Entry, frame: Frame, half_scale: bool) -> UInt8[Tensor, "3 h w"]:
    """Returns the pixels fitted to the input square, decoded at half scale where asked for and where nothing has to be enlarged then."""
    half = half_scale and all(-(-crop // 2) >= resized for crop, resized in zip(frame.crop_size, frame.resized, strict=True))
    pixels = image.decode(raw, entry.name, entry.size, half)
    height, width = pixels.shape[:2]
    if (height, width) == frame.original:
        return frame.image(pixels)
    y0, x0, y1, x1 = frame.crop
    tall, wide = frame.original
    crop = (y0 * height // tall, x0 * width // wide, -(-y1 * height // tall), -(-x1 * width // wide))
    return replace(frame, original=(height, width), crop=crop).image(pixels)


def _draw(masks: int, chance: Chance, epoch: int, position: int) -> Draws:
    def uniform(purpose: str, *shape: int) -> Tensor:
        return torch.from_numpy(draw(chance.seed, purpose, epoch, position).random(shape, dtype=np.float32))

    noise = draw(chance.seed, "box_noise", epoch, position).standard_normal((masks, 4), dtype=np.float32)
    return Draws(
        first=uniform("first", masks),
        clicks=uniform("clicks", masks, chance.clicks, 2),
        box_noise=torch.from_numpy(noise),
        drop_path=uniform("drop_path", 1, chance.blocks, 2),
    )
