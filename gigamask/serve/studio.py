"""Pictures in front of a model: bytes enter and an id leaves; then prompts about it enter and answers leave.

Each picture is embedded once and kept, the oldest let go first. What was asked is asked step by step as in training: each further prompt sees the
answer that was chosen before, so that taking a step back is asking with one prompt less.

Not here: who may ask (`serve.guard`), the addresses (`serve.app`), pictures of shards (`serve.shelf`).
"""

import io
import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, UInt8
from PIL import Image, ImageOps
from torch import Tensor

from gigamask.data import image
from gigamask.faults import Fault
from gigamask.geometry.runs import Runs
from gigamask.grounding.inference import GroundingPredictor
from gigamask.model.decoding import PromptDecoder
from gigamask.model.sam import Sam
from gigamask.predict.automatic import AutomaticMasks, stability
from gigamask.predict.cache import EmbeddingCache
from gigamask.predict.embedding import prompts_of
from gigamask.predict.predictor import MASK_THRESHOLD, Predictor
from gigamask.predict.settings import Settings

HELD_BYTES = 2**30
"""Of pictures that are kept; one of SA-1B's size has 10 MB, its embedding 4."""
LEAST_HELD = 2
MOST_STEPS = 64
"""Prompts about one picture."""
MOST_PIXELS = 2**25
"""Of a picture that is dropped, 33 megapixels: the browser gets it whole, and an answer at that size has three times as many numbers."""
MOST_TEXT = 300
"""Letters of a query."""
OFFSET = 1.0
"""In logits, of the stability: that of the automatic masks."""
QUALITY = 92


class Unknown(Fault):
    """Nothing of that name is there, or no longer."""


@dataclass(frozen=True)
class Step:
    """One prompt: a point `(x, y)` that is foreground or not, or a box `(x0, y0, x1, y1)`, in the picture's pixels. Of the answers to it, `chosen` is
    what the next prompt sees; None: the one of the highest predicted IoU."""

    point: tuple[float, float] | None = None
    foreground: bool = True
    box: tuple[float, float, float, float] | None = None
    chosen: int | None = None


@dataclass(eq=False)
class Picture:
    """One picture, who answers about it, the low-resolution logits of what was asked, all its masks once they were looked for, and its own."""

    name: str
    pixels: UInt8[np.ndarray, "H W 3"]
    predictor: Predictor
    own: Runs | None = None
    everything: Runs | None = None
    asked: dict[tuple, tuple[Tensor, Tensor]] = field(default_factory=dict)

    @property
    def size(self) -> tuple[int, int]:
        """(H, W)"""
        return self.pixels.shape[0], self.pixels.shape[1]


