"""Samples as large as SA-1B's."""

import numpy as np
import pytest

from gigamask.data import annotation, image
from gigamask.plugins.memory import large_sample
from tests.errors import error_line


@pytest.mark.slow
def test_large_sample_is_like_sa1b():
    jpg, json = large_sample.make((1500, 2250), 100)
    entry = annotation.parse(json, "specimen")
    assert image.size(jpg, "specimen") == entry.size == (1500, 2250)
    assert 2.2 < 8 * len(jpg) / (1500 * 2250) < 3.6
    runs = np.diff(entry.masks.offsets)
    assert len(runs) == 100
    assert 200 < np.median(runs) < 400
    assert 35_000 < runs.sum() < 60_000
    assert (entry.masks.areas() > 0).all()


@pytest.mark.slow
@pytest.mark.parametrize("size", [(1, 1), (7, 400), (64, 48)])
def test_any_size_has_as_many_masks_as_requested(size):
    jpg, json = large_sample.make(size, 30, seed=3)
    entry = annotation.parse(json, "specimen")
    assert image.decode(jpg, "specimen", entry.size).shape == (*size, 3)
    assert (entry.masks.areas() > 0).tolist() == [True] * 30
    assert large_sample.make(size, 30, seed=3) == (jpg, json)
    assert large_sample.make(size, 30, seed=4) != (jpg, json)
    assert len(annotation.parse(large_sample.make(size, 0)[1], "specimen").masks) == 0


def test_what_no_sample_can_be_is_refused():
    with error_line(r"^0 x 9 .*65535.*134217728"):
        large_sample.make((0, 9), 1)
    with error_line(r"^60000 x 60000 pixels: "):
        large_sample.make((60000, 60000), 1)
    with error_line(r"^10001 .*10000"):
        large_sample.make((9, 9), 10001)
