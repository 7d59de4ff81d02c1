"""Synthetic scenes of every kind: determined by seed and number, and written by the command."""

import json
import tarfile

import numpy as np
import pytest

from gigamask.plugins.scenes.clutter import compose_clutter
from gigamask.plugins.scenes.composites import compose_composites
from gigamask.plugins.scenes.dead_leaves import compose_leaves
from tests.commands import invoke, refusal

KINDS = {
    "clutter": compose_clutter,
    "dead_leaves": compose_leaves,
    "composites": compose_composites,
}


@pytest.mark.slow
@pytest.mark.parametrize("compose", KINDS.values())
def test_images_depend_on_seed_and_number_alone(compose):
    one, again, other = compose(3, 5), compose(3, 5), compose(4, 5)
    assert np.array_equal(one.pixels, again.pixels)
    assert np.array_equal(one.masks.to_dense(), again.masks.to_dense())
    assert one.pixels.shape != other.pixels.shape or not np.array_equal(one.pixels, other.pixels)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_command_writes_them(tmp_path, kind):
    invoke(f"synth {tmp_path}/out --kind {kind} --images 2")
    with tarfile.open(tmp_path / "out" / "sa_000000.tar") as archive:
        assert archive.getnames() == ["sa_0.jpg", "sa_0.json", "sa_1.jpg", "sa_1.json"]
        record = json.load(archive.extractfile("sa_1.json"))
    assert len(record["annotations"]) == len(KINDS[kind](0, 1).masks)


@pytest.mark.parametrize("kind", KINDS)
def test_they_have_no_crowds(tmp_path, capsys, kind):
    line = refusal(capsys, f"synth {tmp_path}/out --kind {kind} --crowded 0.5")
    assert "--crowded is for --kind objects" in line
    assert f"got {kind}" in line