class Studio:
    """A model, perhaps with a network that knows words, and the pictures it has been shown. The model answers one of several threads at a time."""

    def __init__(
        self, model: Sam, asker: GroundingPredictor | None = None, masks: Settings | None = None, cache: EmbeddingCache | None = None
    ) -> None:
        self.model, self.asker, self._masks, self._cache = model, asker, masks or Settings(), cache
        self._pictures: OrderedDict[str, Picture] = OrderedDict()
        self._shown, self._at_work = threading.Lock(), threading.Lock()

    def show(self, raw: bytes, name: str, own: Runs | None = None) -> dict[str, Any]:
        """Takes a picture as a file's bytes, upright as a camera's EXIF says unless it has masks of its `own`, which lie on the pixels as stored."""
        name = name.encode("utf-8", "replace").decode()
        height, width = image.size(raw, name)
        if height * width > MOST_PIXELS:
            raise Fault(f"{name}: has {height} x {width} pixels, at most {MOST_PIXELS:,} are taken; scale it down first")
        pixels = image.decode(raw, name) if own is not None else upright(image.decode(raw, name), raw)
        told = blake2b(f"{pixels.shape} {own is not None} {name if own is not None else ''}\0".encode(), digest_size=12)
        told.update(np.ascontiguousarray(pixels).data)
        with self._shown:
            key = told.hexdigest()
            if key not in self._pictures:
                self._pictures[key] = Picture(name, pixels, Predictor(self.model, self._cache), own)
            self._pictures.move_to_end(key)
            while len(self._pictures) > LEAST_HELD and sum(each.pixels.nbytes for each in self._pictures.values()) > HELD_BYTES:
                self._pictures.popitem(last=False)
            return {"id": key, "name": name, "height": pixels.shape[0], "width": pixels.shape[1], "masks": None if own is None else len(own)}

    def jpeg(self, key: str) -> bytes:
        """Returns the pixels of a picture as a JPEG."""
        return to_jpeg(self._picture(key).pixels)

    def embed(self, key: str) -> dict[str, Any]:
        """Embeds a picture unless it is, and tells how long that took."""
        picture, began_s = self._picture(key), time.perf_counter()
        with self._at_work:
            again = picture.predictor.is_image_set
            self._embedded(picture)
        return {"seconds": round(time.perf_counter() - began_s, 3), "held": again}

    def ask(self, key: str, steps: Sequence[Step], several: bool | None = None) -> list[dict[str, Any]]:
        """Returns the answers to the last of some prompts, best first by predicted IoU.

        Of one prompt there are three, of more the one that SAM is trained to give then; `several` says otherwise.
        """
        picture = self._picture(key)
        check(picture.size, steps)
        with self._at_work:
            predictor = self._embedded(picture)
            low, iou = self._played(picture, predictor, tuple(steps), several)
            logits = predictor.transform.frame(picture.size).logits_to_original(low[None])[0]
            masks, stable = Runs.from_dense((logits > MASK_THRESHOLD).cpu().numpy()), stability(logits, OFFSET)
        told = described(masks, {"predicted_iou": iou.tolist(), "stability": stable.nan_to_num(0.0).tolist()})
        return [told[number] | {"number": number} for number in iou.argsort(descending=True, stable=True).tolist()]

    def everything(self, key: str) -> list[dict[str, Any]]:
        """Returns all masks of a picture: its own, or those that are found by asking a grid of points, which takes long."""
        picture = self._picture(key)
        with self._at_work:
            return described(self._all(picture), {})

    def words(self, key: str, text: str) -> dict[str, Any]:
        """Returns which of all masks a text means, the best first, and how many of them fit better than none."""
        picture = self._picture(key)
        if self.asker is None:
            raise Fault("no network that knows words was given; start the page with --words RUN")
        if len(text) > MOST_TEXT:
            raise Fault(f"the text has {len(text)} letters, at most {MOST_TEXT} are taken; say it shorter")
        with self._at_work:
            masks = self._all(picture)
            masks = masks[np.flatnonzero(masks.areas())]
            if not len(masks):
                raise Fault("no mask is found in this picture, so there is none to choose from")
            [found] = self.asker.predict(picture.pixels, masks, [text])
        best = found.order[: max(found.fitting, 3)]
        told = described(masks[best], {"confidence": found.confidence[: len(best)].tolist()})
        return {"fitting": found.fitting, "candidates": len(masks), "answers": told}

    def _picture(self, key: str) -> Picture:
        with self._shown:
            if key not in self._pictures:
                raise Unknown("this picture is no longer held; open it again")
            self._pictures.move_to_end(key)
            return self._pictures[key]

    def _embedded(self, picture: Picture) -> Predictor:
        if not picture.predictor.is_image_set:
            picture.predictor.set_image(picture.pixels)
        return picture.predictor

    def _all(self, picture: Picture) -> Runs:
        if picture.own is not None:
            return picture.own
        if picture.everything is None:
            picture.everything = AutomaticMasks(self.model, cache=self._cache, **self._masks.told()).find(picture.pixels).masks
        return picture.everything

    @torch.inference_mode()
    def _played(
        self, picture: Picture, predictor: Predictor, steps: tuple[Step, ...], several: bool | None
    ) -> tuple[Float[Tensor, "C G G"], Float[Tensor, "C"]]:
        """Returns logits and predicted IoU after the last step; those of steps before are played unless they were."""
        key = (*steps[:-1], replace(steps[-1], chosen=None)), several
        if key in picture.asked:
            return picture.asked[key]
        fed = None
        if len(steps) > 1:
            low, iou = self._played(picture, predictor, steps[:-1], several)
            chosen = steps[-2].chosen
            if chosen is not None and not 0 <= chosen < len(low):
                raise Fault(f"answer {chosen} was chosen of {len(low)}; choose one that was given")
            fed = low[int(iou.argmax()) if chosen is None else chosen][None, None]
        transform, points = predictor.transform, [step for step in steps if step.point is not None]
        coords = np.array([step.point for step in points], np.float64).reshape(1, -1, 2)
        marks = torch.tensor([[int(step.foreground) for step in points]])
        boxes = [step.box for step in steps if step.box is not None]
        box = torch.from_numpy(transform.apply_boxes(np.array(boxes[-1:], np.float64), picture.size)) if boxes else None
        given = (torch.from_numpy(transform.apply_coords(coords, picture.size)), marks) if points else (None, None)
        prompts = prompts_of(*given, box, fed, len(steps) == 1 if several is None else several, self.model.spec.grid)
        answer = PromptDecoder(self.model, predictor.get_image_embedding())(prompts)
        if len(picture.asked) > 4 * MOST_STEPS:
            picture.asked.clear()
        picture.asked[key] = answer.low[0], answer.iou[0].float()
        return picture.asked[key]


