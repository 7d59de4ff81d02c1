"""Images that were opened in the page, and a model that segments them.

Each image is embedded once and cached, and the least recently used one is dropped first. Prompts
are given one by one as in training: each further prompt sees the mask that was chosen before, so
undoing one is asking again with one prompt less.

Not here: the routes (`serve.app`), images of a dataset (`serve.dataset_view`).
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
from gigamask.errors import GigamaskError
from gigamask.grounding.inference import GroundingPredictor
from gigamask.inference.amg_config import AutomaticMaskConfig
from gigamask.inference.automatic_mask_generator import (
    SamAutomaticMaskGenerator,
    calculate_stability_score,
)
from gigamask.inference.embedding_cache import EmbeddingCache
from gigamask.inference.predictor import MASK_THRESHOLD, SamPredictor
from gigamask.masks.rle import RLEMasks
from gigamask.models.sam.prompt_encoder import make_prompts
from gigamask.models.sam.sam import PromptDecoder, Sam

MAX_CACHED_BYTES = 2**30
"""Of opened images' pixels; an SA-1B image has 10 MB, its embedding 4."""
MIN_CACHED_IMAGES = 2
MAX_PROMPTS = 64
"""Prompts on one image."""
MAX_PIXELS = 2**25
"""Of an opened image, 33 megapixels: it is sent to the browser in full, and the logits of three
masks at that size have three times as many numbers."""
MAX_TEXT_LENGTH = 300
STABILITY_OFFSET = 1.0
"""In logits; that of automatic mask generation."""
JPEG_QUALITY = 92


class NotFoundError(GigamaskError):
    """There is nothing of that name or number, or no longer."""


@dataclass(frozen=True)
class PromptStep:
    """One prompt: a point or a box, in pixels of the image.

    Attributes:
        point: (x, y).
        foreground: whether the point is on the object.
        box: (x0, y0, x1, y1).
        chosen: number of the mask, of those predicted for this prompt, that the next prompt sees;
            None is the one with the highest predicted IoU.
    """

    point: tuple[float, float] | None = None
    foreground: bool = True
    box: tuple[float, float, float, float] | None = None
    chosen: int | None = None


@dataclass(eq=False)
class OpenImage:
    """An opened image and what has been computed of it.

    Attributes:
        name: its file name.
        pixels: RGB.
        predictor: holds its embedding once there is one.
        annotated_masks: its masks in the dataset; None if it is not from one.
        generated_masks: all masks found by a grid of points, once they were asked for.
        predictions: logits and predicted IoU after each sequence of prompts.
    """

    name: str
    pixels: UInt8[np.ndarray, "H W 3"]
    predictor: SamPredictor
    annotated_masks: RLEMasks | None = None
    generated_masks: RLEMasks | None = None
    predictions: dict[tuple, tuple[Tensor, Tensor]] = field(default_factory=dict)

    @property
    def size(self) -> tuple[int, int]:
        """(H, W)"""
        return self.pixels.shape[0], self.pixels.shape[1]


