"""Smoothed edges of label images are found, whatever smoothed them; clean ones are left alone."""

import io

import numpy as np
import pytest
from PIL import Image

from gigamask.datatools import smoothed_labels
from tests.errors import corrupt_sample

ROWS, COLUMNS = np.mgrid[:48, :64]
DISC = np.where((ROWS - 24) ** 2 + (COLUMNS - 32) ** 2 < 300, 255, 0).astype(np.uint8)
OBJECTS = np.kron(np.arange(1, 13, dtype=np.uint8).reshape(3, 4), np.ones((16, 16), np.uint8))
OBJECTS = np.where((ROWS % 16 < 11) & (COLUMNS % 16 < 11), OBJECTS, 0).astype(np.uint8)


def resized(labels: np.ndarray, how: int, size: tuple[int, int] = (128, 96)) -> np.ndarray:
    return np.asarray(Image.fromarray(labels).resize(size, how)).astype(np.int32)


@pytest.mark.parametrize("labels", [DISC, OBJECTS])
@pytest.mark.parametrize("how", [Image.BILINEAR, Image.BICUBIC, Image.LANCZOS])
@pytest.mark.parametrize("size", [(128, 96), (100, 75), (512, 384), (40, 30)])
def test_smoothed_edges_are_refused_with_the_way_out(labels, how, size):
    with corrupt_sample(r"--binary 128 .*--nearest-value") as caught:
        smoothed_labels.check(resized(labels, how, size), "a")
    assert caught.value.kind == "smoothed edges"


def test_masks_that_were_saved_as_jpeg_are_refused():
    file = io.BytesIO()
    Image.fromarray(DISC).save(file, "JPEG", quality=85)
    with corrupt_sample("values between"):
        smoothed_labels.check(np.asarray(Image.open(file)).astype(np.int32), "a")


def cells(count: int) -> np.ndarray:
    """Cells that fill the image, nearest to random points."""
    points = np.random.default_rng(0).integers(0, (48, 64), (count, 2))
    away = (ROWS[..., None] - points[:, 0]) ** 2 + (COLUMNS[..., None] - points[:, 1]) ** 2
    return away.argmin(-1) + 1


@pytest.mark.parametrize("count", [5, 60, 250, 1000])
def test_cells_side_by_side_are_left_alone(count):
    smoothed_labels.check(cells(count).astype(np.int32), "a")


def test_clean_label_images_are_left_alone():
    small = np.zeros((48, 64), np.int32)
    small[2::6, 2::6] = np.arange(8 * 11).reshape(8, 11) + 1  # objects of one pixel
    for labels in (DISC, OBJECTS, small, small * 0, resized(OBJECTS, Image.NEAREST)):
        smoothed_labels.check(labels.astype(np.int32), "a")


def test_the_nearest_value():
    found, _ = smoothed_labels.to_nearest_value(resized(OBJECTS, Image.BILINEAR))
    expected = resized(OBJECTS, Image.NEAREST)
    assert (found != expected).mean() < 0.03
    assert set(np.unique(found)) == set(range(13))
    clean = OBJECTS.astype(np.int32)
    np.testing.assert_array_equal(smoothed_labels.to_nearest_value(clean)[0], clean)
    clean[20, 5:60] = 50  # a line of one pixel
    found, lost = smoothed_labels.to_nearest_value(clean)
    assert (lost, 50 in found) == (1, False)
