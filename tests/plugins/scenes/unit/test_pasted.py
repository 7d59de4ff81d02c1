"""Photographs with things of others pasted over them: exact masks of what is visible."""

import numpy as np
import pytest

from gigamask.masks.rle import RLEMasks
from gigamask.plugins.scenes import pasted
from gigamask.synthetic.scenes import SyntheticScene, write_scenes
from gigamask.workflows.open_data import open_index
from tests.commands import invoke, refusal
from tests.errors import error_line


def coin(number):
    """A bright disc with a hub in the dark, which anybody can tell from the pixels."""
    y, x = np.mgrid[:64, :96]
    distance = np.hypot(x - 40 - number, y - 30)
    masks = np.stack([distance < 12 + 2 * number, distance < 6])
    pixels = np.repeat(masks[0, ..., None] * np.uint8(200), 3, 2)
    scores = np.array([0.875, 0.9375]), np.array([0.96875, 0.984375])
    points = np.full((2, 2), (40 + number, 30))
    return SyntheticScene(pixels, RLEMasks.from_dense(masks), *scores, points, ("coin", "hub"))


@pytest.fixture(scope="module")
def coins(tmp_path_factory):
    return write_scenes(tmp_path_factory.mktemp("coins"), 4, coin)[0]


@pytest.fixture(scope="module")
def index(coins):
    return str(open_index(coins).folder)


def test_masks_are_what_is_visible(index, monkeypatch):
    monkeypatch.setattr(pasted, "MIN_AREA", 1)
    monkeypatch.setattr(pasted, "MIN_VISIBLE", 0)
    monkeypatch.setattr(pasted, "SOFT_PX", 0.01)
    counts = []
    for number in range(12):
        scene = pasted.compose_pasted(0, number, data=index)
        masks, kinds = scene.masks.to_dense(), np.array(scene.categories)
        coins, hubs = masks[kinds == "coin"], masks[kinds == "hub"]
        assert max(coins.sum(0).max(), hubs.sum(0).max()) == 1
        assert (masks.any(0) != (scene.pixels[..., 0] > 100)).mean() < 0.02
        assert masks[np.arange(len(masks)), *scene.points_xy.T[::-1]].all()
        assert set(zip(kinds, scene.predicted_iou, scene.stability_score, strict=True)) <= {
            ("coin", 0.875, 0.96875),
            ("hub", 0.9375, 0.984375),
        }
        counts.append(len(coins))
    assert 3 < np.mean(counts) < 13


def test_masks_that_are_mostly_hidden_are_left_out(index, monkeypatch):
    def count():
        scenes = [pasted.compose_pasted(1, number, data=index) for number in range(8)]
        areas = np.concatenate([scene.masks.areas() for scene in scenes])
        return len(areas), areas.min()

    kept, smallest = count()
    monkeypatch.setattr(pasted, "MIN_VISIBLE", 0.9)
    whole, _ = count()
    monkeypatch.setattr(pasted, "MIN_VISIBLE", 0)
    monkeypatch.setattr(pasted, "MIN_AREA", 1)
    drawn, _ = count()
    assert smallest >= 20
    assert whole < kept < drawn


@pytest.mark.parametrize("side, size", [(300, (64, 96)), (48, (32, 48))])
def test_photographs_are_made_smaller_but_not_larger(index, side, size):
    assert pasted.compose_pasted(0, 0, (side, side), data=index).pixels.shape[:2] == size


@pytest.mark.long
def test_command_writes_the_same_with_any_number_of_workers(coins, tmp_path):
    for workers in (1, 2):
        flags = f"--data {coins} --images 3 --seed 2 --workers {workers}"
        invoke(f"synth {tmp_path}/{workers} --kind pasted {flags}")
    one, two = ((tmp_path / name / "sa_000000.tar").read_bytes() for name in "12")
    assert one == two


@pytest.mark.parametrize("masks", [0, 1])
def test_photographs_must_have_masks_that_are_not_empty(tmp_path, masks):
    empty = SyntheticScene(
        np.zeros((8, 8, 3), np.uint8),
        RLEMasks.from_dense(np.zeros((masks, 8, 8), bool)),
        np.ones(masks),
        np.ones(masks),
        np.zeros((masks, 2), np.int64),
    )
    write_scenes(tmp_path, 1, lambda _: empty)
    with error_line("--data"):
        pasted.compose_pasted(0, 0, data=str(open_index(tmp_path).folder))


def test_photographs_must_be_given(coins, tmp_path, capsys):
    assert "--data" in refusal(capsys, f"synth {tmp_path}/out --kind pasted")
    assert "--data" in refusal(capsys, f"synth {tmp_path}/out --data {coins}")
    assert not (tmp_path / "out").exists()
