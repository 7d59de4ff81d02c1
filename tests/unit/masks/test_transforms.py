"""The transform on cases whose answer is known."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image
from torch.nn.functional import interpolate

from gigamask.masks import transforms
from gigamask.masks.rle import RLEMasks
from gigamask.masks.transforms import (
    ImageTransform,
    boxes_on_grid,
    logit_boxes,
    logit_stacks,
    resize,
    stretched,
    whole_image,
)


@pytest.mark.parametrize(
    "original, resized",
    [
        ((1500, 2250), (683, 1024)),
        ((2060, 1500), (1024, 746)),
        ((1, 5000), (1, 1024)),
        ((321, 481), (683, 1024)),
    ],
)
def test_the_long_side_fills_the_square(original, resized):
    transform = ImageTransform.resize_longest_side(original, 1024)
    assert transform.resized == resized
    assert transform.crop == (0, 0, *original)


def test_pixels_of_the_right_size_stay_as_they_are():
    pixels = np.random.default_rng(0).integers(0, 256, (20, 30, 3), np.uint8)
    assert np.array_equal(
        ImageTransform.resize_longest_side((20, 30), 30)
        .apply_image(pixels)
        .permute(1, 2, 0)
        .numpy(),
        pixels,
    )
    cropped = ImageTransform((20, 30), (3, 4, 13, 24), (10, 20), 20, flip=True).apply_image(pixels)
    assert np.array_equal(cropped.permute(1, 2, 0).numpy(), pixels[3:13, 4:24][:, ::-1])


def test_pixels_are_resized_as_torch_does():
    pixels = np.random.default_rng(0).integers(0, 256, (200, 300, 3), np.uint8)
    pixels.setflags(write=False)
    expected = interpolate(
        torch.tensor(pixels).permute(2, 0, 1)[None].float(),
        (43, 64),
        mode="bilinear",
        antialias=True,
    )[0]
    image = ImageTransform.resize_longest_side((200, 300), 64).apply_image(pixels)
    assert image.dtype == torch.uint8
    assert image.is_contiguous()
    assert (image.float() - expected).abs().max() <= 1


@pytest.mark.parametrize("size", [(33, 1), (700, 2), (90, 1), (1, 33), (2, 700)])
@pytest.mark.parametrize("channels", [1, 3, 4])
def test_lines_of_one_pixel_are_resized_as_pillow_does(size, channels):
    pixels = np.random.default_rng(0).integers(0, 256, (*size, channels), np.uint8)
    transform = ImageTransform.resize_longest_side(size, 48)
    height, width = transform.resized
    assert 1 in (height, width)
    given = torch.tensor(pixels).permute(2, 0, 1)[None]
    for shown in (transform.apply_image(pixels), resize(given.float(), (height, width))[0]):
        for plane, expected in zip(shown, np.moveaxis(pixels, 2, 0), strict=True):
            image = Image.fromarray(np.ascontiguousarray(expected))
            expected = np.array(image.resize((width, height), Image.Resampling.BILINEAR))
            assert np.abs(plane.numpy() - expected.astype(float)).max() <= 1


def test_cells_beside_the_image_are_background():
    full = RLEMasks.from_dense(np.ones((1, 60, 90), bool))
    transform = ImageTransform.resize_longest_side((60, 90), 64, flip=True)
    assert transform.resized == (43, 64)
    masks = transform.apply_masks(full, 16).to_dense()[0]
    assert masks[:11].all()
    assert not masks[11:].any()


@pytest.mark.usefixtures("no_shape_checks")
def test_points_are_pixels_of_the_crop_times_the_scale():
    transform = ImageTransform((100, 200), (10, 20, 60, 120), (25, 50), 64)
    points = np.array([[[20, 10], [119, 59]]], np.float32)
    moved = transform.points_to_input(points)
    assert moved.dtype == np.float32
    assert moved.tolist() == [[[0.0, 0.0], [49.5, 24.5]]]
    assert transform.points_to_original(moved).tolist() == points.tolist()
    whole = points.astype(np.uint8)
    assert replace(transform, resized=(20, 40)).points_to_input(whole)[0, 1].tolist() == [
        39.6,
        19.6,
    ]
    mirrored = replace(transform, flip=True)
    assert mirrored.points_to_input(points).tolist() == [[[49.5, 0.0], [0.0, 24.5]]]


def test_a_box_keeps_within_what_the_grid_shows():
    """A bar of 40 pixels with an arm one pixel high, on cells of 10 pixels."""
    mask = np.zeros((1, 100, 100), bool)
    mask[0, 20:60, 30:70] = mask[0, 21, 70:99] = True
    transform = ImageTransform.resize_longest_side((100, 100), 50)
    runs = RLEMasks.from_dense(mask)
    on_grid = transform.apply_masks(runs, 10)
    assert on_grid.boxes().tolist() == [[3, 2, 6, 5]]
    assert transform.boxes_to_input(runs.boxes().astype(float)).tolist() == [[15, 10, 49, 29.5]]
    assert boxes_on_grid(transform, runs.boxes(), on_grid).tolist() == [[15, 10, 37, 29.5]]
    fine = transform.apply_masks(runs, 50)
    assert boxes_on_grid(transform, runs.boxes(), fine).tolist() == [[15, 10, 49, 29.5]]


def test_logits_go_back_as_sam_does():
    low = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    transform = ImageTransform.resize_longest_side((30, 45), 64)
    back = transform.logits_to_original(low)
    square = interpolate(low, (64, 64), mode="bilinear", align_corners=False)
    assert torch.equal(
        back, interpolate(square[:, :, :43, :64], (30, 45), mode="bilinear", align_corners=False)
    )
    assert transform.logits_to_original(low.bfloat16()).dtype == torch.float32


@pytest.mark.parametrize(
    "transform",
    [
        ImageTransform.resize_longest_side((30, 45), 64, flip=True),
        ImageTransform((30, 45), (0, 0, 30, 30), (64, 64), 64),
    ],
)
def test_logits_of_a_crop_or_a_mirror_image_do_not_go_back(transform):
    with pytest.raises(ValueError, match=r"\(0, 0, 30, .*flip="):
        transform.logits_to_original(torch.zeros(1, 1, 16, 16))


def test_a_stretched_image_fills_the_square():
    transform = whole_image((30, 45), 64, stretch=True)
    assert (transform.resized, transform.scale_xy) == ((64, 64), (64 / 45, 64 / 30))
    low = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    assert torch.equal(
        transform.logits_to_original(low),
        interpolate(low, (30, 45), mode="bilinear", align_corners=False),
    )
    full = RLEMasks.from_dense(np.ones((1, 30, 45), bool))
    assert transform.apply_masks(full, 16).areas().tolist() == [256]


def test_a_crop_of_the_square_is_one_of_the_stretched_image():
    square = ImageTransform((60, 60), (12, 30, 60, 60), (48, 30), 48, flip=True)
    transform = stretched(square, (20, 60))
    assert transform.original == (20, 60)
    assert transform.crop == (4, 30, 20, 60)
    assert (transform.resized, transform.flip) == ((48, 30), True)
    assert stretched(square, (1, 1)).crop == (0, 0, 1, 1)


@pytest.mark.parametrize("stretch", [False, True])
@pytest.mark.parametrize("size", [(30, 45), (200, 131), (64, 64), (7, 500)])
def test_logits_in_a_box_are_those_of_the_whole_image(size, stretch):
    random = torch.Generator().manual_seed(0)
    low = torch.full((6, 16, 16), -5.0)
    low[1, 0, 3] = low[2, 4:9, 2:5] = low[3, :, 0] = 4.0
    low[4] = torch.randn(16, 16, generator=random)
    low[5, 7, 7] = float("nan")
    transform = whole_image(size, 64, stretch)
    whole = transform.logits_to_original(low[:, None])[:, 0]
    boxes = list(logit_boxes(transform, low, -1.0))
    assert len(boxes) == 6
    for logits, (box, (y0, x0)) in zip(whole[:5], boxes[:5], strict=True):
        inside = torch.zeros(size, dtype=torch.bool)
        inside[y0 : y0 + box.shape[0], x0 : x0 + box.shape[1]] = True
        assert torch.allclose(logits[inside].view(box.shape), box, atol=1e-5)
        assert not (logits[~inside] > -1).any()
    assert boxes[0][0].numel() == boxes[5][0].numel() == 0
    assert size[0] < 20 or boxes[2][0].numel() < whole[0].numel() / 2


@pytest.mark.parametrize("stretch", [False, True])
@pytest.mark.parametrize("size", [(30, 45), (200, 131), (64, 64), (7, 500), (1, 1)])
def test_stacks_on_a_gpu_are_parts_of_the_whole_image(size, stretch, monkeypatch):
    random = torch.Generator().manual_seed(0)
    low = torch.full((40, 16, 16), -5.0)
    low[1, 0, 3] = low[2, 4:9, 2:5] = low[3, :, 0] = low[4, 15, 15] = low[5, :2, 14:] = 4.0
    low[6:38] = torch.randn(32, 16, 16, generator=random) - 1
    low[38, 7, 7] = float("nan")
    transform = whole_image(size, 64, stretch)
    whole = transform.logits_to_original(low[:, None])[:, 0]
    monkeypatch.setattr(transforms, "is_readable", lambda tensor: False)
    monkeypatch.setattr(transforms, "STACK_BYTES", 4 * 10 * size[0] * size[1])
    seen = []
    for index, logits, corners in logit_stacks(transform, low, -1.0):
        seen += index.tolist()
        for number, stacked, (y0, x0) in zip(index, logits, corners, strict=True):
            height, width = stacked.shape
            if number < 38:
                part = whole[number, y0 : y0 + height, x0 : x0 + width]
                torch.testing.assert_close(stacked, part, rtol=0, atol=1e-5)
                outside = whole[number].clone()
                outside[y0 : y0 + height, x0 : x0 + width] = -9
                assert not (outside > -1).any()
            else:
                assert not (stacked > -1).any()
    assert sorted(seen) == list(range(40))


@pytest.mark.parametrize("size", [(100, 262), (260, 235), (289, 126)])
@pytest.mark.parametrize("at", [(16, 18), (3, 4), (0, 12)])
def test_a_small_box_is_resized_even_if_its_part_has_as_many_rows(size, at):
    """Torch copies an image whose size stays the same, whatever the scale."""
    low = torch.full((1, 64, 64), -5.0)
    low[0, at[0] : at[0] + 2, at[1] : at[1] + 2] = 4.0
    transform = whole_image(size, 256)
    whole = transform.logits_to_original(low[:, None])[0, 0]
    [(box, (y0, x0))] = logit_boxes(transform, low, -1.0)
    torch.testing.assert_close(
        box, whole[y0 : y0 + box.shape[0], x0 : x0 + box.shape[1]], rtol=0, atol=1e-5
    )
