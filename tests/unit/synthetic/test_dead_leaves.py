"""Synthetic scenes of textured, occluding shapes: determined by seed and number, with masks of what
is visible, and textured as photographs are.
"""

import json
import tarfile

import cv2
import numpy as np
import pytest

from gigamask.cli.main import main
from gigamask.synthetic.dead_leaves import compose_leaves
from gigamask.synthetic.scenes import compose_scene


def test_scenes_depend_on_seed_and_number_alone():
    one, again, other = compose_leaves(3, 5), compose_leaves(3, 5), compose_leaves(4, 5)
    assert np.array_equal(one.pixels, again.pixels)
    assert np.array_equal(one.masks.to_dense(), again.masks.to_dense())
    assert one.pixels.shape != other.pixels.shape or not np.array_equal(one.pixels, other.pixels)


def test_masks_are_of_all_sizes_and_hold_their_points():
    shares = []
    for number in range(8):
        scene = compose_leaves(0, number)
        masks = scene.masks.to_dense()
        assert len(masks) >= 4
        shares += list(masks.mean((1, 2)))
        points = scene.points_xy
        assert masks[np.arange(len(masks)), points[:, 1], points[:, 0]].all()
    shares = np.array(shares)
    assert shares.min() >= 0.003
    assert (shares < 0.01).mean() > 0.2
    assert (shares > 0.1).mean() > 0.05


def steps(scene):
    """Return the mean step of brightness at boundaries of masks, and elsewhere."""
    gray = cv2.cvtColor(scene.pixels, cv2.COLOR_RGB2GRAY).astype(float)
    step = np.abs(np.diff(gray, axis=1))
    masks = scene.masks.to_dense()
    crossed = (masks[:, :, 1:] != masks[:, :, :-1]).any(0)
    return step[crossed].mean(), step[~crossed].mean()


def test_textures_are_stronger_than_those_of_objects_and_weaker_than_boundaries():
    leaves = np.mean([steps(compose_leaves(0, number)) for number in range(10)], 0)
    objects = np.mean([steps(compose_scene(0, number)) for number in range(10)], 0)
    assert leaves[1] > 1.5 * objects[1]
    assert leaves[0] > 2 * leaves[1]


def test_command_writes_scenes(tmp_path):
    folder = tmp_path / "leaves"
    assert main(["synth", str(folder), "--kind", "dead_leaves", "--images", "2"]) == 0
    with tarfile.open(folder / "sa_000000.tar") as archive:
        assert archive.getnames() == ["sa_0.jpg", "sa_0.json", "sa_1.jpg", "sa_1.json"]
        record = json.load(archive.extractfile("sa_1.json"))
    assert len(record["annotations"]) == len(compose_leaves(0, 1).masks)


@pytest.mark.parametrize("flags", [["--queries"], ["--crowded", "0.5"]])
def test_kinds_have_neither_queries_nor_crowds(tmp_path, capsys, flags):
    assert main(["synth", str(tmp_path / "leaves"), "--kind", "dead_leaves", *flags]) == 2
    assert "--kind dead_leaves cannot be combined with --" in capsys.readouterr().err
