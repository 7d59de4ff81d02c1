"""Images opened in the page, and the model that segments them.

Each image is embedded once and cached (`serve.open_images`). As in training, prompts are predicted
one by one, each with the mask chosen for the one before, so that undoing a prompt means predicting
again without it.

Routes are in `serve.app`, images of a dataset in `serve.dataset_view`.
"""

import io
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from hashlib import blake2b
from typing import Any

import numpy as np
import torch
from jaxtyping import UInt8
from PIL import Image, ImageOps

from gigamask.data import image
from gigamask.errors import GigamaskError
from gigamask.grounding.inference import GroundingPredictor
from gigamask.grounding.vocabulary import check_text
from gigamask.inference.amg_config import AutomaticMaskConfig
from gigamask.inference.automatic_mask_generator import (
    MaskProposals,
    SamAutomaticMaskGenerator,
    calculate_stability_score,
)
from gigamask.inference.predictor import MASK_THRESHOLD, SamPredictor
from gigamask.masks.rle import RLEMasks
from gigamask.models.embedding_cache import EmbeddingCache
from gigamask.models.sam.sam import Sam
from gigamask.pixels import to_rgb
from gigamask.serve.open_images import Answer, OpenImage, OpenImages
from gigamask.serve.prompt_steps import MAX_PROMPTS, PromptStep, check_steps

MAX_PIXELS = 2**25
"""Limit of an opened image, 33 megapixels: it is sent to the browser in full, and three masks of
that size have three times as many logits."""
MAX_TEXT_LENGTH = 300
BASE_LOGIT = 8.0
"""Logit inside a mask that is given, not predicted; outside it is negative."""
STABILITY_OFFSET = 1.0
"""Offset in logits, as in automatic mask generation."""
JPEG_QUALITY = 92


