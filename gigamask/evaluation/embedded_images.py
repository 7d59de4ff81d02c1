"""Annotated images with their embeddings, read ahead by a thread and embedded in batches.

Only a few images are in memory at a time, regardless of the number of rows.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import islice

import numpy as np
import torch
from jaxtyping import Float, Int64, UInt8
from torch import Tensor

from gigamask.data.dataset import AnnotatedImages, Sa1bDataset
from gigamask.data.index import Index
from gigamask.data.mask_sampling import MaskFilters
from gigamask.errors import CorruptSampleError, check_range
from gigamask.inference.amg_config import check_tiles
from gigamask.inference.tile_decoder import TileDecoder
from gigamask.inference.tiles import TileGrid
from gigamask.masks.devices import widest
from gigamask.masks.transforms import ImageTransform, whole_image
from gigamask.models.configs import SamConfig
from gigamask.models.embedding_cache import ImageEmbedder
from gigamask.models.prompt_decoder import PromptDecoder
from gigamask.models.promptable import PromptableModel
from gigamask.pixels import PixelConfig
from gigamask.records import ImageAnnotation
from gigamask.types import Prompts, Targets

BATCH_SIZE = 4
"""Images per pass of the encoder."""
ImageSource = Index | AnnotatedImages
"""Images that are evaluated: an index, or images that need none."""
GROUP_BYTES = 2**28
"""Bytes of float32 logits in a group of prompts, three masks each, at the stored size."""


@dataclass(frozen=True, kw_only=True)
class CropOptions:
    """How images are cropped for prompts; saved with every result."""

    tile: int | None = None
    """side in pixels of the tiles in which prompts for larger images are answered, with
    `inference.tile_decoder`"""
    halo: int | None = None
    """overlap of neighboring tiles in pixels; None: an eighth of a tile"""


@dataclass(frozen=True)
class LoadedImage:
    """A stored image, its annotation, its transform, and its resized pixels for the encoder."""

    pixels: UInt8[np.ndarray, "H W N"]
    annotation: ImageAnnotation
    transform: ImageTransform
    resized: UInt8[Tensor, "N h w"]


@dataclass(frozen=True)
class EmbeddedImage:
    """A stored image, its annotation, its transform, its embedding, and those of its crops."""

    pixels: UInt8[np.ndarray, "H W N"]
    annotation: ImageAnnotation
    transform: ImageTransform
    embedding: Float[Tensor, "1 C E E"]
    crops: dict[ImageTransform, Tensor] = field(default_factory=dict, repr=False, compare=False)

    def targets(self, mask_indices: np.ndarray, annotated_box: bool = False) -> Targets:
        """Return annotated masks at the stored size.

        Args:
            mask_indices: Their indices in the annotation.
            annotated_box: Whether to take the boxes that the annotation states, if it does.
        """
        rle, ignore = self.annotation.masks[mask_indices], self.annotation.ignore
        device = self.embedding.device
        masks = torch.from_numpy(np.ascontiguousarray(rle.to_dense())).to(device)
        valid = torch.ones_like(masks)
        if ignore is not None:
            valid &= ~torch.from_numpy(np.ascontiguousarray(ignore.to_dense())).to(device)
        instances = self.annotation.instances if annotated_box else None
        boxes_xyxy = rle.boxes() if instances is None else instances.boxes[mask_indices]
        boxes_input = self.transform.boxes_to_input(boxes_xyxy.astype(np.float32))
        boxes = torch.from_numpy(boxes_input).float().to(device)
        cell_xy = self.transform.scale_xy
        scale_xy = torch.tensor(cell_xy, dtype=widest(boxes).dtype, device=device)
        return Targets(masks, valid, boxes, cell_xy, scale_xy.expand(len(boxes), 2))

    def decoder(
        self, model: PromptableModel, options: CropOptions | None = None, best_only: bool = False
    ) -> PromptDecoder | TileDecoder:
        """Return the decoder of prompts for this image, at its stored size.

        Args:
            model: Model that made the embedding.
            options: How the image is cropped; None: not at all.
            best_only: Whether to keep only the mask with the highest predicted IoU.
        """
        options = options or CropOptions()
        if options.tile is not None and max(self.transform.original) > options.tile:
            halo = check_tiles(options.tile, options.halo)
            grid = TileGrid(self.transform.original, options.tile, halo)
            embedder = ImageEmbedder(model, None)
            return TileDecoder(embedder, self.pixels, self.transform, grid, best_only, self.crops)
        resize = self.transform.logits_to_original
        return PromptDecoder(model, self.embedding, resize=resize, best_only=best_only)

    def point_grid_prompts(self, points_per_side: int) -> Iterator[Prompts]:
        """Yield point prompts for three masks each, in groups that fit in memory.

        The points are those of the automatic mask generator for the whole image.
        """
        height, width = self.transform.resized
        steps = (torch.arange(points_per_side) + 0.5) / points_per_side
        grid = torch.cartesian_prod(steps * width, steps * height).to(self.embedding.device)
        for group in self.groups(np.arange(len(grid))):
            points = grid[torch.from_numpy(group)][:, None]
            labels = torch.tensor([1, -1], device=grid.device).expand(len(points), 2)
            tokens = torch.cat([points, torch.zeros_like(points)], 1)
            yield Prompts(tokens, labels, None, multimask_output=True)

    def groups(self, indices: np.ndarray) -> Iterator[np.ndarray]:
        """Yield the indices of masks in groups that fit in memory at the stored size."""
        height, width = self.transform.original
        size = max(1, GROUP_BYTES // (3 * 4 * height * width))
        for start in range(0, len(indices), size):
            yield indices[start : start + size]


def scored_masks(index: Index, row: int, filters: MaskFilters) -> Int64[np.ndarray, "n"]:
    """Return the indices of an image's masks that are evaluated.

    Args:
        index: Index of the images.
        row: The image's row in the index.
        filters: Filters that the masks must pass; empty masks never do.
    """
    rows = index.mask_rows(row)
    image_area = int(index.images["height"][row]) * int(index.images["width"][row])
    columns = index.masks
    keep = filters.keep(
        columns["area"][rows],
        image_area,
        columns["predicted_iou"][rows],
        columns["stability_score"][rows],
    )
    return np.flatnonzero(keep & (columns["area"][rows] > 0))


def scored_rows(
    images: ImageSource, rows: Iterable[int], filters: MaskFilters, with_empty: bool = False
) -> Iterator[int]:
    """Yield the rows that have a mask to evaluate; without an index, which knows them, all rows.

    Args:
        images: Index of the images, or the images.
        rows: Rows of the images.
        filters: As for `scored_masks`.
        with_empty: Whether to yield those of images whose annotation has no mask, too.
    """
    if not isinstance(images, Index):
        return iter(rows)
    columns = images.images

    def is_empty(row: int) -> bool:
        return columns["masks"][row] == 0 and columns["json_offset"][row] >= 0

    return (
        row
        for row in rows
        if len(scored_masks(images, row, filters)) or (with_empty and is_empty(row))
    )


def embed_images(
    model: PromptableModel, images: ImageSource, rows: Iterable[int], batch_size: int = BATCH_SIZE
) -> Iterator[tuple[int, EmbeddedImage | CorruptSampleError]]:
    """Yield each row with its embedded image, or the error if it cannot be read, in order.

    Args:
        model: Model that embeds the images.
        images: Index of the images, or the images.
        rows: Rows of the images.
        batch_size: Images per pass of the encoder, and number of images read ahead.

    Raises:
        GigamaskError: `batch_size` is less than 1.
    """
    check_range("batch_size", batch_size, 1)
    ahead = _read_ahead(
        annotated_images(images, model.config.pixels), rows, model.config, batch_size
    )
    while batch := list(islice(ahead, batch_size)):
        embedded = deque(
            _embed(model, [image for _, image in batch if isinstance(image, LoadedImage)])
        )
        errors = [
            (row, image if isinstance(image, CorruptSampleError) else None) for row, image in batch
        ]
        # Keeps no reference to an image, so that the caller decides how long it lives.
        batch.clear()
        for row, error in errors:
            yield row, error or embedded.popleft()


def annotated_images(images: ImageSource, pixels: PixelConfig) -> AnnotatedImages:
    """Return the images of an index by row; other images unchanged.

    Args:
        images: The images.
        pixels: Channels and window of the model that sees the images.
    """
    return Sa1bDataset(images, pixels=pixels) if isinstance(images, Index) else images


def embed_image(model: PromptableModel, dataset: AnnotatedImages, row: int) -> EmbeddedImage:
    """Read one image and embed it.

    Args:
        model: Model that embeds the image.
        dataset: The images, with the pixels of the model.
        row: The image's row.

    Raises:
        CorruptSampleError: The image cannot be read.
    """
    [embedded] = _embed(model, [_load(dataset, row, model.config)])
    return embedded


def _embed(model: PromptableModel, images: Sequence[LoadedImage]) -> list[EmbeddedImage]:
    """Embed images in one pass of the encoder."""
    if not images:
        return []
    embeddings = ImageEmbedder(model, None).embed([image.resized[None] for image in images])
    return [
        EmbeddedImage(image.pixels, image.annotation, image.transform, embedding)
        for image, embedding in zip(images, embeddings, strict=True)
    ]


def _read_ahead(
    dataset: AnnotatedImages, rows: Iterable[int], config: SamConfig, count: int
) -> Iterator[tuple[int, LoadedImage | CorruptSampleError]]:
    """Yield each row's image or error, while a thread reads the next `count` images.

    A thread suffices, since decoding releases the interpreter lock.
    """

    def read(row: int) -> LoadedImage | CorruptSampleError:
        try:
            return _load(dataset, row, config)
        except CorruptSampleError as error:
            return error

    pending: deque[tuple[int, Future[LoadedImage | CorruptSampleError]]] = deque()
    pool = ThreadPoolExecutor(1, "read")
    try:
        for row in rows:
            pending.append((row, pool.submit(read, row)))
            if len(pending) > count:
                yield pending[0][0], pending.popleft()[1].result()
        while pending:
            yield pending[0][0], pending.popleft()[1].result()
    finally:
        pool.shutdown(cancel_futures=True)


def _load(dataset: AnnotatedImages, row: int, config: SamConfig) -> LoadedImage:
    """Read one image and resize it to the input of a model."""
    pixels, annotation = dataset[row]
    transform = whole_image(annotation.size, config.image_size, config.stretch)
    return LoadedImage(pixels, annotation, transform, transform.apply_image(pixels))
