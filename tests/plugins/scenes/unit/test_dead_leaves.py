"""Synthetic scenes of textured, occluding shapes: masks of what is visible, textured as photographs
are."""

import numpy as np
import pytest

from gigamask.plugins.scenes.dead_leaves import compose_leaves
from gigamask.synthetic.scenes import compose_scene
from tests.plugins.scenes.steps import steps


@pytest.mark.slow
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


@pytest.mark.slow
def test_textures_are_stronger_than_those_of_objects_and_weaker_than_boundaries():
    leaves = np.mean([steps(compose_leaves(0, number)) for number in range(10)], 0)
    objects = np.mean([steps(compose_scene(0, number)) for number in range(10)], 0)
    assert leaves[1] > 1.5 * objects[1]
    assert leaves[0] > 2 * leaves[1]
