"""`SamPredictor`: embed an image once, then predict masks for any number of prompts.

Methods, arguments and shapes are those of Segment Anything's class. In shapes, C is 3 with
`multimask_output` and 1 without; G, the side of low-resolution logits, is 256 at an input of 1024.
"""

import warnings
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from numbers import Integral
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, UInt8
from torch import Tensor

from gigamask.data.orientation import upright_pixels
from gigamask.distributed.precision import PrecisionName, prediction_autocast
from gigamask.errors import GigamaskError, check_choice
from gigamask.inference.amg_config import check_tiles
from gigamask.inference.classes import class_scores
from gigamask.inference.resize_longest_side import ResizeLongestSide
from gigamask.inference.tile_decoder import TileDecoder
from gigamask.inference.tiles import TileGrid
from gigamask.masks.devices import as_array, is_readable
from gigamask.masks.transforms import ImageTransform, masks_of_logits
from gigamask.models.embedding_cache import EmbeddingCache, ImageEmbedder
from gigamask.models.prompt_decoder import PromptDecoder, refined
from gigamask.models.prompt_encoder import check_finite, make_prompts
from gigamask.models.promptable import PromptableModel, require_model
from gigamask.pixels import PixelConfig

MASK_THRESHOLD = 0.0
"""Logits above this threshold are foreground, unless `Sam.mask_threshold` is another."""
IMAGE_FORMATS = ("RGB", "BGR")


