"""Images and annotations of an index by row, and the training samples built from them."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np
import torch
from jaxtyping import Int, Int32, Int64, UInt8
from torch import Tensor

from gigamask.data import annotation, image
from gigamask.data.index import Index
from gigamask.data.mask_sampling import CandidateMasks
from gigamask.data.sample_config import SampleConfig
from gigamask.data.sample_table import granularity
from gigamask.data.shards import ShardReader
from gigamask.errors import CorruptSampleError, GigamaskError, PixelFormatError
from gigamask.masks.rle import RLEMasks
from gigamask.masks.transforms import ImageTransform, boxes_on_grid
from gigamask.pixels import RGB, PixelConfig
from gigamask.records import AnnotatedImage, ImageAnnotation, SampleRef
from gigamask.rng import make_rng
from gigamask.types import RandomInputs, RandomSpec, Sample

CHECKED_IMAGES = 8
"""Images that are checked before training."""


class RawSample(NamedTuple):
    """The bytes of an image and of its json; `json` is None if it is missing or was not read."""

    name: str
    jpg: bytes
    json: bytes | None

    def annotation(self) -> ImageAnnotation:
        """Return the checked annotation; raise CorruptSampleError if it is missing or invalid."""
        if self.json is None:
            raise CorruptSampleError(
                f"{self.name}: has no json, so it has no masks; leave the image out, or add its "
                "json and index it again"
            )
        return annotation.parse(self.json, self.name)

    def pixels(
        self,
        size: tuple[int, int] | None = None,
        half: bool = False,
        pixels: PixelConfig = RGB,
    ) -> UInt8[np.ndarray, "H W C"]:
        """Decode the image as a model sees it.

        Args:
            size: The size (H, W) that the annotation states.
            half: Decode at half the size, rounded up.
            pixels: Channels and window of the model.

        Raises:
            CorruptSampleError: The image cannot be decoded or has another size.
        """
        return image.decode(self.jpg, self.name, size, half, pixels)


@runtime_checkable
class AnnotatedImages(Protocol):
    """Images with their annotations by row."""

    def __len__(self) -> int: ...

    def __getitem__(self, row: int) -> AnnotatedImage:
        """Read and decode one image and its annotation, or raise `CorruptSampleError`."""
        ...


class Sa1bDataset:
    """Map-style dataset over an index: `dataset[row]` is an image and its annotation.

    It may be pickled, forked or passed to a worker; each copy must be used from one thread only.

    Args:
        index: The index whose rows are read.
        read_ahead: Size in bytes of the aligned blocks in which remote tars are fetched; 0 fetches
            exactly the requested bytes.
        blocks: Number of blocks kept in memory.
        pixels: Channels and window of the model that sees the images.
    """

    def __init__(
        self,
        index: Index,
        read_ahead: int = 0,
        blocks: int = 4,
        pixels: PixelConfig = RGB,
    ) -> None:
        self.index, self.pixels = index, pixels
        self._shards = ShardReader(index.shard_paths, read_ahead=read_ahead, blocks=blocks)

    def __len__(self) -> int:
        return len(self.index)

    def __getitem__(self, row: int) -> AnnotatedImage:
        """Read and decode one image and its annotation.

        Raises:
            CorruptSampleError: The image or its annotation is missing or cannot be decoded.
        """
        raw = self.read(row)
        entry = raw.annotation()
        return AnnotatedImage(raw.pixels(entry.size, pixels=self.pixels), entry)

    def read(self, row: int, with_json: bool = True) -> RawSample:
        """Read the bytes of one row, in a single read if image and json are neighbors.

        Args:
            row: Row of the index.
            with_json: Whether to read the json too, if there is one.

        Raises:
            CorruptSampleError: The bytes cannot be read.
        """
        [raw] = self.read_many([row], with_json)
        if isinstance(raw, CorruptSampleError):
            raise raw
        return raw

    def read_many(
        self, rows: Sequence[int], with_json: bool = True
    ) -> list[RawSample | CorruptSampleError]:
        """Read the bytes of several rows together.

        Args:
            rows: Rows of the index.
            with_json: Whether to read the jsons too, if there are any.

        Returns:
            The bytes of each row, or the error if they cannot be read.
        """
        entries = self._shards.read_entries(self.index, rows, with_json)
        return [
            entry
            if isinstance(entry, CorruptSampleError)
            else RawSample(self.index.entry_name(row), *entry)
            for row, entry in zip(rows, entries, strict=True)
        ]

    def close(self) -> None:
        """Close all files; a later read opens them again."""
        self._shards.close()


def check_pixels(index: Index, pixels: PixelConfig, needs_window: bool = False) -> None:
    """Check that a model can read the pixels of the first image of an index.

    Args:
        index: The index.
        pixels: Channels and window of the model.
        needs_window: Whether one of the first images must have pixels for the window.

    Raises:
        GigamaskError: The image is of another kind.
    """
    dataset = Sa1bDataset(index)
    for row in range(min(CHECKED_IMAGES, len(index))):
        try:
            raw = dataset.read(row, with_json=False)
            stored = image.read_stored(raw.jpg, raw.name, channels=pixels.channels)
            pixels.to_uint8(stored[:1, :1], raw.name)
        except PixelFormatError as error:
            raise GigamaskError(str(error)) from None
        except CorruptSampleError:
            continue  # training reports it
        if stored.dtype != np.uint8 or not needs_window:
            return
    if needs_window:
        raise GigamaskError(
            f"{index.entry_name(0)}: has 8 bits per channel, which are used as they are; leave "
            "--window and --percentiles out"
        )


MaskReader = Callable[
    [Int64[np.ndarray, "k"], ImageTransform], tuple[RLEMasks, Int[np.ndarray, "k 4"]]
]
"""Function that resamples the masks at given positions to the target grid of a transform.

