"""Synthetic scenes of clutter: exact masks of what is visible, of all sizes, and texture."""

import numpy as np
import pytest

from gigamask.plugins.scenes import clutter
from gigamask.plugins.scenes.clutter import compose_clutter
from gigamask.synthetic.shapes import Window
from tests.plugins.scenes import canvases
from tests.plugins.scenes.steps import steps


@pytest.fixture(scope="module")
def scenes():
    return [compose_clutter(0, number) for number in range(24)]


@pytest.mark.slow
def test_masks_are_exact_and_lie_in_one_another_or_apart():
    """Each is what is visible of a region with its parts, or of two objects that touch."""
    for scene, canvas in canvases.drawn(clutter, compose_clutter, range(4)):
        masks = scene.masks.to_dense()
        regions = len(canvas.parents)
        inside = np.eye(regions, dtype=bool)
        for region in range(regions - 1, 0, -1):
            inside[canvas.parents[region]] |= inside[region]
        wholes = {inside[region][canvas.owner].tobytes() for region in range(1, regions)}
        unknown = [mask for mask in masks if mask.tobytes() not in wholes]
        assert len(unknown) <= 1
        assert all((mask == np.isin(canvas.owner, canvas.owner[mask])).all() for mask in unknown)


@pytest.mark.slow
def test_sizes_are_spread_in_log_area_from_six_pixels_to_most_of_the_image(scenes):
    shares = np.concatenate([scene.masks.to_dense().mean((1, 2)) for scene in scenes])
    assert shares.min() >= 0.0007
    assert shares.max() > 0.5
    fifths = np.histogram(np.log(shares), np.linspace(np.log(0.0007), np.log(0.9), 6))[0]
    assert (fifths / len(shares) > (0.2, 0.2, 0.15, 0.1, 0.03)).all()
    assert fifths.max() / len(shares) < 0.4
    assert min(len(scene.masks) for scene in scenes) >= 4


@pytest.mark.slow
def test_textures_and_boundaries_are_as_strong_as_those_of_dead_leaves(scenes):
    boundary, inside = np.mean([steps(scene) for scene in scenes], 0)
    assert 30 < boundary < 46
    assert 6 < inside < 8.5


@pytest.mark.slow
def test_points_lie_in_their_masks_and_many_masks_in_others(scenes):
    nested = 0
    for scene in scenes:
        masks, points = scene.masks.to_dense(), scene.points_xy
        assert masks[np.arange(len(masks)), points[:, 1], points[:, 0]].all()
        nested += (scene.masks.intersections(scene.masks) == scene.masks.areas()).sum() - len(masks)
    assert nested > len(scenes)


def test_marks_are_not_regions():
    generator = np.random.default_rng(0)
    window = Window(8, 8, np.ones((48, 80), np.uint8))
    canvas = canvases.blank(clutter.ClutterCanvas, (64, 96), generator)
    number = canvas.add(generator, window, 0)
    owner, light = canvas.owner.copy(), canvas.light.copy()
    for _ in range(8):
        canvas.mark(window, number)
    assert (canvas.owner == owner).all()
    assert (canvas.light != light).any()
    assert (canvas.light == light)[owner == 0].all()
