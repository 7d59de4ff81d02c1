"""What a relevance network knows of an image's masks, worked out once: images and masks enter, a row of numbers for each mask leaves.

A row holds, in the order of `model.sizes.RelevanceSpec.parts`: the mean of the frozen segmenter's embedding under the mask, each cell counted by the
share that the mask covers of it; mean and deviation of the colours under it; where it lies; the mask itself, stretched from its box to a small
square. Rows are kept in memory and, where a folder is given, on disk, so that the encoder sees an image once, whatever is asked of it and how often.

Not here: which masks a query is asked about (`grounding.questions`), embeddings as such (`predict.embedding`).
"""

from collections import OrderedDict
from collections.abc import Sequence
from hashlib import blake2b

import numpy as np
import torch
from jaxtyping import Float, Float32, UInt8
from torch import Tensor
from torch.nn import functional

from gigamask.data import annotation, image
from gigamask.data.index import Index
from gigamask.data.shards import Shards
from gigamask.faults import BadSample, Fault
from gigamask.geometry.frame import Frame
from gigamask.geometry.runs import Runs
from gigamask.model.sam import Sam
from gigamask.model.sizes import RelevanceSpec
from gigamask.predict.cache import EmbeddingCache
from gigamask.predict.embedding import Embedder

COLOUR_SIDE = 128
"""Side of the grid that colours are taken on, or the input's where that is smaller."""
HELD_BYTES = 2**30
"""Rows in memory; those of 100 masks and a 256-channel embedding have 0.2 MB."""


class Gallery:
    """Describes the masks of images for one segmenter, by `width` numbers each. `encoded` counts the images that went through its encoder."""

    def __init__(self, model: Sam, spec: RelevanceSpec, cache: EmbeddingCache | None = None, held_bytes: int = HELD_BYTES) -> None:
        if model.spec.embedding_dim != spec.embedding_dim:
            there = model.spec.embedding_dim
            raise Fault(f"the segmenter's embedding has {there} channels, --model.embedding-dim is {spec.embedding_dim}; give {there}")
        self.model, self.spec, self.encoded, self.width = model, spec, 0, sum(spec.parts)
        self._embedder, self._cache, self._room = Embedder(model, None), cache, held_bytes
        self._held: OrderedDict[str, Float[Tensor, "n F"]] = OrderedDict()

    def describe(self, pixels: UInt8[np.ndarray, "H W 3"], masks: Runs) -> Float[Tensor, "n F"]:
        """Returns what is known of an image's masks, on the CPU."""
        frame = Frame.whole(masks.size, self.model.spec.input_side)
        resized = frame.image(pixels)
        [embedding] = self._embedder.embed([resized[None]])
        self.encoded += 1
        look = pooled(embedding[0].float().cpu(), torch.from_numpy(frame.soft_masks(masks, embedding.shape[-1])))
        place, outline = torch.from_numpy(places(masks)), torch.from_numpy(outlines(masks, self.spec.crop_side))
        return torch.cat([look, colours(resized, masks, frame), place, outline.flatten(1)], 1)

    def rows(self, index: Index, shards: Shards, rows: Sequence[int]) -> list[Float[Tensor, "n F"] | BadSample]:
        """Returns what is known of the masks of some images of an index, in their jsons' order, or why an image cannot be read."""
        return [self._row(index, shards, row) for row in rows]

    def _row(self, index: Index, shards: Shards, row: int) -> Float[Tensor, "n F"] | BadSample:
        name = index.entry_name(row)
        if name in self._held:
            self._held.move_to_end(name)
            return self._held[name]
        try:
            found = self._read(index, shards, row, name)
        except BadSample as bad:
            return bad
        self._held[name] = found
        self._room -= found.nbytes
        while self._room < 0 and len(self._held) > 1:
            self._room += self._held.popitem(last=False)[1].nbytes
        return found

    def _read(self, index: Index, shards: Shards, row: int, name: str) -> Float[Tensor, "n F"]:
        jpg, json = shards.read_entry(index, row)
        if json is None:
            raise BadSample(f"{name}: it has no json, a query needs masks to choose from; leave its queries out")
        key = self._key(jpg, json) if self._cache else ""
        if self._cache and (kept := self._cache.get(key)) is not None:
            return kept
        entry = annotation.parse(json, name)
        found = self.describe(image.decode(jpg, name, entry.size), entry.masks)
        if self._cache:
            self._cache.put(key, found)
        return found

    def _key(self, jpg: bytes, json: bytes) -> str:
        told = blake2b(f"{self._embedder.weights()} {self.spec.parts}\0{len(jpg)}\0".encode(), digest_size=16)
        told.update(jpg)
        told.update(json)
        return told.hexdigest()


def pooled(image: Float[Tensor, "C h w"], shares: Float[Tensor, "n h w"]) -> Float[Tensor, "n C"]:
    """Returns the mean of an image's channels under each mask, cells counted by the share of them that it covers; 0 under a mask without a pixel."""
    flat = shares.flatten(1)
    return flat @ image.flatten(1).T / flat.sum(1, keepdim=True).clamp(min=1e-9)


def colours(resized: UInt8[Tensor, "3 h w"], masks: Runs, frame: Frame) -> Float[Tensor, "n K"]:
    """Returns mean and deviation of red, green and blue under each mask, from -1 to 1 and from 0 to 1."""
    side = min(COLOUR_SIDE, frame.side)
    square = functional.pad(resized.float() / 127.5 - 1, (0, frame.side - resized.shape[2], 0, frame.side - resized.shape[1]))
    cells, shares = functional.adaptive_avg_pool2d(square, side), torch.from_numpy(frame.soft_masks(masks, side))
    mean = pooled(cells, shares)
    return torch.cat([mean, (pooled(cells.square(), shares) - mean.square()).clamp(min=0).sqrt()], 1)


def places(masks: Runs) -> Float32[np.ndarray, "n P"]:
    """Returns where masks lie: their boxes' centres, from the image's, and sizes in shares of its long side; and what else `PLACES` names.

    A mask without a pixel has the numbers of the first one.
    """
    height, width = masks.size
    boxes, areas = masks.boxes().astype(np.float64), np.maximum(masks.areas(), 1)
    sides = np.maximum(boxes[:, 2:] - boxes[:, :2] + 1, 1)
    centres = boxes[:, :2] + (sides - (width, height)) / 2
    share = areas / (height * width)
    told = [centres / max(masks.size), sides / max(masks.size)]
    told += [each[:, None] for each in (np.sqrt(share), np.log(share) / 8, areas / sides.prod(1), np.log(sides[:, 0] / sides[:, 1]))]
    return np.concatenate(told, 1).astype(np.float32)


def outlines(masks: Runs, side: int) -> Float32[np.ndarray, "n side side"]:
    """Returns each mask stretched from its box to a square of cells, as the share of each cell that it covers; 0 of a mask without a pixel."""
    found = np.zeros((len(masks), side, side), np.float32)
    boxes = masks.boxes().tolist()
    for number in np.flatnonzero(masks.areas()).tolist():
        x0, y0, x1, y1 = boxes[number]
        rows, columns = np.linspace(y0, y1 + 1, side + 1), np.linspace(x0, x1 + 1, side + 1)
        found[number] = masks[number : number + 1].average(rows, columns)[0]
    return found
