"""Images in front of a model: read and decoded ahead by a thread, embedded several at once, one after the other in the order they are asked for.

Enters a model, an index and rows of it; leaves a `Scene` for each, or why it cannot be read. However many rows there are, few images are in memory.

Not here: what is asked about them (`interactive`, `automatic`).
"""

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice

import numpy as np
import torch
from jaxtyping import Float, Int64, UInt8
from torch import Tensor

from gigamask.data.dataset import Sa1bDataset
from gigamask.data.index import Index
from gigamask.data.mask_sampling import MaskFilters
from gigamask.errors import CorruptSampleError, GigamaskError
from gigamask.inference.embedding import ImageEmbedder
from gigamask.masks.transforms import ImageTransform
from gigamask.models.sam.decoding import PromptDecoder
from gigamask.models.sam.sam import Sam
from gigamask.types import ImageAnnotation, Prompts, Targets

AT_ONCE = 4
"""Images that are embedded in one pass of the encoder."""
GROUP_BYTES = 2**28
"""Of one group of masks' logits at the stored size: three masks each, float32."""


@dataclass(frozen=True)
class LoadedImage:
    """One image as it is stored, its annotations, the frame that fits it, and its pixels as the encoder takes them."""

    pixels: UInt8[np.ndarray, "H W 3"]
    entry: ImageAnnotation
    transform: ImageTransform
    fitted: UInt8[Tensor, "3 h w"]


@dataclass(frozen=True)
class EmbeddedImage:
    """One image in front of the model: its pixels and annotations, the frame that fits it, and its embedding."""

    pixels: UInt8[np.ndarray, "H W 3"]
    entry: ImageAnnotation
    transform: ImageTransform
    embedding: Float[Tensor, "1 C E E"]

    def truth(self, numbers: np.ndarray) -> Targets:
        """Returns some of its masks at the stored size."""
        runs = self.entry.masks[numbers]
        device = self.embedding.device
        masks = torch.from_numpy(np.ascontiguousarray(runs.to_dense())).to(device)
        boxes = (
            torch.from_numpy(self.transform.boxes_to_input(runs.boxes().astype(np.float32)))
            .float()
            .to(device)
        )
        (height, width), (h, w) = self.transform.original, self.transform.resized
        return Targets(masks, torch.ones_like(masks), boxes, (w / width, h / height))

    def decoder(self, model: Sam, best_only: bool = False) -> PromptDecoder:
        """Return the decoder of prompts about this image at its stored size.

        Args:
            model: the model that made the embedding.
            best_only: keep only the mask with the highest predicted IoU.
        """
        resize = self.transform.logits_to_original
        return PromptDecoder(model, self.embedding, resize=resize, best_only=best_only)

    def mask_size(self, points_a_side: int) -> Iterator[Prompts]:
        """Yields the points of a square grid over the image, three masks asked for each, in groups that fit into memory."""
        height, width = self.transform.resized
        steps = (torch.arange(points_a_side) + 0.5) / points_a_side
        points = torch.cartesian_prod(steps * width, steps * height).to(self.embedding) - 0.5
        for group in self.groups(np.arange(len(points))):
            asked = points[torch.from_numpy(group)][:, None]
            labels = torch.tensor([1, -1], device=points.device).expand(len(asked), 2)
            yield Prompts(
                torch.cat([asked, torch.zeros_like(asked)], 1), labels, None, multimask_output=True
            )

    def groups(self, numbers: np.ndarray) -> Iterator[np.ndarray]:
        """Yields the masks in groups that fit into memory at the stored size."""
        height, width = self.transform.original
        size = max(1, GROUP_BYTES // (3 * 4 * height * width))
        for start in range(0, len(numbers), size):
            yield numbers[start : start + size]


def scored_masks(index: Index, row: int, filters: MaskFilters) -> Int64[np.ndarray, "n"]:
    """Returns the numbers of an image's masks that pass the filters."""
    rows = index.mask_rows(row)
    area = int(index.images["height"][row]) * int(index.images["width"][row])
    columns = index.masks
    keep = filters.keep(
        columns["area"][rows],
        area,
        columns["predicted_iou"][rows],
        columns["stability_score"][rows],
    )
    return np.flatnonzero(keep & (columns["area"][rows] > 0))


def embed_images(
    model: Sam, index: Index, rows: Iterable[int], at_once: int = AT_ONCE
) -> Iterator[tuple[int, EmbeddedImage | CorruptSampleError]]:
    """Yields each row with its image embedded, or with why it cannot be read, in their order.

    At most `at_once` images go through the encoder together, while as many are read ahead.
    """
    if at_once < 1:
        raise GigamaskError(
            f"{at_once} images at once, there must be 1 at least; give another number"
        )
    ahead = _read_ahead(index, rows, model.config.image_size, at_once)
    while group := list(islice(ahead, at_once)):
        embedded = deque(
            _embed(model, [picture for _, picture in group if isinstance(picture, LoadedImage)])
        )
        told = [
            (row, picture if isinstance(picture, CorruptSampleError) else None)
            for row, picture in group
        ]
        group.clear()
        for row, bad in told:
            yield (
                row,
                bad or embedded.popleft(),
            )  # nothing is held on to here, so that the caller decides what is


def embed_image(model: Sam, dataset: Sa1bDataset, row: int) -> EmbeddedImage:
    """Reads one image of the index and embeds it; raises `CorruptSampleError` when it cannot be read."""
    [scene] = _embed(model, [_picture(dataset, row, model.config.image_size)])
    return scene


def _embed(model: Sam, pictures: Sequence[LoadedImage]) -> list[EmbeddedImage]:
    """Embeds images in one pass of the encoder."""
    if not pictures:
        return []
    embeddings = ImageEmbedder(model, None).embed([picture.fitted[None] for picture in pictures])
    return [
        EmbeddedImage(each.pixels, each.entry, each.transform, embedding)
        for each, embedding in zip(pictures, embeddings, strict=True)
    ]


def _read_ahead(
    index: Index, rows: Iterable[int], side: int, count: int
) -> Iterator[tuple[int, LoadedImage | CorruptSampleError]]:
    """Yields each row's image or what is wrong with it, while a thread reads the next `count` ones: libraries that decode let others work."""
    dataset = Sa1bDataset(index)

    def take(row: int) -> LoadedImage | CorruptSampleError:
        try:
            return _picture(dataset, row, side)
        except CorruptSampleError as bad:
            return bad

    waiting: deque[tuple[int, Future[LoadedImage | CorruptSampleError]]] = deque()
    pool = ThreadPoolExecutor(1, "read")
    try:
        for row in rows:
            waiting.append((row, pool.submit(take, row)))
            if len(waiting) > count:
                yield waiting[0][0], waiting.popleft()[1].result()
        while waiting:
            yield waiting[0][0], waiting.popleft()[1].result()
    finally:
        pool.shutdown(cancel_futures=True)


def _picture(dataset: Sa1bDataset, row: int, side: int) -> LoadedImage:
    """Read one image and fit it into a square of `side` pixels; raise CorruptSampleError when it is unusable."""
    pixels, entry = dataset[row]
    frame = ImageTransform.whole(entry.size, side)
    return LoadedImage(pixels, entry, frame, frame.image(pixels))