It also returns the boxes of their visible parts, in original pixels.
"""


def build_sample(
    raw: bytes,
    entry: ImageAnnotation,
    ref: SampleRef,
    config: SampleConfig,
    random_spec: RandomSpec,
) -> Sample:
    """Build one training sample from an image file and its annotation.

    All random numbers are keyed by epoch and position in the epoch, so neither the worker nor the
    order of loading changes the sample. A mask that is outside the crop, or empty on the target
    grid, is left out.

    Args:
        raw: The image file.
        entry: Its checked annotation.
        ref: Position in the sequence of samples.
        config: Image transform, mask filters and sizes.
        random_spec: Seed and counts of the random numbers drawn per sample.

    Returns:
        Pixels fitted to the input square, masks on the target grid, boxes in input pixels, and the
        random numbers that training uses.

    Raises:
        CorruptSampleError: The image cannot be decoded.
    """
    masks, spans = entry.masks, entry.masks.spans()
    boxes = spans.boxes(entry.size[0])
    candidates = CandidateMasks(
        entry.size, spans.areas(), boxes, entry.predicted_iou, entry.stability_score
    )

    def read_masks(
        positions: Int64[np.ndarray, "k"], transform: ImageTransform
    ) -> tuple[RLEMasks, Int[np.ndarray, "k 4"]]:
        chosen = masks[positions]
        whole = transform.crop_size == transform.original
        boxes = candidates.boxes[positions] if whole else _visible_boxes(chosen, transform)
        return transform.apply_masks(chosen, config.mask_size), boxes

    classes = entry.classes(config.class_names) if config.class_names else None
    return build_sample_from(
        RawSample(entry.name, raw, None), candidates, read_masks, ref, config, random_spec, classes
    )


def build_sample_from(
    raw: RawSample,
    candidates: CandidateMasks,
    read_masks: MaskReader,
    ref: SampleRef,
    config: SampleConfig,
    random_spec: RandomSpec,
    classes: Int64[np.ndarray, "n"] | None = None,
) -> Sample:
    """Build one training sample from mask attributes and a function that reads masks.

    Args:
        raw: The image file and its name.
        candidates: Size of the image, and areas, boxes and scores of its masks.
        read_masks: Reads the chosen masks.
        ref: Position in the sequence of samples.
        config: Image transform, mask filters and sizes.
        random_spec: Seed and counts of the random numbers drawn per sample.
        classes: Class of each mask; None if the model has no classes.

    Returns:
        The sample, as in `build_sample`.

    Raises:
        CorruptSampleError: The image cannot be decoded.
    """

    def generator(purpose: str) -> np.random.Generator:
        return make_rng(random_spec.seed, purpose, ref.epoch, ref.position)

    allowed = allowed_masks(candidates, ref.mask_index, config)
    transform = config.get_transform(candidates.size, candidates.boxes[allowed], generator("frame"))
    chosen = choose_masks(candidates, allowed, transform, config, generator("masks"))
    masks, boxes = read_masks(chosen, transform)
    visible = masks.areas() > 0
    shares = candidates.areas[chosen] / (candidates.size[0] * candidates.size[1])
    strata = granularity(shares) if ref.stratum < 0 else np.full(len(shares), ref.stratum)
    pixels = _resize(raw, transform, config).numpy()
    return Sample(
        name=raw.name,
        ref=ref,
        image=torch.from_numpy(config.color_jitter.adjust(pixels, generator("colour"))),
        transform=transform,
        masks=masks[visible],
        boxes_input=boxes_on_grid(transform, boxes[visible], masks[visible]),
        strata=strata[visible].astype(np.int64),
        random_inputs=_draw_random_inputs(int(visible.sum()), random_spec, generator),
        classes=None if classes is None else classes[chosen][visible],
    )


def allowed_masks(
    candidates: CandidateMasks, mask_index: int, config: SampleConfig
) -> Int64[np.ndarray, "k"]:
    """Return the positions of the masks that pass the filters.

    Args:
        candidates: Size of the image, and areas, boxes and scores of its masks.
        mask_index: Index of the only mask to choose among them; -1: all.
        config: Mask filters.
    """
    height, width = candidates.size
    passes = config.filters.keep(
        candidates.areas, height * width, candidates.predicted_iou, candidates.stability_score
    )
    positions = np.flatnonzero(passes & (candidates.areas > 0))
    return positions if mask_index < 0 else positions[mask_index : mask_index + 1]


def choose_masks(
    candidates: CandidateMasks,
    allowed: Int64[np.ndarray, "n"],
    transform: ImageTransform,
    config: SampleConfig,
    generator: np.random.Generator,
) -> Int64[np.ndarray, "k"]:
    """Choose the masks to train on.

    Args:
        candidates: Size of the image, and areas, boxes and scores of its masks.
        allowed: Positions of the masks that may be chosen.
        transform: Transform of the image; masks whose boxes lie outside its crop are not chosen.
        config: Mask sampler and maximum number of masks.
        generator: Random generator.

    Returns:
        Positions of the chosen masks in the annotation.
    """
    (y0, x0, y1, x1), boxes = transform.crop, candidates.boxes
    inside = (boxes[:, 0] < x1) & (boxes[:, 1] < y1) & (boxes[:, 2] >= x0) & (boxes[:, 3] >= y0)
    positions = allowed[inside[allowed]]
    return positions[config.mask_sampler.choose(candidates[positions], config.max_masks, generator)]


def _visible_boxes(masks: RLEMasks, transform: ImageTransform) -> Int32[np.ndarray, "k 4"]:
    """Return the boxes of visible parts, in original pixels; undefined for hidden masks."""
    y0, x0, y1, x1 = transform.crop
    visible = masks.resample(np.arange(y0, y1), np.arange(x0, x1))
    return visible.boxes() + np.array([x0, y0, x0, y0], np.int32)


def _resize(
    raw: RawSample, transform: ImageTransform, config: SampleConfig
) -> UInt8[Tensor, "C h w"]:
    """Decode and transform an image; with `half_scale`, at half size if nothing is upscaled."""
    half = config.half_scale and all(
        -(-crop // 2) >= resized
        for crop, resized in zip(transform.crop_size, transform.resized, strict=True)
    )
    pixels = raw.pixels(transform.original, half, config.pixels)
    height, width = pixels.shape[:2]
    if (height, width) == transform.original:
        return transform.apply_image(pixels)
    (y0, x0, y1, x1), (full_h, full_w) = transform.crop, transform.original
    crop = (
        y0 * height // full_h,
        x0 * width // full_w,
        -(-y1 * height // full_h),
        -(-x1 * width // full_w),
    )
    return replace(transform, original=(height, width), crop=crop).apply_image(pixels)


def _draw_random_inputs(
    masks: int, random_spec: RandomSpec, generator: Callable[[str], np.random.Generator]
) -> RandomInputs:
    def uniform(purpose: str, *shape: int) -> Tensor:
        return torch.from_numpy(generator(purpose).random(shape, dtype=np.float32))

    clicks = uniform("clicks", masks, random_spec.clicks, 2)
    noise = generator("box_noise").standard_normal((masks, 4), dtype=np.float32)
    return RandomInputs(
        first_prompt=uniform("first", masks),
        clicks=torch.cat([clicks, uniform("points", masks, random_spec.points, 2)], 1),
        box_noise=torch.from_numpy(noise),
        drop_path=torch.from_numpy(random_spec.draw_drop_path(generator("drop_path"))),
        patches=uniform("patches", 1, random_spec.patches),
    )
