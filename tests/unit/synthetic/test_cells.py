"""Synthetic micrographs: determined by seed and number, cells apart, masks that show cells."""

import json
import tarfile

import numpy as np
import pytest

from gigamask.cli.main import main
from gigamask.synthetic.cells import MIN_AREA_PX, compose_cells


def test_cells_depend_on_seed_and_number_alone():
    one, again, other = compose_cells(3, 5), compose_cells(3, 5), compose_cells(4, 5)
    assert np.array_equal(one.pixels, again.pixels)
    assert np.array_equal(one.masks.to_dense(), again.masks.to_dense())
    assert one.pixels.shape != other.pixels.shape or not np.array_equal(one.pixels, other.pixels)


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


def test_command_writes_cells(tmp_path, capsys):
    folder = tmp_path / "cells"
    assert main(["synth", str(folder), "--kind", "cells", "--images", "2"]) == 0
    with tarfile.open(folder / "sa_000000.tar") as archive:
        assert archive.getnames() == ["sa_0.jpg", "sa_0.json", "sa_1.jpg", "sa_1.json"]
        record = json.load(archive.extractfile("sa_1.json"))
    assert len(record["annotations"]) == len(compose_cells(0, 1).masks)


@pytest.mark.parametrize("flags", [["--queries"], ["--crowded", "0.5"]])
def test_cells_have_neither_queries_nor_crowds(tmp_path, capsys, flags):
    assert main(["synth", str(tmp_path / "cells"), "--kind", "cells", *flags]) == 2
    assert "--kind cells cannot be combined with --" in capsys.readouterr().err
