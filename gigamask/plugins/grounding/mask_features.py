"""Features of an image's masks, computed once per image, and the frozen backbones of a grounding
run.

The features of a mask are, in the order of `GroundingModelConfig.parts`: the mean of the
segmenter's embedding under the mask, weighted by the share of each cell that it covers; mean and
standard deviation of the colours under it; its geometry; and the mask itself, cropped to its box
and resized to a small square.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float, Float32, UInt8
from torch import Tensor
from torch.nn import functional

from gigamask.data import annotation, image
from gigamask.data.index import Index
from gigamask.data.shards import ShardReader
from gigamask.distributed.precision import choose_device
from gigamask.errors import CorruptSampleError, GigamaskError
from gigamask.masks.rle import RLEMasks
from gigamask.masks.transforms import ImageTransform, whole_image
from gigamask.models.embedding_cache import EmbeddingCache, ImageEmbedder
from gigamask.models.promptable import PromptableModel
from gigamask.plugins.grounding.model_config import GroundingModelConfig
from gigamask.plugins.grounding.soft_masks import average, soft_masks
from gigamask.plugins.grounding.text_encoders import TextEncoder
from gigamask.plugins.grounding.text_features import TextFeatures, TextFeatureStore, TextModel
from gigamask.progress import progress_bar
from gigamask.training.checkpoint import load_model

COLOUR_GRID = 128
"""Side of the grid on which colours are averaged; at most the input side."""
MEMORY_BYTES = 2**30
"""Limit of the features in memory; 100 masks with a 256-channel embedding take 0.2 MB."""

ImageKey = tuple[str, bytes, int]
"""Path of the shard, name of the image, and its offset in the shard."""


class MaskFeatureExtractor:
    """Computes the features of masks with a segmenter, and keeps them in memory and on disk.

    Attributes:
        width: Number of features per mask, F.
        encoded: Number of images encoded so far.
    """

    def __init__(
        self,
        model: PromptableModel,
        config: GroundingModelConfig,
        cache: EmbeddingCache | None = None,
        memory_bytes: int = MEMORY_BYTES,
    ) -> None:
        """Start without features in memory.

        Args:
            model: The segmenter.
            config: Sizes of the features.
            cache: Features on disk; None keeps them in memory only.
            memory_bytes: Limit of the features in memory.

        Raises:
            GigamaskError: The width of the segmenter's embedding differs from the config's, or it
                does not read RGB.
        """
        if model.config.in_channels != 3:
            raise GigamaskError(
                f"the segmenter reads images of {model.config.in_channels} channels, but texts are "
                "about colors; choose one that reads RGB"
            )
        channels = model.config.embedding_channels
        if channels != config.embedding_dim:
            raise GigamaskError(
                f"--model.embedding-dim is {config.embedding_dim}, but the segmenter's embedding "
                f"has {channels} channels; pass {channels}"
            )
        self.model, self.config, self.encoded, self.width = model, config, 0, sum(config.parts)
        self._embedder, self._cache, self._free_bytes = (
            ImageEmbedder(model, None),
            cache,
            memory_bytes,
        )
        self._memory: OrderedDict[ImageKey, Float[Tensor, "n F"]] = OrderedDict()

    def extract(self, pixels: UInt8[np.ndarray, "H W 3"], masks: RLEMasks) -> Float[Tensor, "n F"]:
        """Compute the features of an image's masks.

        Args:
            pixels: RGB image.
            masks: Its masks, n.

        Returns:
            Features [n, F] on the CPU.
        """
        image.check_size(pixels.shape[:2], masks.size, "the image", "its masks have")
        config = self.model.config
        transform = whole_image(masks.size, config.image_size, config.stretch)
        resized = transform.apply_image(pixels)
        [embedding] = self._embedder.embed([resized[None]])
        self.encoded += 1
        coverage = torch.from_numpy(soft_masks(transform, masks, embedding.shape[-1]))
        parts = [
            masked_mean(embedding[0].float().cpu(), coverage),
            colours(resized, masks, transform),
            torch.from_numpy(geometry(masks)),
            torch.from_numpy(outlines(masks, self.config.crop_side)).flatten(1),
        ]
        return torch.cat(parts, 1)

    def extract_rows(
        self, index: Index, shards: ShardReader, rows: Sequence[int]
    ) -> list[Float[Tensor, "n F"] | CorruptSampleError]:
        """Return the features of the masks of indexed images, in the order of their annotations.

        Args:
            index: Index of the images.
            shards: Its tars.
            rows: Rows of the index.

        Returns:
            For each row, the features [n, F], or the error if the image cannot be read.
        """
        return [self._extract_row(index, shards, row) for row in rows]

    def _extract_row(
        self, index: Index, shards: ShardReader, row: int
    ) -> Float[Tensor, "n F"] | CorruptSampleError:
        key = _image_key(index, row)
        if key in self._memory:
            self._memory.move_to_end(key)
            return self._memory[key]
        try:
            features = self._load_or_extract(index, shards, row)
        except CorruptSampleError as error:
            return error
        self._memory[key] = features
        self._free_bytes -= features.nbytes
        while self._free_bytes < 0 and len(self._memory) > 1:
            self._free_bytes += self._memory.popitem(last=False)[1].nbytes
        return features

    def _load_or_extract(self, index: Index, shards: ShardReader, row: int) -> Float[Tensor, "n F"]:
        name = index.entry_name(row)
        jpg, json = shards.read_entry(index, row)
        if json is None:
            raise CorruptSampleError(
                f"{name}: has no json with masks to choose from; remove its queries"
            )
        key = self._cache_key(jpg, json) if self._cache else ""
        if self._cache and (cached := self._cache.get(key)) is not None:
            return cached
        entry = annotation.parse(json, name)
        features = self.extract(
            image.decode(jpg, name, entry.size, pixels=self.model.config.pixels), entry.masks
        )
        if self._cache:
            self._cache.put(key, features)
        return features

    def _cache_key(self, jpg: bytes, json: bytes) -> str:
        header = f"{self._embedder.encoder_digest()} {self.config.parts}\0{len(jpg)}\0"
        digest = blake2b(header.encode(), digest_size=16)
        digest.update(jpg)
        digest.update(json)
        return digest.hexdigest()


def _image_key(index: Index, row: int) -> ImageKey:
    """Return what identifies an image in all data sets, unlike `Index.entry_name`."""
    images = index.images
    path = index.manifest.parts[images["shard"][row]].tar.path
    return path, bytes(images["name"][row]), int(images["jpg_offset"][row])


def masked_mean(
    image: Float[Tensor, "C h w"], coverage: Float[Tensor, "n h w"]
) -> Float[Tensor, "n C"]:
    """Average an image's channels under each mask.

    Args:
        image: Channels on a grid.
        coverage: Share of each cell that each mask covers.

    Returns:
        Means [n, C]; 0 for an empty mask.
    """
    weights = coverage.flatten(1)
    return weights @ image.flatten(1).T / weights.sum(1, keepdim=True).clamp(min=1e-9)


def colours(
    resized: UInt8[Tensor, "3 h w"], masks: RLEMasks, transform: ImageTransform
) -> Float[Tensor, "n K"]:
    """Compute mean and standard deviation of red, green and blue under each mask.

    Args:
        resized: The image in the input frame.
        masks: Masks of the original image, n.
        transform: Transform from the original image to the input.

    Returns:
        Means in [-1, 1] and deviations in [0, 1], [n, 6].
    """
    grid, (_, height, width) = min(COLOUR_GRID, transform.image_size), resized.shape
    padding = (0, transform.image_size - width, 0, transform.image_size - height)
    square = functional.pad(resized.float() / 127.5 - 1, padding)
    cells = functional.adaptive_avg_pool2d(square, grid)
    coverage = torch.from_numpy(soft_masks(transform, masks, grid))
    mean = masked_mean(cells, coverage)
    variance = masked_mean(cells.square(), coverage) - mean.square()
    return torch.cat([mean, variance.clamp(min=0).sqrt()], 1)


def geometry(masks: RLEMasks) -> Float32[np.ndarray, "n P"]:
    """Describe the position, size and shape of masks.

    Lengths are relative to the image's long side. An empty mask is described as a mask of one pixel
    in the corner.

    Args:
        masks: Masks of one image, n.

    Returns:
        Centre x and y relative to the image's centre, width, height, square root and scaled
        logarithm of the area share, share of the box that is covered, log aspect ratio; [n, 8].
    """
    height, width = masks.size
    boxes, areas = masks.boxes().astype(np.float64), np.maximum(masks.areas(), 1)
    sizes = np.maximum(boxes[:, 2:] - boxes[:, :2] + 1, 1)
    centres = boxes[:, :2] + (sizes - (width, height)) / 2
    share = areas / (height * width)
    columns = [
        centres / max(masks.size),
        sizes / max(masks.size),
        np.sqrt(share),
        np.log(share) / 8,
        areas / sizes.prod(1),
        np.log(sizes[:, 0] / sizes[:, 1]),
    ]
    return np.column_stack(columns).astype(np.float32)


def outlines(masks: RLEMasks, side: int) -> Float32[np.ndarray, "n side side"]:
    """Crop each mask to its box and resize it to a square.

    Args:
        masks: Masks of one image, n.
        side: Number of cells along a side.

    Returns:
        Share of each cell that the mask covers, [n, side, side]; 0 for an empty mask.
    """
    coverage = np.zeros((len(masks), side, side), np.float32)
    boxes = masks.boxes().tolist()
    for number in np.flatnonzero(masks.areas()).tolist():
        x0, y0, x1, y1 = boxes[number]
        rows, columns = np.linspace(y0, y1 + 1, side + 1), np.linspace(x0, x1 + 1, side + 1)
        coverage[number] = average(masks[number : number + 1], rows, columns)[0]
    return coverage


@dataclass(frozen=True, eq=False)
class Backbones:
    """The frozen segmenter and the text encoder of a run, loaded once and shared."""

    segmenter: str
    text: TextEncoder
    config: GroundingModelConfig
    device: str
    seed: int
    cache_folder: Path

    @cached_property
    def mask_features(self) -> MaskFeatureExtractor:
        """The segmenter's mask features, with their cache on disk."""
        model = load_model(self.segmenter, self.device)
        return MaskFeatureExtractor(model, self.config, EmbeddingCache(self.cache_folder, None))

    def text_features(
        self, texts: Sequence[str] = ()
    ) -> Callable[[Sequence[str]], TextFeatures] | None:
        """Return the function that computes features of texts.

        Args:
            texts: Texts whose features are computed now and stored on disk; if empty, nothing is
                stored.

        Returns:
            The function, or None if the text model is trained as part of the network.
        """
        if self.text.trainable:
            return None
        store = self._store if texts else TextFeatureStore(self.frozen_text_model)
        with progress_bar("text features") as progress:
            store.fill(texts, progress)
        return store.get

    def load_text_model(self, device: torch.device | str) -> TextModel:
        """Load the text model.

        Args:
            device: Device of the model.

        Returns:
            A new model, which is not shared.

        Raises:
            GigamaskError: The width of its features differs from the config's.
        """
        text = self.text.build(device, self.seed)
        if text.dim != self.config.text_dim:
            raise GigamaskError(
                f"--model.text-dim is {self.config.text_dim}, but the text model's features have "
                f"{text.dim} channels; pass {text.dim}"
            )
        return text

    @cached_property
    def _store(self) -> TextFeatureStore:
        return TextFeatureStore(self.frozen_text_model, self.cache_folder)

    @cached_property
    def frozen_text_model(self) -> TextModel:
        """The text model, if it is not trained."""
        return self.load_text_model(choose_device(self.device))