class Session:
    """A model, perhaps with one that grounds text, and the opened images; thread-safe.

    One thread at a time runs the model; images can be opened and shown meanwhile.
    """

    def __init__(
        self,
        model: Sam,
        text_model: GroundingPredictor | None = None,
        mask_settings: AutomaticMaskConfig | None = None,
        cache: EmbeddingCache | None = None,
    ) -> None:
        """Args:
        model: the promptable segmenter.
        text_model: selects masks by text.
        mask_settings: how all masks of an image are generated.
        cache: keeps embeddings on disk.
        """
        self.model, self.text_model = model, text_model
        self._mask_settings, self._cache = mask_settings or AutomaticMaskConfig(), cache
        self._images: OrderedDict[str, OpenImage] = OrderedDict()
        self._images_lock, self._model_lock = threading.Lock(), threading.Lock()

    def open(self, raw: bytes, name: str, masks: RLEMasks | None = None) -> dict[str, Any]:
        """Decode an image and return its id, name and size.

        Args:
            raw: the image file's bytes.
            name: the file's name.
            masks: its masks in a dataset. They lie on the pixels as stored, so that the camera's
                EXIF orientation is only applied without them.
        """
        name = name.encode("utf-8", "replace").decode()
        height, width = image.size(raw, name)
        if height * width > MAX_PIXELS:
            raise GigamaskError(
                f"{name}: has {height} x {width} pixels, at most {MAX_PIXELS:,} are accepted; scale"
                " it down first"
            )
        decoded = image.decode(raw, name)
        pixels = decoded if masks is not None else upright(decoded, raw)
        content = f"{pixels.shape} {masks is not None} {name if masks is not None else ''}\0"
        digest = blake2b(content.encode(), digest_size=12)
        digest.update(np.ascontiguousarray(pixels).data)
        key = digest.hexdigest()
        with self._images_lock:
            if key not in self._images:
                predictor = SamPredictor(self.model, cache=self._cache)
                self._images[key] = OpenImage(name, pixels, predictor, masks)
            self._images.move_to_end(key)
            cached_bytes = sum(opened.pixels.nbytes for opened in self._images.values())
            while len(self._images) > MIN_CACHED_IMAGES and cached_bytes > MAX_CACHED_BYTES:
                _, dropped = self._images.popitem(last=False)
                cached_bytes -= dropped.pixels.nbytes
        return {
            "id": key,
            "name": name,
            "height": pixels.shape[0],
            "width": pixels.shape[1],
            "masks": None if masks is None else len(masks),
        }

    def jpeg(self, key: str) -> bytes:
        """Return an opened image as a JPEG."""
        return encode_jpeg(self._image(key).pixels)

    def embed(self, key: str) -> dict[str, Any]:
        """Embed an image, and return the seconds it took and whether it had been embedded."""
        opened, start_s = self._image(key), time.perf_counter()
        with self._model_lock:
            cached = opened.predictor.is_image_set
            self._embedded(opened)
        return {"seconds": round(time.perf_counter() - start_s, 3), "cached": cached}

    def predict(
        self, key: str, steps: Sequence[PromptStep], multimask_output: bool | None = None
    ) -> list[dict[str, Any]]:
        """Return the masks for a sequence of prompts, the highest predicted IoU first.

        Args:
            key: id of the image.
            steps: the prompts, in the order in which they were given.
            multimask_output: whether three masks are predicted; None means for the first prompt,
                and one mask for more prompts, as in training.
        """
        opened = self._image(key)
        check_steps(opened.size, steps)
        with self._model_lock:
            predictor = self._embedded(opened)
            low, iou = self._predict_steps(opened, predictor, tuple(steps), multimask_output)
            transform = predictor.transform.image_transform(opened.size)
            logits = transform.logits_to_original(low[None])[0]
            masks = RLEMasks.from_dense((logits > MASK_THRESHOLD).cpu().numpy())
            stable = calculate_stability_score(logits, STABILITY_OFFSET).nan_to_num(0.0)
        described = masks_to_json(
            masks, {"predicted_iou": iou.tolist(), "stability": stable.tolist()}
        )
        order = iou.argsort(descending=True, stable=True).tolist()
        return [described[number] | {"number": number} for number in order]

    def all_masks(self, key: str) -> list[dict[str, Any]]:
        """Return the annotated masks of an image, or those that a grid of points finds; slow."""
        opened = self._image(key)
        with self._model_lock:
            return masks_to_json(self._all_masks(opened), {})

    def find(self, key: str, text: str) -> dict[str, Any]:
        """Return the masks that fit a text, best first, and how many fit better than none.

        Args:
            key: id of the image.
            text: what to look for.
        """
        opened = self._image(key)
        if self.text_model is None:
            raise GigamaskError("no model for text was given; start the page with --words RUN")
        if len(text) > MAX_TEXT_LENGTH:
            raise GigamaskError(
                f"the text has {len(text)} letters, at most {MAX_TEXT_LENGTH} are accepted"
            )
        with self._model_lock:
            masks = self._all_masks(opened)
            masks = masks[np.flatnonzero(masks.areas())]
            if not len(masks):
                raise GigamaskError(
                    "no mask was found in this image, so there is none to choose from"
                )
            [found] = self.text_model.predict(opened.pixels, masks, [text])
        best = found.order[: max(found.fitting, 3)]
        scores = {"confidence": found.confidence[: len(best)].tolist()}
        answers = masks_to_json(masks[best], scores)
        return {"fitting": found.fitting, "candidates": len(masks), "answers": answers}

    def _image(self, key: str) -> OpenImage:
        with self._images_lock:
            if key not in self._images:
                raise NotFoundError("this image is no longer cached; open it again")
            self._images.move_to_end(key)
            return self._images[key]

    def _embedded(self, opened: OpenImage) -> SamPredictor:
        if not opened.predictor.is_image_set:
            opened.predictor.set_image(opened.pixels)
        return opened.predictor

    def _all_masks(self, opened: OpenImage) -> RLEMasks:
        if opened.annotated_masks is not None:
            return opened.annotated_masks
        if opened.generated_masks is None:
            settings = vars(self._mask_settings)
            generator = SamAutomaticMaskGenerator(self.model, cache=self._cache, **settings)
            opened.generated_masks = generator.generate_proposals(opened.pixels).masks
        return opened.generated_masks

    @torch.inference_mode()
    def _predict_steps(
        self,
        opened: OpenImage,
        predictor: SamPredictor,
        steps: tuple[PromptStep, ...],
        multimask_output: bool | None,
    ) -> tuple[Float[Tensor, "C G G"], Float[Tensor, "C"]]:
        """Return low-resolution logits and predicted IoU after the last step.

        Earlier steps are predicted first, unless they are cached.
        """
        key = (*steps[:-1], replace(steps[-1], chosen=None)), multimask_output
        if key in opened.predictions:
            return opened.predictions[key]
        mask_input = None
        if len(steps) > 1:
            low, iou = self._predict_steps(opened, predictor, steps[:-1], multimask_output)
            chosen = steps[-2].chosen
            if chosen is not None and not 0 <= chosen < len(low):
                raise GigamaskError(f"mask {chosen} was chosen of {len(low)}; choose one of these")
            mask_input = low[int(iou.argmax()) if chosen is None else chosen][None, None]
        transform = predictor.transform
        points = [step for step in steps if step.point is not None]
        coords = np.array([step.point for step in points], np.float64).reshape(1, -1, 2)
        coords = torch.from_numpy(transform.apply_coords(coords, opened.size))
        labels = torch.tensor([[int(step.foreground) for step in points]])
        boxes = np.array([step.box for step in steps if step.box is not None][-1:], np.float64)
        box = torch.from_numpy(transform.apply_boxes(boxes, opened.size)) if len(boxes) else None
        prompts = make_prompts(
            *((coords, labels) if points else (None, None)),
            box,
            mask_input,
            len(steps) == 1 if multimask_output is None else multimask_output,
            self.model.config.mask_size,
        )
        prediction = PromptDecoder(self.model, predictor.get_image_embedding())(prompts)
        if len(opened.predictions) > 4 * MAX_PROMPTS:
            opened.predictions.clear()
        opened.predictions[key] = (
            prediction.low_res_logits[0],
            prediction.iou_predictions[0].float(),
        )
        return opened.predictions[key]


