"""Coordinates and pixels of `ResizeLongestSide`, by hand, and compared to training's own."""

import numpy as np
import pytest
import torch
from PIL import Image

from gigamask.inference.resize_longest_side import ResizeLongestSide


def test_the_long_side_becomes_the_models_and_the_other_is_rounded():
    transform = ResizeLongestSide(64)
    picture = np.random.default_rng(0).integers(0, 256, (30, 47, 3), dtype=np.uint8)
    assert transform.apply_image(picture).shape == (41, 64, 3)  # 40.85
    assert transform.apply_image(picture.transpose(1, 0, 2)).shape == (64, 41, 3)
    assert transform.apply_image_torch(torch.zeros(2, 3, 30, 47)).shape == (2, 3, 41, 64)
    assert np.array_equal(
        transform.apply_image(picture[:, :, ::-1]), transform.apply_image(picture)[:, :, ::-1]
    )


def test_coordinates_are_scaled_by_the_ratio_of_the_sides():
    transform, size = ResizeLongestSide(64), (30, 47)
    points = np.array([[0, 0], [47, 30], [23, 15]])
    assert np.allclose(
        transform.apply_coords(points, size), [[0, 0], [64, 41], [23 * 64 / 47, 15 * 41 / 30]]
    )
    assert points.tolist() == [[0, 0], [47, 30], [23, 15]]
    assert np.allclose(transform.apply_boxes(np.array([0, 0, 47, 30]), size), [[0, 0, 64, 41]])
    assert torch.allclose(
        transform.apply_coords_torch(torch.tensor(points), size),
        torch.tensor(transform.apply_coords(points, size)).float(),
    )
    assert transform.apply_boxes_torch(torch.tensor([[0, 0, 47, 30]]), size)[
        0
    ].tolist() == pytest.approx([0, 0, 64, 41])


def test_training_resizes_pixels_to_one_level():
    transform = ResizeLongestSide(64)
    picture = np.random.default_rng(0).integers(0, 256, (100, 150, 3), dtype=np.uint8)
    training = transform.image_transform((100, 150)).apply_image(picture)
    training = training.permute(1, 2, 0).numpy()
    assert np.abs(transform.apply_image(picture).astype(int) - training).max() <= 1


@pytest.mark.parametrize("dtype", [np.uint8, np.float32, np.int32])
def test_a_mask_is_resized_as_an_image_of_one_channel(dtype):
    mask = np.random.default_rng(0).integers(0, 2, (30, 47)).astype(dtype)
    transform = ResizeLongestSide(32)
    transform.target_length = 64  # which programs set
    resized = Image.fromarray(mask).resize((64, 41), Image.Resampling.BILINEAR)
    np.testing.assert_array_equal(transform.apply_image(mask), np.array(resized))
