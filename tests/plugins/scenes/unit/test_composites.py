"""Synthetic scenes of things of several materials: many masks are whole things, parts included."""

import numpy as np
import pytest

from gigamask.plugins.scenes import composites
from gigamask.plugins.scenes.composites import CompositeCanvas, compose_composites, make_species
from tests.plugins.scenes import canvases


@pytest.fixture(scope="module")
def drawn():
    """Twelve scenes, and their canvases."""
    return canvases.drawn(composites, compose_composites, range(12))


@pytest.mark.slow
def test_many_masks_are_whole_things_with_all_their_parts(drawn):
    whole = several = count = 0
    for scene, canvas in drawn:
        objects = np.array(canvas.objects)[canvas.owner]
        for mask in scene.masks.to_dense():
            kinds = np.unique(objects[mask])
            is_whole = len(kinds) == 1 and (mask == (objects == kinds[0])).all()
            whole += is_whole
            several += is_whole and len(np.unique(canvas.owner[mask])) > 2
            count += 1
    assert whole > 0.4 * count
    assert several > 0.3 * whole


@pytest.mark.slow
def test_sizes_reach_from_ten_pixels_to_most_of_the_image(drawn):
    shares = np.concatenate([scene.masks.to_dense().mean((1, 2)) for scene, _ in drawn])
    assert 0.0005 <= shares.min() < 0.001
    assert shares.max() > 0.4
    for scene, _ in drawn:
        points = scene.points_xy
        assert scene.masks.to_dense()[np.arange(len(points)), points[:, 1], points[:, 0]].all()


def test_parts_of_a_species_follow_what_they_are_attached_to():
    for seed in range(40):
        species = make_species(np.random.default_rng(seed))
        assert species[0].parent == 0
        assert all(part.parent < index for index, part in enumerate(species) if index)
        assert all(0 <= part.material < composites.MATERIALS[1] for part in species)


def test_things_of_a_species_have_one_form_and_different_colors():
    generator = np.random.default_rng(1)
    canvas = canvases.blank(CompositeCanvas, (120, 240), generator)
    species = make_species(generator)
    for x in (60.0, 180.0):
        canvas.draw_composite(species, np.array([x, 60.0]), 30.0)
    regions = np.array(canvas.parents[1:])
    first, second = np.split(np.arange(1, len(canvas.parents)), 2)
    assert len(first) == len(species)
    assert (regions[first - 1] == 0).sum() == 1
    assert not np.allclose(canvas.colors[first[0]], canvas.colors[second[0]])
    areas = np.bincount(np.array(canvas.objects)[canvas.owner].ravel())
    assert 0.5 < areas[first[0]] / areas[second[0]] < 2