def check(size: tuple[int, int], steps: Sequence[Step]) -> None:
    """Raises `Fault` where the prompts are none, too many, or not in a picture of that size (H, W)."""
    if not 1 <= len(steps) <= MOST_STEPS:
        raise Fault(f"{len(steps)} prompts were given; give 1 to {MOST_STEPS}")
    for step in steps:
        if (step.point is None) == (step.box is None):
            raise Fault("a prompt is either a point or a box; give one of them")
        corners = np.array(step.point if step.box is None else step.box, np.float64).reshape(-1, 2)
        if not (np.isfinite(corners).all() and (corners >= 0).all() and (corners <= size[::-1]).all()):
            raise Fault(f"a prompt lies at {corners.tolist()}, outside of the picture of {size[1]} x {size[0]}; ask within it")


def described(masks: Runs, scores: dict[str, list[float]]) -> list[dict[str, Any]]:
    """Returns each mask as COCO's run lengths with its area, its box `xyxy` with inclusive ends, and its scores."""
    areas, boxes = masks.areas().tolist(), masks.boxes().tolist()
    return [
        {
            "segmentation": {"size": list(masks.size), "counts": counts.decode()},
            "area": areas[number],
            "box": boxes[number],
            **{name: round(float(values[number]), 4) for name, values in scores.items()},
        }
        for number, counts in enumerate(masks.to_coco())
    ]


def upright(pixels: UInt8[np.ndarray, "H W 3"], raw: bytes) -> UInt8[np.ndarray, "h w 3"]:
    """Returns a photograph as its EXIF orientation says it was seen."""
    with Image.open(io.BytesIO(raw), formats=["JPEG", "PNG", "WEBP"]) as opened:
        turned = ImageOps.exif_transpose(_with_orientation(Image.fromarray(pixels), opened.getexif().get(0x0112, 1)))
    return np.array(turned)


def _with_orientation(picture: Image.Image, orientation: int) -> Image.Image:
    picture.getexif()[0x0112] = orientation
    return picture


def to_jpeg(pixels: UInt8[np.ndarray, "H W 3"]) -> bytes:
    """Returns pixels as a JPEG, which carries nothing else."""
    return image.encode_jpeg(pixels, QUALITY, "444")
