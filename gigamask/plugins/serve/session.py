"""Images opened in the page, and the model that segments them.

Each image is embedded once and cached (`serve.open_images`). As in training, prompts are predicted
one by one, each with the mask chosen for the one before, so that undoing a prompt means predicting
again without it.

Routes are in `app`, images of a dataset in `dataset_view`.
"""

import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from hashlib import blake2b

import cv2
import numpy as np
from jaxtyping import UInt8

from gigamask.data import image
from gigamask.data.orientation import turn_upright
from gigamask.errors import GigamaskError
from gigamask.inference.amg_config import AutomaticMaskConfig
from gigamask.inference.automatic_mask_generator import (
    MaskProposals,
    SamAutomaticMaskGenerator,
)
from gigamask.inference.classes import class_fields
from gigamask.inference.predictor import SamPredictor
from gigamask.inference.text_predictor import TextPredictor
from gigamask.masks.rle import RLEMasks
from gigamask.models.embedding_cache import EmbeddingCache
from gigamask.models.promptable import PromptableModel
from gigamask.pixels import PREVIEW_PERCENTILES, PixelConfig, to_rgb
from gigamask.plugins.serve.open_images import Json, OpenImage, OpenImages, masks_to_json
from gigamask.plugins.serve.prompt_batches import PromptBatches, PromptRequest, answer_together
from gigamask.plugins.serve.prompt_steps import PromptStep, check_steps

MAX_JPEG_SIDE = 65_500
"""Longest side of a JPEG, as which images are shown, in libjpeg-turbo."""
MAX_PIXELS = 2**25
"""Limit of an opened image, 33 megapixels: it is sent to the browser in full, and its masks are
resized to it."""
JPEG_QUALITY = 92


class StoppedError(GigamaskError):
    """Raised by what is being computed when it is asked to stop."""


class Session:
    """A segmenter, optionally a grounding model, and the opened images; thread-safe.

    One thread at a time embeds images, and one finds all masks or answers a text. Prompts on
    embedded images are answered meanwhile (`prompt_batches`), and images can be opened and shown,
    one at a time, since decoding a small file may take 100 MB and more.
    """

    def __init__(
        self,
        model: PromptableModel,
        text_model: TextPredictor | None = None,
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
        self._embed_lock, self._search_lock = threading.Lock(), threading.Lock()
        self._batches = PromptBatches()
        # Threads of their own would each keep the memory of their largest image.
        self._codec = ThreadPoolExecutor(1)
        self.stopping = threading.Event()

    def stop(self) -> None:
        """End what is being generated with an error, and wait for the threads of this session."""
        self.stopping.set()
        self._codec.shutdown(cancel_futures=True)
        self._batches.stop()

    def use_model(self, model: PromptableModel) -> None:
        """Segment with another model from now on; opened images are dropped."""
        with self._search_lock, self._embed_lock:
            self.model, self.images = model, OpenImages()

    def open(
        self,
        raw: bytes,
        name: str,
        masks: RLEMasks | None = None,
        halve: bool = False,
    ) -> Json:
        """Decode an image and return its id, name and size, and how it is shown, if not as stored.

        Args:
            raw: The image file's bytes.
            name: The file's name.
            masks: Its masks in a dataset, aligned with the pixels as stored; the EXIF orientation
                is applied only to images without masks.
            halve: Open an image above the limit at half its size, up to four times the limit.
        """
        name = name.encode("utf-8", "replace").decode()
        height, width = size = image.size(raw, name)
        half = halve and is_large(size)
        if is_large(half_of(size) if half else size):
            limit = MAX_PIXELS * (4 if halve else 1)
            raise GigamaskError(
                f"{name}: has {height} x {width} pixels, at most {limit:,} are accepted;"
                " scale it down first"
            )
        if max(size) > (1 + half) * MAX_JPEG_SIDE:
            raise GigamaskError(
                f"{name}: has {height} x {width} pixels, a side may have {MAX_JPEG_SIDE:,}; cut or "
                "scale it first"
            )
        key, opened = self._codec.submit(self._decode, raw, name, masks, half).result()
        height, width = opened.size
        count = None if masks is None else len(masks)
        return {
            "id": key,
            "name": name,
            "height": height,
            "width": width,
            "masks": count,
            "note": opened.note,
        }

    def jpeg(self, key: str) -> bytes:
        """Return an opened image as a JPEG."""
        return self._codec.submit(encode_jpeg, to_rgb(self.images.get(key).pixels)).result()

    def embed(self, key: str) -> Json:
        """Embed an image, and return the seconds it took and whether it was cached."""
        opened, start_s = self.images.get(key), time.perf_counter()
        with self._embed_lock:
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
        client: str | None = None,
    ) -> list[Json]:
        """Return the masks for a sequence of prompts, highest predicted IoU first.

        Args:
            key: Id of the image.
            steps: The prompts, in order.
            multimask_output: Whether to predict three masks; None means three for a single prompt
                and one for several, as in training.
            base: A mask that the prompts correct.
            best_only: Return only the mask with the highest predicted IoU.
            client: Who previews the masks: only the newest preview of a client is answered, after
                all that is no preview.

        Raises:
            SupersededError: The client asked for another preview meanwhile.
            GigamaskError: The prompts are invalid, or the image was dropped.
        """
        opened = self.images.get(key)
        check_steps(opened.size, steps)
        request = PromptRequest(opened, tuple(steps), multimask_output, base, client)
        if not opened.predictor.is_image_set:
            with self._embed_lock:
                _embed(opened)
        if opened.predictor.crop_decoders:  # which embed, too
            with self._embed_lock:
                answer_together([request])
            answer = request.future.result()
        else:
            answer = self._batches.answer(request)
        self.images.trim()
        predictor = opened.predictor
        transform, config = predictor.transform.image_transform(opened.size), predictor.model.config
        order = answer.iou.argsort(descending=True, stable=True).tolist()
        return [
            answer.show(number, config, transform) | {"number": number}
            for number in order[: 1 if best_only else None]
        ]

    def all_masks(self, key: str) -> list[Json]:
        """Return all masks that the model finds from a grid of points, with its scores (slow)."""
        opened = self.images.get(key)
        with self._search_lock:
            proposals = self._proposals(opened)
            classes = class_fields(proposals.class_scores, self.model.config.class_names)
        scores = {
            "predicted_iou": proposals.predicted_iou.tolist(),
            "stability": proposals.stability_score.tolist(),
        }
        return masks_to_json(proposals.masks, scores, classes)

    def find(self, key: str, text: str) -> Json:
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
        self.text_model.check(text)
        with self._search_lock:
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
        self, raw: bytes, name: str, masks: RLEMasks | None, half: bool
    ) -> tuple[str, OpenImage]:
        """Decode an image and cache it; return it with its id."""
        how = shown_pixels(self.model)
        stored = image.read_stored(raw, name, half=half, channels=how.channels)
        notes = [] if stored.dtype == np.uint8 else [f"{stored.dtype}, {how.description}"]
        if half:
            size = image.size(raw, name)
            stored = image.halve(stored, size)
            notes.append(f"half of {size[1]} x {size[0]} pixels")
        pixels = how.to_uint8(stored, name)
        if masks is None:
            pixels = turn_upright(pixels, raw)
        content = f"{pixels.shape} {masks is not None} {name if masks is not None else ''}\0"
        digest = blake2b(content.encode(), digest_size=12)
        digest.update(np.ascontiguousarray(pixels).data)
        key = digest.hexdigest()
        tile, halo = self._mask_settings.tile, self._mask_settings.halo
        if tile is None or max(pixels.shape) <= tile:
            tile = halo = None
        predictor = SamPredictor(self.model, cache=self._cache, tile=tile, halo=halo)
        opened = OpenImage(name, pixels, predictor, masks, "; ".join(notes))
        self.images.add(key, opened)
        return key, opened

    def _proposals(self, opened: OpenImage) -> MaskProposals:
        if opened.proposals is None:
            settings = vars(self._mask_settings)
            generator = SamAutomaticMaskGenerator(self.model, cache=self._cache, **settings)
            opened.proposals = generate_proposals(generator, opened, self.stopping)
        return opened.proposals