def check_steps(size: tuple[int, int], steps: Sequence[PromptStep]) -> None:
    """Raise `GigamaskError` for no prompts, too many, or one that lies outside of the image.

    Args:
        size: (H, W) of the image.
        steps: the prompts.
    """
    if not 1 <= len(steps) <= MAX_PROMPTS:
        raise GigamaskError(f"{len(steps)} prompts were given; give 1 to {MAX_PROMPTS}")
    for step in steps:
        if (step.point is None) == (step.box is None):
            raise GigamaskError("a prompt is either a point or a box; give one of them")
        corners = np.array(step.point if step.box is None else step.box, np.float64).reshape(-1, 2)
        inside = (corners >= 0).all() and (corners <= size[::-1]).all()
        if not (np.isfinite(corners).all() and inside):
            raise GigamaskError(
                f"a prompt is at {corners.tolist()}, outside the image of {size[1]} x {size[0]};"
                " give one inside"
            )


def masks_to_json(masks: RLEMasks, scores: dict[str, list[float]]) -> list[dict[str, Any]]:
    """Return each mask as COCO RLE with its area, box and scores.

    Args:
        masks: masks of one image.
        scores: by name, one score for each mask.

    Returns:
        dictionaries; "box" is `xyxy` with inclusive ends.
    """
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
    """Return decoded pixels rotated as the file's EXIF orientation says.

    Args:
        pixels: RGB as stored.
        raw: the image file's bytes.
    """
    with Image.open(io.BytesIO(raw), formats=["JPEG", "PNG", "WEBP"]) as opened:
        orientation = opened.getexif().get(0x0112, 1)
    rotated = Image.fromarray(pixels)
    rotated.getexif()[0x0112] = orientation
    return np.array(ImageOps.exif_transpose(rotated))


def encode_jpeg(pixels: UInt8[np.ndarray, "H W 3"]) -> bytes:
    """Return RGB pixels as a JPEG without metadata."""
    return image.encode_jpeg(pixels, JPEG_QUALITY, "444")
