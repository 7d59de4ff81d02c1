"""Synthetic micrographs: cells apart, masks that show cells."""

import numpy as np
import pytest

from gigamask.synthetic.cells import MIN_AREA_PX, compose_cells


@pytest.mark.slow
def test_cells_touch_without_overlap_and_stand_out():
    contrasts, touching = [], 0
    for number in range(6):
        image = compose_cells(0, number)
        masks = image.masks.to_dense()
        assert len(masks) >= 10
        assert masks.sum((1, 2)).min() >= MIN_AREA_PX
        assert masks.sum(0).max() == 1
        assert np.ptp(image.pixels, axis=2).max() == 0
        inside = masks.any(0)
        gray = image.pixels[..., 0].astype(float)
        contrasts.append(abs(gray[inside].mean() - gray[~inside].mean()) / gray[~inside].std())
        labels = np.tensordot(np.arange(1, len(masks) + 1), masks, 1)
        left, right = labels[:, :-1], labels[:, 1:]
        touching += int(((left != right) & (left > 0) & (right > 0)).any())
        points = image.points_xy
        assert masks[np.arange(len(masks)), points[:, 1], points[:, 0]].all()
    assert min(contrasts) > 0.5
    assert touching >= 3
