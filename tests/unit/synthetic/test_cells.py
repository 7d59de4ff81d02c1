"""Synthetic micrographs: cells apart, masks that show cells."""

import numpy as np
import pytest

from gigamask.data.index import build
from gigamask.synthetic.cells import MIN_AREA_PX, compose_cells
from tests.commands import invoke, refusal


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


@pytest.mark.slow
def test_the_command_writes_those_of_its_seed(tmp_path, capsys):
    invoke(f"synth {tmp_path}/out --kind cells --images 2 --seed 3")
    one, again, other = (compose_cells(seed, 1) for seed in (3, 3, 4))
    assert np.array_equal(one.pixels, again.pixels)
    assert len(one.masks) != len(other.masks)
    index = build(tmp_path / "out", tmp_path / "index")
    assert len(index) == 2
    assert index.manifest.masks == len(one.masks) + len(compose_cells(3, 0).masks)
    line = refusal(capsys, f"synth {tmp_path}/out --kind cells --crowded 0.5")
    assert "--crowded is for --kind objects" in line
    invoke(f"synth {tmp_path}/out --kind cells --images 1 --first 500")
    assert "it also holds 1 other tar" in capsys.readouterr().out
