"""The weights in the package: useful at once, and found by name wherever weights are asked for."""

import json
from pathlib import Path

import cv2
import numpy as np
import pytest

from gigamask import load_model
from gigamask.cli.main import main
from gigamask.models import weight_paths
from gigamask.models.configs import ConvPyramid, WindowDecoder
from gigamask.synthetic.dead_leaves import compose_leaves
from gigamask.synthetic.scenes import seeded, write_scenes
from tests.journeys.runs import records


@pytest.fixture(scope="module")
def leaves(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("leaves")
    write_scenes(folder, 6, seeded(compose_leaves, 99))
    return folder


def test_it_is_the_small_model_and_fits_in_eight_megabytes():
    model = load_model("starter")
    assert isinstance(model.config.encoder, ConvPyramid)
    assert isinstance(model.config.decoder, WindowDecoder)
    assert weight_paths.STARTER_FILE.stat().st_size < 8e6


@pytest.mark.long
def test_it_segments_unseen_scenes(leaves, tmp_path, capsys):
    scores = tmp_path / "scores.json"
    assert main(f"evaluate starter --data {leaves} --json {scores}".split()) == 0
    read = json.loads(scores.read_text())
    assert read["box"] > 0.8
    assert read["clicks"]["1"] > 0.5
    assert read["clicks"]["9"] > read["clicks"]["3"] > read["clicks"]["1"]


def test_segment_and_export_take_it_by_name(tmp_path):
    photo = tmp_path / "photo.png"
    cv2.imwrite(str(photo), compose_leaves(99, 1).pixels[..., ::-1])
    few = f"--points-per-side 6 --out {tmp_path}/masks".split()
    assert main(["segment", "starter", str(photo), *few]) == 0
    found = json.loads((tmp_path / "masks" / "photo.json").read_text())
    assert len(found["annotations"]) > 3
    exported = tmp_path / "copy.safetensors"
    assert main(f"export starter --to safetensors --out {exported}".split()) == 0
    theirs, ours = (load_model(name).state_dict() for name in (str(exported), "starter"))
    assert all(np.array_equal(theirs[name], ours[name]) for name in ours)


@pytest.mark.long
def test_training_starts_from_it(leaves, tmp_path):
    losses = {}
    for name, flags in {"random": [], "starter": ["--init", "starter"]}.items():
        run = tmp_path / name
        words = [*f"train compact --data {leaves} --out {run}".split(), *flags]
        small = "--steps 1 --batch-size 2 --micro-batch-size 2 --log-every 1".split()
        assert main([*words, *small, "--loader.workers", "0"]) == 0
        losses[name] = records(run)[-1]["loss"]
    assert losses["starter"] < 0.7 * losses["random"]


def test_a_folder_of_that_name_is_meant_instead(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("starter").mkdir()
    cv2.imwrite("photo.png", np.zeros((8, 8, 3), np.uint8))
    assert main("segment starter photo.png --out masks".split()) == 2
    assert "starter: holds no model.safetensors" in capsys.readouterr().err


def test_a_misspelled_name_says_what_there_is(leaves, tmp_path, capsys):
    words = f"--data {leaves} --out {tmp_path}/run".split()
    assert main(["train", "compact", "--init", "startr", *words]) == 2
    assert "or starter" in capsys.readouterr().err


def test_a_model_of_words_is_trained_on_its_masks_and_asked(tmp_path, capsys):
    scenes = tmp_path / "scenes"
    assert main(f"ground synth {scenes} --images 4".split()) == 0
    flags = f"--segmenter starter --data {scenes} --steps 2".split()
    flags += f"--queries {scenes}/queries.jsonl --out {tmp_path}/words".split()
    train = ["ground", "train", "ground_tiny", *flags]
    assert main(train) == 2
    assert "the segmenter's embedding has 97 channels; pass 97" in capsys.readouterr().err
    assert main([*train, "--model.embedding-dim", "97"]) == 0
    image = f"{next(scenes.glob('*.tar'))}:sa_0"
    capsys.readouterr()
    assert main(["ask", str(tmp_path / "words"), image, "the largest circle"]) == 0
    assert "\nthe largest circle: " in capsys.readouterr().out