class Session:
    """A segmenter, optionally a grounding model, and the opened images; thread-safe.

    One thread at a time runs the models. Images can be opened and shown meanwhile, one at a time,
    since decoding a small file may take 100 MB and more.
    """

    def __init__(
        self,
        model: Sam,
        text_model: GroundingPredictor | None = None,
        mask_settings: AutomaticMaskConfig | None = None,
        cache: EmbeddingCache | None = None,
    ) -> None:
        """Start without images.

        Args:
            model: The promptable segmenter.
            text_model: Selects masks by text.
            mask_settings: How all masks of an image are generated.
            cache: Cache of embeddings on disk.
        """
        self.model, self.text_model = model, text_model
        self._mask_settings, self._cache = mask_settings or AutomaticMaskConfig(), cache
        self.images = OpenImages()
        self._model_lock = threading.Lock()
        # Threads of their own would each keep the memory of their largest image.
        self._codec = ThreadPoolExecutor(1)

    def use_model(self, model: Sam) -> None:
        """Segment with another model from now on; opened images are dropped."""
        with self._model_lock:
            self.model, self.images = model, OpenImages()

    def open(
        self, raw: bytes, name: str, masks: RLEMasks | None = None, quarter_turns: bool = False
    ) -> dict[str, Any]:
        """Decode an image and return its id, name and size.

        Args:
            raw: The image file's bytes.
            name: The file's name.
            masks: Its masks in a dataset, aligned with the pixels as stored; the EXIF orientation
                is applied only to images without masks.
            quarter_turns: Apply only EXIF orientations that swap height and width, as `convert`
                does, which recognizes them by the size of the masks.
        """
        name = name.encode("utf-8", "replace").decode()
        height, width = image.size(raw, name)
        if height * width > MAX_PIXELS:
            raise GigamaskError(
                f"{name}: has {height} x {width} pixels, at most {MAX_PIXELS:,} are accepted; scale"
                " it down first"
            )
        key, (height, width) = self._codec.submit(
            self._decode, raw, name, masks, quarter_turns
        ).result()
        count = None if masks is None else len(masks)
        return {"id": key, "name": name, "height": height, "width": width, "masks": count}

    def jpeg(self, key: str) -> bytes:
        """Return an opened image as a JPEG."""
        return self._codec.submit(encode_jpeg, to_rgb(self.images.get(key).pixels)).result()

    def embed(self, key: str) -> dict[str, Any]:
        """Embed an image, and return the seconds it took and whether it was cached."""
        opened, start_s = self.images.get(key), time.perf_counter()
        with self._model_lock:
            cached = opened.predictor.is_image_set
            _embed(opened)
        self.images.trim()
        return {"seconds": round(time.perf_counter() - start_s, 3), "cached": cached}

    def predict(
        self,
        key: str,
        steps: Sequence[PromptStep],
        multimask_output: bool | None = None,
        base: RLEMasks | None = None,
        best_only: bool = False,
    ) -> list[dict[str, Any]]:
        """Return the masks for a sequence of prompts, highest predicted IoU first.

        Args:
            key: Id of the image.
            steps: The prompts, in order.
            multimask_output: Whether to predict three masks; None means three for a single prompt
                and one for several, as in training.
            base: A mask that the prompts correct.
            best_only: Return only the mask with the highest predicted IoU.
        """
        opened = self.images.get(key)
        check_steps(opened.size, steps)
        with self._model_lock:
            _embed(opened)
            answer = self._predict_steps(opened, tuple(steps), multimask_output, base)
        self.images.trim()
        described = masks_to_json(
            answer.masks,
            {"predicted_iou": answer.iou.tolist(), "stability": answer.stability.tolist()},
        )
        order = answer.iou.argsort(descending=True, stable=True).tolist()
        return [
            described[number] | {"number": number} for number in order[: 1 if best_only else None]
        ]

    def all_masks(self, key: str) -> list[dict[str, Any]]:
        """Return all masks that the model finds from a grid of points, with its scores (slow)."""
        opened = self.images.get(key)
        with self._model_lock:
            proposals = self._proposals(opened)
        scores = {
            "predicted_iou": proposals.predicted_iou.tolist(),
            "stability": proposals.stability_score.tolist(),
        }
        return masks_to_json(proposals.masks, scores)

    def find(self, key: str, text: str) -> dict[str, Any]:
        """Return the best masks for a text, best first, and how many of all masks fit it.

        Args:
            key: Id of the image.
            text: The text.

        Returns:
            The answers, the number of candidates, and whether these are the annotations of the
            dataset or the masks that the model finds.
        """
        opened = self.images.get(key)
        if self.text_model is None:
            raise GigamaskError("there is no model for text; start the page with --grounding RUN")
        if len(text) > MAX_TEXT_LENGTH:
            raise GigamaskError(
                f"the text has {len(text)} characters, at most {MAX_TEXT_LENGTH} are accepted"
            )
        check_text(text)
        with self._model_lock:
            annotated = opened.annotated_masks
            masks = self._proposals(opened).masks if annotated is None else annotated
            masks = masks[np.flatnonzero(masks.areas())]
            if not len(masks):
                raise GigamaskError(
                    "no mask was found in this image, so there is none to choose from"
                )
            [found] = self.text_model.predict(opened.pixels, masks, [text])
        best = found.order[: max(found.num_matches, 3)]
        scores = {"confidence": found.confidence[: len(best)].tolist()}
        answers = masks_to_json(masks[best], scores)
        return {
            "num_matches": found.num_matches,
            "candidates": len(masks),
            "note": found.note,
            "annotated": annotated is not None,
            "answers": answers,
        }

    def _decode(
        self, raw: bytes, name: str, masks: RLEMasks | None, quarter_turns: bool
    ) -> tuple[str, tuple[int, int]]:
        """Decode an image and cache it; return its id and size."""
        pixels = decoded = image.decode(raw, name, pixels=self.model.config.pixels)
        if masks is None:
            pixels = apply_exif_orientation(decoded, raw)
            if quarter_turns and pixels.shape == decoded.shape:
                pixels = decoded
        content = f"{pixels.shape} {masks is not None} {name if masks is not None else ''}\0"
        digest = blake2b(content.encode(), digest_size=12)
        digest.update(np.ascontiguousarray(pixels).data)
        key = digest.hexdigest()
        tile, halo = self._mask_settings.tile, self._mask_settings.halo
        if tile is None or max(pixels.shape) <= tile:
            tile = halo = None
        predictor = SamPredictor(self.model, cache=self._cache, tile=tile, halo=halo)
        self.images.add(key, OpenImage(name, pixels, predictor, masks))
        return key, pixels.shape[:2]

    def _proposals(self, opened: OpenImage) -> MaskProposals:
        if opened.proposals is None:
            settings = vars(self._mask_settings)
            generator = SamAutomaticMaskGenerator(self.model, cache=self._cache, **settings)
            opened.proposals = generator.generate_proposals(opened.pixels, opened.report)
        return opened.proposals

    @torch.inference_mode()
    def _predict_steps(
        self,
        opened: OpenImage,
        steps: tuple[PromptStep, ...],
        multimask_output: bool | None,
        base: RLEMasks | None = None,
    ) -> Answer:
        """Return the answer after the last step.

        Earlier steps are predicted first, unless they are cached.
        """
        based = None if base is None else base.to_coco()[0]
        key = (*steps[:-1], replace(steps[-1], chosen=None)), multimask_output, based
        if key in opened.predictions:
            return opened.predictions[key]
        mask_input = None
        transform = opened.predictor.transform
        if base is not None and len(steps) == 1:
            side = self.model.config.mask_size
            small = transform.image_transform(opened.size).apply_masks(base, side).to_dense()
            mask_input = torch.from_numpy(np.where(small, BASE_LOGIT, -BASE_LOGIT))[None].float()
        if len(steps) > 1:
            before = self._predict_steps(opened, steps[:-1], multimask_output, base)
            chosen, low = steps[-2].chosen, before.low_res_logits
            if chosen is not None and not 0 <= chosen < len(low):
                raise GigamaskError(f"mask {chosen} was chosen of {len(low)}; choose one of these")
            mask_input = low[int(before.iou.argmax()) if chosen is None else chosen][None, None]
        points = [step for step in steps if step.point is not None]
        coords = np.array([step.point for step in points], np.float64).reshape(1, -1, 2)
        coords = torch.from_numpy(transform.apply_coords(coords, opened.size))
        labels = torch.tensor([[int(step.foreground) for step in points]])
        boxes = np.array([step.box for step in steps if step.box is not None][-1:], np.float64)
        box = torch.from_numpy(transform.apply_boxes(boxes, opened.size)) if len(boxes) else None
        logits, iou, low = opened.predictor.predict_torch(
            *((coords, labels) if points else (None, None)),
            box,
            mask_input,
            len(steps) == 1 and base is None if multimask_output is None else multimask_output,
            return_logits=True,
        )
        if len(opened.predictions) > 4 * MAX_PROMPTS:
            opened.predictions.clear()
        opened.predictions[key] = Answer(
            low[0],
            iou[0].float(),
            RLEMasks.from_dense((logits[0] > MASK_THRESHOLD).cpu().numpy()),
            calculate_stability_score(logits[0], STABILITY_OFFSET).nan_to_num(0.0),
        )
        return opened.predictions[key]


