"""Under every augmentation image, masks, points and boxes agree about where things are."""

import numpy as np
import pytest
import simplejpeg
from hypothesis import given, settings
from hypothesis import strategies as st

from gigamask.data.augment import (
    HorizontalFlip,
    LargeScaleJitter,
    NoAugment,
    RandomCrop,
    RandomResizedCrop,
    ScaleJitter,
)
from gigamask.data.dataset import build_sample
from gigamask.data.sample_config import SampleConfig
from gigamask.masks.rle import RLEMasks
from gigamask.records import ImageAnnotation, SampleRef
from gigamask.rng import make_rng
from gigamask.types import RandomSpec

KEEPING_SHAPE = [
    NoAugment(),
    HorizontalFlip(),
    LargeScaleJitter(),
    LargeScaleJitter(1.5, 4.0),
    ScaleJitter(),
    LargeScaleJitter(0.1, 0.3, flip=1.0),
    RandomCrop(40),
    RandomCrop(400, flip=1.0),
]
AUGMENTS = [*KEEPING_SHAPE, RandomResizedCrop()]
CHANCE = RandomSpec(seed=3, clicks=1, blocks=1)
COLOURS = np.array([[250, 10, 10], [10, 250, 10], [10, 10, 250]])


def painted(height, width, seed):
    """A photograph of three rectangles in pure colors on black, and their masks."""
    random = make_rng(seed, "rectangles")
    masks, pixels = np.zeros((3, height, width), bool), np.zeros((height, width, 3), np.uint8)
    for number in range(3):
        y0, x0 = int(random.integers(height)), int(random.integers(width))
        y1, x1 = int(random.integers(y0 + 1, height + 1)), int(random.integers(x0 + 1, width + 1))
        masks[: number + 1, y0:y1, x0:x1] = False
        masks[number, y0:y1, x0:x1] = True
        pixels[y0:y1, x0:x1] = COLOURS[number]
    scores = np.full(3, 0.9, np.float32)
    raw = simplejpeg.encode_jpeg(pixels, quality=100, colorsubsampling="444")
    return (
        raw,
        masks,
        ImageAnnotation("x.tar:a", (height, width), RLEMasks.from_dense(masks), scores, scores),
    )


def assembled(size, augment, position, side, mask_size):
    """The painted masks, their annotation, and the sample of training."""
    raw, masks, entry = painted(*size, position)
    config = SampleConfig(image_size=side, mask_size=mask_size, augment=augment)
    return masks, entry, build_sample(raw, entry, SampleRef(0, position, 0), config, CHANCE)


# As wide as it is high, wider, higher, and hardly anything.
sizes = st.tuples(st.integers(1, 90), st.integers(1, 90)) | st.sampled_from(
    [(1, 1), (1, 300), (300, 1), (2, 200)]
)
any_frame = given(sizes, st.sampled_from(AUGMENTS), st.integers(0, 2**31))


@settings(deadline=None)
@given(sizes, st.sampled_from(AUGMENTS), st.integers(0, 2**31), st.sampled_from([48, 64]))
def test_colours_of_the_image_are_masks_on_the_grid(size, augment, position, side):
    dense, entry, sample = assembled(size, augment, position, side, side)
    h, w = sample.transform.resized
    assert sample.image.shape == (3, h, w)
    shown = np.zeros((side, side, 3), int)
    shown[:h, :w] = sample.image.numpy().transpose(1, 2, 0)
    # Away from borders, where resizing and the JPEG mix colours, a pixel has its mask's colour, and
    # beside the mask it has not.
    reach = 2 + int(np.ceil(max(np.array(sample.transform.resized) / sample.transform.crop_size)))
    cells = sample.transform.apply_masks(entry.masks, side).areas()
    shown_masks = np.flatnonzero((cells > 0) & (dense.sum((1, 2)) <= 0.9 * dense[0].size))
    assert len(shown_masks) == len(sample.masks)
    fine = sample.transform.apply_masks(entry.masks[shown_masks], 8 * side).to_dense()
    shares = fine.reshape(len(fine), side, 8, side, 8).mean((2, 4))
    for number, mask, share in zip(shown_masks, sample.masks.to_dense(), shares, strict=True):
        full, none = share > 0.999, share < 0.001
        assert mask[full].all()
        assert not mask[none].any()
        off = np.abs(shown - COLOURS[number]).max(2)
        assert (off[eroded(full, reach)] < 60).all()
        assert (off[eroded(none, reach)] > 60).all()
    assert not shown[h:].any()
    assert not shown[:, w:].any()


