"""Parts, differences and outlines from run lengths equal those of OpenCV and pycocotools."""

import tracemalloc

import cv2
import numpy as np
import pytest
from pycocotools import mask as coco

from gigamask.masks.components import connected_components, join_rings, outlines, paste, subtract
from gigamask.masks.rle import RLEMasks, from_keys


def random_masks(seed):
    """Return two noisy masks of one size, one of which touches all borders."""
    rng = np.random.default_rng(seed)
    height, width = rng.integers(1, 24, 2)
    return rng.random((2, height, width)) < rng.choice([0.1, 0.4, 0.6, 0.95])


@pytest.mark.parametrize("seed", range(40))
def test_components_differences_and_outlines_are_exact(seed):
    dense = random_masks(seed)
    one, other = (RLEMasks.from_dense(each[None]) for each in dense)
    assert (subtract(one, other).to_dense()[0] == dense[0] & ~dense[1]).all()
    assert not subtract(none := RLEMasks.from_dense(np.zeros_like(dense[:1])), none).areas()[0]
    parts = connected_components(one)
    count, labels = cv2.connectedComponents(dense[0].astype(np.uint8), connectivity=8)
    assert len(parts) == count - 1
    assert (np.diff(parts.areas()) <= 0).all()
    assert (parts.to_dense().sum(0) == dense[0]).all()
    for part in parts.to_dense():
        assert len(np.unique(labels[part])) == 1
    if not dense[0].any():
        return
    found = outlines(one)
    assert len(found) == len(parts)
    assert (sum(drawn(rings, one.size) for rings in found) == dense[0]).all()
    assert (drawn([ring for rings in found for ring in rings], one.size) == dense[0]).all()


def drawn(rings, size):
    """Return the mask of polygons joined to one, as pycocotools draws it."""
    corners = join_rings(rings).ravel().astype(float).tolist()
    [rle] = coco.frPyObjects([corners], *size)
    return RLEMasks.from_coco([rle["counts"]], size).to_dense()[0].astype(int)


def test_a_pasted_crop_stays_as_it_is():
    dense = np.random.default_rng(0).random((2, 5, 7)) < 0.5
    whole = np.zeros((2, 20, 9), bool)
    whole[:, 15:, 2:] = dense
    assert (paste(RLEMasks.from_dense(dense), 2, 15, (20, 9)).to_dense() == whole).all()


def test_many_parts_of_a_large_mask_need_no_pixels():
    height, width, count = 6000, 5500, 1000
    rng = np.random.default_rng(0)
    columns = 5 * rng.choice(width // 5, count, replace=False)
    rows = rng.integers(0, height - 5, count)
    begin = ((columns[:, None] + np.arange(3)) * height + rows[:, None]).ravel()
    keys = np.sort(np.concatenate([begin, begin + 4]))
    mask = from_keys((height, width), 1, keys, height * width + 1)
    tracemalloc.start()
    try:
        parts = connected_components(mask)
        assert tracemalloc.get_traced_memory()[1] < 2e6
    finally:
        tracemalloc.stop()
    assert len(parts) == count
    assert (parts.areas() == 12).all()
