"""Settings of the samples, shared by recipes and loader workers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from gigamask.data.augment import Augment, ColorJitter, NoAugment
from gigamask.data.mask_sampling import MaskFilters, MaskSampler, RandomMasks
from gigamask.errors import GigamaskError
from gigamask.lazy_numpy import np
from gigamask.pixels import RGB, PixelConfig

if TYPE_CHECKING:
    from jaxtyping import Int

    from gigamask.masks.transforms import ImageTransform


@dataclass(frozen=True, kw_only=True)
class MaskOptions:
    """What counts as a mask in annotations of other formats than SA-1B's."""

    keep_crowds: bool = False
    """COCO: keep annotations marked iscrowd, as brush masks of CVAT and RectLabel are"""
    ignore: tuple[int, ...] = ()
    """label images: pixel values to ignore, besides 0 and the 255 around objects of Pascal VOC"""
    binary: int | None = None
    """label images: make one mask of all pixels with this value or more, such as 128 for masks that
    were resized with smoothing"""
    nearest_value: bool = False
    """label images: give pixels of smoothed edges the value of the nearest region"""


@dataclass(frozen=True, kw_only=True)
class OwnDataOptions(MaskOptions):
    """Annotations in other formats than SA-1B's; each field is a flag of the commands that read
    them."""

    images: str | None = None
    """folder of images, if the data are their annotations, such as COCO's JSON; or the column of
    images of a table, if its name does not say so"""
    masks: str | None = None
    """annotations, such as COCO's JSON or a folder of label images, if the data are the folder of
    images; or the column of masks of a table"""


@dataclass(frozen=True)
class SampleConfig:
    """Everything that determines a sample except its image and its random numbers."""

    image_size: int
    """side of the input square in pixels"""
    mask_size: int
    """side of the square grid that masks are resampled to"""
    max_masks: int = 64
    """maximum number of masks per image to train on"""
    filters: MaskFilters = field(default_factory=MaskFilters)
    """which masks may be trained on"""
    mask_sampler: MaskSampler = field(default_factory=RandomMasks)
    """which masks to choose if there are more than `max_masks`"""
    augment: Augment = field(default_factory=NoAugment)
    """resizing, cropping and flipping of the image into the input square"""
    color_jitter: ColorJitter = field(default_factory=ColorJitter)
    """random changes of brightness, contrast and saturation"""
    half_scale: bool = False
    """decode JPEGs at half scale if that is no smaller than the input: 1.3x faster, about 42 dB
    PSNR relative to exact decoding"""
    mask_store: str | None = None
    """folder of precomputed masks, read instead of each image's json"""
    with_masks: bool = True
    """whether samples have masks; if not, every image is a sample, and no json is read"""
    stretch: bool = False
    """whether images are stretched to squares before anything else"""
    class_names: tuple[str, ...] = ()
    """categories that masks are classified by; without any, samples have no classes"""
    pixels: PixelConfig = RGB
    """channels of the model, and window of pixels of more than 8 bits"""

    def __post_init__(self) -> None:
        if self.color_jitter.saturation and self.pixels.channels != 3:
            raise GigamaskError(
                f"saturation is of three channels, not of {self.pixels.channels}; leave "
                "--loader.color-jitter.saturation out"
            )

    def get_transform(
        self,
        original: tuple[int, int],
        boxes: Int[np.ndarray, "n 4"],
        generator: np.random.Generator,
    ) -> ImageTransform:
        """Draw the transform of one image's pixels, masks, points and boxes.

        Args:
            original: Size (H, W) of the stored image.
            boxes: Boxes xyxy of the masks that may be trained on, in original pixels.
            generator: Random generator.
        """
        draw, size = self.augment.get_transform_with_objects, self.image_size
        if not self.stretch:
            return draw(original, size, boxes.astype(float), generator)
        from gigamask.masks.transforms import stretched

        side = max(original)
        height, width = original
        scale = side / np.array([width, height, width, height])
        return stretched(draw((side, side), size, boxes * scale, generator), original)
