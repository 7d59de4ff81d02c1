"""Image, masks, points and boxes agree about where things are."""

from dataclasses import replace

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from gigamask.masks.rle import RLEMasks
from gigamask.masks.transforms import ImageTransform, stretched


@st.composite
def transforms(draw) -> ImageTransform:
    """Frames of any crop, scale and flip; the crop keeps its shape only roughly, as
    rounding does."""
    height, width = draw(st.integers(1, 60)), draw(st.integers(1, 60))
    y0, x0 = draw(st.integers(0, height - 1)), draw(st.integers(0, width - 1))
    y1, x1 = draw(st.integers(y0 + 1, height)), draw(st.integers(x0 + 1, width))
    side = draw(st.sampled_from([16, 24, 64]))
    if draw(st.booleans()):  # stretched, as if the image were a square
        longer = max(height, width)
        square = ImageTransform.resize_longest_side((longer, longer), side, draw(st.booleans()))
        y0, x0 = min(y0, longer - 1), min(x0, longer - 1)
        return stretched(replace(square, crop=(y0, x0, longer, longer)), (height, width))
    resized = ImageTransform.resize_longest_side((y1 - y0, x1 - x0), side).resized
    return ImageTransform((height, width), (y0, x0, y1, x1), resized, side, draw(st.booleans()))


@given(transforms(), st.integers(0, 2**32 - 1))
def test_points_and_boxes_come_back(transform, seed):
    points = np.random.default_rng(seed).uniform(-5, 65, (3, 7, 2))
    assert np.allclose(transform.points_to_original(transform.points_to_input(points)), points)
    assert np.allclose(transform.points_to_input(transform.points_to_original(points)), points)
    corners = np.sort(points[:, :2], 1).reshape(3, 4)
    boxes = transform.boxes_to_input(corners)
    assert (boxes[:, :2] <= boxes[:, 2:]).all()
    assert np.allclose(
        np.sort(transform.points_to_original(boxes.reshape(3, 2, 2)), 1).reshape(3, 4), corners
    )


@given(transforms(), st.sampled_from([4, 8, 16]), st.integers(0, 2**32 - 1))
def test_a_cell_shows_the_pixel_at_its_centre(transform, grid, seed):
    masks = np.random.default_rng(seed).random((3, *transform.original)) < 0.5
    centres = (np.arange(grid) + 0.5) * transform.image_size / grid
    xy = np.stack(np.meshgrid(centres, centres), -1)
    original = transform.points_to_original(xy - np.array(transform.scale_xy) / 2)
    # A centre on the border of two pixels may show either; the whole-number rule takes one,
    # rounding in float perhaps the other.
    x, y = (
        np.stack([np.floor(original[..., i] + 0.5 + nudge) for nudge in (-1e-6, 1e-6)]).astype(int)
        for i in (0, 1)
    )
    inside = (xy[..., 0] < transform.resized[1]) & (xy[..., 1] < transform.resized[0])
    shown = transform.apply_masks(RLEMasks.from_dense(masks), grid).to_dense()
    assert not shown[:, ~inside].any()
    y0, x0, y1, x1 = transform.crop
    candidates = masks[:, np.clip(y, y0, y1 - 1)[:, None], np.clip(x, x0, x1 - 1)[None]]
    assert (shown[:, None, None] == candidates).any((1, 2))[:, inside].all()


@given(transforms(), st.data())
def test_a_marked_pixel_lands_where_points_say(transform, data):
    y0, x0, y1, x1 = transform.crop
    x, y = data.draw(st.integers(x0, x1 - 1)), data.draw(st.integers(y0, y1 - 1))
    pixels = np.zeros((*transform.original, 3), np.uint8)
    pixels[y, x] = 255
    image = transform.apply_image(pixels)
    assert image.shape == (3, *transform.resized)
    half = (np.array(transform.scale_xy) - 1) / 2
    expected = transform.points_to_input(np.array([x, y], np.float64)) + half
    weight = image[0].double().numpy()
    # A pixel at the border of the image is pulled inwards by the filter's cut-off, by no more than
    # a pixel of the input or of the crop.
    reach = max(1.0, *(np.array(transform.resized) / transform.crop_size))
    rows, columns = np.indices(weight.shape)
    centre = np.array([(weight * columns).sum(), (weight * rows).sum()]) / weight.sum()
    assert np.abs(centre - expected).max() <= reach


@given(
    st.integers(1, 60), st.integers(1, 60), st.sampled_from([16, 24, 64]), st.integers(0, 2**32 - 1)
)
def test_a_flip_mirrors_image_and_masks_alike(height, width, side, seed):
    random = np.random.default_rng(seed)
    plain, mirrored = (
        ImageTransform.resize_longest_side((height, width), side, flip) for flip in (False, True)
    )
    h, w = plain.resized
    pixels = random.integers(0, 256, (height, width, 3), np.uint8)
    assert np.array_equal(
        plain.apply_image(pixels).numpy()[:, :, ::-1], mirrored.apply_image(pixels).numpy()
    )
    runs = RLEMasks.from_dense(random.random((2, height, width)) < 0.5)
    assert np.array_equal(
        plain.apply_masks(runs, side).to_dense()[:, :h, :w][:, :, ::-1],
        mirrored.apply_masks(runs, side).to_dense()[:, :h, :w],
    )
