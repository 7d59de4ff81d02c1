"""`gigamask evaluate --tile` and `--precision`, as a command and in Python."""

import json

import pytest

import gigamask
from gigamask.synthetic import scenes as synthetic
from tests.commands import invoke, refusal


@pytest.fixture(scope="module")
def scenes(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("small")
    synthetic.write(folder, 1, seed=7, long_side=(96, 128))
    return str(folder)


@pytest.mark.long
def test_tiles_are_scored_and_recorded(scenes, tmp_path):
    words = f"evaluate starter --data {scenes} --device cpu --json"  # random weights see too little
    ways = {
        "plain": "",
        "tiles": "--tile 64 --halo 16 --automatic --points-per-side 2",
    }
    for name, flags in ways.items():
        invoke(words, tmp_path / name, flags)
    plain, tiled = (json.loads((tmp_path / name).read_text()) for name in ways)
    assert tiled["protocol"] == plain["protocol"] | {"tile": 64, "halo": 16}
    assert tiled["masks"] == plain["masks"] > 0
    assert tiled["clicks"] != plain["clicks"]
    assert tiled["automatic"]["settings"]["tile"] == 64
    found = gigamask.evaluate("starter", scenes, device="cpu", tile=64, halo=16)
    assert found["box"] == pytest.approx(tiled["box"], abs=1e-6)


@pytest.mark.parametrize(
    "flags, message",
    [
        ("--tile 64 --halo 33", "--halo of tile 64 must be between 0 and 32 (got 33)"),
        ("--halo 4", "--halo 4 is the overlap of tiles: set their side, too"),
        ("--tile 8", "--tile must be at least 32"),
        ("--table one --html ./one", "--html ./one, --table one, --json None: give each a file"),
    ],
)
def test_flags_that_make_no_sense(flags, message, weights, scenes, capsys):
    assert message in refusal(capsys, f"evaluate {weights} --data {scenes} --device cpu", flags)


def test_the_precision_changes_scores_a_little_and_is_recorded(weights, scenes):
    found = {
        precision: gigamask.evaluate(
            weights, scenes, device="cpu", precision=precision, automatic=True, points_per_side=4
        )
        for precision in ("auto", "fp32", "bf16")
    }
    assert [each["precision"] for each in found.values()] == ["fp32", "fp32", "bf16"]
    assert found["auto"] == found["fp32"]
    assert found["bf16"]["clicks"] != found["fp32"]["clicks"]
    assert found["bf16"]["clicks"]["9"] == pytest.approx(found["fp32"]["clicks"]["9"], abs=0.1)