class SamPredictor:
    """Predicts masks of an image from points, a box or a mask.

    `features`, `original_size`, `input_size` (both (H, W)) and `is_image_set` describe the image;
    a program may set them, as to an embedding of its own. Values of a `Tensor` are taken as they
    are of an array, wherever it is.
    `class_scores` `(B, C, n)` are the probabilities of the n classes of the last predicted masks;
    None if the model has no classes (`model.config.class_names`).

    Args:
        sam_model: Model that embeds images and predicts masks.
        cache: Cache of embeddings on disk, keyed by weights and pixels and shared by processes;
            None embeds every image.
        tile: Side in pixels of the tiles of larger images: only those that prompts touch are
            embedded, and each prompt is answered in its own (`inference.tile_decoder`). None:
            images are embedded as a whole.
        halo: Overlap of neighboring tiles in pixels; None: an eighth of a tile.
        precision: Number format of the model: fp32, bf16, fp16, or auto for the caller's autocast
            if there is one, otherwise bf16 on a GPU and fp32 on a CPU.

    Raises:
        GigamaskError: The tiles are too small for the halo.
    """

    def __init__(
        self,
        sam_model: PromptableModel,
        *,
        cache: EmbeddingCache | None = None,
        tile: int | None = None,
        halo: int | None = None,
        precision: PrecisionName = "auto",
    ) -> None:
        require_model(sam_model)
        self._cache, self.precision = cache, precision
        self._tile, self._halo = tile, check_tiles(tile, halo)
        self.model = sam_model
        self.reset_image()

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name == "model":  # a program may set another
            self.transform = ResizeLongestSide(value.config.image_size, value.config.stretch)
            self._embedder = ImageEmbedder(value, self._cache)

    @property
    def device(self) -> torch.device:
        """Device of the model."""
        return self.model.device

    def autocast(self) -> AbstractContextManager:
        """Return the context in which the model runs."""
        return prediction_autocast(self.precision, self.device)

    def reset_image(self) -> None:
        """Discard all images."""
        self._images: list[tuple[Tensor | None, ImageTransform]] = []
        self.crop_decoders: list[TileDecoder] = []
        self.is_image_set = False
        self.features: Tensor | None = None
        self.class_scores: Tensor | None = None
        self._selected = 0
        self.original_size: tuple[int, int] | None = None
        self.input_size: tuple[int, int] | None = None

    def set_image(self, image: np.ndarray | Tensor | str | Path, image_format: str = "RGB") -> None:
        """Embed an image, to which later prompts refer.

        Args:
            image: `(H, W, 3)` pixels in uint8, or `(H, W)` if they are gray; `(H, W, C)` for a
                model of C channels. Numbers of other types need the model's window
                (`Sam.set_window`). The path of an image file is read upright, as EXIF says.
            image_format: Order of the channels of pixels, "RGB" or "BGR".

        Raises:
            GigamaskError: The image has another shape or type, or the format is unknown.
        """
        self.set_images([image], image_format)

    def set_images(
        self, images: Sequence[np.ndarray | Tensor | str | Path], image_format: str = "RGB"
    ) -> None:
        """Embed images of any sizes in one pass of the encoder, and select the first.

        Args:
            images: Pixels or paths as for `set_image`, at least one image.
            image_format: Order of the channels of pixels, "RGB" or "BGR".

        Raises:
            GigamaskError: An image has another shape or type or cannot be read, or the format is
                unknown.
        """
        check_choice("image_format", image_format, IMAGE_FORMATS)
        shape = getattr(images, "shape", ())
        if isinstance(images, str | Path) or (len(shape) == 3 and shape[-1] <= 4):
            raise GigamaskError("images is one image: pass a list of images, or call set_image")
        if not len(images):
            raise GigamaskError("no image to embed: pass at least one")
        self.reset_image()  # should one be refused, prompts do not refer to the image before
        pixels = []
        for number, image in enumerate(images):
            seen = pixels_of(image, f"image {number}", self.model.config.pixels)
            given = "RGB" if isinstance(image, str | Path) else image_format
            pixels.append(seen if given == self.model.image_format else seen[..., ::-1])
        transforms = [self.transform.image_transform(each.shape[:2]) for each in pixels]
        if self._tile:
            self._images = [(None, transform) for transform in transforms]
            self.crop_decoders = [
                TileDecoder(
                    self._embedder,
                    image.copy(),
                    transform,
                    TileGrid(transform.original, self._tile, self._halo),
                )
                for image, transform in zip(pixels, transforms, strict=True)
            ]
            self.select(0)
            return
        small = map(self.transform.apply_image, pixels)
        resized = [torch.from_numpy(each).permute(2, 0, 1)[None] for each in small]
        _embed(self, resized, transforms)

    def set_torch_image(
        self, transformed_image: Tensor, original_image_size: tuple[int, int]
    ) -> None:
        """Embed an already resized image, to which later prompts refer.

        Args:
            transformed_image: `(1, 3, h, w)` pixels in 0..255, uint8 or float, whose long side is
                the model's image size; as many channels as the model reads.
            original_image_size: Height and width before resizing.

        Raises:
            GigamaskError: The image has another shape, or the predictor has tiles.
        """
        if self._tile:
            raise GigamaskError(
                "tile crops the image before it is resized: call set_image instead of "
                "set_torch_image, or make the predictor without tile"
            )
        transformed_image = torch.as_tensor(transformed_image)
        side, shape = self.model.config.image_size, tuple(transformed_image.shape)
        channels = self.model.config.in_channels
        if len(shape) != 4 or shape[:2] != (1, channels) or max(shape[2:]) != side:
            raise GigamaskError(
                f"transformed_image must be 1 x {channels} x h x w with the long side {side}, as "
                f"transform.apply_image returns it (got {' x '.join(map(str, shape))})"
            )
        original = tuple(original_image_size)
        if len(original) != 2 or min(original) < 1:
            raise GigamaskError(f"original_image_size must be height and width (got {original})")
        check_finite(transformed_image=transformed_image)
        whole = self.transform.image_transform(original)
        _embed(self, [transformed_image], [replace(whole, resized=shape[2:])])

    def select(self, number: int) -> None:
        """Select image `number` (from 0) of the last `set_images` call for later prompts."""
        if not 0 <= number < len(self._images):
            raise GigamaskError(
                f"cannot select image {number}, {len(self._images)} images are set: "
                "call set_images first, and count from 0"
            )
        self._selected = number
        self.features, transform = self._images[number]
        self.original_size, self.input_size = transform.original, transform.resized
        self.is_image_set = True

    def predict(
        self,
        point_coords: np.ndarray | Tensor | None = None,
        point_labels: np.ndarray | Tensor | None = None,
        box: np.ndarray | Tensor | None = None,
        mask_input: np.ndarray | Tensor | None = None,
        multimask_output: bool = True,
        return_logits: bool = False,
        *,
        refine: int = 0,
    ) -> tuple[
        Bool[np.ndarray, "C H W"] | Float[np.ndarray, "C H W"],
        Float[np.ndarray, "C"],
        Float[np.ndarray, "C G G"],
    ]:
        """Predict masks for one prompt on the image.

        Args:
            point_coords: `(N, 2)` x and y in pixels of the original image, counted from 0.
            point_labels: `(N,)`; 1 foreground, 0 background.
            box: `(4,)` x0, y0, x1, y1: first and last pixels of the original image.
            mask_input: `(1, G, G)` low-resolution logits of an earlier prediction.
            multimask_output: Whether to predict three masks instead of one.
            return_logits: Whether to return masks as logits instead of bools.
            refine: How often each mask is passed back with its prompt, and replaced by the single
                mask that is predicted for both, if its predicted IoU is higher; masks for clicks
                alone become the mean of both.

        Returns:
            Masks at the size of the original image, their predicted IoU, and low-resolution logits
            that can be passed as `mask_input`; of clicks alone, those before they are refined, from
            which further clicks go on better.

        Raises:
            GigamaskError: No image is set, or a prompt has a wrong shape or label.
        """
        size = _transform_of(self).original
        points = labels = boxes = mask_logits = None
        if point_coords is not None:
            coords = as_array(point_coords)
            if coords.shape[-1:] == (2,):  # `make_prompts` refuses others
                coords = self.transform.apply_coords(coords, size)
            points = torch.from_numpy(coords)[None].float()
        if point_labels is not None:
            labels = torch.from_numpy(as_array(point_labels).astype(np.float64))[None]
        if box is not None:
            boxes = torch.from_numpy(self.transform.apply_boxes(_one_box(box), size)).float()
        if mask_input is not None:
            mask_logits = torch.from_numpy(as_array(mask_input).astype(np.float32))[None]
        masks, iou, low = self.predict_torch(
            points, labels, boxes, mask_logits, multimask_output, return_logits, refine=refine
        )
        return masks[0].cpu().numpy(), iou[0].float().cpu().numpy(), low[0].float().cpu().numpy()

    @torch.no_grad()
    def predict_torch(
        self,
        point_coords: Tensor | None,
        point_labels: Tensor | None,
        boxes: Tensor | None = None,
        mask_input: Tensor | None = None,
        multimask_output: bool = True,
        return_logits: bool = False,
        *,
        refine: int = 0,
    ) -> tuple[
        Bool[Tensor, "B C H W"] | Float[Tensor, "B C H W"],
        Float[Tensor, "B C"],
        Float[Tensor, "B C G G"],
    ]:
        """Predict masks for B prompts on the image.

        Coordinates are in pixels of the model's input, as `transform.apply_coords_torch` and
        `transform.apply_boxes_torch` return them.

        Args:
            point_coords: `(B, N, 2)` x and y.
            point_labels: `(B, N)`; 1 foreground, 0 background, -1 no point.
            boxes: `(B, 4)` x0, y0, x1, y1.
            mask_input: `(B, 1, G, G)` low-resolution logits, or one for all prompts.
            multimask_output: Whether to predict three masks per prompt instead of one.
            return_logits: Whether to return masks as logits instead of bools.
            refine: As for `predict`.

        Returns:
            Masks at the size of the original image, their predicted IoU, and low-resolution logits.

        Raises:
            GigamaskError: No image is set, or a prompt has a wrong shape or label.
        """
        if not isinstance(refine, Integral) or refine < 0:
            raise GigamaskError(f"refine must be a number of times, 0 or more (got {refine!r})")
        transform = _transform_of(self)
        prompts = make_prompts(
            point_coords,
            point_labels,
            boxes,
            mask_input,
            multimask_output,
            self.model.config.mask_size,
        )
        by_boxes = False
        if self.crop_decoders:
            decoder = self.crop_decoders[self._selected]
        else:
            embedding = _embedding_of(self)
            by_boxes = is_readable(embedding) and not return_logits
            resize = None if by_boxes else transform.logits_to_original
            decoder = PromptDecoder(self.model, embedding, resize=resize)
        with self.autocast():
            prediction = refined(decoder, prompts, decoder(prompts), refine)
        if prediction.class_logits is not None:
            self.class_scores = class_scores(prediction.class_logits)
        masks, threshold = prediction.logits, self.model.mask_threshold
        if by_boxes:
            masks = masks_of_logits(transform, masks.flatten(0, 1), threshold)
            masks = masks.unflatten(0, prediction.iou_predictions.shape)
        elif not return_logits:
            masks = masks > threshold
        # Not in autocast's half precision, which NumPy may lack.
        iou, low = (
            each.to(torch.promote_types(each.dtype, torch.float32))
            for each in (prediction.iou_predictions, prediction.low_res_logits)
        )
        return masks, iou, low

    def get_image_embedding(self) -> Float[Tensor, "1 C E E"]:
        """Return the embedding of the image.

        Raises:
            GigamaskError: No image is set.
        """
        _transform_of(self)
        if self.crop_decoders:
            with self.autocast():
                return self.crop_decoders[self._selected].embed_whole()
        return _embedding_of(self).contiguous()  # as programs send it to others


