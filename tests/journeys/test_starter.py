"""The weights in the package: useful at once, and found by name wherever weights are asked for."""

from pathlib import Path

import cv2
import numpy as np
import pytest

from gigamask import load_model
from gigamask.models import weight_paths
from gigamask.models.configs import ConvPyramid, WindowDecoder
from gigamask.serialization import read_json
from gigamask.synthetic import scenes as synthetic
from tests.commands import invoke, refusal
from tests.journeys.runs import records


@pytest.fixture(scope="module")
def unseen(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("unseen")
    synthetic.write(folder, 6, seed=99)
    return folder


def test_it_is_the_small_model_and_fits_in_eight_megabytes():
    model = load_model("starter")
    assert isinstance(model.config.encoder, ConvPyramid)
    assert isinstance(model.config.decoder, WindowDecoder)
    assert weight_paths.STARTER_FILE.stat().st_size < 8e6


@pytest.mark.long
def test_it_segments_unseen_scenes(unseen, tmp_path, capsys):
    scores = tmp_path / "scores.json"
    invoke(f"evaluate starter --data {unseen} --json {scores}")
    read = read_json(scores)
    assert read["box"] > 0.8
    assert read["clicks"]["1"] > 0.5
    assert read["clicks"]["9"] > read["clicks"]["3"] > read["clicks"]["1"]


def test_segment_and_export_take_it_by_name(tmp_path):
    photo = tmp_path / "photo.png"
    cv2.imwrite(str(photo), synthetic.compose_scene(99, 1).pixels[..., ::-1])
    few = f"--points-per-side 6 --out {tmp_path}/masks"
    invoke(f"segment starter {photo}", few)
    found = read_json(tmp_path / "masks" / "photo.json")
    assert len(found["annotations"]) > 3
    exported = tmp_path / "copy.safetensors"
    invoke(f"export starter --to safetensors --out {exported}")
    theirs, ours = (load_model(name).state_dict() for name in (str(exported), "starter"))
    assert all(np.array_equal(theirs[name], ours[name]) for name in ours)


@pytest.mark.long
def test_training_starts_from_it(unseen, tmp_path):
    losses = {}
    small = "--steps 1 --batch-size 2 --micro-batch-size 2 --log-every 1 --loader.workers 0"
    for name, flags in {"random": "", "starter": "--init starter"}.items():
        run = tmp_path / name
        invoke(f"train compact --data {unseen} --out {run}", flags, small)
        losses[name] = records(run)[-1]["loss"]
    assert losses["starter"] < 0.7 * losses["random"]


def test_a_folder_of_that_name_is_meant_instead(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("starter").mkdir()
    cv2.imwrite("photo.png", np.zeros((8, 8, 3), np.uint8))
    assert "starter: holds no model.safetensors" in refusal(
        capsys, "segment starter photo.png --out masks"
    )


def test_a_misspelled_name_says_what_there_is(unseen, tmp_path, capsys):
    words = f"--data {unseen} --out {tmp_path}/run"
    assert "or starter" in refusal(capsys, "train compact --init startr", words)