def generate_proposals(
    generator: SamAutomaticMaskGenerator, opened: OpenImage, *stops: threading.Event
) -> MaskProposals:
    """Return all masks of an image.

    Args:
        generator: Generates them.
        opened: The image; its `fraction` follows.
        *stops: The generation ends once one of these is set.

    Raises:
        StoppedError: It was ended.
    """

    def report(fraction: float) -> None:
        if any(each.is_set() for each in stops):
            raise StoppedError(f"{opened.name}: stopped before all of its masks were found")
        opened.fraction = fraction

    return generator.generate_proposals(opened.pixels, report)


def is_large(size: tuple[int, int]) -> bool:
    """Return whether an image of this (H, W) is above the limit."""
    return size[0] * size[1] > MAX_PIXELS


def half_of(size: tuple[int, int]) -> tuple[int, int]:
    """Return half of (H, W), rounded up."""
    return -(-size[0] // 2), -(-size[1] // 2)


def shown_pixels(model: PromptableModel) -> PixelConfig:
    """Return how images are read: through the model's window, or percentiles of each image."""
    stated = model.config.pixels
    return stated if stated.has_window else replace(stated, percentiles=PREVIEW_PERCENTILES)


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


def _embed(opened: OpenImage) -> None:
    """Embed an image unless it is."""
    if not opened.predictor.is_image_set:
        opened.predictor.set_image(opened.pixels)


def encode_jpeg(pixels: UInt8[np.ndarray, "H W 3"]) -> bytes:
    """Return RGB pixels as a JPEG without metadata."""
    return image.encode_jpeg(pixels, JPEG_QUALITY, "444")


def shrunk(pixels: UInt8[np.ndarray, "H W 3"], side: int) -> UInt8[np.ndarray, "h w 3"]:
    """Return RGB pixels of a small picture.

    Args:
        pixels: The image.
        side: Its longer side at most, in pixels.
    """
    scale = min(1.0, side / max(pixels.shape[:2]))
    size = [max(1, round(scale * each)) for each in pixels.shape[1::-1]]
    return cv2.resize(pixels, size, interpolation=cv2.INTER_AREA)