class NoImageError(GigamaskError, RuntimeError):
    """No image is set; Meta's class raises a RuntimeError."""


def pixels_of(
    image: np.ndarray | Tensor | str | Path, name: str, pixels: PixelConfig
) -> UInt8[np.ndarray, "H W C"]:
    """Return an image as a model sees it.

    Args:
        image: Pixels, or the path of an image file, which is read upright.
        name: Name of pixels for error messages.
        pixels: Channels and window of the model.
    """
    given = as_array(image) if isinstance(image, Tensor) else image
    return upright_pixels(given, name, pixels)


def _one_box(box: np.ndarray | Tensor) -> np.ndarray:
    """Return a box as an array; raise `GigamaskError` unless it is one, and warn if it is reversed
    or of fractions.

    Args:
        box: The box of a prompt.
    """
    corners = as_array(box)
    if corners.shape not in ((4,), (1, 4)):
        shape = " x ".join(map(str, corners.shape))
        raise GigamaskError(
            f"box must be one box of 4 numbers, x0 y0 x1 y1 (got {shape}); predict_torch takes "
            "several as `boxes`"
        )
    x0, y0, x1, y1 = corners.ravel().tolist()
    if x1 < x0 or y1 < y0 or 0 < max(x1, y1) < 1:
        warnings.warn(
            "box must be x0 y0 x1 y1 in pixels, not fractions of the image's size, with x0 <= x1 "
            f"and y0 <= y1 (got {x0:g} {y0:g} {x1:g} {y1:g}); of x, y, width and height, pass x, "
            "y, x + width - 1, y + height - 1",
            stacklevel=3,
        )
    return corners


def _transform_of(predictor: SamPredictor) -> ImageTransform:
    """Return the transform of the image.

    Raises:
        GigamaskError: No image is set.
    """
    if not predictor.is_image_set or predictor.original_size is None:
        raise NoImageError("no image is set: call set_image first")
    whole = predictor.transform.image_transform(predictor.original_size)
    if predictor.input_size is None:
        return whole
    height, width = map(int, predictor.input_size)
    return replace(whole, resized=(height, width))


def _embedding_of(predictor: SamPredictor) -> Float[Tensor, "1 C E E"]:
    """Return the embedding of the image, on the device of the model, which may have moved."""
    assert predictor.features is not None
    return predictor.features.to(predictor.device)


def _embed(
    predictor: SamPredictor, resized: Sequence[Tensor], transforms: Sequence[ImageTransform]
) -> None:
    """Embed resized images and select the first."""
    predictor.reset_image()
    with predictor.autocast():
        embeddings = predictor._embedder.embed(resized)
    predictor._images = list(zip(embeddings, transforms, strict=True))
    predictor.select(0)
