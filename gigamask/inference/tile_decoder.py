"""`TileDecoder`: answers each prompt in the tile of a large image in which it lies.

Only tiles that prompts touch are embedded. If a mask reaches the border of its tile, the prompt is
answered again in a tile around the mask, and, if that cuts it, too, in larger and larger crops, up
to the whole image.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b

import numpy as np
import torch
from jaxtyping import Float, Float64, UInt8
from torch import Tensor

from gigamask.inference.crops import (
    CROP_FACTOR,
    crop_around,
    crop_of,
    extents_of_masks,
    pasted_answer,
    prompted_regions,
    prompts_in_crops,
)
from gigamask.inference.tiles import TileGrid
from gigamask.masks.transforms import ImageTransform
from gigamask.models.embedding_cache import ImageEmbedder
from gigamask.models.prompt_decoder import PromptDecoder
from gigamask.types import Prediction, Prompts

CROPS_AT_ONCE = 4
"""Crops per pass of the encoder."""
CACHE_BYTES = 2**29
"""Bytes of the embeddings of crops that are kept for later rounds."""
ANSWERS_KEPT = 256
"""Low-resolution logits that are remembered on the grids of their tiles, or those of one call."""


@dataclass(frozen=True, eq=False)
class TileDecoder:
    """Decoder of prompts for one large image, tile by tile.

    Low-resolution logits that it has returned, passed as mask prompts, are used at the resolution
    of the tile that they come from; on the grid of a large image, small objects have no cell.

    Args:
        embedder: Embeds tiles.
        pixels: The image.
        transform: Transform of the whole image.
        grid: The tiles.
        best_only: Whether to keep only the mask with the highest predicted IoU.
        embeddings: Where the embeddings of crops are kept, which decoders of an image may share.
    """

    embedder: ImageEmbedder
    pixels: UInt8[np.ndarray, "H W N"]
    transform: ImageTransform
    grid: TileGrid
    best_only: bool = False
    embeddings: dict[ImageTransform, Tensor] = field(default_factory=dict, repr=False)
    _answers: dict[bytes, tuple[ImageTransform, Tensor]] = field(
        default_factory=dict, init=False, repr=False
    )

    @torch.no_grad()
    def __call__(self, prompts: Prompts) -> Prediction:
        """Return logits at the original size, predicted IoU and low-resolution logits per prompt.

        Args:
            prompts: Prompts for the whole image.
        """
        if not len(prompts.labels):
            whole, only = self.embed_whole(), self.best_only
            none = PromptDecoder(self.embedder.model, whole, best_only=only)(prompts)
            low = none.low_res_logits
            return replace(none, logits=low.new_zeros(*low.shape[:2], *self.transform.original))
        prompts = prompts.to(prompts.labels.device)
        prompts, sources = self._recall(prompts)
        regions = prompted_regions(prompts, self.transform, sources)
        crops = {
            row: self._first_crop(region, source)
            for row, (region, source) in enumerate(zip(regions, sources, strict=True))
        }
        answers: dict[int, Prediction] = {}
        pending, is_first = crops, True
        while pending:
            answers |= self._answer(prompts, pending, sources)
            crops = crops | pending
            pending = {
                row: larger
                for row, crop in pending.items()
                if (larger := self._larger_crop(answers[row], crop, regions[row], is_first))
                is not None
            }
            is_first = False
        parts = [answers[row] for row in crops]
        low, iou = (
            torch.cat([getattr(part, name) for part in parts])
            for name in ("low_res_logits", "iou_predictions")
        )
        classes = [part.class_logits for part in parts if part.class_logits is not None]
        per_row = list(crops.values())
        together = Prediction(low, iou, low, None, torch.cat(classes) if classes else None)
        answer = pasted_answer(together, per_row, self.transform)
        self._remember(answer.low_res_logits, low, per_row)
        return answer

    @property
    def nbytes(self) -> int:
        """Bytes of the embeddings of crops."""
        return sum(embedding.nbytes for embedding in list(self.embeddings.values()))

    def embed_whole(self) -> Float[Tensor, "1 C E E"]:
        """Return the embedding of the whole image."""
        return self.embed([self.transform])

    def embed(self, crops: Sequence[ImageTransform]) -> Float[Tensor, "B C E E"]:
        """Return the embeddings of crops, and keep the last ones used."""
        cached = self.embeddings
        found = {crop: cached.pop(crop) for crop in crops if crop in cached}
        missing = [crop for crop in crops if crop not in found]
        if missing:
            pixels = [crop.apply_image(self.pixels)[None] for crop in missing]
            found.update(zip(missing, self.embedder.embed(pixels), strict=True))
        cached.update(found)
        most = max(CACHE_BYTES // (next(iter(cached.values())).nbytes or 1), 1)
        for crop in list(cached)[:-most]:
            del cached[crop]
        return torch.cat([found[crop] for crop in crops])

    def _first_crop(
        self, region: Float64[np.ndarray, "4"], source: ImageTransform
    ) -> ImageTransform:
        """Return the crop in which to answer a prompt.

        Args:
            region: What is prompted, x0 y0 x1 y1; NaN if nothing is.
            source: The image or crop that its mask prompt is a mask of.
        """
        if not np.isfinite(region).all():
            return self.transform
        if source != self.transform and _contains(source, region):
            return source
        tile = crop_of(self.grid.nearest(region), self.transform)
        margin = (CROP_FACTOR - 1) / 2 * (region[2:] - region[:2]).max()
        height, width = self.transform.original
        wide = (region + margin * np.array([-1, -1, 1, 1])).clip(0, (width, height, width, height))
        return (
            tile if _contains(tile, wide) else crop_around(region, self.transform, self.grid.tile)
        )

    def _larger_crop(
        self,
        answer: Prediction,
        crop: ImageTransform,
        region: Float64[np.ndarray, "4"],
        is_first: bool,
    ) -> ImageTransform | None:
        """Return the crop in which to answer again; None if the best mask is not cut.

        Args:
            answer: Answer to one prompt.
            crop: Its crop.
            region: What was prompted.
            is_first: Whether the crop is the first, so that one of the same side may suffice.
        """
        low = answer.low_res_logits[0]
        best = low[int(answer.iou_predictions[0].argmax())] > 0
        extent = extents_of_masks(best[None], crop)[0]
        if not np.isfinite(extent).all():
            return None
        cell = crop.image_size / low.shape[-1] / min(crop.scale_xy)
        (y0, x0, y1, x1), (height, width) = crop.crop, crop.original
        gaps = np.abs(extent - [x0, y0, x1, y1])
        if not ((gaps <= cell) & (np.array([x0, y0, x1, y1]) != [0, 0, width, height])).any():
            return None
        around = np.where(
            [True, True, False, False], np.fmin(extent, region), np.fmax(extent, region)
        )
        side = max(crop.crop_size)
        shifted = crop_around(around, self.transform, side)
        if is_first and CROP_FACTOR * (around[2:] - around[:2]).max() <= side and shifted != crop:
            return shifted
        return crop_around(around, self.transform, 2 * side)

    def _answer(
        self, prompts: Prompts, crops: dict[int, ImageTransform], sources: Sequence[ImageTransform]
    ) -> dict[int, Prediction]:
        """Return the answers to some prompts on the grids of their crops.

        Args:
            prompts: Prompts for the whole image.
            crops: Crop of each prompt to answer.
            sources: The image or crop that each mask prompt is a mask of.
        """
        distinct, answers = list(dict.fromkeys(crops.values())), {}
        for start in range(0, len(distinct), CROPS_AT_ONCE):
            some = distinct[start : start + CROPS_AT_ONCE]
            rows = sorted(
                (row for row, crop in crops.items() if crop in some),
                key=lambda row: some.index(crops[row]),
            )
            per_row = [crops[row] for row in rows]
            embedding = self.embed(some)
            places = torch.tensor([some.index(crop) for crop in per_row], device=embedding.device)
            decode = PromptDecoder(self.embedder.model, embedding, places, best_only=self.best_only)
            answer = decode(prompts_in_crops(prompts, rows, per_row, self.transform, sources))
            for index, row in enumerate(rows):
                own, classes = slice(index, index + 1), answer.class_logits
                low = answer.low_res_logits[own]
                classes = None if classes is None else classes[own]
                answers[row] = Prediction(low, answer.iou_predictions[own], low, None, classes)
        return answers

    def _recall(self, prompts: Prompts) -> tuple[Prompts, list[ImageTransform]]:
        """Return prompts with the mask prompts' own logits, and what each is a mask of."""
        sources = [self.transform] * len(prompts.labels)
        if prompts.masks is None:
            return prompts, sources
        masks = list(prompts.masks)
        for row, mask in enumerate(masks):
            found = self._answers.get(_digest(mask))
            if found is not None:
                sources[row], masks[row] = found[0], found[1].to(mask)
        return replace(prompts, masks=torch.stack(masks)), sources

    def _remember(
        self,
        pasted: Float[Tensor, "R K G G"],
        low: Float[Tensor, "R K G G"],
        crops: Sequence[ImageTransform],
    ) -> None:
        """Keep logits on the grids of their crops by what they are on that of the image."""
        new: dict[bytes, tuple[ImageTransform, Tensor]] = {}
        for crop, shown, own in zip(crops, pasted, low, strict=True):
            if crop != self.transform:
                new |= {_digest(each): (crop, map_) for each, map_ in zip(shown, own, strict=True)}
        excess = len(self._answers) + len(new) - ANSWERS_KEPT
        for key in list(self._answers)[: max(excess, 0)]:
            del self._answers[key]
        self._answers.update(new)


def _contains(crop: ImageTransform, region: Float64[np.ndarray, "4"]) -> bool:
    y0, x0, y1, x1 = crop.crop
    return bool((region[:2] >= [x0, y0]).all() and (region[2:] <= [x1, y1]).all())


def _digest(logits: Float[Tensor, "G G"]) -> bytes:
    return blake2b(logits.float().cpu().contiguous().numpy().data, digest_size=16).digest()
