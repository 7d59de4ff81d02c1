"""Frames that the augmentations lay."""

import numpy as np
import pytest

from gigamask.data.augment import Flip, Plain
from gigamask.draws import draw
from gigamask.faults import Fault
from gigamask.geometry.frame import Frame


def test_plain_is_the_whole_image():
    assert Plain().frame((300, 400), 128, draw(0, "frame")) == Frame.whole((300, 400), 128)


def test_flip_mirrors_its_share_of_the_visits():
    frames = [Flip(0.25).frame((300, 400), 128, draw(0, "frame", 0, position)) for position in range(2000)]
    # 500 expected, standard deviation 19.
    assert abs(sum(frame.flip for frame in frames) - 500) < 95
    assert {(frame.original, frame.crop, frame.resized, frame.side) for frame in frames} == {((300, 400), (0, 0, 300, 400), (96, 128), 128)}


@pytest.mark.parametrize(("probability", "flipped"), [(0.0, False), (1.0, True)])
def test_flip_at_its_ends(probability, flipped):
    generators = [np.random.Generator(np.random.Philox(key=key)) for key in range(50)]
    assert {Flip(probability).frame((30, 40), 64, generator).flip for generator in generators} == {flipped}


@pytest.mark.parametrize("probability", [-0.1, 1.5])
def test_a_probability_that_is_none_is_refused(probability):
    with pytest.raises(Fault, match=rf"the flip's probability is {probability}, it lies in \[0, 1\]"):
        Flip(probability)