def share_image(source: Session, target: Session, key: str) -> None:
    """Open an image in another session, too.

    Args:
        source: The session that has the image.
        target: The session that gets it.
        key: Id of the image in both.
    """
    if key not in target.images:
        opened = source.images.get(key)
        target.images.add(key, OpenImage(opened.name, opened.pixels, SamPredictor(target.model)))


def _embed(opened: OpenImage) -> SamPredictor:
    """Embed an image unless it is, and return its predictor."""
    if not opened.predictor.is_image_set:
        opened.predictor.set_image(opened.pixels)
    return opened.predictor


def masks_to_json(masks: RLEMasks, scores: dict[str, list[float]]) -> list[dict[str, Any]]:
    """Return each mask as COCO RLE with its area, box and scores.

    Args:
        masks: Masks of one image.
        scores: One score per mask, by name.

    Returns:
        One dictionary per mask; "box" is `xyxy` with inclusive ends.
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


def apply_exif_orientation(
    pixels: UInt8[np.ndarray, "H W C"], raw: bytes
) -> UInt8[np.ndarray, "h w C"]:
    """Rotate decoded pixels according to the file's EXIF orientation.

    Args:
        pixels: Pixels as stored; returned as they are unless they are RGB of a photograph's format.
        raw: The image file's bytes.
    """
    if pixels.shape[2] != 3 or image.keeps_its_bytes(raw):
        return pixels
    with Image.open(io.BytesIO(raw), formats=["JPEG", "PNG", "WEBP"]) as opened:
        orientation = opened.getexif().get(0x0112, 1)
    rotated = Image.fromarray(pixels)
    rotated.getexif()[0x0112] = orientation
    return np.array(ImageOps.exif_transpose(rotated))


def encode_jpeg(pixels: UInt8[np.ndarray, "H W 3"]) -> bytes:
    """Return RGB pixels as a JPEG without metadata."""
    return image.encode_jpeg(pixels, JPEG_QUALITY, "444")