def eroded(mask, by):
    """The pixels of a mask all of whose neighbours, up to `by` away, are in it; what lies beside
    the picture counts as in it."""
    for _ in range(2):  # down the columns, then along the rows
        padded = np.pad(mask, ((by, by), (0, 0)), constant_values=True)
        mask = np.logical_and.reduce(
            [padded[shift : shift + len(mask)] for shift in range(2 * by + 1)]
        ).T
    return mask


@settings(deadline=None)
@any_frame
def test_boxes_are_those_of_the_visible_part(size, augment, position):
    dense, entry, sample = assembled(size, augment, position, 64, 32)
    transform = sample.transform
    y0, x0, y1, x1 = transform.crop
    boxes = []
    on_grid = transform.apply_masks(entry.masks, 32)
    for mask, cells in zip(dense, on_grid.areas(), strict=True):
        rows, columns = (
            np.flatnonzero(mask[y0:y1, x0:x1].any(1)),
            np.flatnonzero(mask[y0:y1, x0:x1].any(0)),
        )
        if cells and mask.sum() <= 0.9 * mask.size:
            boxes.append([columns[0] + x0, rows[0] + y0, columns[-1] + x0, rows[-1] + y0])
    exact = transform.boxes_to_input(np.array(boxes, np.float32).reshape(-1, 4))
    # Thin parts that the grid does not show are left out.
    low, high = (op(sample.boxes_input, exact) for op in (np.minimum, np.maximum))
    assert np.array_equal(np.concatenate([low[:, :2], high[:, 2:]], 1), exact)
    assert (sample.boxes_input >= 0).all()
    scale = np.array(transform.scale_xy)
    assert (sample.boxes_input[:, 2:] + scale <= np.array(transform.resized)[::-1] + 1e-4).all()
    assert len(sample.masks) == len(boxes) == len(sample.random_inputs.first_prompt)


@settings(deadline=None)
@any_frame
def test_foreground_points_land_in_their_mask_and_box(size, augment, position):
    dense, _, sample = assembled(size, augment, position, 64, 64)
    if not len(sample.masks):
        return
    transform = sample.transform
    points = sample.masks.sample_points(make_rng(position, "points").random((len(sample.masks), 5)))
    scale, centres = np.array(transform.scale_xy), points + 0.5
    original = np.floor(transform.points_to_original(centres - scale / 2) + 0.5 + 1e-9).astype(int)
    for (x0, y0, x1, y1), inside, landed in zip(sample.boxes_input, centres, original, strict=True):
        # A cell belongs to a box when its centre does; a box ends with its last pixel.
        assert (inside >= np.array([x0, y0]) - 1e-3).all()
        assert (inside <= np.array([x1, y1]) + scale + 1e-3).all()
        near = [
            dense[:, y, x]
            | dense[:, max(y - 1, 0), x]
            | dense[:, y, max(x - 1, 0)]
            | dense[:, max(y - 1, 0), max(x - 1, 0)]
            for x, y in landed
        ]
        assert np.logical_and.reduce(near).any()


@any_frame
def test_frames_lie_in_image_and_square_and_lead_back(size, augment, position):
    transform = augment.get_transform(size, 64, make_rng(0, "frame", position))
    y0, x0, y1, x1 = transform.crop
    assert 0 <= y0 < y1 <= size[0]
    assert 0 <= x0 < x1 <= size[1]
    assert 1 <= min(transform.resized) <= max(transform.resized) <= 64
    corners = np.array([[x0, y0], [x1 - 1, y1 - 1]])
    laid = np.sort(transform.points_to_input(corners.astype(float)), 0)
    end = np.array(transform.resized[::-1]) - np.array(transform.scale_xy)
    assert np.allclose(laid, [[0, 0], end])
    assert np.allclose(np.sort(transform.points_to_original(laid), 0), corners)
    assert transform == augment.get_transform(size, 64, make_rng(0, "frame", position))


@pytest.mark.parametrize("size", [(480, 640), (640, 480)])
def test_photographs_keep_their_shape(size):
    for position in range(200):
        for augment in KEEPING_SHAPE:
            transform = augment.get_transform(size, 256, make_rng(0, "frame", position))
            down, across = np.array(transform.resized) / transform.crop_size
            # Both sides are rounded to whole pixels.
            assert (
                abs(down - across)
                <= 0.5 / transform.crop_size[0] + 0.5 / transform.crop_size[1] + 1e-9
            )
