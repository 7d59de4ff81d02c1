"""A synthetic sample as large as SA-1B's, for benchmarks.

The image is noise at SA-1B's bit rate (quality 95, about 2.8 bits per pixel). Masks are smooth
blobs whose relative side is log-normal with a median of 0.061, which gives about as many runs (300)
and characters (430) as real masks have.
"""

import cv2
import numpy as np

from gigamask.data.annotation import MAX_MASKS, MAX_SIDE, encode, image_record
from gigamask.data.image import MAX_PIXELS, encode_jpeg
from gigamask.errors import GigamaskError
from gigamask.masks.rle import RLEMasks
from gigamask.rng import make_rng

JPEG_QUALITY = 95
MEDIAN_SIDE, SPREAD = 0.061, 1.1
LOGITS = 64
"""Side of the grid on which a blob is made before it is enlarged."""


def make(size: tuple[int, int], masks: int, seed: int = 0) -> tuple[bytes, bytes]:
    """Make a sample.

    Args:
        size: Height and width in pixels.
        masks: Number of masks, all non-empty.
        seed: Random seed.

    Returns:
        The bytes of the jpg and of the json.

    Raises:
        GigamaskError: The size or the number of masks is out of range.
    """
    height, width = size
    if not (1 <= height <= MAX_SIDE and 1 <= width <= MAX_SIDE and height * width <= MAX_PIXELS):
        raise GigamaskError(
            f"{height} x {width} pixels: sides must be 1 to {MAX_SIDE}, and at most {MAX_PIXELS}"
            " pixels in total"
        )
    if not 0 <= masks <= MAX_MASKS:
        raise GigamaskError(f"{masks} masks: the number of masks must be 0 to {MAX_MASKS}")
    made = blobs(size, masks, make_rng(seed, "specimen masks"))
    return photograph(size, make_rng(seed, "specimen photograph")), annotation(seed, made)


def annotation(image_id: int, masks: RLEMasks) -> bytes:
    """Return the json of masks with equal scores, prompted at the centers of their boxes.

    Args:
        image_id: The `image_id`.
        masks: The masks.
    """
    boxes, scores = masks.boxes(), np.full(len(masks), 0.95)
    return encode(
        image_record(
            image_id, masks, range(len(masks)), (boxes[:, :2] + boxes[:, 2:]) / 2, scores, scores
        )
    )


def photograph(size: tuple[int, int], generator: np.random.Generator) -> bytes:
    """Return a JPEG of multi-octave noise with camera grain.

    Args:
        size: Height and width in pixels.
        generator: Random numbers.
    """
    height, width = size
    image = np.full((height, width, 3), 120, np.float32)
    for cells, strength in ((6, 60), (24, 30), (96, 18), (400, 10)):
        coarse = generator.standard_normal((cells, cells * 3 // 2, 3), dtype=np.float32)
        image += cv2.resize(coarse, (width, height), interpolation=cv2.INTER_CUBIC) * strength
    image += (
        cv2.GaussianBlur(generator.standard_normal((height, width), dtype=np.float32), (0, 0), 0.7)[
            :, :, None
        ]
        * 6.5
    )
    return encode_jpeg(np.clip(image, 0, 255).astype(np.uint8), JPEG_QUALITY)


def blobs(size: tuple[int, int], count: int, generator: np.random.Generator) -> RLEMasks:
    """Return smooth masks with centers in the image, drawn on grids and placed as run lengths.

    Args:
        size: Height and width in pixels.
        count: Number of masks.
        generator: Random numbers.
    """
    parts = [RLEMasks.from_coco([], size)]
    ys, xs = np.mgrid[-1 : 1 : LOGITS * 1j, -1 : 1 : LOGITS * 1j].astype(np.float32)
    for share in np.clip(MEDIAN_SIDE * np.exp(generator.normal(0, SPREAD, count)), 0.004, 0.8):
        side = max(int(2 * share * (size[0] * size[1]) ** 0.5), 12)
        rough = cv2.GaussianBlur(
            generator.standard_normal((LOGITS, LOGITS), dtype=np.float32), (0, 0), 5
        )
        blob = (
            cv2.resize(
                0.35 - xs**2 - ys**2 + 4 * rough, (side, side), interpolation=cv2.INTER_LINEAR
            )
            > 0
        )
        blob[side // 2, side // 2] = True  # never empty
        placed = [np.arange(length) - generator.integers(length) + side // 2 for length in size]
        rows, columns = (np.where((at >= 0) & (at < side), at, -1) for at in placed)
        parts.append(RLEMasks.from_dense(blob[None]).resample(rows, columns))
    return RLEMasks.concatenate(parts)
