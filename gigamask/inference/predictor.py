"""The predictor: an image is embedded once, then answers as many prompts as one likes. Methods, arguments and shapes are those of `SamPredictor`.

Enters: images `(H, W, 3)` in uint8, prompts in original pixels. Leaves: masks at the image's own size, predicted IoU, low-resolution logits.
C is 3 where several masks are asked for, else 1; G, the side of low-resolution logits, is 256 for a model of 1024 px.

Not here: conventions of pixels and coordinates, and where training's differ (`predict.transform`), grids of points (`predict.automatic`),
embeddings kept on disk (`predict.cache`).
"""

from collections.abc import Sequence

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from gigamask.errors import GigamaskError
from gigamask.inference.embedding import ImageEmbedder
from gigamask.inference.embedding_cache import EmbeddingCache
from gigamask.inference.resize_longest_side import ResizeLongestSide
from gigamask.masks.transforms import ImageTransform
from gigamask.models.sam.decoding import PromptDecoder
from gigamask.models.sam.prompts import make_prompts
from gigamask.models.sam.sam import Sam

MASK_THRESHOLD = 0.0
"""Of logits: above it is foreground."""
FORMATS = ("RGB", "BGR")


class SamPredictor:
    """Embeds images and answers prompts about one of them. `features`, `original_size`, `input_size` (both (H, W)) and `is_image_set` are that one's.

    With a `cache`, what was embedded before with the same weights, by whichever process, is not embedded again.
    """

    def __init__(self, model: Sam, cache: EmbeddingCache | None = None) -> None:
        self.model = model
        self.transform = ResizeLongestSide(model.spec.image_size)
        self._embedder = ImageEmbedder(model, cache)
        self.reset_image()

    @property
    def device(self) -> torch.device:
        """Where the model is."""
        return self.model.pixel_mean.device

    def reset_image(self) -> None:
        """Forgets all images."""
        self._images: list[tuple[Tensor, ImageTransform]] = []
        self.is_image_set = False
        self.features: Tensor | None = None
        self._selected = 0
        self.original_size: tuple[int, int] | None = None
        self.input_size: tuple[int, int] | None = None

    def set_image(self, image: np.ndarray, image_format: str = "RGB") -> None:
        """Embeds one image; raises Fault where it is not `(H, W, 3)` in uint8, or its format none of `FORMATS`."""
        self.set_images([image], image_format)

    def set_images(self, images: Sequence[np.ndarray], image_format: str = "RGB") -> None:
        """Embeds images of any sizes in one pass of the encoder; prompts are about the first of them until another is selected."""
        if image_format not in FORMATS:
            raise GigamaskError(
                f"image_format is {image_format!r}, known are {', '.join(FORMATS)}; give one of them"
            )
        if not len(images):
            raise GigamaskError("no image was given; give one at least")
        resized = []
        for number, image in enumerate(images):
            if image.ndim != 3 or image.shape[2] != 3 or image.dtype != np.uint8 or not image.size:
                stated = f"{' x '.join(map(str, image.shape))} {image.dtype}"
                raise GigamaskError(
                    f"image {number} is {stated}; give height x width x 3 in uint8, as of PIL's convert('RGB')"
                )
            pixels = self.transform.apply_image(
                image if image_format == "RGB" else image[..., ::-1]
            )
            resized.append(torch.from_numpy(pixels).permute(2, 0, 1)[None])
        self._show(
            resized, [self.transform.frame((image.shape[0], image.shape[1])) for image in images]
        )

    def set_torch_image(
        self, transformed_image: Tensor, original_image_size: tuple[int, int]
    ) -> None:
        """Embeds an image `(1, 3, h, w)` in 0..255, uint8 or float, that was resized already from `original_image_size` (H, W).

        Raises Fault where its long side is not the model's.
        """
        side, shape = self.model.spec.image_size, tuple(transformed_image.shape)
        if len(shape) != 4 or shape[:2] != (1, 3) or max(shape[2:]) != side:
            stated = " x ".join(map(str, shape))
            raise GigamaskError(
                f"the image is {stated}; give 1 x 3 x h x w whose long side is {side}, as 'transform.apply_image' makes it"
            )
        height, width = map(int, original_image_size)
        self._show(
            [transformed_image],
            [ImageTransform((height, width), (0, 0, height, width), (shape[2], shape[3]), side)],
        )

    def select(self, number: int) -> None:
        """Makes prompts be about image `number` of those last set, counted from 0."""
        if not 0 <= number < len(self._images):
            raise GigamaskError(
                f"image {number} was selected and {len(self._images)} are set; set images first, then select by a number from 0 on"
            )
        self._selected = number
        self.features, frame = self._images[number]
        self.original_size, self.input_size, self.is_image_set = frame.original, frame.resized, True

    def _show(self, resized: Sequence[Tensor], frames: Sequence[ImageTransform]) -> None:
        """Embeds resized images and selects the first."""
        self.reset_image()
        self._images = list(zip(self._embedder.embed(resized), frames, strict=True))
        self.select(0)

    def predict(
        self,
        point_coords: np.ndarray | None = None,
        point_labels: np.ndarray | None = None,
        box: np.ndarray | None = None,
        mask_input: np.ndarray | None = None,
        multimask_output: bool = True,
        return_logits: bool = False,
    ) -> tuple[
        Bool[np.ndarray, "C H W"] | Float[np.ndarray, "C H W"],
        Float[np.ndarray, "C"],
        Float[np.ndarray, "C G G"],
    ]:
        """Returns masks at the image's size, their scores (predicted IoU), and low-resolution logits that a later question may be fed.

        `point_coords` `(N, 2)` are `xy` in original pixels, `point_labels` `(N,)` 1 for foreground and 0 for background, `box` `(4,)` is `xyxy`,
        `mask_input` `(1, G, G)` logits of an earlier answer. With `return_logits` masks are logits, else these above 0.
        Raises Fault where no image is set, or prompts have other shapes.
        """
        self.get_image_embedding()
        size = self._images[self._selected][1].original
        points = (
            None
            if point_coords is None
            else torch.as_tensor(self.transform.apply_coords(np.asarray(point_coords), size))[
                None
            ].float()
        )
        labels = None if point_labels is None else torch.as_tensor(np.asarray(point_labels))[None]
        boxes = (
            None
            if box is None
            else torch.as_tensor(self.transform.apply_boxes(np.asarray(box), size)).float()
        )
        masks = (
            None if mask_input is None else torch.as_tensor(np.asarray(mask_input))[None].float()
        )
        found, iou, low = self.predict_torch(
            points, labels, boxes, masks, multimask_output, return_logits
        )
        return found[0].cpu().numpy(), iou[0].float().cpu().numpy(), low[0].float().cpu().numpy()

    @torch.no_grad()
    def predict_torch(
        self,
        point_coords: Tensor | None,
        point_labels: Tensor | None,
        boxes: Tensor | None = None,
        mask_input: Tensor | None = None,
        multimask_output: bool = True,
        return_logits: bool = False,
    ) -> tuple[
        Bool[Tensor, "B C H W"] | Float[Tensor, "B C H W"],
        Float[Tensor, "B C"],
        Float[Tensor, "B C G G"],
    ]:
        """Returns what `predict` does for B prompts at once, given in input pixels, as `transform.apply_coords_torch` and its like make them.

        `point_coords` `(B, N, 2)`, `point_labels` `(B, N)` where -1 is no point, `boxes` `(B, 4)`, `mask_input` `(B, 1, G, G)` or one for all.
        """
        features, (_, frame) = self.get_image_embedding(), self._images[self._selected]
        prompts = make_prompts(
            point_coords,
            point_labels,
            boxes,
            mask_input,
            multimask_output,
            self.model.spec.mask_size,
        )
        found = PromptDecoder(self.model, features, resize=frame.logits_to_original)(prompts)
        masks = found.logits if return_logits else found.logits > MASK_THRESHOLD
        return masks, found.iou_predictions, found.low_res_logits

    def get_image_embedding(self) -> Float[Tensor, "1 C E E"]:
        """Returns the selected image's embedding; raises Fault where none is set."""
        if self.features is None:
            raise GigamaskError(
                "no image is set, so there is nothing to ask about; call set_image first"
            )
        return self.features
